"""Waves: the tasks that ranks serve in one tick, cut into parts that travel, run and go back one behind the other; and
what memory they need at once.

In: a tick, the tasks of its plan, a `Cut`, or a `Room` that the parts must fit in. Out: that many schedules of one
rank, each an exchange of its own. Pure, and the same cut on every rank.

Waves are cut by head groups: all that any rank computes with the keys of a document's head group lies in one wave. So
keys travel no more often than without waves, and what comes back for one key, from however many servers, is added at
once. Where a head group is too much, its rows are cut into blocks too, each of which needs the keys before it: more
bytes, for less memory. Tasks that need no other rank are in no wave; the first schedule has them.

Waves take places in turn, `OUT` on their way out and `BACK` on their way back; where transports keep memory between
exchanges, each place is as large as the largest wave that ever had it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from deepspeed_cad.cost import count_pairs, window_start
from deepspeed_cad.errors import CADError
from deepspeed_cad.layout import Ints, Tick, expand
from deepspeed_cad.schedule import Schedule, Slices, build_slices, schedule_rank

OUT, BACK = 2, 3
"""Waves of one tick that have memory at once, on their way out and on their way back. While one is served the next one
comes; results of the one before are on their way, and those of the one before that are placed. So what waves need of
memory falls with their number. Fewer would make servers wait for transfers; more would only hold memory."""
HEADROOM = 1.25
"""Times what is needed: memory that is kept between exchanges is made so large where the limit allows it, so that it
does not grow with every longer document."""
MOST = 32
"""Waves of one tick: as many as the identities of exchanges tell apart (exchange/failure/identity.py)."""
ROW_OVER_KEY = 4
"""Bytes of a query row, with its dO, over those of a key row: with 4 query heads per KV head."""
_CUTS = (
    (0, (4, 5, 6, 7, 8, 10, 12, 16)), (2, (4, 5, 6, 7, 8, 10, 12, 16, 24)), (3, (5, 6, 8, 10, 12, 16, 24, MOST)),
    (4, (8, 10, 12, 16, 24, MOST)), (8, (8, 16, 24, MOST)), (16, (24, MOST)), (32, (MOST,)),
)  # fmt: skip
"""Blocks, and numbers of waves with each, that are tried for a room, in this order: whole head groups first, because
rows cut into blocks take keys along several times. Up to 3 waves need hardly less than one."""
LONGER = 1.005
"""Times the work of the fullest rank that waves may take: with more, other cuts are looked at. Plans give all ranks the
same to do, so that whoever is held up ends later."""
MORE = 2
"""Times a limit that nobody set: so much, where it is known to be free, if what fits takes longer than that."""
FINER = 0.001
"""Of that work, what is lost for each block of rows, as kernels end with idle processors: 12 waves with 3 blocks took
0.4 % longer to attend half a million tokens on two H200 than one wave (benchmarks/results/h200x2, commit fcc832a)."""


class Room(NamedTuple):
    """What the exchanges of one tick may need of memory."""

    limit: float
    out: tuple[int, int]
    """Bytes that go out for one query row and for one key row of a head group, in the pass that has more."""
    back: tuple[int, int]
    """The same of what comes back."""
    source: str = 'the key "memory"'
    parts: int = 1
    """Nano-batches, which have as much each: users think of the sum."""
    headroom: float = HEADROOM
    """Times what is needed that memory is made which is kept; see `with_headroom`."""
    most: float = 0.0
    """Bytes for what no cut makes fit into the limit: it gets the least that there is a cut for."""


class Cut(NamedTuple):
    waves: int = 1
    blocks: int = 0
    """0: waves have about equal work. Else about equally many bytes, for memory, and head groups have so many blocks of
    rows: those of the longest task; shorter ones have fewer."""
    granularity: int = 128
    """Rows: blocks are multiples of it from the begin of their task."""


WHOLE = Cut()


class Waves(NamedTuple):
    """One rank's part of a tick."""

    cut: Cut
    """The same on every rank: whoever has the tasks and this makes the same waves."""
    schedules: tuple[Schedule, ...]


def schedule_waves(
    tick: Tick, tasks: Ints, rank: int, groups: int, window: int | None, cut: Cut
) -> tuple[Schedule, ...]:
    """The schedules of one rank ([n, 6] tasks, see Plan.tasks)."""
    slices = (build_slices(tick, part, window) for part in split_tasks(tick, tasks, window, cut))
    return tuple(schedule_rank(tick, part, rank, groups, window) for part in slices)


