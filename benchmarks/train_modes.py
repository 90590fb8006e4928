"""The modes of the training benchmark: how one step's documents become micro-batches of this rank, and what attends.

In: a `Setting` and the shared model. Out: `Mode`s, all with the same weights, kernel, loss and optimizer:

    dp              every rank trains its own row; documents attend on that rank
    ulysses         each row in turn is split along the sequence over all ranks, attention by heads, as DeepSpeed has it
    allgather_cp    each row in turn: every document is split into head and tail pieces over all ranks, K and V gathered
    cad             every rank trains its own row, attention by deepspeed_cad
    cad:gathered    the same for one document over all ranks, but layers that carry state gather all its rows, and every
                    rank runs all of them
    bound           as dp, with attention replaced by its own query; bound_qkv: with gradients of K and V as well

`dp:kept` and `ulysses:kept` keep attention's output through activation checkpointing, `:kept_host` in host memory, as
`"keep": "host"` has it; their Ulysses is train_ulysses.py's own. The others run attention twice, `cad` does not.
`ulysses_joined` and `allgather_cp_joined` put all rows of a step into one micro-batch instead of one after the other.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from train_attention import TimedKernel, gathered_attention, local_attention, query_attention, use_attention
from train_hybrid import find_recurrent, gather_rows, with_borders
from train_kept import KeptOutputs
from train_model import share_parameters
from train_shapes import is_plain
from train_split import MicroBatch, Setting, own_row, split_pieces, split_rows, split_sequence
from train_ulysses import use_kept_ulysses, use_ulysses
from transformers import LlamaForCausalLM

import deepspeed_cad
from deepspeed_cad import session as sessions
from deepspeed_cad.attention.parking import Parking
from deepspeed_cad.session import find_binding

KINDS = ("dp", "ulysses", "ulysses_joined", "allgather_cp", "allgather_cp_joined", "cad", "bound", "bound_qkv")
GATHERED = "cad:gathered"
KEEPING = ("dp", "ulysses", "ulysses_joined")
"""Those that may have `:kept` behind them."""


@dataclass(eq=False)
class Mode:
    """One way to train a step."""

    name: str
    model: LlamaForCausalLM
    split: Callable[[int], list[MicroBatch]]
    exact: bool = True
    """Whether it computes the loss of whole documents."""
    attends: bool = True
    exchanges: bool = False
    """Whether `waited` knows how long exchanges held up this rank."""
    _made: dict[int, list[MicroBatch]] = field(default_factory=dict)

    def micro_batches(self, step: int) -> list[MicroBatch]:
        """The micro-batches of a step, made once."""
        if step not in self._made:
            self._made[step] = self.split(step)
        return self._made[step]

    def before(self, step: int, following: int | None) -> None:
        """Called before the step; `following` is the step that this mode trains next."""

    def waited(self) -> float:
        """Seconds this rank waited for exchanges since the last call."""
        return 0.0

    def buffer_bytes(self) -> int:
        """Device memory that the mode holds outside of torch's allocator."""
        return 0

    def close(self) -> None:
        """Give back what the mode holds."""


class CADMode(Mode):
    """deepspeed_cad with a session of its own."""

    feed: Any = None
    session: Any = None

    def open(self, setting: Setting, block: dict[str, Any]) -> CADMode:
        """Turn CAD on for the mode's model."""
        # A process has one session. The variants measured here have one each, which never run at the same time.
        sessions._sessions.clear()
        deepspeed_cad.apply(self.model, block)
        binding = find_binding(self.model)
        assert binding is not None
        self.feed, self.session = binding.feed, binding.session
        choose = self.session.kernel
        wrapped: dict[int, TimedKernel] = {}

        def timed(need: Any) -> Any:
            kernel = choose(need)
            return wrapped.setdefault(id(kernel), TimedKernel(kernel, setting.watch))

        self.session.kernel = timed  # type: ignore[method-assign]
        self.ahead: list[int] = []
        steps = range(len(setting.workload.steps))
        self.loaded = [own_row(setting, step) for step in steps] if self.session.config.look_ahead else []
        return self

    def before(self, step: int, following: int | None) -> None:
        """As a loader with look-ahead does: announce the next micro-batch while this one trains."""
        gather_rows(self.name.startswith(GATHERED))
        if not self.session.config.look_ahead:
            return
        wanted = [step] if following is None else [step, following]
        for one in wanted[len(self.ahead) :]:
            row = self.loaded[one]
            self.feed.announce(self.feed.read({"input_ids": row.tokens[None], "position_ids": row.positions[None]}))
            self.ahead.append(one)
        if self.ahead.pop(0) != step:
            raise RuntimeError(f"{self.name}: step {step} is trained, but another one was announced")

    def waited(self) -> float:
        """See Mode."""
        return self.session.take_statistics("benchmark").waited_s

    def buffer_bytes(self) -> int:
        """See Mode: landing areas in symmetric memory."""
        return 0 if self.session.transport is None else self.session.transport.landing_bytes

    def close(self) -> None:
        """See Mode."""
        self.feed.begin_epoch()
        self.session.close()


