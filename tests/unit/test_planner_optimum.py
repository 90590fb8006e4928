"""The planner against an exact optimum on small inputs (needs highspy; skipped without it)."""

from __future__ import annotations

import numpy as np
import pytest

from deepspeed_cad.cost import PAIRS, CostModel, count_pairs
from deepspeed_cad.layout import Layout, Segments
from deepspeed_cad.planner import HeadShape, PlanInput, make_plan
from deepspeed_cad.planner.constants import FORWARD_SHARE, TRAVELS

highspy = pytest.importorskip("highspy")

STEP, TOLERANCE = 128, 0.3
SHAPE = HeadShape(query_heads=8, groups=2, head_dim=16, value_dim=16, bytes_per_element=2)


def least_bytes(problem: PlanInput, tolerance: float) -> float:
    """Bytes of the best plan whose cuts lie on the granularity, as a mixed integer program."""
    tick, shape, ranks = problem.tick, problem.shape, problem.tick.ranks
    solver = highspy.Highs()
    solver.silent()
    load: list[list] = [[] for _ in range(ranks)]
    total = 0.0
    cost = []
    variables: dict[tuple[int, int, int, int], tuple[object, object]] = {}
    for document, begin, end, home in granules(tick.query, problem.granularity):
        total += float(count_pairs(begin, end)) * shape.groups
        for group in range(shape.groups):
            runs = [solver.addBinary() for _ in range(ranks)]
            solver.addConstr(sum(runs[1:], runs[0]) == 1)
            for server, run in enumerate(runs):
                load[server].append(float(count_pairs(begin, end)) * run)
                if server != home:
                    cost.append((end - begin) * (shape.query_bytes + shape.output_bytes) * run)
                needs = solver.addVariable(0, 1)
                solver.addConstr(needs >= run)
                if server != home:
                    cost.append((end - begin) * shape.key_value_bytes * needs)
                variables[document, begin, group, server] = (run, needs)
    for (document, begin, group, server), (_, needs) in variables.items():
        later = variables.get((document, begin + problem.granularity, group, server))
        if later is not None:
            solver.addConstr(needs >= later[1])
    mean = total / ranks
    for own in load:
        solver.addConstr(sum(own[1:], own[0]) <= mean * (1 + tolerance))
        solver.addConstr(sum(own[1:], own[0]) >= mean * (1 - tolerance))
    solver.setOptionValue("mip_rel_gap", 0.01)
    solver.setOptionValue("time_limit", 10.0)
    solver.minimize(sum(cost[1:], cost[0]))
    return float(solver.getInfo().mip_dual_bound)


def granules(segments: Segments, step: int) -> list[tuple[int, int, int, int]]:
    """(document, begin, end, home) of every piece between multiples of `step`; segments begin on multiples here."""
    found = []
    for document, begin, end, home in zip(segments.document, segments.begin, segments.end, segments.rank, strict=True):
        for low in range(int(begin), int(end), step):
            found.append((int(document), low, min(low + step, int(end)), int(home)))
    return found


