"""CAD: in place, in place with pipelines, and with reserved servers; each micro-batch planned by the real planner.

In: a setting and the layouts of a step's micro-batches. Out: `Foreseen`.

In place, all ranks meet in every layer, forward and backward. An exchange is hidden behind the attention that a rank
runs meanwhile (`"overlap": "local_first"`). With reserved servers two parts alternate (interleaved.py), so that linear
layers hide it too, and finish times are equalised: a trainer's linear part is its base load. Where weights are sharded
(ZeRO-3, FSDP) the parts alternate inside layers, and servers wait while linear layers run. With pipelines the stages
run in lockstep rounds, a forward and a backward tick each, and one plan spreads the attention of all stages over all
ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from deepspeed_cad.errors import CADConfigError
from deepspeed_cad.forecast.attention_seconds import Both, Floats, of_tasks
from deepspeed_cad.forecast.bytes_held import (
    activation_bytes,
    kept_output_bytes,
    landing_bytes,
    served_bytes,
    stage_bytes,
    state_bytes,
)
from deepspeed_cad.forecast.bytes_moved import Traffic, count_traffic
from deepspeed_cad.forecast.finish import done
from deepspeed_cad.forecast.interleaved import Part, backward_seconds, forward_seconds
from deepspeed_cad.forecast.non_attention_seconds import before_attention
from deepspeed_cad.forecast.schedule import (
    Figures,
    compose,
    hop_seconds,
    last_stage_seconds,
    linear_seconds,
    tensor_seconds,
)
from deepspeed_cad.forecast.setting import Setting
from deepspeed_cad.forecast.step import Foreseen, Seconds
from deepspeed_cad.layout import Ints, Layout, Segments, Tick
from deepspeed_cad.pipeline.rounds import Rounds
from deepspeed_cad.planner import make_plan
from deepspeed_cad.planner.alternation import alternate
from deepspeed_cad.planner.constants import WAVES_IN_TURN
from deepspeed_cad.planner.cut import PlanLayers, choose_interleaved_cut
from deepspeed_cad.planner.plan import Plan, PlanInput

EXCHANGES = 2
"""Of a layer's forward or backward: there and back."""


def in_place(setting: Setting, step: Sequence[Layout]) -> Foreseen:
    """See the module; with pipelines where the setting has stages."""
    if setting.pipeline > 1:
        return _in_rounds(setting, step)
    ran, mean, peak, moved = 0.0, Seconds(), 0.0, np.zeros(2)
    for layout in step:
        tokens = layout.tokens.astype(np.float64)
        seconds, parts, traffic = _meet(setting, layout, tokens, setting.hosts)
        ran += seconds
        mean = _add(mean, parts)
        moved += np.array(traffic.moved) * setting.layers * _times(setting)
        peak = max(peak, _peak(setting, float(tokens.max()), traffic))
    moved /= setting.seats
    return compose(
        setting,
        "cad",
        ran,
        mean,
        len(step),
        float(sum(layout.tokens.sum() for layout in step)),
        Figures((float(moved[0]), float(moved[1])), peak),
    )


def reserved(setting: Setting, step: Sequence[Layout], servers: int) -> Foreseen:
    """See the module. The last `servers` seats hold no model; the rows that they would have trained are left out."""
    trainers = setting.seats - servers
    if not 0 < servers < setting.seats:
        raise CADConfigError(
            f"{servers} servers of {setting.seats} seats: expected at least one server and one trainer"
        )
    if setting.pipeline > 1:
        raise CADConfigError("reserved servers together with pipeline stages cannot be foreseen; leave one of them out")
    ran, mean, peak, moved, trained = 0.0, Seconds(), 0.0, np.zeros(2), 0.0
    for layout in step:
        kept = _first_rows(layout, trainers)
        tokens = kept.tokens.astype(np.float64)
        linear, tensor = linear_seconds(setting, tokens), tensor_seconds(setting, tokens)
        met = _alternate(setting, kept, trainers) if alternates(setting) else _in_turn(setting, kept, linear + tensor)
        exchange = met.exchange + _latency(setting)
        ran += met.ran + exchange
        mean = _add(
            mean,
            Seconds(float(linear.total.mean()), float(met.attention.mean()), exchange, float(tensor.total.mean())),
        )
        moved += sum((np.array(one.moved) for one in met.traffics), np.zeros(2)) * setting.layers
        trained += float(tokens.sum())
        # Servers park nothing.
        at_servers = replace(setting, keep="device")
        held = sum(landing_bytes(setting, one) + served_bytes(at_servers, one) for one in met.traffics)
        most = float(tokens.max())
        trainer = state_bytes(setting, trainers) + activation_bytes(setting, most, waiting=met.waiting)
        peak = max(peak, trainer + kept_output_bytes(setting, most) + held)
    moved /= setting.seats
    return compose(
        setting,
        "cad reserved",
        ran,
        mean,
        len(step),
        trained,
        Figures((float(moved[0]), float(moved[1])), peak, degree=servers, holders=trainers),
    )


