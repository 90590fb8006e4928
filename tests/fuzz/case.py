"""A case: everything that a random training loop differs in, as one line of JSON that can be replayed; and a random one
of a seed, the same for the same seed."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from dataclasses import dataclass, field
from typing import Any

ALL = -1
"""In place of a rank: every rank."""

DENSE = ("llama", "mistral", "gemma2", "qwen2")
MIXTURES = ("gpt_oss", "deepseek_v3", "mixtral")
"""In fp64 only: in fp32 a router may choose another expert after a rounding."""
HYBRIDS = ("lfm2", "qwen3_5_text", "granitemoehybrid")
"""Layers that carry state beside layers that attend; likewise in fp64."""
PIPELINED = ("llama", "mistral", "qwen2", "gpt_oss", "mixtral", "deepseek_v3", "qwen3_5_text")
"""Models that `to_pipeline` cuts, and one that is refused later."""
WITHOUT_WINDOWS = ("llama", "deepseek_v3")
"""Where a ready-made mask of four axes means the same as documents: it takes the place of windows, too."""

EXCEPTIONS = ("forward", "loss", "backward")
KINDS = (*EXCEPTIONS, "loader", "positions", "break", "skip", "look")


@dataclass(frozen=True)
class Form:
    """How a micro-batch tells its documents."""

    shape: str
    """"row": one row, packed; "rows": several, packed, padded on the right; "left", "right": a document in each row;
    "stream": each rank's part of a row that all ranks share."""
    positions: str
    """"again": position ids begin again at each document; "on": they go on over it; "none": there are none."""
    lengths: bool
    """Whether there is cu_seq_lens_q, as for flash attention."""
    mask: str
    """"": a mask of zeros and ones where there is padding; "ones": one where there is none; "numbers": it numbers
    documents; "blocks": four axes, true and false; "bias": four axes, added to scores."""

    @property
    def tells(self) -> bool:
        return self.positions == "again" or self.lengths or self.mask not in ("", "ones") or self.shape in FLAT

    @property
    def name(self) -> str:
        """The words that are not as in most."""
        words = self.shape, "" if self.positions == "again" else self.positions, "lengths" * self.lengths, self.mask
        return " ".join(word for word in words if word)


FLAT = ("left", "right")
MASKS_OF_FOUR_AXES = ("blocks", "bias")
_POSITIONS = ("again", "on", "none")
_MASKS = ("", "numbers", *MASKS_OF_FOUR_AXES)
_ALL_FORMS = (
    Form("stream", "again", False, ""),
    *itertools.starmap(Form, itertools.product(("row",), _POSITIONS, (False, True), (*_MASKS, "ones"))),
    *itertools.starmap(Form, itertools.product(("rows", *FLAT), _POSITIONS, (False,), _MASKS)),
)
FORMS = {form.name: form for form in _ALL_FORMS if form.tells}
"""By name, such as "row none lengths ones"."""


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


MOMENTS = (
    "open", "plan", "dispatch", "dispatch served", "dispatch done", "return", "return done", "backward dispatch",
    "backward dispatch served", "backward dispatch done", "backward return", "backward return done",
)  # fmt: skip


@dataclass(frozen=True)
class Fate:
    """A reserved server that is killed, or stops without a word, in a step. It may be over before that."""

    server: int
    """Which, from 0."""
    signal: str
    """"KILL"; "STOP"; "PAUSE": it is stopped for a second, which is no reason to lose it."""
    what: str
    """One of MOMENTS: when it is told that, when it has computed what arrived ("served"), or is done with it."""
    turn: int
    """Micro-batch, as trainers count forwards."""
    layer: int = 0
    after: float = 0.0
    """Seconds after that moment."""
    wave: int = 0


