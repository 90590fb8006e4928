"""CAD: in place, in place with pipelines, and with reserved servers; each micro-batch planned by the real planner.

In: a setting and the layouts of a step's micro-batches. Out: `Foreseen`.

In place, all ranks meet in every layer, forward and backward. An exchange is hidden behind the attention that a rank
runs meanwhile. With pipelines the stages run in lockstep rounds (pipeline/rounds.py), a forward and a backward tick
each, and one plan spreads the attention of all stages over all ranks. With reserved servers two parts alternate, so
that other layers hide exchanges too, and finish times are equalised: what a trainer computes besides is its base load.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from deepspeed_cad.cost import CostModel
from deepspeed_cad.forecast.attention import (
    Floats,
    Part,
    alternating_seconds,
    end_of_passes,
    find_travel,
    flows_of,
    moved_bytes,
    of_documents,
    of_tasks,
    read_others,
    trip_seconds,
)
from deepspeed_cad.forecast.bytes_held import activation_bytes, key_bytes, landing_bytes, served_bytes, state_bytes
from deepspeed_cad.forecast.packing import deal_out
from deepspeed_cad.forecast.schedule import compose, non_attention
from deepspeed_cad.forecast.setting import Setting
from deepspeed_cad.forecast.step import Foreseen, Seconds
from deepspeed_cad.layout import Layout, Segments, Tick
from deepspeed_cad.pipeline.rounds import Rounds
from deepspeed_cad.planner import make_plan
from deepspeed_cad.planner.constants import FORWARD_SHARE, WAVES_IN_TURN
from deepspeed_cad.planner.cut import PlanLayers, choose_interleaved_cut
from deepspeed_cad.planner.finish import alternate, begin_in_place
from deepspeed_cad.planner.plan import Flows, Plan, PlanInput

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
    again = RECOMPUTED if setting.repeats_attention else 1.0
    met, plans, peak, moved = [], [], 0.0, np.zeros(2)
    for layout in _ticks(rounds, step):
        plans.append(plan := plan_in_place(setting, layout))
        ran, seconds, flows = _meet(setting, layout, plan)
        moved += moved_bytes(flows, not setting.forward_only) * (setting.attending * again / stages)
        # In pipelines another rank runs the backward of what it serves: servers keep nothing.
        held = landing_bytes(setting, flows, with_outputs=stages > 1) + (served_bytes(setting, flows) * (stages == 1))
        if (travel := find_travel(setting, layout)) is not None:
            ran += travel.late
            held += travel.held
        met.append((ran, *seconds))
        tokens = most if stages > 1 else float(layout.tokens.max())
        peak = max(peak, held + activation_bytes(setting, tokens, in_flight, kept=True))
    ran, *parts = map(float, np.sum(met, 0))
    trained = float(sum(layout.tokens.sum() for layout in step))
    return compose(
        setting, "cad", ran, Seconds(*parts), len(step), trained, moved / setting.seats, variant=variant,
        peak=peak + state_bytes(setting, setting.seats), plans=(plans[min(stages, len(step)) - 1],),
    )  # fmt: skip


def _ticks(rounds: Rounds, step: Sequence[Layout]) -> Iterator[Layout]:
    """What meets: each micro-batch, or in pipelines those of a round side by side, one stage behind the other.

    Backward ticks have the micro-batches of forward ticks with stages reversed, so one plan stands for both."""
    if rounds.stages == 1:
        yield from step
        return
    nothing = Layout(step[0].ranks, Segments(*np.zeros((5, 0), np.int64)), 0 * step[0].tokens)
    for round_ in filter(rounds.has_forward, range(rounds.count)):
        turns = [rounds.forward(round_, stage) for stage in range(rounds.stages)]
        columns, documents, ranks, tokens = [], 0, 0, []
        for layout in (nothing if turn is None else step[turn] for turn in turns):
            own = layout.segments
            columns.append((own.document + documents, own.begin, own.end, own.rank + ranks, own.offset))
            documents, ranks = documents + layout.documents, ranks + layout.ranks
            tokens.append(layout.tokens)
        yield Layout(ranks, Segments(*map(np.concatenate, zip(*columns))), np.concatenate(tokens))


def _meet(setting: Setting, layout: Layout, plan: Plan) -> tuple[float, Seconds, Flows]:
    """One micro-batch of which all ranks wait for each other in every layer: seconds, those of the mean rank, bytes."""
    layers, flows = setting.attending, flows_of(plan, layout.tick())
    alone = of_tasks(setting, plan.tasks, layout.ranks)
    waiting = of_tasks(setting, plan.tasks[read_others(plan.tasks, layout.segments)], layout.ranks)
    other = non_attention(setting, layout.tokens.astype(np.float64))
    # In the reverse order of stages the last one, with head and loss, is where the first is. Pipelines run no forward
    # alone.
    loss = np.where(np.arange(layout.ranks) < setting.seats, other.loss, 0.0)
    start = other.each + np.stack([0.0 * loss, loss])
    links = layers / np.array([setting.machine.copies, setting.machine.between])

    def ends(links: Floats, waves: int) -> Floats:
        of_pass = (links, waves, layers)
        found = end_of_passes(flows, setting.hosts, alone, waiting, start, *of_pass)
        if setting.repeats_attention:
            # What runs again is another pass like the forward, to which all come together.
            found[1] += end_of_passes(flows, setting.hosts, alone, waiting, 0.0 * start, *of_pass)[0]
        return found

    ran = exposed = 0.0
    for begin, end, best in list(zip(start, ends(links, plan.waves), ends(0.0 * links, 1)))[: 2 - setting.forward_only]:
        took = float(end.max()) + _latency(setting) / 2
        ran += took + UNEVEN * float(begin.max())
        exposed += max(0.0, took - float(best.max()))
    attending = setting.in_pass(alone, kept=not setting.repeats_attention).sum(0)
    parts = other.layers.sum(0) + loss, attending, other.tensor.sum(0)
    linear, attention, tensor = (float(part.mean()) for part in parts)
    return ran, Seconds(linear, attention, exposed, tensor), flows


def plan_in_place(setting: Setting, layout: Layout) -> Plan:
    """The plan of a micro-batch as training makes it, with waves as transports take them: between hosts.

    Training measures what is not attention, but in pipelines and where attention runs again."""
    tick, begin = layout.tick(), None
    if setting.pipeline == 1 and not setting.recompute_attention and setting.believed is None:
        seconds = np.full(layout.ranks, float(_one_layer(setting).sum()))
        begin = begin_in_place(seconds, tick, _planned_cost(setting), setting.shape.groups, None)
    return make_plan(question(setting, tick, begin, waves=(1,) if setting.hosts is None else setting.waves))


def _one_layer(setting: Setting) -> Floats:
    """[2] seconds per token of what is not attention in one layer, without head and loss."""
    other = non_attention(setting, np.ones(1))
    return ((other.layers + other.tensor)[:, 0] - setting.head * (setting.pipeline == 1)) / setting.attending


def question(setting: Setting, tick: Tick, base_load: Floats | None = None, waves: tuple[int, ...] = (1,)) -> PlanInput:
    """What the planner is asked in training."""
    return PlanInput(
        tick, setting.shape, _planned_cost(setting), tolerance=setting.tolerance, base_load=base_load,
        hosts=setting.hosts, waves=waves, backward=not setting.forward_only,
    )  # fmt: skip


def _planned_cost(setting: Setting) -> CostModel:
    cost = setting.cost if setting.believed is None else setting.believed
    return cost.of_forward(FORWARD_SHARE) if setting.forward_only else cost


def reserved(setting: Setting, step: Sequence[Layout], servers: int) -> Foreseen:
    """See the module. The last `servers` seats hold no model; the rows that they would have trained are left out."""
    trainers = setting.seats - servers
    # Servers park nothing.
    at_servers = replace(setting, keep="device")
    state = state_bytes(setting, trainers)
    met, peak, moved, trained = [], 0.0, np.zeros(2), 0.0
    for layout in deal_out(setting, step, trainers):
        rows = layout.segments.select(layout.segments.rank < trainers)
        own = Layout(layout.ranks, rows, np.where(np.arange(layout.ranks) < trainers, layout.tokens, 0))
        tokens = own.tokens.astype(np.float64)
        other = non_attention(setting, tokens)
        alone, exposed, attended, flows, (waiting, earlier) = _alternate(setting, own, trainers)
        exchange = exposed + _latency(setting)
        ran = alone + exchange + 2 * UNEVEN * float(other.each.sum(0).max())
        linear, attention, tensor = (float(one.mean()) for one in (other.layers.sum(0), attended, other.tensor.sum(0)))
        met.append((ran, linear, attention, exchange, tensor))
        moved += sum(map(moved_bytes, flows))
        trained += float(tokens.sum())
        landing = sum(landing_bytes(setting, one) for one in flows)
        kept = sum(served_bytes(setting, one, slice(trainers)) for one in flows)
        served = sum(served_bytes(at_servers, one, slice(trainers, None)) for one in flows)
        trains = state + kept + activation_bytes(setting, float(tokens.max()), kept=True, waiting=waiting)
        trains += key_bytes(setting, earlier)
        peak = max(peak, landing + max(trains, served))
    ran, *parts = map(float, np.sum(met, 0))
    moved *= setting.attending / setting.seats
    return compose(
        setting, "cad reserved", ran, Seconds(*parts), len(step), trained, moved, holders=trainers, peak=peak,
        degree=servers,
    )  # fmt: skip


def _alternate(
    setting: Setting, rows: Layout, trainers: int
) -> tuple[float, float, Floats, list[Flows], tuple[float, float]]:
    """Two parts, cut and planned as training does it, or one where documents span trainers.

    Out: seconds of trainers without exchanges that nothing hides, and of these; [seats] of attention; what moves of
    each part; tokens of the fullest trainer: of the smaller part, which is being attended while the other runs layers,
    and of the first part that the second one reads.
    """
    each, seats, layers, model = _one_layer(setting), setting.seats, setting.attending, setting.model
    per_token, only_serve = float(each.sum()), np.arange(seats) >= trainers
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
            left = whole - _attention(setting, tick.query)
            turns = alternate(left, tick.query_tokens * per_row, np.ones(seats), only_serve)
            asked = replace(asked, alternation=turns, waves=WAVES_IN_TURN)
        plan = make_plan(asked)
        flows.append(flows_of(plan, tick))
        work = of_tasks(setting, plan.tasks, seats)
        attention += work.sum(0)
        beside = np.multiply.outer(each, tick.query_tokens[:trainers])
        own, served = work[:, :trainers] / layers, work[:, trainers:] / layers
        parts.append(Part(beside, own, served, *trip_seconds(setting.machine, flows[-1]), plan.waves))
    # Of a layer's linear part what lies before its attention: the projections to Q, K and V.
    before = model.hidden * model.head_dim * (model.heads + 2 * model.kv_heads) / model.layer_parameters
    ran, hidden = (
        sum(alternating_seconds(way, layers, before, backward) for backward in (False, True))
        for way in (parts, [replace(one, out=(0.0, 0.0), back=(0.0, 0.0)) for one in parts])
    )
    fullest = int(rows.tokens.argmax())
    of_parts = (0.0, 0.0)
    if cut is not None:
        waiting = min(tick.query_tokens[fullest] for tick in ticks)
        of_parts = float(waiting), float(ticks[-1].query_base[fullest] - ticks[-1].key_base[fullest])
    return hidden + float(rows.tokens.max()) * setting.work.loss, max(0.0, ran - hidden), attention, flows, of_parts


def even_servers(setting: Setting, layout: Layout) -> int:
    """How many seats to reserve so that servers and trainers have equally much to do with rows like the mean one."""
    attention = float(of_documents(layout, setting.cost).sum(0).mean()) * setting.shape.groups
    attention *= setting.machine.in_training * setting.attending
    other = float(non_attention(setting, layout.tokens.mean(keepdims=True)).each.sum())
    return min(setting.seats - 1, max(1, int(setting.seats * attention / (attention + other))))


def _attention(setting: Setting, rows: Segments) -> float:
    """Seconds of one layer's attention of these rows, by the kernel's profile."""
    return float(setting.cost.of(rows.begin, rows.end).sum()) * setting.shape.groups


def _latency(setting: Setting) -> float:
    return 4 * setting.attending * setting.machine.latency  # there and back, forward and backward