@dataclass(frozen=True, eq=False)
class _Met:
    """What a micro-batch beside servers is made of."""

    ran: float
    """Seconds of trainers, but for `exchange`."""
    exchange: float
    attention: Floats
    """[seats]"""
    traffics: list[Traffic]
    """Of each part."""
    waiting: float = 0.0
    """Tokens of the smaller part at the fullest trainer, which is being attended while the other runs its layers."""


def alternates(setting: Setting) -> bool:
    """Whether linear layers of one part run while servers attend the other: see docs/interleave.md."""
    return setting.sharding in ("zero1", "zero2")


def _in_turn(setting: Setting, kept: Layout, other: Both) -> _Met:
    """Servers wait while linear layers run, and trainers while servers attend."""
    plan = plan_layout(setting, kept, setting.hosts)
    traffic = _count(setting, plan.tasks, kept.segments, setting.seats, setting.hosts)
    work = _task_seconds(setting, plan.tasks, setting.seats).total
    transfer = (_transfer(setting, traffic.forward) + _transfer(setting, traffic.backward)) * setting.layers
    attended = float(work.max())
    exposed = max(0.0, float(transfer.max()) - attended)
    return _Met(attended + float(other.total.max()), exposed, work, [traffic])


def _alternate(setting: Setting, kept: Layout, trainers: int) -> _Met:
    """Two parts, cut and planned as training does it, or one where documents span trainers."""
    each = linear_seconds(setting, np.ones(1)) + tensor_seconds(setting, np.ones(1))
    # Head and loss are no part of the layers between which servers attend.
    ends = 0.0 if setting.pipeline > 1 else setting.work.loss
    each = Both(each.forward / setting.layers, (each.backward - ends) / setting.layers)
    kinds, per_token = [PlanLayers(setting.cost, None, setting.shape.groups)], float(each.total[0])
    servers = setting.seats - trainers
    cut = choose_interleaved_cut(kept, np.ones(setting.seats, np.int64), kinds, servers, per_token, trainers)
    ticks = (kept.tick(),) if cut is None else kept.cut(cut)
    parts, traffics, attention = [], [], np.zeros(setting.seats)
    every, servers_only = np.ones(setting.seats), np.arange(setting.seats) >= trainers
    whole = _attention(setting, kept.segments)
    for tick in ticks:
        # The planner counts kernels alone; what trainers do besides is made as much shorter.
        per_row = np.float64(per_token / setting.machine.in_training)
        beside: Floats = (kept.tokens - tick.query_tokens) * per_row
        question = _question(setting, tick, setting.hosts, beside)
        if cut is not None and not setting.waits_at_servers:
            turns = alternate(whole - _attention(setting, tick.query), tick.query_tokens * per_row, every, servers_only)
            question = replace(question, alternation=turns, waves=WAVES_IN_TURN)
        plan = make_plan(question)
        tasks = plan.tasks
        traffic = _count(setting, tasks, kept.segments, setting.seats, setting.hosts)
        work = _task_seconds(setting, tasks, setting.seats) * (1.0 / setting.layers)
        linear = Both(*(tick.query_tokens[:trainers] * way for way in (each.forward, each.backward)))
        own, served = (Both(work.forward[who], work.backward[who]) for who in (slice(trainers), slice(trainers, None)))
        parts.append(Part(linear, own, served, *_trips(setting, traffic), plan.waves))
        traffics.append(traffic)
        attention += work.total * setting.layers
    loss = float(kept.tokens.max()) * ends
    before = before_attention(setting.model)
    ran, hidden = (
        forward_seconds(way, setting.layers, before) + backward_seconds(way, setting.layers, before) + loss
        for way in (parts, [replace(one, out=(0.0, 0.0), back=(0.0, 0.0)) for one in parts])
    )
    fullest = int(kept.tokens.argmax())
    waiting = 0.0 if cut is None else float(min(tick.query_tokens[fullest] for tick in ticks))
    return _Met(hidden, max(0.0, ran - hidden), attention, traffics, waiting)


