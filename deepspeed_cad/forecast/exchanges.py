"""What a plan's exchanges take in one layer: seconds of links, and when ranks are done with what they wait for.

In: what the planner counted that moves (`Flows`), seconds of attention of each rank. Out: bytes and seconds. The model
of a pass, and what it is in words: planner/finish.py.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from deepspeed_cad.forecast.attention_seconds import Both, Floats
from deepspeed_cad.forecast.machine import Machine
from deepspeed_cad.layout import Ints, Segments, Tick
from deepspeed_cad.planner.constants import WAVE_SECONDS
from deepspeed_cad.planner.finish import end_of_pass, find_trips
from deepspeed_cad.planner.plan import BETWEEN, INSIDE, O_RECEIVED, O_SENT, QKV_RECEIVED, QKV_SENT, Bools, Flows, Plan
from deepspeed_cad.schedule import build_slices


def moved_bytes(flows: Flows, backward: bool = True) -> Floats:
    """[2] of all ranks inside hosts and between them: Q, K and V there, O home; backward these and dO there, their
    gradients home."""
    there, back = (3.0, 2.0) if backward else (1.0, 1.0)
    moved: Floats = (there * flows.bytes[QKV_RECEIVED] + back * flows.bytes[O_SENT]).sum(1)
    return moved


def link_seconds(machine: Machine, amount: Floats) -> Floats:
    """[ranks]: of bytes [2, ranks], inside a host and between hosts; both kinds of links work at once."""
    return np.maximum(amount[INSIDE] / machine.copies, amount[BETWEEN] / machine.between)


def trip_seconds(machine: Machine, flows: Flows) -> tuple[tuple[float, float], tuple[float, float]]:
    """Seconds of a layer's exchanges there, forward and backward, and back; the busier direction counts."""

    def longest(*amounts: Floats) -> float:
        return max(float(link_seconds(machine, amount).max()) for amount in amounts)

    left, there, back, home = (flows.bytes[kind] for kind in (QKV_SENT, QKV_RECEIVED, O_SENT, O_RECEIVED))
    return (longest(there, left), longest(there + back, left + home)), (longest(back, home), longest(there, left))


def flows_of(plan: Plan, tick: Tick) -> Flows:
    """What a plan moves, and what lies side by side at servers as schedules put it there."""
    assert plan.flows is not None, "plans that the planner made have flows"
    return replace(plan.flows, served=build_slices(tick, plan.tasks).served_rows.T)


def read_others(tasks: Ints, rows: Segments) -> Bools:
    """[tasks]: whether each reads anything that its server does not hold."""
    own = rows.select(np.lexsort((rows.begin, rows.document)))
    first = np.searchsorted(own.document, tasks[:, 0])
    held = np.full(rows.document.max(initial=-1) + 1, np.iinfo(np.int64).max)
    # Rows of a document before the first that is not where it begins.
    moved = own.rank != own.rank[np.searchsorted(own.document, own.document)]
    np.minimum.at(held, own.document[moved], own.begin[moved])
    return (tasks[:, 5] != own.rank[first]) | (tasks[:, 2] > held[tasks[:, 0]])


def end_of_passes(
    flows: Flows,
    hosts: Ints | None,
    own: Both,
    waiting: Both,
    start: Both,
    per_byte: Floats,
    waves: int = 1,
    passes: int = 1,
) -> Both:
    """[ranks]: when a rank has all of its O, and all of its dQ, dK and dV.

    Args:
        flows: what moves in a layer.
        hosts: [ranks] number of each one's host; None: all share one.
        own: [ranks] seconds of all tasks of a rank.
        waiting: of them, those that read something of another rank.
        start: when each comes to its attention, and sends what others wait for.
        per_byte: [2] seconds inside a host and between hosts, in as many layers as all these.
        waves: in how many parts an exchange goes.
        passes: layers.
    """
    routes, trips = find_trips(flows, hosts, per_byte, waves)
    ends = []
    forward = own.forward, waiting.forward, start.forward
    backward = own.backward, waiting.backward, start.backward
    for (work, waits, begin), (there, back) in zip((forward, backward), trips):
        # A server begins what it waits for when the last of its homes has come to it.
        begun = begin.copy()
        np.maximum.at(begun, routes.server, begin[routes.home])
        ends.append(end_of_pass(routes, there, back, begin + work - begun, waits, begun))
    return Both(*(end + (waves - 1) * WAVE_SECONDS * passes for end in ends))
