"""CAD: in place, in place with pipelines, and with reserved servers; each micro-batch planned by the real planner.

In: a setting and the layouts of a step's micro-batches. Out: `Foreseen`.

In place, all ranks meet in every layer, forward and backward. An exchange is hidden behind the attention that a rank
runs meanwhile (`"overlap": "local_first"`). With pipelines the stages run in lockstep rounds (pipeline/rounds.py),
a forward and a backward tick each, and one plan spreads the attention of all stages over all ranks: idle stages serve.
With reserved servers two parts alternate (interleaved.py), so that other layers hide exchanges too, and finish times
are equalised: what a trainer computes besides is its base load. Where weights are sharded (ZeRO-3, FSDP) the parts
alternate inside layers, and servers wait while other layers run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from deepspeed_cad.cost import CostModel
from deepspeed_cad.errors import CADConfigError
from deepspeed_cad.forecast.attention_seconds import Both, Floats, of_tasks
from deepspeed_cad.forecast.bytes_held import activation_bytes, landing_bytes, served_bytes, state_bytes
from deepspeed_cad.forecast.exchanges import (
    end_of_passes,
    flows_of,
    link_seconds,
    moved_bytes,
    read_others,
    trip_seconds,
)
from deepspeed_cad.forecast.interleaved import Part, backward_seconds, forward_seconds
from deepspeed_cad.forecast.non_attention_seconds import before_attention
from deepspeed_cad.forecast.schedule import compose, non_attention
from deepspeed_cad.forecast.setting import Setting
from deepspeed_cad.forecast.state_layers import find_travel
from deepspeed_cad.forecast.step import Foreseen, Seconds
from deepspeed_cad.forecast.steps import deal_out
from deepspeed_cad.layout import Ints, Layout, Segments, Tick
from deepspeed_cad.pipeline.rounds import Rounds
from deepspeed_cad.planner import make_plan
from deepspeed_cad.planner.alternation import alternate
from deepspeed_cad.planner.begin import begin_in_place
from deepspeed_cad.planner.constants import FORWARD_SHARE, WAVES_IN_TURN
from deepspeed_cad.planner.cut import PlanLayers, choose_interleaved_cut
from deepspeed_cad.planner.plan import O_RECEIVED, O_SENT, QKV_RECEIVED, QKV_SENT, Flows, Plan, PlanInput

EXCHANGES = 2
"""Of a layer's forward or backward: there and back."""
UNEVEN = 0.013
"""Of what is not attention: lost because GPUs of one kind do not run alike and meet in every layer, where plain
training waits for the slowest once a step. Beside servers twice, for each of two parts. The mean over runs:
docs/foreseen.md."""
RECOMPUTED = 1.4
"""How often a layer's exchanges run where the recompute repeats them, beside forward and backward: two fifths more."""


def in_place(setting: Setting, step: Sequence[Layout], variant: str = "") -> Foreseen:
    """See the module; with pipelines where the setting has stages. `variant`: what tables call it beside its name."""
    step = deal_out(setting, step)
    stages, most = setting.pipeline, float(max(layout.tokens.max() for layout in step))
    rounds = Rounds(stages, len(step))
    in_flight = rounds.in_flight(0), rounds.in_flight(stages - 1)
    met, peak, moved, state_moved = [], 0.0, np.zeros(2), np.zeros(2)
    for layout in _ticks(rounds, step):
        ran, seconds, flows = _meet(setting, layout)
        travel = find_travel(setting, layout)
        if travel is not None:
            waited = float(travel.seconds.total)
            ran += waited + float(travel.late.total)
            seconds = seconds._replace(exchange=seconds.exchange + waited)
            state_moved += travel.moved
        met.append((ran, *seconds))
        moved += moved_bytes(flows, not setting.forward_only)
        # In pipelines another rank runs the backward of what it serves: servers keep nothing.
        held = landing_bytes(setting, flows, with_outputs=stages > 1) + (served_bytes(setting, flows) * (stages == 1))
        tokens = most if stages > 1 else float(layout.tokens.max())
        held += 0.0 if travel is None else travel.held
        peak = max(peak, held + activation_bytes(setting, tokens, in_flight, kept=True))
    ran, *parts = map(float, np.sum(met, 0))
    again = RECOMPUTED if setting.checkpointing and setting.recompute_attention else 1.0
    return compose(
        setting,
        "cad",
        ran,
        Seconds(*parts),
        len(step),
        float(sum(layout.tokens.sum() for layout in step)),
        moved * (setting.attending * again / (stages * setting.seats)) + state_moved / setting.seats,
        peak=peak + state_bytes(setting, setting.seats),
        variant=variant,
    )


