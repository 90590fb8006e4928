"""The modes of the training benchmark: how one step's documents become micro-batches of this rank, and what attends.

In: a `Setting` and the shared model. Out: `Mode`s, all with the same weights, kernel, loss and optimizer:

    dp              every rank trains its own row; documents attend on that rank
    ulysses         each row in turn is split along the sequence over all ranks, attention by heads, as DeepSpeed has it
    allgather_cp    each row in turn: every document is split into head and tail pieces over all ranks, K and V gathered
    cad             every rank trains its own row, attention by deepspeed_cad
    bound           as dp, with attention replaced by its own query; bound_qkv: with gradients of K and V as well

`ulysses_joined` and `allgather_cp_joined` put all rows of a step into one micro-batch instead of one after the other.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from train_attention import (
    AttentionFunction,
    Gathered,
    Stopwatch,
    TimedKernel,
    gathered_attention,
    local_attention,
    make_sequences,
    query_attention,
)
from train_model import share_parameters
from train_workload import Row, Workload
from transformers import AttentionInterface, LlamaForCausalLM

import deepspeed_cad
from deepspeed_cad import session as sessions
from deepspeed_cad.integrations.transformers import find_binding
from deepspeed_cad.kernels.interface import Kernel
from deepspeed_cad.lookahead import announce


@dataclass(frozen=True, eq=False)
class Setting:
    """What all modes share."""

    workload: Workload
    rank: int
    ranks: int
    device: torch.device
    vocab: int
    kernel: Kernel
    watch: Stopwatch
    cad: dict[str, Any]
    """The "cad" block that variants start from."""


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """What one forward of the decoder gets, on this rank."""

    inputs: dict[str, Any]
    targets: torch.Tensor


@dataclass(eq=False)
class Mode:
    """One way to train a step."""

    name: str
    model: LlamaForCausalLM
    split: Callable[[int], list[MicroBatch]]
    exact: bool = True
    """Whether it computes the loss of whole documents."""
    attends: bool = True
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

    def open(self, setting: Setting, block: dict[str, Any]) -> CADMode:
        """Turn CAD on for the mode's model."""
        # A process has one session. The variants measured here have one each, which never run at the same time.
        sessions._sessions.clear()
        deepspeed_cad.apply(self.model, block)
        binding = find_binding(self.model)
        assert binding is not None
        self.setting, self.feed, self.session = setting, binding.feed, binding.session
        choose = self.session.kernel
        wrapped: dict[int, TimedKernel] = {}

        def timed(need: Any) -> Any:
            kernel = choose(need)
            return wrapped.setdefault(id(kernel), TimedKernel(kernel, setting.watch))

        self.session.kernel = timed  # type: ignore[method-assign]
        self.ahead: list[int] = []
        return self

    def before(self, step: int, following: int | None) -> None:
        """As a loader with look-ahead does: announce the next micro-batch while this one trains."""
        if not self.session.config.look_ahead:
            return
        wanted = [step] if following is None else [step, following]
        for one in wanted[len(self.ahead) :]:
            row = own_row(self.setting, one)
            announce(self.feed, {"input_ids": row.tokens[None], "position_ids": row.positions[None]})
            self.ahead.append(one)
        if self.ahead.pop(0) != step:
            raise RuntimeError(f"{self.name}: step {step} is trained, but another one was announced")

    def waited(self) -> float:
        """See Mode."""
        return self.session.take_statistics("benchmark").waited_s

    def buffer_bytes(self) -> int:
        """See Mode: landing areas in symmetric memory."""
        slots = getattr(self.session.transport, "_slots", {}).values()
        areas = [area for slot in slots for area in (*slot.dispatch, slot.give_back)]
        return sum(area.capacity for area in areas)

    def close(self) -> None:
        """See Mode."""
        self.feed.forget()
        self.session.close()