def waves_within(tick: Tick, tasks: Ints, rank: int, groups: int, window: int | None, cut: Cut, room: Room) -> Waves:
    """A cut, from `cut` on, with which what lands on any rank fits into `room`, and one rank's schedules. Of those that
    fit it is the first in which ranks hardly hold each other up; else the first such one within `MORE`; else that in
    which they do so least. Where nothing fits: what needs least, or CADError on every rank where that is too much."""
    least: tuple[tuple[float, int], Cut, list[Slices]] | None = None
    best, found, beyond = float("inf"), None, None
    more = min(room.most, MORE * room.limit) if room.most < float("inf") else 0.0
    # `cut`, and what needs less memory and has no fewer waves.
    smaller = (Cut(waves, blocks, cut.granularity) for blocks, counts in _CUTS for waves in counts if waves > cut.waves)
    for one in (cut, *smaller):
        parts = split_tasks(tick, tasks, window, one)
        slices = [build_slices(tick, part, window) for part in parts]
        needed = room_needed(room, [(part.served_rows, part.landed_rows) for part in slices])
        least = least if least is not None and least[0] <= needed else (needed, one, slices)
        if needed[0] > max(room.limit, more):
            continue
        # What was planned was weighed by the planner.
        longer = 1.0 if one == cut else stretch(tick, parts, window) + FINER * one.blocks
        if needed[0] > room.limit:
            beyond = beyond or ((one, slices) if longer <= LONGER else None)
        elif longer < best:
            best, found = longer, (one, slices)
        if best <= LONGER:
            break
    found = (beyond if best > LONGER else None) or found
    if found is None:
        assert least is not None  # some cut was looked at
        if least[0][0] > room.most:
            raise too_much(room, *least[0])
        found = least[1:]
    return Waves(found[0], tuple(schedule_rank(tick, part, rank, groups, window) for part in found[1]))


def stretch(tick: Tick, parts: list[Ints], window: int | None) -> float:
    """When the last rank is done over the most that one rank has to do, if transfers took no time. As
    attention/overlap.py runs them: own tasks in equal shares before, between and behind the waves. Behind a wave one
    more starts, once the wave before is back from all ranks; and a wave is served when all ranks have started it."""
    served = np.zeros((len(parts), tick.ranks))
    own = np.zeros(tick.ranks)
    for part, work in zip(parts, served, strict=True):
        pairs = count_pairs(part[:, 1], part[:, 2], window) * (part[:, 4] - part[:, 3])
        alone = _run_alone(tick, part, window)
        np.add.at(own, part[alone, 5], pairs[alone])
        np.add.at(work, part[~alone, 5], pairs[~alone])
    share = own / (len(parts) + 1)
    done, before, started = share.copy(), 0.0, [0.0] * OUT
    for wave, work in enumerate(served):
        done = np.maximum(done, started[wave]) + work
        back = float(done.max())
        if wave + OUT < len(served):
            np.maximum(done, before, out=done)
            started.append(float(done.max()))
        before = back
        done += share
    most = float((served.sum(axis=0) + own).max())
    return float(done.max()) / most if most else 1.0


