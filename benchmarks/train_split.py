"""How the documents of one step become micro-batches of this rank, in every mode of the training benchmark.

In: a `Setting` and the number of a step. Out: `MicroBatch`es: what the decoder is called with, and the targets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from train_attention import Gathered, Stopwatch, make_sequences
from train_workload import Row, Workload

from deepspeed_cad.kernels.interface import Kernel


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


def own_row(setting: Setting, step: int) -> Row:
    """The tokens of this rank: its row, or its part of the stream."""
    rows = setting.workload.make_rows(step, setting.vocab)
    if not setting.workload.stream:
        return rows[setting.rank]
    here = slice(setting.rank * setting.workload.tokens_per_rank, (setting.rank + 1) * setting.workload.tokens_per_rank)
    local = setting.workload.local(step, setting.rank)
    lengths = tuple(int(n) for n in local.end - local.begin)
    return Row(lengths, rows[0].tokens[here], rows[0].positions[here], rows[0].targets[here])


def make_micro_batch(setting: Setting, tokens: Any, positions: Any, targets: Any, documents: Any = None) -> MicroBatch:
    """Rows of tokens on the device, with what attention needs to know of its documents, where it needs that."""
    inputs: dict[str, Any] = {
        "input_ids": tokens[None].to(setting.device),
        "position_ids": positions[None].to(setting.device),
        "use_cache": False,
    }
    if documents is not None:
        inputs["documents"] = documents
    return MicroBatch(inputs, targets.to(setting.device))


def split_rows(setting: Setting, documents: bool) -> Callable[[int], list[MicroBatch]]:
    """This rank's own row; `documents`: with what local attention needs."""

    def split(step: int) -> list[MicroBatch]:
        row = own_row(setting, step)
        sequences = make_sequences(row.lengths, row.lengths, setting.device) if documents else None
        return [make_micro_batch(setting, row.tokens, row.positions, row.targets, sequences)]

    return split


def _join(rows: list[Row], joined: bool) -> list[Row]:
    if not joined:
        return rows
    columns = (torch.cat([getattr(row, name) for row in rows]) for name in ("tokens", "positions", "targets"))
    return [Row(tuple(n for row in rows for n in row.lengths), *columns)]


def split_sequence(setting: Setting, joined: bool) -> Callable[[int], list[MicroBatch]]:
    """An equal part of every row, one row after the other, or of all rows `joined` into one."""

    def split(step: int) -> list[MicroBatch]:
        made = []
        for row in _join(setting.workload.make_rows(step, setting.vocab), joined):
            if len(row.tokens) % setting.ranks:
                raise ValueError(f"ulysses: {len(row.tokens)} tokens cannot be split over {setting.ranks} ranks")
            own = (x.chunk(setting.ranks)[setting.rank] for x in (row.tokens, row.positions, row.targets))
            made.append(make_micro_batch(setting, *own, make_sequences(row.lengths, row.lengths, setting.device)))
        return made

    return split


def split_pieces(setting: Setting, joined: bool) -> Callable[[int], list[MicroBatch]]:
    """Two pieces of every document of every row, one row after the other, or of all rows `joined` into one."""

    def split(step: int) -> list[MicroBatch]:
        made = []
        for row in _join(setting.workload.make_rows(step, setting.vocab), joined):
            source, gathered = cut_pieces(row.lengths, setting.rank, setting.ranks, setting.device)
            padding = source < 0
            tokens, positions = (x[source.clamp(min=0)].masked_fill(padding, 0) for x in (row.tokens, row.positions))
            targets = row.targets[source.clamp(min=0)].masked_fill(padding, -100)
            made.append(make_micro_batch(setting, tokens, positions, targets, gathered))
        return made

    return split


def cut_pieces(lengths: tuple[int, ...], rank: int, ranks: int, device: torch.device) -> tuple[torch.Tensor, Gathered]:
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
