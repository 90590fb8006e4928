"""Which rows an exchange copies where: pure tables, made once per schedule and used by every layer.

In: a `Schedule`. Out: `PushTable`s, what this rank copies into its peers' landing areas. Where only some ranks are
neighbours: `near_part`, the schedule of the neighbours alone, and `FarPart`s, the messages to and from all others. A
message is a run of rows that lie one behind the other at the server. Both ends cut the same runs, as they see the
slices between them in the same order; so nothing is unpacked on arrival, and nothing packed on the way back.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from deepspeed_cad.errors import CADError
from deepspeed_cad.layout import Ints
from deepspeed_cad.schedule import HOME, KEY, KIND, QUERY, ROWS, SERVER, SERVER_ROW, STAGE_ROW, Schedule

ALIGNMENT = 256
"""Bytes: every field of a landing area begins at a multiple."""


@dataclass(frozen=True, eq=False)
class PushTable:
    """What one rank copies in one direction, peer after peer."""

    peers: Ints
    """[ranks]: in the order in which they are served; every rank begins with another one, itself last."""
    begin: Ints
    """[ranks + 1]: the part of `slices` that goes to each of `peers`."""
    slices: Ints
    """[n, 5]: kind, source row, head group, row in the peer's landing area, rows."""
    rows_sent: Ints
    """[2]: query and key rows that leave this rank."""
    source_rows: Ints
    """[2]: one past the highest source row that is read, of query and of key tensors."""


def dispatch_pushes(schedule: Schedule) -> PushTable:
    """From the homes' tensors into the servers' group-major buffers; what a rank serves itself included."""
    kind, _, server, group, home_row, server_row, rows, _ = np.concatenate([schedule.sends, schedule.own]).T
    return _pushes(schedule, server, np.stack([kind, home_row, group, server_row, rows], axis=1), schedule.served_rows)


def return_pushes(schedule: Schedule) -> PushTable:
    """From the servers' group-major tensors into the homes' landing areas; own slices stay where they are."""
    kind, home, _, group, _, server_row, rows, stage_row = schedule.receives.T
    slices = np.stack([kind, server_row, 0 * group, stage_row, rows], axis=1)
    return _pushes(schedule, home, slices, schedule.landed_rows)


def _pushes(schedule: Schedule, peer: Ints, slices: Ints, landing_rows: Ints) -> PushTable:
    reach = landing_rows[peer, slices[:, 0]]
    beyond = slices[:, 3] + slices[:, 4] > reach
    if beyond.any():
        first = int(np.flatnonzero(beyond)[0])
        raise CADError(
            f"rank {schedule.rank}: a slice ends at row {int(slices[first, 3] + slices[first, 4])} of rank "
            f"{int(peer[first])}'s landing area, which has {int(reach[first])} rows: schedule and plan disagree"
        )
    turn = (peer - schedule.rank - 1) % schedule.ranks
    order = np.lexsort((slices[:, 3], slices[:, 0], turn))
    turn, slices = turn[order], slices[order]
    joined = np.zeros(len(slices), bool)
    if len(slices) > 1:
        before, after = slices[:-1], slices[1:]
        joined[1:] = (
            (turn[1:] == turn[:-1])
            & (before[:, [0, 2]] == after[:, [0, 2]]).all(axis=1)
            & (before[:, 1] + before[:, 4] == after[:, 1])
            & (before[:, 3] + before[:, 4] == after[:, 3])
        )
    heads = np.flatnonzero(~joined)
    merged = slices[heads].copy()
    if len(heads):
        merged[:, 4] = np.add.reduceat(slices[:, 4], heads)
    leaves = merged[turn[heads] != schedule.ranks - 1]
    ends = merged[:, 1] + merged[:, 4]
    return PushTable(
        peers=(np.arange(schedule.ranks) + schedule.rank + 1) % schedule.ranks,
        begin=np.searchsorted(turn[heads], np.arange(schedule.ranks + 1)).astype(np.int64),
        slices=np.ascontiguousarray(merged, dtype=np.int64),
        rows_sent=np.array([leaves[leaves[:, 0] == kind, 4].sum() for kind in (QUERY, KEY)], np.int64),
        source_rows=np.array([ends[merged[:, 0] == kind].max(initial=0) for kind in (QUERY, KEY)], np.int64),
    )