def own_row(setting: Setting, step: int) -> Row:
    """The tokens of this rank: its row, or its part of the stream."""
    rows = setting.workload.make_rows(step, setting.vocab)
    if not setting.workload.stream:
        return rows[setting.rank]
    here = slice(setting.rank * setting.workload.tokens_per_rank, (setting.rank + 1) * setting.workload.tokens_per_rank)
    local = setting.workload.local(step, setting.rank)
    lengths = tuple(int(n) for n in local.end - local.begin)
    return Row(lengths, rows[0].tokens[here], rows[0].positions[here], rows[0].targets[here])


def make_modes(names: list[str], model: LlamaForCausalLM, setting: Setting) -> list[Mode]:
    """The modes by name, in that order; raises ValueError for a name that is none."""
    modes: list[Mode] = []
    for name in names:
        kind = name.split("@")[0].split(":")[0]
        if kind not in ("dp", "ulysses", "ulysses_joined", "allgather_cp", "allgather_cp_joined", "cad", "bound", "bound_qkv"):
            raise ValueError(f"there is no mode {name!r}; there are dp, ulysses, allgather_cp, cad, bound, bound_qkv")
        copy = share_parameters(model)
        joined = kind.endswith("_joined")
        if kind == "cad":
            mode: Mode = CADMode(name, copy, _split_local(setting, False)).open(setting, cad_block(name, setting))
        elif kind.startswith("ulysses"):
            use_ulysses(copy, setting)
            mode = Mode(name, copy, _split_sequence(setting, joined))
        elif kind.startswith("allgather_cp"):
            _use(copy, "benchmark_gathered", gathered_attention(setting.kernel, setting.watch))
            mode = Mode(name, copy, _split_pieces(setting, joined))
        elif kind.startswith("bound"):
            _use(copy, f"benchmark_{kind}", query_attention("all" if kind == "bound_qkv" else "query"))
            mode = Mode(name, copy, _split_local(setting, False), exact=False, attends=False)
        else:
            _use(copy, "benchmark_local", local_attention(setting.kernel))
            mode = Mode(name, copy, _split_local(setting, True), exact=not setting.workload.stream)
        modes.append(mode)
    return modes


def cad_block(name: str, setting: Setting) -> dict[str, Any]:
    """The "cad" block of a mode name: `cad`, `cad:recompute`, `cad@{"overlap": "none"}`."""
    plain, _, changes = name.partition("@")
    block = dict(setting.cad)
    if plain.endswith(":recompute"):
        block["recompute_attention"] = True
    elif plain != "cad":
        raise ValueError(f"{name!r}: a variant of cad is cad:recompute, or cad@ and a JSON object")
    return {**block, **(json.loads(changes) if changes else {})}


def _use(model: LlamaForCausalLM, name: str, attend: AttentionFunction) -> None:
    AttentionInterface.register(name, attend)
    model.set_attn_implementation(name)


def use_ulysses(model: LlamaForCausalLM, setting: Setting) -> None:
    """Sequence parallelism over all ranks by DeepSpeed's UlyssesSPAttentionHF, around the same kernel."""
    name = "benchmark_ulysses"
    if name in AttentionInterface._global_mapping:
        model.set_attn_implementation(name)
        return
    import deepspeed.ops

    # Otherwise the first start on a CPU compiles a library for 80 s.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    deepspeed.init_distributed(dist_backend="nccl" if setting.device.type == "cuda" else "gloo", auto_mpi_discovery=False)
    _use(model, name, local_attention(setting.kernel))
    UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model,
        core_attn_implementation=name,
        sequence_parallel_size=dist.get_world_size(),
        micro_batch_size=1,
        seq_length_is_variable=True,
    )


# How a step is split


def _micro_batch(setting: Setting, tokens: Any, positions: Any, targets: Any, documents: Any = None) -> MicroBatch:
    inputs: dict[str, Any] = {
        "input_ids": tokens[None].to(setting.device),
        "position_ids": positions[None].to(setting.device),
        "use_cache": False,
    }
    if documents is not None:
        inputs["documents"] = documents
    return MicroBatch(inputs, targets.to(setting.device))