def small_problem(seed: int) -> PlanInput:
    """Two or three ranks with a document each, apart or in one stream."""
    random = np.random.default_rng(seed)
    ranks = int(random.integers(2, 4))
    lengths = (random.integers(1, 8, ranks) * STEP).tolist()
    if seed % 2:
        layout = Layout.from_stream(lengths, ranks, -(-sum(lengths) // ranks // STEP) * STEP)
    else:
        layout = Layout.from_rank_lengths([[length] for length in lengths])
    return PlanInput(layout.tick(), SHAPE, PAIRS, tolerance=TOLERANCE, granularity=STEP)


def test_bytes_are_close_to_the_least_that_is_possible() -> None:
    ratios = []
    for seed in range(10):
        problem = small_problem(seed)
        plan = make_plan(problem)
        mean = plan.load.mean()
        assert plan.load.max() <= mean * (1 + TOLERANCE) and plan.load.min() >= mean * (1 - TOLERANCE)
        # The planner keeps half of the tolerance in reserve as soon as it moves anything.
        moved = plan.load.tolist() != plan.load_before.tolist()
        least = least_bytes(problem, TOLERANCE / 2 if moved else TOLERANCE)
        ratios.append(float(plan.sent_bytes.sum()) / least if least > 0 else 1.0)
    assert np.mean(ratios) <= 1.15 and max(ratios) <= 1.8, ratios


def least_finish(problem: PlanInput) -> float:
    """The earliest end of two ranks on two hosts, transfers included, over all plans whose cuts lie on the granularity.

    The model of planner/finish.py as a mixed integer program; it is exact for two ranks with whole documents.
    """
    tick, shape, cost = problem.tick, problem.shape, problem.cost
    solver = highspy.Highs()
    solver.silent()
    nothing = solver.addVariable(0, 0)
    work, served, keys, rows = ([[1.0 * nothing], [1.0 * nothing]] for _ in range(4))
    fixed = [0.0, 0.0]
    needs: dict[tuple[int, int, int], object] = {}
    for document, begin, end, home in granules(tick.query, problem.granularity):
        amount = float(count_pairs(begin, end)) * cost.pair
        for group in range(shape.groups):
            away, need = solver.addBinary(), solver.addVariable(0, 1)
            solver.addConstr(need >= away)
            if (document, begin - problem.granularity, group) in needs:
                solver.addConstr(needs[document, begin - problem.granularity, group] >= need)
            needs[document, begin, group] = need
            fixed[home] += amount
            work[home].append(-amount * away)
            work[1 - home].append(amount * away)
            served[1 - home].append(amount * away)
            rows[home].append(float(end - begin) * away)
            keys[home].append(float(end - begin) * need)

    def weighted(*parts: tuple[float, list]) -> object:
        terms = [weight * term for weight, column in parts for term in column]
        return sum(terms[1:], terms[0])

    byte = cost.byte_between / TRAVELS
    query, output, both = byte * shape.query_bytes, byte * shape.output_bytes, byte * shape.key_value_bytes
    last = solver.addVariable(0)
    ends: list[list] = [[], []]
    for share, sent, returned in (
        (FORWARD_SHARE, (query, both), (output, 0.0)),
        (1 - FORWARD_SHARE, (query + output, both), (query, both)),
    ):
        for one in (0, 1):
            done = solver.addVariable(0)
            solver.addConstr(done >= weighted((share, work[one])) + share * fixed[one])
            there = (sent[0], rows[1 - one]), (sent[1], keys[1 - one])
            solver.addConstr(done >= weighted(*there, (share, served[one])))
            there = (sent[0] + returned[0], rows[one]), (sent[1] + returned[1], keys[one])
            solver.addConstr(done >= weighted(*there, (share, served[1 - one])))
            ends[one].append(1.0 * done)
    for one in (0, 1):
        solver.addConstr(last >= sum(ends[one][1:], ends[one][0]))
    solver.setOptionValue("mip_rel_gap", 0.005)
    solver.setOptionValue("time_limit", 5.0)
    solver.minimize(last)
    return float(solver.getInfo().mip_dual_bound)


@pytest.mark.parametrize(("byte", "gain"), [(1.0, 1.3), (4.0, 1.12), (16.0, 1.0)])
def test_two_hosts_end_nearly_as_early_as_possible(byte: float, gain: float) -> None:
    """From links that hide nearly everything to such that nothing pays; `gain`: of the best plans, on average."""
    ratios, gains = [], []
    for seed in range(6):
        random = np.random.default_rng(seed)
        lengths = [(random.integers(1, 9, count) * STEP).tolist() for count in (1 + seed % 2, 1)]
        tick, cost = Layout.from_rank_lengths(lengths).tick(), CostModel(byte_between=byte)
        problem = PlanInput(tick, SHAPE, cost, tolerance=0.02, granularity=STEP, hosts=np.arange(2))
        plan, least = make_plan(problem), least_finish(problem)
        ratios.append(plan.finish.max() / least)
        gains.append(plan.load_before.max() / least)
    assert np.mean(ratios) <= 1.03 and max(ratios) <= 1.08, ratios
    assert np.mean(gains) == pytest.approx(gain, abs=0.05), gains