def _ticks(rounds: Rounds, step: Sequence[Layout]) -> Iterator[Layout]:
    """What meets: each micro-batch, or in pipelines those of a round side by side, one stage behind the other.

    The backward ticks have the micro-batches of the forward ticks in the reverse order of stages, so one plan stands
    for both.
    """
    if rounds.stages == 1:
        yield from step
        return
    nothing = Layout(step[0].ranks, Segments(*np.zeros((5, 0), np.int64)), 0 * step[0].tokens)
    for round_ in filter(rounds.has_forward, range(rounds.count)):
        found = [rounds.forward(round_, stage) for stage in range(rounds.stages)]
        yield _side_by_side([nothing if m is None else step[m] for m in found])


def _side_by_side(layouts: list[Layout]) -> Layout:
    columns, documents, ranks = [], 0, 0
    for layout in layouts:
        own = layout.segments
        columns.append((own.document + documents, own.begin, own.end, own.rank + ranks, own.offset))
        documents, ranks = documents + layout.documents, ranks + layout.ranks
    tokens = np.concatenate([layout.tokens for layout in layouts])
    return Layout(ranks, Segments(*(np.concatenate(column) for column in zip(*columns))), tokens)


def _meet(setting: Setting, layout: Layout) -> tuple[float, Seconds, Flows]:
    """One micro-batch of which all ranks wait for each other in every layer: seconds, those of the mean rank, bytes."""
    hosts, ranks, layers = setting.all_hosts, layout.ranks, setting.attending
    plan = setting.made[id(layout)][1] if id(layout) in setting.made else plan_in_place(setting, layout)
    flows = flows_of(plan, layout.tick())
    again = setting.checkpointing and setting.recompute_attention
    alone = _task_seconds(setting, plan.tasks, ranks)
    waiting = _task_seconds(setting, plan.tasks[read_others(plan.tasks, layout.segments)], ranks)
    other = non_attention(setting, layout.tokens.astype(np.float64))
    # In the reverse order of stages the last one, with head and loss, is where the first is.
    loss = np.where(np.arange(ranks) < setting.seats, other.loss, 0.0)
    start = other.each + Both(0.0 * loss, loss)  # of pipelines, which run no forward alone
    links = layers / np.array([setting.machine.copies, setting.machine.between])
    work = setting.in_pass(alone, kept=not again)

    def ends(links: Floats, waves: int, start: Both) -> Both:
        return end_of_passes(flows, hosts, alone, waiting, start, links, waves, layers)

    ended, instant = ends(links, plan.waves, start), ends(0.0 * links, 1, start)
    if again:
        # What runs again is another pass like the forward, to which all come together.
        together = Both(0.0 * loss, 0.0 * loss)
        ended, instant = (
            Both(found.forward, found.backward + ends(link, waves, together).forward)
            for found, link, waves in ((ended, links, plan.waves), (instant, 0.0 * links, 1))
        )
    ran = exposed = 0.0
    for begin, end, best in (
        (start.forward, ended.forward, instant.forward),
        (start.backward, ended.backward, instant.backward),
    )[: 1 if setting.forward_only else 2]:
        if setting.overlap == "pingpong":
            # One part moves while the other runs what is not attention.
            end = np.maximum(best, end - begin.max())
        took = float(end.max()) + _latency(setting) / 2
        ran += took + UNEVEN * float(begin.max())
        exposed += max(0.0, took - float(best.max()))
    layer_seconds = float((other.layers.total + loss).mean())
    mean = Seconds(layer_seconds, float(work.total.mean()), exposed, float(other.tensor.total.mean()))
    return ran, mean, flows