def _split_local(setting: Setting, documents: bool) -> Callable[[int], list[MicroBatch]]:
    def split(step: int) -> list[MicroBatch]:
        row = own_row(setting, step)
        sequences = make_sequences(row.lengths, row.lengths, setting.device) if documents else None
        return [_micro_batch(setting, row.tokens, row.positions, row.targets, sequences)]

    return split


def _join(rows: list[Row], joined: bool) -> list[Row]:
    if not joined:
        return rows
    columns = (torch.cat([getattr(row, name) for row in rows]) for name in ("tokens", "positions", "targets"))
    return [Row(tuple(n for row in rows for n in row.lengths), *columns)]


def _split_sequence(setting: Setting, joined: bool) -> Callable[[int], list[MicroBatch]]:
    def split(step: int) -> list[MicroBatch]:
        made = []
        for row in _join(setting.workload.make_rows(step, setting.vocab), joined):
            if len(row.tokens) % setting.ranks:
                raise ValueError(f"ulysses: rows of {len(row.tokens)} tokens cannot be split over {setting.ranks} ranks")
            own = (x.chunk(setting.ranks)[setting.rank] for x in (row.tokens, row.positions, row.targets))
            made.append(_micro_batch(setting, *own, make_sequences(row.lengths, row.lengths, setting.device)))
        return made

    return split


def _split_pieces(setting: Setting, joined: bool) -> Callable[[int], list[MicroBatch]]:
    def split(step: int) -> list[MicroBatch]:
        made = []
        for row in _join(setting.workload.make_rows(step, setting.vocab), joined):
            source, gathered = cut_pieces(row.lengths, setting.rank, setting.ranks, setting.device)
            padding = source < 0
            tokens, positions = (x[source.clamp(min=0)].masked_fill(padding, 0) for x in (row.tokens, row.positions))
            targets = row.targets[source.clamp(min=0)].masked_fill(padding, -100)
            made.append(_micro_batch(setting, tokens, positions, targets, gathered))
        return made

    return split


def cut_pieces(
    lengths: tuple[int, ...], rank: int, ranks: int, device: torch.device
) -> tuple[torch.Tensor, Gathered]:
    """Head and tail pieces of every document: rank r has parts r and 2·ranks − 1 − r of 2·ranks nearly equal ones.

    Gives the rows of the packed documents that this rank holds (−1 where padded to the longest rank), and what its
    attention needs.
    """
    starts = np.cumsum([0, *lengths])
    edges = [np.round(np.linspace(0, n, 2 * ranks + 1)).astype(np.int64) for n in lengths]
    pieces: list[list[list[tuple[int, int, int]]]] = []
    for r in range(ranks):
        parts = (r, 2 * ranks - 1 - r)
        runs = [[(d, int(e[p]), int(e[p + 1])) for d, e in enumerate(edges) if e[p] < e[p + 1]] for p in parts]
        pieces.append(runs)
    held = [sum(end - begin for run in runs for _, begin, end in run) for runs in pieces]
    rows = max(held)
    where = np.empty(int(starts[-1]), np.int64)
    """Row of the gathered keys of every packed row."""
    sources = []
    for r, runs in enumerate(pieces):
        packed = [np.arange(starts[d] + begin, starts[d] + end) for run in runs for d, begin, end in run]
        source = np.concatenate([*packed, np.full(rows - held[r], -1)])
        where[source[: held[r]]] = r * rows + np.arange(held[r])
        sources.append(source)
    q_lengths = [end - begin for run in pieces[rank] for _, begin, end in run]
    k_lengths = [end for run in pieces[rank] for _, _, end in run]
    keys = [np.concatenate([where[starts[d] : starts[d] + end] for d, _, end in run]) for run in pieces[rank] if run]
    if rows > held[rank]:
        q_lengths.append(rows - held[rank])
        k_lengths.append(rows - held[rank])
        keys.append(rank * rows + np.arange(held[rank], rows))
    index = tuple(torch.from_numpy(one).to(device) for one in keys)
    return torch.from_numpy(sources[rank]), Gathered(make_sequences(q_lengths, k_lengths, device), index)