def _attention(setting: Setting, rows: Segments) -> float:
    """Seconds of one layer's attention of these rows, by the kernel's profile."""
    return float(setting.cost.of(rows.begin, rows.end).sum()) * setting.shape.groups


def _count(setting: Setting, tasks: Ints, rows: Segments, ranks: int, hosts: Ints | None) -> Traffic:
    return count_traffic(tasks, rows, setting.shape, ranks, hosts, setting.copies_own_rows)


def _trips(setting: Setting, traffic: Traffic) -> tuple[tuple[float, float], tuple[float, float]]:
    """Seconds of one layer's exchanges there and back, forward and backward; the busier direction counts."""

    def longest(*amounts: Floats) -> float:
        return max(float(_transfer(setting, one).max()) for one in amounts)

    there, back = traffic.asked, traffic.answered
    left, home = traffic.sent, traffic.returned
    out = longest(there, left), longest(there + back, left + home)
    return out, (longest(back, home), longest(there, left))


def even_servers(setting: Setting, tokens: float, attention: float) -> int:
    """How many seats to reserve so that servers and trainers have equally much to do.

    `attention`: seconds of a row of that many tokens, forward and backward, all layers.
    """
    rows = np.array([tokens])
    linear = float(linear_seconds(setting, rows).total[0] + tensor_seconds(setting, rows).total[0])
    return min(setting.seats - 1, max(1, int(setting.seats * attention / (attention + linear))))


def plan_layout(
    setting: Setting,
    layout: Layout,
    hosts: Ints | None,
    waves: tuple[int, ...] = (1,),
) -> Plan:
    """The plan of one micro-batch, as training makes it."""
    return make_plan(_question(setting, layout.tick(), hosts, waves=waves))


def _question(
    setting: Setting, tick: Tick, hosts: Ints | None, base_load: Floats | None = None, waves: tuple[int, ...] = (1,)
) -> PlanInput:
    return PlanInput(
        tick,
        setting.shape,
        setting.cost if setting.believed is None else setting.believed,
        tolerance=setting.tolerance,
        base_load=base_load,
        hosts=hosts,
        waves=waves,
    )


def plan_in_place(setting: Setting, layout: Layout, hosts: Ints | None) -> Plan:
    """The plan with waves as transports take them: between hosts."""
    return plan_layout(setting, layout, hosts, waves=(1,) if hosts is None else setting.waves)


def _meet(
    setting: Setting, layout: Layout, tokens: Floats, hosts: Ints | None, loss: Floats | float = 0.0
) -> tuple[float, Seconds, Traffic]:
    """One micro-batch of which all ranks wait for each other in every layer: seconds, those of the mean rank, bytes.

    `loss`: [ranks], head and loss where they are not part of the linear layers.
    """
    plan = setting.made.get(id(layout)) or plan_in_place(setting, layout, hosts)
    traffic = _count(setting, plan.tasks, layout.segments, layout.ranks, hosts)
    again = setting.checkpointing and setting.recompute_attention
    alone = _task_seconds(setting, plan.tasks, layout.ranks)
    waiting = _task_seconds(setting, plan.tasks[traffic.remote], layout.ranks)
    links = setting.layers / np.array([setting.machine.copies, setting.machine.between])
    ended = done(traffic, alone, waiting, links, plan.waves, setting.layers).repeated(again)
    work = alone.repeated(again)
    linear, tensor, hop = linear_seconds(setting, tokens), tensor_seconds(setting, tokens), hop_seconds(setting, tokens)
    linear = linear + Both(0.0 * tokens, loss + 0.0 * tokens)
    ran = exposed = 0.0
    for own, end, other in (
        (work.forward, ended.forward, linear.forward + tensor.forward + hop),
        (work.backward, ended.backward, linear.backward + tensor.backward + hop),
    ):
        slowest = float((other + own).max())
        # Ping-pong moves one part while the other runs its linear layers.
        late = np.maximum(end - own - other, 0.0) if setting.overlap == "pingpong" else end - own
        shown = float((other + own + late).max()) - slowest + _latency(setting) / 2
        ran += slowest + shown
        exposed += shown
    mean = Seconds(float(linear.total.mean()), float(work.total.mean()), exposed, float(tensor.total.mean()))
    return ran, mean, traffic