@dataclass(frozen=True)
class Case:
    """One random training loop."""

    seed: int
    """Of the documents."""
    world: int = 2
    """Ranks that train."""
    servers: int = 0
    """Ranks that are reserved beside them."""
    stages: int = 0
    """Of a DeepSpeed pipeline; 0: none."""
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
    """Of each rank's loader; of a pipeline its steps, as often for every rank."""
    stop: int = 0
    """Every rank leaves each epoch after so many micro-batches; 0: at the end of its loader."""
    islice: bool = False
    """It stops by islice instead of break."""
    generator: bool = False
    """The loader is a generator function's iterable: no length."""
    forms: tuple[str, ...] = ("row",)
    """How micro-batches are given: which of FORMS, drawn for each."""
    longest: int = 64
    """Tokens of a document, at most."""
    documents: int = 4
    """Of a micro-batch, at most; there may be none."""
    evaluate: int = 0
    """Every so many micro-batches (steps of a pipeline) a rank evaluates, one rank more often than the other; 0: never.
    """
    look: int = 0
    """Every so many micro-batches a forward without gradients, on every rank."""
    gradients: int = 2
    """Every so many micro-batches gradients are compared, too."""
    plant: Plant | None = None
    fates: tuple[Fate, ...] = ()
    comes: tuple[float, ...] = ()
    """Servers that come when the job runs: seconds after trainers met. Counted behind the reserved ones."""
    awaits: bool = False
    """Rank 0 trains its third micro-batch when one of these has come."""
    flight: int = 1
    """Micro-batches whose forwards run before the first backward, which is that of any of them."""

    @property
    def processes(self) -> int:
        return self.world + self.servers + len(self.comes)

    @property
    def looks_together(self) -> bool:
        return self.block.get("forward_only") == "balanced"

    @property
    def goes_on(self) -> bool:
        return self.block.get("on_server_failure") == "continue"

    def to_line(self) -> str:
        """One line of JSON without what is as in every case."""
        plain = dataclasses.asdict(Case(self.seed))
        changed = {name: value for name, value in dataclasses.asdict(self).items() if value != plain[name]}
        return json.dumps({"seed": self.seed, **changed})

    @classmethod
    def from_line(cls, line: str) -> Case:
        read = json.loads(line)
        plant, fates = read.pop("plant", None), read.pop("fates", [])
        for name in ("batches", "forms", "comes"):
            if name in read:
                read[name] = tuple(read[name])
        return cls(**read, plant=plant and Plant(**plant), fates=tuple(Fate(**fate) for fate in fates))

    def given_out(self, rank: int) -> int:
        """Micro-batches of an epoch that reach this rank's loop where nothing is planted."""
        return min(self.batches[rank], self.stop or self.batches[rank])

    def hits(self, rank: int, epoch: int, at: int, kind: str) -> bool:
        plant = self.plant
        here = plant is not None and plant.rank in (rank, ALL)
        return here and (plant.kind, plant.epoch, plant.at) == (kind, epoch, at)


WAYS = {"in place": 0.4, "reserved": 0.17, "killed": 0.2, "hung": 0.03, "pipeline": 0.2}
"""How often each way to run is drawn."""
LINKS = {"inside": 100, "between": 10}
"""Given to most cases: measuring takes longer than a case does."""


def draw(seed: int, worlds: tuple[int, int] = (1, 4)) -> Case:
    """A random case; `worlds`: fewest and most ranks that train."""
    rng = random.Random(seed)
    way = rng.choices(list(WAYS), list(WAYS.values()))[0]
    if way == "pipeline" and worlds[1] > 1:
        return _draw_pipeline(rng, seed, worlds)
    case = _draw_loop(rng, seed, worlds, reserved=way in ("reserved", "killed", "hung"))
    if way in ("killed", "hung"):
        return _draw_fates(rng, case, rng.choice(["STOP", "STOP", "PAUSE"]) if way == "hung" else "KILL")
    if case.world > 1 and not case.ddp and rng.random() < (0.15 if case.servers else 0.4):
        return dataclasses.replace(case, plant=_draw_plant(rng, case))
    if not case.ddp and rng.random() < 0.2:
        return dataclasses.replace(case, flight=rng.choice([2, 2, 3]))
    return case


