"""Seconds of core attention, and of the exchanges of a plan in one layer, those of layers that carry state included.

In: documents and tasks with the cost model of a profile; what the planner counted that moves (`Flows`). Out: seconds of
each rank, with forward and backward on the first axis of two, as all arrays of seconds in this room; bytes; when ranks
are done with what they wait for. The model of a pass, and what it is in words: planner/finish.py. Beside reserved
servers two parts of a micro-batch alternate (docs/interleave.md): `Part`. Where documents of a hybrid span ranks:
`Travel` (docs/models.md).

The cost model has forward and backward together. They are told apart by what was measured: keys cost in backward only,
where every task writes dK and dV of its whole prefix, and of the rest forward is a fixed share.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from deepspeed_cad.cost import CostModel, count_pairs
from deepspeed_cad.forecast.bytes_held import HEADROOM
from deepspeed_cad.forecast.machine import Machine
from deepspeed_cad.forecast.setting import STATE, Setting
from deepspeed_cad.layout import Ints, Layout, Segments, Tick
from deepspeed_cad.planner.constants import FORWARD_SHARE, WAVE_SECONDS
from deepspeed_cad.planner.finish import end_of_pass, find_trips
from deepspeed_cad.planner.plan import O_RECEIVED, O_SENT, QKV_RECEIVED, QKV_SENT, Floats, Flows, Plan
from deepspeed_cad.schedule import build_slices
from deepspeed_cad.shares import MOST_PIECES

COPIES = 1.0 + 2.0 * HEADROOM
"""Of what the kernel takes, beside what the layer would hold on one rank: as the kernel takes it, and landing areas out
and back. In waves it would be less."""
WAIT, PARTED = 0.098, 0.72
"""More time of layers that carry state, as shares of their own, where it is handed on, for each piece of the longest
document but its first, and where heads part: measured with two pieces (benchmarks/results/h100x2/hybrid_long_*.json).
With four the step took as much longer (docs/models.md)."""


def seconds(cost: CostModel, begin: npt.ArrayLike, end: npt.ArrayLike) -> Floats:
    """[2, …]: of query rows [begin, end) of documents, one head group, elementwise."""
    rows = np.asarray(end, np.int64) - np.asarray(begin, np.int64)
    forward = FORWARD_SHARE * np.where(rows > 0, cost.pair * count_pairs(begin, end) + cost.row * rows, 0.0)
    return np.stack([forward, cost.of(begin, end) - forward])


def summed(each: Floats, by: Ints, count: int) -> Floats:
    """[2, count]: sums of the elements that have the same number."""
    return np.stack([np.bincount(by, way, minlength=count) for way in each])


def of_documents(layout: Layout, cost: CostModel, cut: bool = False) -> Floats:
    """[2, ranks]: each rank's own rows, one head group. `cut`: what lies on the rank before is not attended to."""
    own = layout.segments
    begin = np.zeros_like(own.begin) if cut else own.begin
    return summed(seconds(cost, begin, own.end - own.begin + begin), own.rank, layout.ranks)


def of_pieces(lengths: Ints, cost: CostModel, parts: int) -> Floats:
    """[2, documents]: all of a document, cut into 2 × `parts` equal pieces that each read all keys before their end."""
    rows = lengths.astype(np.float64)
    pieces = np.minimum(rows, 1.0 if parts == 1 else 2.0 * parts)
    once = cost.pair * rows * (rows + 1.0) / 2.0 + cost.row * rows
    # The pieces end at 1, 2, 3 … times their length.
    keys = rows * (pieces + 1.0) / 2.0
    forward = FORWARD_SHARE * once
    return np.stack([forward, once - forward + cost.key * keys + cost.task * pieces])


def of_tasks(setting: Setting, tasks: Ints, ranks: int) -> Floats:
    """[2, ranks]: the tasks of a plan by the rank that runs them, in training, all layers of a stage."""
    each = seconds(setting.cost, tasks[:, 1], tasks[:, 2]) * (tasks[:, 4] - tasks[:, 3])
    return summed(each, tasks[:, 5], ranks) * (setting.machine.in_training * setting.attending)


def document_lengths(layout: Layout) -> Ints:
    """Rows of every document, over all ranks that it lies on."""
    own = layout.segments
    return np.bincount(own.document, own.end - own.begin, minlength=layout.documents).astype(np.int64)


def moved_bytes(flows: Flows, backward: bool = True) -> Floats:
    """[2] of all ranks inside hosts and between them: Q, K and V there, O home; backward these and dO there, their
    gradients home."""
    there, back = (3.0, 2.0) if backward else (1.0, 1.0)
    return (there * flows.bytes[QKV_RECEIVED] + back * flows.bytes[O_SENT]).sum(1)


def trip_seconds(machine: Machine, flows: Flows) -> tuple[tuple[float, float], tuple[float, float]]:
    """Seconds of a layer's exchanges there, forward and backward, and back; the busier direction counts."""

    rates = np.array([[machine.copies], [machine.between]])  # INSIDE, BETWEEN: both kinds of links work at once

    def longest(*amounts: Floats) -> float:
        return max(float((amount / rates).max()) for amount in amounts)

    left, there, back, home = (flows.bytes[kind] for kind in (QKV_SENT, QKV_RECEIVED, O_SENT, O_RECEIVED))
    return (longest(there, left), longest(there + back, left + home)), (longest(back, home), longest(there, left))


def flows_of(plan: Plan, tick: Tick) -> Flows:
    """What a plan moves, and what lies side by side at servers as schedules put it there."""
    assert plan.flows is not None, "plans that the planner made have flows"
    return replace(plan.flows, served=build_slices(tick, plan.tasks).served_rows.T)


