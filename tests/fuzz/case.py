"""A case: everything that a random training loop differs in, as one line of JSON that can be replayed.

draw.py makes cases of seeds.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
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
    def pads(self) -> bool:
        """Whether rows may be longer than their documents."""
        return self.shape in ("rows", "left", "right")

    @property
    def tells(self) -> bool:
        """Whether documents can be read from it."""
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
        """Ranks that train, ranks that serve, and servers that come later."""
        return self.world + self.servers + len(self.comes)

    @property
    def looks_together(self) -> bool:
        """Whether all ranks run forwards without backward together."""
        return self.block.get("forward_only") == "balanced"

    @property
    def goes_on(self) -> bool:
        """Whether trainers go on without a server."""
        return self.block.get("on_server_failure") == "continue"

    def to_line(self) -> str:
        """One line of JSON without what is as in every case."""
        plain = dataclasses.asdict(Case(self.seed))
        changed = {name: value for name, value in dataclasses.asdict(self).items() if value != plain[name]}
        return json.dumps({"seed": self.seed, **changed})

    @classmethod
    def from_line(cls, line: str) -> Case:
        """The inverse of `to_line`."""
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
        """Whether something of this kind is planted there."""
        plant = self.plant
        if plant is None or plant.kind != kind or plant.rank not in (rank, ALL):
            return False
        return (plant.epoch, plant.at) == (epoch, at)
