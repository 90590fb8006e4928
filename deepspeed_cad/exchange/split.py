"""Which part of an exchange stays among neighbours, whose memory this rank reaches, and which travels as messages.

In: a `Schedule`, and the ranks that are neighbours (this one included). Out: `near_part`, the schedule of the
neighbours alone, and a `FarPart`, the messages to and from all others. Both parts fill the same buffers, [served rows,
width] at the server and [landed rows, width] at home; every slice is in one of them. Numpy only.

A message is a run of rows that lie one behind the other at the server. Both ends cut the same runs, because they see
the slices between them in the same order; so nothing is unpacked on arrival, and nothing packed on the way back.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from deepspeed_cad.layout import Ints
from deepspeed_cad.schedule import HOME, KIND, ROWS, SERVER, SERVER_ROW, STAGE_ROW, Schedule


@dataclass(frozen=True, eq=False)
class FarPart:
    """Messages of one kind (query or key rows) between this rank and those that are not its neighbours.

    Tables have a row per message: peer, first row, rows.
    """

    home_index: Ints
    """row × groups + group of every row that leaves this rank as a home: packed in this order."""
    packed: Ints
    """As a home; rows count within what is packed."""
    landed: Ints
    """The same messages on their way back: rows of the landing area at home."""
    served: Ints
    """As a server, both ways: rows of the group-major buffer."""


def near_part(schedule: Schedule, members: Ints) -> Schedule:
    """What moves between the ranks `members` (ascending, this one among them), which are numbered from 0 there.

    Its buffers have room for all rows, also those that other ranks send; only rows per rank, slices and rank numbers
    differ from those of `schedule`.
    """
    if len(members) == schedule.ranks:
        return schedule

    def among(table: Ints) -> Ints:
        chosen = table[np.isin(table[:, HOME], members) & np.isin(table[:, SERVER], members)]
        for column in (HOME, SERVER):
            chosen[:, column] = np.searchsorted(members, chosen[:, column])
        return chosen

    return dataclasses.replace(
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


def list_messages(is_send: bool, runs: Ints, address: int, width: int) -> Ints:
    """[messages, 4]: is_send, peer, address, bytes; of runs of a tensor at `address` with rows of `width` bytes."""
    runs = runs if width else runs[:0]
    return np.stack(
        [np.full(len(runs), int(is_send)), runs[:, 0], address + runs[:, 1] * width, runs[:, 2] * width], axis=1
    ).astype(np.int64)


def _cut(slices: Ints, peer: int) -> Ints:
    """Where runs begin: slices with the same peer that follow each other in the server's buffer make one."""
    if not len(slices):
        return np.zeros(0, np.int64)
    before, after = slices[:-1], slices[1:]
    joined = (before[:, peer] == after[:, peer]) & (before[:, SERVER_ROW] + before[:, ROWS] == after[:, SERVER_ROW])
    return np.flatnonzero(np.concatenate([[True], ~joined]))


def _runs(slices: Ints, peer: int, begins: Ints, cuts: Ints) -> Ints:
    if not len(slices):
        return np.zeros((0, 3), np.int64)
    return np.stack([slices[cuts, peer], begins[cuts], np.add.reduceat(slices[:, ROWS], cuts)], axis=1)