def make_modes(names: list[str], model: LlamaForCausalLM, setting: Setting) -> list[Mode]:
    """The modes by name, in that order; raises ValueError for a name that is none."""
    modes: list[Mode] = []
    for name in names:
        kind = name.split("@")[0].split(":")[0]
        if kind not in KINDS:
            raise ValueError(f"there is no mode {name!r}; there are {', '.join(KINDS)}")
        outputs = kept_outputs(name, setting) if kind in KEEPING else None
        if find_recurrent(model) and kind.startswith(("ulysses", "allgather")):
            raise ValueError(
                f"mode {name!r} splits documents over ranks, and the state of this model would have to travel"
            )
        if not is_plain(model) and kind.startswith(("ulysses", "allgather")):
            raise ValueError(f"mode {name!r} knows no sinks, no windows, and no values that are smaller than keys")
        copy = share_parameters(model)
        joined = kind.endswith("_joined")
        if kind == "cad":
            workload = setting.workload
            if name.startswith(GATHERED) and not (workload.stream and all(len(one) == 1 for one in workload.steps)):
                raise ValueError(f"mode {name!r} takes steps of one document that lies on all ranks")
            cad = CADMode(name, copy, split_rows(setting, False), exchanges=True)
            mode: Mode = cad.open(setting, cad_block(name, setting))
        elif kind.startswith("ulysses"):
            if outputs is None:
                use_ulysses(copy, setting.kernel, setting.device)
            else:
                use_kept_ulysses(copy, f"benchmark_{name}".replace(":", "_"), setting.kernel, outputs)
            mode = Mode(name, copy, split_sequence(setting, joined))
        elif kind.startswith("allgather_cp"):
            use_attention(copy, "benchmark_gathered", gathered_attention(setting.kernel, setting.watch))
            mode = Mode(name, copy, split_pieces(setting, joined))
        elif kind.startswith("bound"):
            use_attention(copy, f"benchmark_{kind}", query_attention("all" if kind == "bound_qkv" else "query"))
            split = with_borders(copy, setting, split_rows(setting, False))
            mode = Mode(name, copy, split, exact=False, attends=False)
        else:
            use_attention(copy, f"benchmark_{name}".replace(":", "_"), local_attention(setting.kernel, outputs))
            split = with_borders(copy, setting, split_rows(setting, True))
            mode = Mode(name, copy, split, exact=not setting.workload.stream)
        modes.append(mode)
    return modes


def kept_outputs(name: str, setting: Setting) -> KeptOutputs | None:
    """Where a baseline `…:kept` keeps what its recompute needs; None for one that attends again."""
    variant = name.partition(":")[2]
    if variant not in ("", "kept", "kept_host"):
        raise ValueError(f"{name!r}: a variant of {', '.join(KEEPING)} is :kept or :kept_host")
    parking = Parking(setting.device) if variant == "kept_host" else None
    return KeptOutputs(parking) if variant else None


def cad_block(name: str, setting: Setting) -> dict[str, Any]:
    """The "cad" block of a mode name: `cad`, `cad:recompute`, `cad@{"overlap": "none"}`."""
    plain, _, changes = name.partition("@")
    block = dict(setting.cad)
    if plain.endswith(":recompute"):
        block["recompute_attention"] = True
    elif plain not in ("cad", GATHERED):
        raise ValueError(f"{name!r}: a variant of cad is cad:recompute, cad:gathered, or cad@ and a JSON object")
    return {**block, **(json.loads(changes) if changes else {})}