def _in_rounds(setting: Setting, step: Sequence[Layout]) -> Foreseen:
    """Lockstep rounds (pipeline/rounds.py), in which idle stages serve.

    The backward ticks have the micro-batches of the forward ticks in the reverse order of stages, so one plan stands
    for both.
    """
    stages, count, seats = setting.pipeline, len(step), setting.seats
    hosts, rounds = setting.all_hosts, Rounds(stages, count)
    ran, mean, moved, traffics = 0.0, Seconds(), np.zeros(2), []
    for tick in filter(rounds.has_forward, range(rounds.count)):
        found = [(stage, rounds.forward(tick, stage)) for stage in range(stages)]
        active = [(stage, m) for stage, m in found if m is not None]
        layout = _side_by_side([step[m] for _, m in active], [stage for stage, _ in active], stages)
        tokens = layout.tokens.astype(np.float64)
        # In the reverse order of stages the last one, with head and loss, is where the first is.
        loss = last_stage_seconds(setting, np.where(np.arange(len(tokens)) < seats, tokens, 0.0))
        seconds, parts, traffic = _meet(setting, layout, tokens, hosts, loss)
        ran += seconds
        mean = _add(mean, parts)
        moved += np.array(traffic.moved) * setting.layers * _times(setting)
        traffics.append(traffic)
    moved /= stages * seats
    in_flight = rounds.in_flight(0), rounds.in_flight(stages - 1)
    most = float(max(layout.tokens.max() for layout in step))
    peak = state_bytes(setting, seats) + stage_bytes(setting, most, in_flight, kept=True)
    # Another rank runs the backward of what it serves: servers keep nothing.
    peak += max(landing_bytes(setting, traffic, with_outputs=True) for traffic in traffics)
    return compose(
        setting,
        "cad",
        ran,
        mean,
        count,
        float(sum(layout.tokens.sum() for layout in step)),
        Figures((float(moved[0]), float(moved[1])), peak),
    )


def _task_seconds(setting: Setting, tasks: Ints, ranks: int) -> Both:
    """[ranks]: tasks of a plan, in training, all layers of a stage."""
    return of_tasks(tasks, setting.cost, ranks) * (setting.machine.in_training * setting.layers)


def _transfer(setting: Setting, amount: Floats) -> Floats:
    """[ranks]: seconds of bytes [2, ranks], inside a host and between hosts; both kinds of links work at once."""
    return np.maximum(amount[0] / setting.machine.copies, amount[1] / setting.machine.between)


def _latency(setting: Setting) -> float:
    """Seconds of a micro-batch's exchanges beyond their bytes."""
    return 2 * EXCHANGES * setting.layers * setting.machine.latency


def _times(setting: Setting) -> float:
    """How often a layer's exchanges run, beside forward and backward: a recompute is two fifths of both."""
    return 1.4 if setting.checkpointing and setting.recompute_attention else 1.0


def _peak(setting: Setting, tokens: float, traffic: Traffic) -> float:
    state = state_bytes(setting, setting.seats)
    held = landing_bytes(setting, traffic) + served_bytes(setting, traffic)
    return state + activation_bytes(setting, tokens) + kept_output_bytes(setting, tokens) + held


def _first_rows(layout: Layout, ranks: int) -> Layout:
    """The same seats, of which only the first have tokens."""
    kept = layout.segments.select(layout.segments.rank < ranks)
    return Layout(layout.ranks, kept, np.where(np.arange(layout.ranks) < ranks, layout.tokens, 0))


def _side_by_side(layouts: list[Layout], stages: list[int], count: int) -> Layout:
    """One layout of all stages: micro-batch i at stage `stages[i]`, nothing at the others."""
    seats = layouts[0].ranks
    columns: list[list[Ints]] = [[], [], [], [], []]
    tokens = np.zeros(count * seats, np.int64)
    documents = 0
    for layout, stage in sorted(zip(layouts, stages, strict=True), key=lambda pair: pair[1]):
        own = layout.segments
        for column, values in zip(
            columns, (own.document + documents, own.begin, own.end, own.rank + stage * seats, own.offset), strict=True
        ):
            column.append(values)
        tokens[stage * seats : (stage + 1) * seats] = layout.tokens
        documents += layout.documents
    return Layout(count * seats, Segments(*(np.concatenate(column) for column in columns)), tokens)


def _add(one: Seconds, other: Seconds) -> Seconds:
    return Seconds(
        one.linear + other.linear,
        one.attention + other.attention,
        one.exchange + other.exchange,
        one.collectives + other.collectives,
    )