def _draw_loop(rng: random.Random, seed: int, worlds: tuple[int, int], reserved: bool) -> Case:
    most = min(worlds[1], 3) if reserved else worlds[1]
    counts = range(worlds[0], most + 1)
    world = rng.choices(counts, [(1, 6, 3, 2)[min(n, 4) - 1] for n in counts])[0]
    model = rng.choice(rng.choice((DENSE, DENSE, MIXTURES, HYBRIDS)))
    ahead = rng.random() < 0.8
    ddp = world > 1 and rng.random() < 0.2
    forms = _draw_forms(rng, model, world, reserved)
    checkpoint = rng.choice(["", "", "plain", "reentrant"])
    if checkpoint == "reentrant" and (ddp or model in (*MIXTURES, "granitemoehybrid")):
        checkpoint = "plain"
    count = rng.randint(1, 4)
    unequal = not ddp and rng.random() < 0.4
    batches = tuple(count + (rng.randint(0, 2) if unequal else 0) for _ in range(world))
    # Most loaders of unequal lengths are left together: that is how it can be right.
    stop = rng.randint(1, min(batches)) if rng.random() < (0.7 if unequal else 0.2) else 0
    block = _draw_block(rng, ahead)
    if block.get("documents") == "deal" and rng.random() < 0.7:
        forms = ("row",)
    slow = model in HYBRIDS
    case = Case(
        seed, world, 1 + (rng.random() < 0.4) if reserved else 0, 0, model,
        dtype="fp32" if model in DENSE and rng.random() < 0.3 or model == "gemma2" else "fp64",
        checkpoint=checkpoint, ddp=ddp, block=block, ahead=ahead,
        accumulation=rng.choice([1, 1, 2, 3, 4]) if ahead else 1,
        epochs=rng.choice([1, 1, 1, 1, 2, 2, 3]), batches=batches, stop=stop, islice=rng.random() < 0.5,
        generator=rng.random() < 0.3, forms=forms,
        longest=rng.choice([8, 30, 60]) if slow else rng.choice([8, 40, 150, 300]),
        documents=rng.choice([1, 3, 5]) if slow else rng.choice([1, 3, 8]),
        evaluate=rng.choice([0, 0, 1, 2, 2]), look=rng.choice([0, 0, 0, 1, 2]), gradients=rng.choice([1, 2, 3]),
    )  # fmt: skip
    if case.look:
        block["forward_only"] = "balanced"
    return case


def _draw_forms(rng: random.Random, model: str, world: int, reserved: bool) -> tuple[str, ...]:
    """One to three ways to give micro-batches, as often of one shape as of another."""
    shapes: dict[str, list[str]] = {}
    for name, form in FORMS.items():
        windows = form.mask in MASKS_OF_FOUR_AXES and model not in WITHOUT_WINDOWS
        # State does not travel beside reserved servers.
        spans = form.shape == "stream" and ((model in HYBRIDS and reserved) or world == 1)
        # In fp64, eager attention of transformers gives NaN to rows of padding that see no token.
        if not windows and not spans:
            shapes.setdefault(form.shape, []).append(name)
    if rng.random() < 0.2:
        return ("row",)
    # "row" has most ways to tell its documents.
    drawn = [rng.choice([*shapes, "row", "row"]) for _ in range(rng.randint(1, 3))]
    return tuple(sorted({rng.choice(shapes[shape]) for shape in drawn}))