def plan_landing(rows: Ints, kinds: list[int], row_bytes: list[int]) -> tuple[Ints, Ints]:
    """Lay the fields of an exchange one after the other; `rows` is [ranks, 2], as Schedule.served_rows. Gives bytes:
    where each field begins in every rank's landing area ([fields, ranks]), and what every rank needs ([ranks])."""
    sizes = np.array([rows[:, kind] * width for kind, width in zip(kinds, row_bytes)], np.int64).reshape(-1, len(rows))
    padded = -(-sizes // ALIGNMENT) * ALIGNMENT
    return np.cumsum(padded, axis=0) - padded, padded.sum(axis=0)


def address_fields(sources: list[tuple[int, int, int, int, int]], landing: Ints) -> Ints:
    """[fields, 5 + ranks]: kind, source address, bytes from row to row, from group to group and of one row; then the
    address where the field lands at every rank."""
    return np.ascontiguousarray(np.concatenate([np.array(sources, np.int64).reshape(-1, 5), landing], axis=1))


@dataclass(frozen=True, eq=False)
class FarPart:
    """Messages of one kind (query or key rows) between this rank and those that are not its neighbours. Tables have a
    row per message: peer, first row, rows."""

    home_index: Ints
    """row × groups + group of every row that leaves this rank as a home: packed in this order."""
    packed: Ints
    """As a home; rows count within what is packed."""
    landed: Ints
    """The same messages on their way back: rows of the landing area at home."""
    served: Ints
    """As a server, both ways: rows of the group-major buffer."""


def near_part(schedule: Schedule, members: Ints) -> Schedule:
    """What moves between the ranks `members` (ascending, this one among them), which are numbered from 0 there. Its
    buffers have room for all rows, also those that other ranks send; only rows per rank, slices and rank numbers differ
    from those of `schedule`."""
    if len(members) == schedule.ranks:
        return schedule

    def among(table: Ints) -> Ints:
        chosen = table[np.isin(table[:, HOME], members) & np.isin(table[:, SERVER], members)]
        for column in (HOME, SERVER):
            chosen[:, column] = np.searchsorted(members, chosen[:, column])
        return chosen

    return replace(
        schedule,
        rank=int(np.searchsorted(members, schedule.rank)),
        ranks=len(members),
        sends=among(schedule.sends),
        receives=among(schedule.receives),
        own=among(schedule.own),
        served_rows=schedule.served_rows[members],
        landed_rows=schedule.landed_rows[members],
    )


def far_part(schedule: Schedule, members: Ints, kind: int) -> FarPart:
    """What moves between this rank and all but `members`."""
    sends, receives = (
        table[(table[:, KIND] == kind) & ~np.isin(table[:, column], members)]
        for table, column in ((schedule.sends, SERVER), (schedule.receives, HOME))
    )
    begins = np.cumsum(sends[:, ROWS]) - sends[:, ROWS]
    cuts = _cut(sends, SERVER)
    return FarPart(
        home_index=schedule.home_index(sends, kind),
        packed=_runs(sends, SERVER, begins, cuts),
        landed=_runs(sends, SERVER, sends[:, STAGE_ROW], cuts),
        served=_runs(receives, HOME, receives[:, SERVER_ROW], _cut(receives, HOME)),
    )


def list_messages(runs: list[tuple[Ints, Ints]], sent: list[torch.Tensor], into: list[torch.Tensor]) -> Ints:
    """[messages, 4]: is_send, peer, address, bytes; of each field the runs that go out of a tensor, and those that
    arrive in another."""
    tables = [np.zeros((0, 4), np.int64)]
    for ways, source, target in zip(runs, sent, into, strict=True):
        width = target.shape[1] * target.element_size()
        for is_send, tensor, rows in ((1, source, ways[0]), (0, target, ways[1])):
            address = tensor.data_ptr() + rows[:, 1] * width
            tables.append(np.stack([np.full(len(rows), is_send), rows[:, 0], address, rows[:, 2] * width], axis=1))
    found = np.concatenate(tables)
    return np.ascontiguousarray(found[found[:, 3] > 0], np.int64)


def _cut(slices: Ints, peer: int) -> Ints:
    """Where runs begin: slices with the same peer that follow each other in the server's buffer make one."""
    before, after = slices[:-1], slices[1:]
    joined = (before[:, peer] == after[:, peer]) & (before[:, SERVER_ROW] + before[:, ROWS] == after[:, SERVER_ROW])
    return np.flatnonzero(np.concatenate([[True], ~joined]))


def _runs(slices: Ints, peer: int, begins: Ints, cuts: Ints) -> Ints:
    if not len(slices):
        return np.zeros((0, 3), np.int64)
    return np.stack([slices[cuts, peer], begins[cuts], np.add.reduceat(slices[:, ROWS], cuts)], axis=1)