def split_tasks(tick: Tick, tasks: Ints, window: int | None, cut: Cut) -> list[Ints]:
    """The tasks of every wave; what runs at home without others is in the first."""
    if cut.waves == 1:
        return [tasks]
    alone = _run_alone(tick, tasks, window)
    moved = tasks[~alone]
    # One row for each head group of a task.
    count = moved[:, 4] - moved[:, 3]
    each = np.repeat(moved, count, axis=0)
    each[:, 3] = expand(moved[:, 3], count)
    each[:, 4] = each[:, 3] + 1
    if cut.blocks:
        # Blocks of rows no longer than the longest task's share.
        rows = each[:, 2] - each[:, 1]
        most = -(-int(rows.max(initial=1)) // cut.blocks)
        step = -(-most // cut.granularity) * cut.granularity
        count = -(-rows // step)
        each = np.repeat(each, count, axis=0)
        each[:, 1] += expand(np.zeros(len(count), np.int64), count) * step
        each[:, 2] = np.minimum(each[:, 2], each[:, 1] + step)
    wave = _waves_of(each, window, cut)
    first, *others = (_join(each[wave == number]) for number in range(cut.waves))
    return [np.concatenate([tasks[alone], first]), *others]


def _run_alone(tick: Tick, tasks: Ints, window: int | None) -> np.ndarray:
    """Which tasks find their rows and keys at their server ([tasks])."""
    document, begin, end, _, _, server = tasks.T
    query, rows_end = tick.query.find(document, begin, server)
    key, keys_end = tick.key.find(document, window_start(begin, window), server)
    return (query >= 0) & (end <= rows_end) & (key >= 0) & (end <= keys_end)


def _waves_of(each: Ints, window: int | None, cut: Cut) -> Ints:
    """The wave of each row: a server's units in order, cut into shares of about equal work. A unit is a head group of a
    document; where several servers work on one, that with the most work on it decides for all. With blocks of rows each
    block is a unit, and shares are of about as many bytes: memory is what counts then."""
    if not len(each):
        return np.zeros(0, np.int64)
    weight = count_pairs(each[:, 1], each[:, 2], window)
    if cut.blocks:
        weight = ROW_OVER_KEY * (each[:, 2] - each[:, 1]) + each[:, 2] - window_start(each[:, 1], window)
    unit = each[:, [0, 3, 5, 1]] if cut.blocks else each[:, [0, 3]]
    at_server, which = np.unique(np.concatenate([unit, each[:, 5:]], axis=1), axis=0, return_inverse=True)
    which = which.ravel()
    work = np.zeros(len(at_server), np.int64)
    np.add.at(work, which, weight)
    units, of_unit = np.unique(at_server[:, :-1], axis=0, return_inverse=True)
    of_unit = of_unit.ravel()
    # Most work first within a unit; of equals the lower rank.
    order = np.lexsort((at_server[:, -1], -work, of_unit))
    chief = order[np.searchsorted(of_unit[order], np.arange(len(units)))]
    server, own = at_server[chief, -1], work[chief]
    by_server = np.argsort(server, kind="stable")
    ends, (servers, first) = np.cumsum(own[by_server]), np.unique(server[by_server], return_index=True)
    place = np.searchsorted(servers, server[by_server])
    before = (ends - own[by_server])[first]
    whole = np.append(before[1:], ends[-1]) - before
    # The wave in which the middle of its work lies.
    middle = 2 * (ends - before[place]) - own[by_server]
    wave = np.empty(len(units), np.int64)
    wave[by_server] = middle * cut.waves // (2 * whole[place])
    return wave[of_unit[which]]


def _join(each: Ints) -> Ints:
    """Tasks again: rows that differ only in head groups that follow each other become one."""
    each = each[np.lexsort((each[:, 3], each[:, 5], each[:, 2], each[:, 1], each[:, 0]))]
    if not len(each):
        return each
    same = (each[1:, [0, 1, 2, 5]] == each[:-1, [0, 1, 2, 5]]).all(axis=1) & (each[1:, 3] == each[:-1, 4])
    heads = np.flatnonzero(np.concatenate([[True], ~same]))
    joined = each[heads]
    joined[:, 4] = each[np.append(heads[1:], len(each)) - 1, 4]
    return joined[np.lexsort(joined.T[::-1])]


def lane_bytes(waves: Sequence[Ints], row: tuple[int, int], lanes: int) -> list[Ints]:
    """[ranks] bytes that land at most in each of the `lanes` places that waves take in turn. `waves`: rows of every
    rank ([ranks, 2]). `row`: bytes of a query and of a key row."""
    each = [rows @ np.array(row, np.int64) for rows in waves]
    return [np.max(each[lane::lanes], axis=0) for lane in range(min(lanes, len(each)))]


def room_needed(room: Room, waves: Sequence[tuple[Ints, Ints]]) -> tuple[float, int]:
    """Bytes that a rank needs for waves of which so many rows land at servers and at homes, and which rank needs most.
    Every rank makes its memory as large as the fullest one needs it; headroom is not counted."""
    lanes = lane_bytes([served for served, _ in waves], room.out, OUT)
    lanes += lane_bytes([landed for _, landed in waves], room.back, BACK)
    needed = float(sum(int(lane.max(initial=0)) for lane in lanes))
    fullest = max(lanes, key=lambda lane: int(lane.max(initial=0)))
    return needed, int(fullest.argmax()) if len(fullest) else 0


def with_headroom(room: Room, needed: float) -> Room:
    """The room for a tick that needs so many bytes: with as much headroom as its limit has left, and no more."""
    return room._replace(headroom=min(HEADROOM, max(1.0, room.limit / needed)) if needed else HEADROOM)


def too_much(room: Room, needed: float, rank: int) -> CADError:
    needed, limit = needed * room.parts, room.limit * room.parts
    over = needed - limit
    return CADError(
        f"the attention that ranks exchange does not fit: cut into the smallest waves, what lands at rank {rank} "
        f"needs {_size(needed)} at once, {_size(over)} more than the {_size(limit)} that {room.source} allows. Set "
        f'"memory" to at least {1.006 * needed / 2**30:.3g} (GiB), use shorter documents or more ranks, or free GPU '
        "memory by more checkpointing"
    )


def _size(count: float) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**29 else f"{count / 2**20:.3g} MiB"