def read_others(tasks: Ints, rows: Segments) -> npt.NDArray[np.bool_]:
    """[tasks]: whether each reads anything that its server does not hold."""
    own = rows.select(np.lexsort((rows.begin, rows.document)))
    first = np.searchsorted(own.document, tasks[:, 0])
    held = np.full(rows.document.max(initial=-1) + 1, np.iinfo(np.int64).max)
    # Rows of a document before the first that is not where it begins.
    moved = own.rank != own.rank[np.searchsorted(own.document, own.document)]
    np.minimum.at(held, own.document[moved], own.begin[moved])
    return (tasks[:, 5] != own.rank[first]) | (tasks[:, 2] > held[tasks[:, 0]])


def end_of_passes(
    flows: Flows, hosts: Ints | None, own: Floats, waiting: Floats, start: Floats, per_byte: Floats, waves: int = 1,
    passes: int = 1,
) -> Floats:  # fmt: skip
    """[2, ranks]: when a rank has all of its O, and all of its dQ, dK and dV.

    `flows` move in a layer. Of each rank: the number of its host (None: all share one); [2, ranks] seconds of its `own`
    tasks, those of them that are `waiting` for something of another rank, and when it comes to its attention, and sends
    what others wait for. `per_byte`: [2] seconds inside a host and between hosts, in as many layers as all these.
    `waves`: in how many parts an exchange goes. `passes`: layers."""
    routes, trips = find_trips(flows, hosts, per_byte, waves)
    ends = []
    for work, waits, begin, (there, back) in zip(own, waiting, start, trips):
        # A server begins what it waits for when the last of its homes has come to it.
        begun = begin.copy()
        np.maximum.at(begun, routes.server, begin[routes.home])
        ends.append(end_of_pass(routes, there, back, begin + work - begun, waits, begun))
    return np.stack(ends) + (waves - 1) * WAVE_SECONDS * passes


@dataclass(frozen=True, eq=False)
class Part:
    """Seconds of one layer for one part, forward and backward."""

    non_attention: Floats
    """[2, trainers]: with the recompute in backward."""
    own: Floats
    """[2, trainers]: tasks that trainers run themselves."""
    served: Floats
    """[2, servers]: tasks that servers run."""
    out: tuple[float, float]
    """Until what servers wait for has arrived."""
    back: tuple[float, float]
    """Until what they found has arrived."""
    waves: int = 1
    """In how many equal parts it goes out, is served and comes back."""


def alternating_seconds(parts: list[Part], layers: int, before: float, backward: bool) -> float:
    """Seconds of all layers, forward or backward, when trainers are done; one part alone has nothing beside it.

    Trainers go at their own pace from one meeting to the next: a part of a layer is home when the last server and the
    last trainer that ran tasks of it are done, and a trainer with less besides runs more of them. Backward is the
    mirror: a trainer runs its own tasks of a part as soon as that is sent, and the last part comes first.

    `before`: of what is not attention in a part's layer, the share that lies before its attention."""
    first = 1.0 - before if backward else before
    numbers = range(len(parts))[::-1] if backward else range(len(parts))
    now = np.zeros(parts[0].own.shape[1])
    free = np.zeros(parts[0].served.shape[1])  # when each server is done with what reached it, in that order
    home = [0.0] * len(parts)  # when results of each part are there
    for layer in range(layers + 1):
        for number in numbers:
            part = parts[number]
            other, own, served = (one[int(backward)] for one in (part.non_attention, part.own, part.served))
            if layer:
                if not backward:
                    now = now + own
                    home[number] = max(home[number], float(now.max()))
                now = np.maximum(now, home[number])
            now = now + other * (first if not layer else 1.0 - first if layer == layers else 1.0)
            if layer == layers:
                continue
            # The part leaves trainers: servers run each wave of it when all of that is there.
            home[number] = 0.0
            for wave in range(part.waves):
                begun = np.maximum(free, now.max() + part.out[backward] * (wave + 1) / part.waves)
                free = begun + served / part.waves + (WAVE_SECONDS if wave else 0.0)
                home[number] = max(home[number], float(free.max(initial=0.0))) + part.back[backward] / part.waves
            if backward:
                now = now + own
                home[number] = max(home[number], float(now.max()))
    return float(now.max())


@dataclass(frozen=True)
class Travel:
    """Of all layers of a micro-batch that carry state; seconds as often as they run."""

    late: float
    """Beyond what they take of a rank's own rows."""
    own: float
    """Of these layers without their MLPs on a rank's own rows of documents that span ranks."""
    held: float
    """Bytes on the fullest rank, beside what the layer holds without."""


def find_travel(setting: Setting, layout: Layout) -> Travel | None:
    """None where nothing travels."""
    state, machine, own = setting.model.state, setting.machine, layout.segments
    if state is None or not own.begin.any():
        return None
    held = np.zeros((layout.documents, layout.ranks))
    np.add.at(held, (own.document, own.rank), own.end - own.begin)
    # Of a row, of the whole layer without its MLP.
    kernel = np.array(STATE) * float(state.taken + state.given) / machine.memory_rate
    once = kernel + np.array([1.0, 2.0]) * (2.0 * state.parameters / machine.matrix_flops)
    layer = state.count * float(setting.in_pass(once, False).sum())
    pieces, rows = int(np.bincount(own.document).max()), float(held[(held > 0).sum(1) > 1].sum(0).max())
    parts = pieces > MOST_PIECES or not state.hands_on
    return Travel(
        (PARTED if parts else WAIT * (pieces - 1)) * layer * rows * (state.taken > 0),
        layer * rows,
        COPIES * 2.0 * state.taken * rows if parts else 0.0,
    )