def _draw_block(rng: random.Random, ahead: bool) -> dict[str, Any]:
    choices: dict[str, list[Any]] = {
        "overlap": ["local_first", "interleave", "none"], "recompute_attention": [True],
        "granularity": [1, 8, 16, 64], "tolerance": [0.01, 0.02, 0.2], "cost": ["h200", "pairs"],
        "documents": ["deal"] if ahead else ["keep"], "look_ahead": [0], "check": ["off"], "keep": ["host"],
        "waves": [2, 3, 5], "memory": [2e-4, 1e-3], "verify": [1], "links": [LINKS],
    }  # fmt: skip
    odds = {
        "granularity": 0.9, "tolerance": 0.8, "overlap": 0.7, "look_ahead": 0.1, "check": 0.1, "memory": 0.1,
        "verify": 0.05, "recompute_attention": 0.15, "links": 0.9,
    }  # fmt: skip
    block = {key: rng.choice(values) for key, values in choices.items() if rng.random() < odds.get(key, 0.3)}
    if block.get("documents") == "deal":
        block.pop("look_ahead", None)
    if "keep" in block:
        block.pop("recompute_attention", None)
    return block


def _draw_plant(rng: random.Random, case: Case) -> Plant:
    kind = rng.choice(KINDS)
    rank = ALL if rng.random() < 0.3 else rng.randrange(case.world)
    least = min(case.given_out(one) for one in range(case.world))
    return Plant(
        kind, rank, rng.randrange(case.epochs), rng.randrange(least), caught=kind in EXCEPTIONS and rng.random() < 0.6
    )  # fmt: skip


def _draw_fates(rng: random.Random, case: Case, signal: str) -> Case:
    """Servers that die in a loop of which all ranks train the same."""
    least = min(case.given_out(rank) for rank in range(case.world))
    case = dataclasses.replace(case, batches=(least,) * case.world, stop=0)
    count = 1 if case.servers == 1 or rng.random() < 0.6 else 2
    turns = least * case.epochs
    fates = tuple(
        Fate(
            server, signal, rng.choice(MOMENTS), rng.randrange(turns), rng.randrange(2),
            after=rng.choice([0.0, 0.0, 0.003, 0.02, 0.1]),
        )
        for server in rng.sample(range(case.servers), count)
    )  # fmt: skip
    block = {key: value for key, value in case.block.items() if key not in ("keep", "recompute_attention")}
    block["on_server_failure"] = "continue" if rng.random() < 0.85 else "stop"
    comes = ()
    if block["on_server_failure"] == "continue" and rng.random() < 0.25:
        comes = tuple(rng.choice([0.0, 0.05, 0.3]) for _ in range(rng.choice([1, 1, 2])))
        if rng.random() < 0.3:
            fates = (dataclasses.replace(fates[0], server=case.servers), *fates[1:])
    flight = rng.choice([1, 1, 1, 2]) if not case.ddp else 1
    return dataclasses.replace(case, fates=fates, block=block, comes=comes, flight=flight)


def _draw_pipeline(rng: random.Random, seed: int, worlds: tuple[int, int]) -> Case:
    model = rng.choice(PIPELINED)
    stages = rng.choice([2, 2, 3]) if worlds[1] > 2 and model not in HYBRIDS else 2
    replicas = rng.choice([1, 2]) if worlds[1] >= 2 * stages else 1
    forms = [name for name, form in FORMS.items() if form.shape == "row"]
    if model not in WITHOUT_WINDOWS:
        forms = [name for name in forms if FORMS[name].mask not in MASKS_OF_FOUR_AXES]
    block = _draw_block(rng, True)
    for key in ("recompute_attention", "documents", "verify"):
        block.pop(key, None)
    block["overlap"] = rng.choice(["local_first", "none"])
    world = stages * replicas
    return Case(
        seed, world, 0, stages, model, dtype="fp32" if model in DENSE and rng.random() < 0.3 else "fp64",
        checkpoint=rng.choice(["", "plain", "reentrant"]), block=block, accumulation=rng.choice([1, 2, 2, 3, 4, 5]),
        batches=(rng.choice([1, 1, 2, 3]),) * world,
        forms=("row",) if rng.random() < 0.2 else tuple(sorted(rng.sample(forms, rng.randint(1, 3)))),
        longest=rng.choice([8, 40, 150, 300]), documents=rng.choice([1, 3, 6]), evaluate=rng.choice([0, 1, 2]),
        gradients=1,
    )  # fmt: skip