def plan_in_place(setting: Setting, layout: Layout) -> Plan:
    """The plan of a micro-batch as training makes it, with waves as transports take them: between hosts.

    Training measures what is not attention, but in pipelines and where attention runs again.
    """
    tick, begin = layout.tick(), None
    if setting.pipeline == 1 and not setting.recompute_attention and setting.believed is None:
        seconds = np.full(layout.ranks, float(_one_layer(setting).total[0]))
        begin = begin_in_place(seconds, tick, _planned_cost(setting), setting.shape.groups, None)
    return make_plan(question(setting, tick, begin, waves=(1,) if setting.all_hosts is None else setting.waves))


def _one_layer(setting: Setting) -> Both:
    """[1] seconds per token of what is not attention in one layer, without head and loss."""
    other = non_attention(setting, np.ones(1))
    each = other.layers + other.tensor
    head = setting.head * (setting.pipeline == 1)
    forward, backward = each.forward - head.forward, each.backward - head.backward
    return Both(forward / setting.attending, backward / setting.attending)


def question(setting: Setting, tick: Tick, base_load: Floats | None = None, waves: tuple[int, ...] = (1,)) -> PlanInput:
    """What the planner is asked in training."""
    return PlanInput(
        tick,
        setting.shape,
        _planned_cost(setting),
        tolerance=setting.tolerance,
        base_load=base_load,
        hosts=setting.all_hosts,
        waves=waves,
        backward=not setting.forward_only,
    )


def _planned_cost(setting: Setting) -> CostModel:
    cost = setting.cost if setting.believed is None else setting.believed
    return cost.of_forward(FORWARD_SHARE) if setting.forward_only else cost


def reserved(setting: Setting, step: Sequence[Layout], servers: int) -> Foreseen:
    """See the module. The last `servers` seats hold no model; the rows that they would have trained are left out."""
    trainers = setting.seats - servers
    if not 0 < servers < setting.seats:
        raise CADConfigError(
            f"{servers} servers of {setting.seats} seats: expected at least one server and one trainer"
        )
    if setting.pipeline > 1:
        raise CADConfigError("reserved servers together with pipeline stages cannot be foreseen; leave one of them out")
    met, peak, moved, trained = [], 0.0, np.zeros(2), 0.0
    for layout in deal_out(setting, step, trainers):
        rows = layout.segments.select(layout.segments.rank < trainers)
        own = Layout(layout.ranks, rows, np.where(np.arange(layout.ranks) < trainers, layout.tokens, 0))
        tokens = own.tokens.astype(np.float64)
        other = non_attention(setting, tokens)
        found = _alternate(setting, own, trainers) if alternates(setting) else _in_turn(setting, own)
        exchange = found.exchange + _latency(setting)
        attention = float(found.attention.mean())
        met.append(
            (
                found.ran + exchange + 2 * UNEVEN * float(other.each.total.max()),
                float(other.layers.total.mean()),
                attention,
                exchange,
                float(other.tensor.total.mean()),
            )
        )
        moved += sum(moved_bytes(one) for one in found.flows)
        trained += float(tokens.sum())
        # Servers park nothing.
        at_servers = replace(setting, keep="device")
        held = sum(landing_bytes(setting, one) + served_bytes(at_servers, one) for one in found.flows)
        peak = max(peak, held + activation_bytes(setting, float(tokens.max()), kept=True, waiting=found.waiting))
    ran, *parts = map(float, np.sum(met, 0))
    return compose(
        setting,
        "cad reserved",
        ran,
        Seconds(*parts),
        len(step),
        trained,
        moved * (setting.attending / setting.seats),
        holders=trainers,
        peak=peak + state_bytes(setting, trainers),
        degree=servers,
    )


class _Met(NamedTuple):
    """What a micro-batch beside servers is made of."""

    ran: float
    """Seconds of trainers, but for `exchange`."""
    exchange: float
    attention: Floats
    """[seats]"""
    flows: list[Flows]
    """Of each part."""
    waiting: float = 0.0
    """Tokens of the smaller part at the fullest trainer, which is being attended while the other runs its layers."""


def alternates(setting: Setting) -> bool:
    """Whether other layers of one part run while servers attend the other: see docs/interleave.md."""
    return setting.sharding in ("zero1", "zero2")


