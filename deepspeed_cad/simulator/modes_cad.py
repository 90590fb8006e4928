"""CAD: in place, in place with pipelines, and with reserved servers; each micro-batch planned by the real planner.

In: a setting and the layouts of a step's micro-batches. Out: `Foreseen`.

In place, all ranks meet in every layer, forward and backward. An exchange is hidden behind the attention that a rank
runs meanwhile (`"overlap": "local_first"`). With reserved servers two parts alternate, so that linear layers hide it
too, and finish times are equalised: a trainer's linear part is its base load. With pipelines the stages run in
lockstep rounds, a forward and a backward tick each, and one plan spreads the attention of all stages over all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from deepspeed_cad.errors import CADConfigError
from deepspeed_cad.layout import Ints, Layout, Segments
from deepspeed_cad.planner import make_plan
from deepspeed_cad.planner.plan import Plan, PlanInput
from deepspeed_cad.rounds import Rounds
from deepspeed_cad.simulator.attention import Both, Floats, of_tasks
from deepspeed_cad.simulator.finish import done
from deepspeed_cad.simulator.memory import (
    activation_bytes,
    kept_output_bytes,
    landing_bytes,
    served_bytes,
    state_bytes,
)
from deepspeed_cad.simulator.schedule import Figures, compose, linear_seconds, tensor_seconds
from deepspeed_cad.simulator.setting import Setting
from deepspeed_cad.simulator.step import Foreseen, Seconds
from deepspeed_cad.simulator.traffic import Traffic, count_traffic

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
        other = linear.total + tensor.total
        # The planner counts kernels alone; what trainers do besides is made as much shorter.
        base = other / setting.layers / setting.machine.in_training
        plan = plan_layout(setting, kept, setting.hosts, base)
        traffic = count_traffic(plan.tasks, kept.segments, setting.shape, setting.seats, setting.hosts)
        work = _task_seconds(setting, plan.tasks, setting.seats)
        busy = work.total + other
        transfer = (_transfer(setting, traffic.forward) + _transfer(setting, traffic.backward)) * setting.layers
        slowest = float(busy.max())
        exchange = max(0.0, float(transfer.max()) - slowest) + _latency(setting)
        ran += slowest + exchange
        mean = _add(
            mean,
            Seconds(float(linear.total.mean()), float(work.total.mean()), exchange, float(tensor.total.mean())),
        )
        moved += np.array(traffic.moved) * setting.layers
        trained += float(tokens.sum())
        trainer = _peak(setting, float(tokens.max()), traffic, trainers)
        peak = max(peak, trainer, landing_bytes(setting, traffic) + served_bytes(setting, traffic))
    moved /= setting.seats
    return compose(
        setting,
        "cad reserved",
        ran,
        mean,
        len(step),
        trained,
        Figures((float(moved[0]), float(moved[1])), peak, degree=servers, measured=False),
    )


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
    base_load: Floats | None = None,
    waves: tuple[int, ...] = (1,),
) -> Plan:
    """The plan of one micro-batch, as training makes it."""
    return make_plan(
        PlanInput(
            layout.tick(),
            setting.shape,
            setting.cost if setting.believed is None else setting.believed,
            tolerance=setting.tolerance,
            base_load=base_load,
            hosts=hosts,
            waves=waves,
        )
    )


def plan_in_place(setting: Setting, layout: Layout, hosts: Ints | None) -> Plan:
    """The plan with waves as transports take them: between hosts."""
    return plan_layout(setting, layout, hosts, waves=(1,) if hosts is None else setting.waves)


def _meet(setting: Setting, layout: Layout, tokens: Floats, hosts: Ints | None) -> tuple[float, Seconds, Traffic]:
    """One micro-batch of which all ranks wait for each other in every layer: seconds, those of the mean rank, bytes."""
    plan = setting.made.get(id(layout)) or plan_in_place(setting, layout, hosts)
    traffic = count_traffic(plan.tasks, layout.segments, setting.shape, layout.ranks, hosts)
    again = setting.checkpointing and setting.recompute_attention
    alone = _task_seconds(setting, plan.tasks, layout.ranks)
    waiting = _task_seconds(setting, plan.tasks[traffic.remote], layout.ranks)
    links = setting.layers / np.array([setting.machine.copies, setting.machine.between])
    ended = done(traffic, alone, waiting, links, plan.waves, setting.layers).repeated(again)
    work = alone.repeated(again)
    linear, tensor = linear_seconds(setting, tokens), tensor_seconds(setting, tokens)
    ran = exposed = 0.0
    for own, end, other in (
        (work.forward, ended.forward, linear.forward + tensor.forward),
        (work.backward, ended.backward, linear.backward + tensor.backward),
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
    """Lockstep rounds (deepspeed_cad/rounds.py), in which idle stages serve.

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
        seconds, parts, traffic = _meet(setting, layout, layout.tokens.astype(np.float64), hosts)
        ran += seconds
        mean = _add(mean, parts)
        moved += np.array(traffic.moved) * setting.layers * _times(setting)
        traffics.append(traffic)
    moved /= stages * seats
    in_flight = rounds.in_flight(0)
    tokens = float(max(layout.tokens.max() for layout in step))
    peak = state_bytes(setting, seats) + activation_bytes(setting, tokens, in_flight)
    peak += kept_output_bytes(setting, tokens, in_flight)
    # Another rank runs the backward of what it serves: servers keep nothing.
    peak += max(landing_bytes(setting, traffic, with_outputs=True) for traffic in traffics)
    return compose(
        setting,
        "cad",
        ran,
        mean,
        count,
        float(sum(layout.tokens.sum() for layout in step)),
        Figures((float(moved[0]), float(moved[1])), peak, measured=False),
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


def _peak(setting: Setting, tokens: float, traffic: Traffic, shards: int | None = None) -> float:
    state = state_bytes(setting, setting.seats if shards is None else shards)
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
