"""A case: everything that a random training loop differs in, as one line of JSON that can be replayed.

`draw` makes a case from a seed, `simpler` the cases that have one feature less: what shrinking tries.
"""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

ALL = -1
"""In place of a rank: every rank."""

DENSE = ("llama", "mistral", "gemma2", "qwen2")
MIXTURES = ("gpt_oss", "deepseek_v3", "mixtral")
"""In fp64 only: in fp32 a router may choose another expert after a rounding."""
FORMS = ("packed", "cumulative", "rows", "left", "right", "stream")

EXCEPTIONS = ("forward", "loss", "backward")
KINDS = (*EXCEPTIONS, "loader", "positions", "break", "skip", "look")


@dataclass(frozen=True)
class Plant:
    """Something that a script does, or that happens to it, at one micro-batch."""

    kind: str
    """One of KINDS: an exception in the forward, between forward and backward, or in the backward; a loader that
    raises; positions that jump; a break; a batch that is skipped; a forward without gradients."""
    rank: int
    """Where; ALL: on every rank."""
    epoch: int
    at: int
    """How many micro-batches of the epoch come before it."""
    caught: bool = False
    """The script catches the exception and goes on with its next micro-batch."""


@dataclass(frozen=True)
class Case:
    """One random training loop."""

    seed: int
    """Of the documents."""
    world: int = 2
    model: str = "llama"
    dtype: str = "fp64"
    checkpoint: str = ""
    """"plain" or "reentrant" activation checkpointing."""
    ddp: bool = False
    block: dict[str, Any] = field(default_factory=dict)
    """Keys of the "cad" block; "cost": "h200" stands for a profile that ships."""
    ahead: bool = True
    """Read through `session.look_ahead`; otherwise no loader announces anything."""
    accumulation: int = 1
    epochs: int = 1
    batches: tuple[int, ...] = (2, 2)
    """Of each rank's loader."""
    stop: int = 0
    """Every rank leaves each epoch after so many micro-batches; 0: at the end of its loader."""
    islice: bool = False
    """It stops by islice instead of break."""
    generator: bool = False
    """The loader is a generator function's iterable: no length."""
    forms: tuple[str, ...] = ("packed",)
    """How micro-batches are given: which of FORMS, drawn for each."""
    longest: int = 64
    """Tokens of a document, at most."""
    documents: int = 4
    """Of a micro-batch, at most; there may be none."""
    evaluate: int = 0
    """Every so many micro-batches a rank evaluates, one rank more often than the other; 0: never."""
    look: int = 0
    """Every so many micro-batches a forward without gradients, on every rank."""
    gradients: int = 2
    """Every so many micro-batches gradients are compared, too."""
    plant: Plant | None = None

    def to_line(self) -> str:
        """One line of JSON without what is as in every case."""
        changed = {
            one.name: getattr(self, one.name)
            for one in dataclasses.fields(self)
            if one.name != "plant" and (one.default is dataclasses.MISSING or getattr(self, one.name) != one.default)
        }
        if self.plant is not None:
            changed["plant"] = dataclasses.asdict(self.plant)
        return json.dumps(changed)

    @classmethod
    def from_line(cls, line: str) -> Case:
        """The inverse of `to_line`."""
        read = json.loads(line)
        plant = read.pop("plant", None)
        for name in ("batches", "forms"):
            if name in read:
                read[name] = tuple(read[name])
        return cls(**read, plant=None if plant is None else Plant(**plant))

    def given_out(self, rank: int) -> int:
        """Micro-batches of an epoch that reach this rank's loop where nothing is planted."""
        return min(self.batches[rank], self.stop or self.batches[rank])

    def hits(self, rank: int, epoch: int, at: int, kind: str) -> bool:
        """Whether something of this kind is planted there."""
        plant = self.plant
        return plant is not None and plant.kind == kind and plant.rank in (rank, ALL) and (
            plant.epoch == epoch and plant.at == at
        )  # fmt: skip