def _in_turn(setting: Setting, rows: Layout) -> _Met:
    """Servers wait while trainers run what is not attention, and trainers while servers attend."""
    plan = make_plan(question(setting, rows.tick()))
    flows = flows_of(plan, rows.tick())
    work = _task_seconds(setting, plan.tasks, setting.seats).total
    sent, received, back, home = (flows.bytes[kind] for kind in (QKV_SENT, QKV_RECEIVED, O_SENT, O_RECEIVED))
    forward = np.maximum(received + home, sent + back)
    backward = np.maximum(received + back + sent, sent + home + received)
    transfer = (link_seconds(setting.machine, forward) + link_seconds(setting.machine, backward)) * setting.attending
    other = non_attention(setting, rows.tokens.astype(np.float64))
    attended = float(work.max())
    exposed = max(0.0, float(transfer.max()) - attended)
    return _Met(attended + float((other.layers + other.tensor).total.max()), exposed, work, [flows])


def _alternate(setting: Setting, rows: Layout, trainers: int) -> _Met:
    """Two parts, cut and planned as training does it, or one where documents span trainers."""
    each, loss, seats = _one_layer(setting), setting.work.loss, setting.seats
    per_token = float(each.total[0])
    kinds = [PlanLayers(setting.cost, None, setting.shape.groups)]
    cut = choose_interleaved_cut(rows, np.ones(seats, np.int64), kinds, seats - trainers, per_token, trainers)
    ticks = (rows.tick(),) if cut is None else rows.cut(cut)
    parts, flows, attention = [], [], np.zeros(seats)
    whole = _attention(setting, rows.segments)
    # The planner counts kernels alone; what trainers do besides is made as much shorter.
    per_row = np.float64(per_token / setting.machine.in_training)
    for tick in ticks:
        asked = question(setting, tick, (rows.tokens - tick.query_tokens) * per_row)
        if cut is not None:
            left, servers_only = whole - _attention(setting, tick.query), np.arange(seats) >= trainers
            turns = alternate(left, tick.query_tokens * per_row, np.ones(seats), servers_only)
            asked = replace(asked, alternation=turns, waves=WAVES_IN_TURN)
        plan = make_plan(asked)
        flows.append(flows_of(plan, tick))
        work = _task_seconds(setting, plan.tasks, seats)
        attention += work.total
        tokens = tick.query_tokens[:trainers]
        beside = Both(tokens * each.forward, tokens * each.backward)
        own, served = (
            Both(work.forward[who], work.backward[who]) * (1.0 / setting.attending)
            for who in (slice(trainers), slice(trainers, None))
        )
        parts.append(Part(beside, own, served, *trip_seconds(setting.machine, flows[-1]), plan.waves))
    before = before_attention(setting.model)
    ran, hidden = (
        forward_seconds(way, setting.attending, before)
        + backward_seconds(way, setting.attending, before)
        + float(rows.tokens.max()) * loss
        for way in (parts, [replace(one, out=(0.0, 0.0), back=(0.0, 0.0)) for one in parts])
    )
    fullest = int(rows.tokens.argmax())
    waiting = 0.0 if cut is None else float(min(tick.query_tokens[fullest] for tick in ticks))
    return _Met(hidden, max(0.0, ran - hidden), attention, flows, waiting)


def even_servers(setting: Setting, tokens: float, attention: float) -> int:
    """How many seats to reserve so that servers and trainers have equally much to do.

    `attention`: seconds of a row of that many tokens, forward and backward, all layers.
    """
    other = float(non_attention(setting, np.array([tokens])).each.total[0])
    return min(setting.seats - 1, max(1, int(setting.seats * attention / (attention + other))))


def _attention(setting: Setting, rows: Segments) -> float:
    """Seconds of one layer's attention of these rows, by the kernel's profile."""
    return float(setting.cost.of(rows.begin, rows.end).sum()) * setting.shape.groups


def _task_seconds(setting: Setting, tasks: Ints, ranks: int) -> Both:
    """[ranks]: tasks of a plan, in training, all layers of a stage."""
    return of_tasks(tasks, setting.cost, ranks) * (setting.machine.in_training * setting.attending)


def _latency(setting: Setting) -> float:
    return 2 * EXCHANGES * setting.attending * setting.machine.latency