def draw(seed: int, worlds: tuple[int, int] = (1, 4)) -> Case:
    """A random case, the same for the same seed."""
    rng = random.Random(seed)
    world = max(rng.randint(*worlds), rng.randint(*worlds))
    model = rng.choice(DENSE + MIXTURES)
    ahead = rng.random() < 0.8
    ddp = world > 1 and rng.random() < 0.2
    checkpoint = rng.choice(["", "", "", "plain", "plain", "reentrant"])
    if checkpoint == "reentrant" and (ddp or model in MIXTURES):
        checkpoint = "plain"
    forms = tuple(sorted(rng.sample(FORMS, rng.randint(1, 3)))) if rng.random() < 0.7 else ("packed",)
    count = rng.randint(1, 6)
    unequal = not ddp and rng.random() < 0.4
    batches = tuple(count + (rng.randint(0, 2) if unequal else 0) for _ in range(world))
    epochs = rng.choice([1, 1, 2, 3])
    # Most loaders of unequal lengths are left together: that is how it can be right.
    stop = rng.randint(1, min(batches)) if rng.random() < (0.7 if unequal else 0.2) else 0
    case = Case(
        seed, world, model,
        dtype="fp64" if model in MIXTURES or rng.random() < 0.7 else "fp32",
        checkpoint=checkpoint, ddp=ddp, block=_draw_block(rng, ahead), ahead=ahead,
        accumulation=rng.choice([1, 1, 2, 3, 4]) if ahead else 1,
        epochs=epochs, batches=batches, stop=stop, islice=rng.random() < 0.5, generator=rng.random() < 0.3,
        forms=forms, longest=rng.choice([8, 40, 150, 400]), documents=rng.choice([1, 3, 8]),
        evaluate=rng.choice([0, 0, 0, 1, 2]), look=rng.choice([0, 0, 0, 1, 2]), gradients=rng.choice([1, 2, 3]),
    )  # fmt: skip
    if world > 1 and not ddp and rng.random() < 0.45:
        case = dataclasses.replace(case, plant=_draw_plant(rng, case))
    if model == "gemma2" and set(forms) & {"left", "right", "rows"}:
        # In fp64, eager attention of transformers gives NaN to rows of padding that see no token.
        case = dataclasses.replace(case, dtype="fp32")
    if case.block.get("documents") == "exchange" and rng.random() < 0.7:
        case = dataclasses.replace(case, forms=("packed",))
    return case


def _draw_block(rng: random.Random, ahead: bool) -> dict[str, Any]:
    choices: dict[str, list[Any]] = {
        "overlap": ["local_first", "interleave", "pingpong", "none"],
        "backward": ["keep", "resend"],
        "recompute_attention": [True],
        "granularity": [1, 8, 16, 64],
        "tolerance": [0.01, 0.02, 0.2],
        "straggler_relief": [0.0, 0.2],
        "cost": ["h200", "pairs"],
        "documents": ["exchange"] if ahead else ["keep"],
        "look_ahead": [0],
        "check": ["off"],
    }
    odds = {"granularity": 0.9, "tolerance": 0.8, "overlap": 0.7, "look_ahead": 0.1, "check": 0.1}
    block = {key: rng.choice(values) for key, values in choices.items() if rng.random() < odds.get(key, 0.3)}
    if block.get("documents") == "exchange":
        block.pop("look_ahead", None)
    return block


def _draw_plant(rng: random.Random, case: Case) -> Plant:
    kind = rng.choice(KINDS)
    rank = ALL if rng.random() < 0.3 else rng.randrange(case.world)
    least = min(case.given_out(one) for one in range(case.world))
    return Plant(
        kind, rank, rng.randrange(case.epochs), rng.randrange(least), caught=kind in EXCEPTIONS and rng.random() < 0.6
    )  # fmt: skip


def simpler(case: Case) -> Iterator[Case]:
    """Cases with one feature less, the largest first."""
    plain = Case(case.seed, world=case.world, batches=case.batches)
    names = ("model", "ddp", "checkpoint", "dtype", "evaluate", "look", "islice", "generator", "forms", "accumulation")
    for name in names:
        if getattr(case, name) != getattr(plain, name):
            yield dataclasses.replace(case, **{name: getattr(plain, name)})
    for key in case.block:
        yield dataclasses.replace(case, block={name: value for name, value in case.block.items() if name != key})
    if case.plant is not None:
        yield dataclasses.replace(case, plant=None)
    last = 0 if case.plant is None else max(case.plant.rank, 0)
    if case.world > 2 and last < case.world - 1:
        yield dataclasses.replace(case, world=case.world - 1, batches=case.batches[:-1])
    if case.epochs > (1 if case.plant is None else case.plant.epoch + 1):
        yield dataclasses.replace(case, epochs=case.epochs - 1)
    least = 1 if case.plant is None else case.plant.at + 1
    if min(case.batches) > least and case.stop < min(case.batches):
        yield dataclasses.replace(case, batches=tuple(one - 1 for one in case.batches))
    if case.stop:
        yield dataclasses.replace(case, stop=0)
    for name, low in (("longest", 8), ("documents", 1)):
        if getattr(case, name) > low:
            yield dataclasses.replace(case, **{name: max(low, getattr(case, name) // 2)})
