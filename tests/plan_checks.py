"""Checks that a plan is one, which know nothing of how it was found: everything is counted again, row by row.

`check_solution` checks what the planner's core found, `check_plan` the plan made of it. `random_problem` asks a
question of any kind. `python tests/plan_checks.py` prints the fingerprints that unit/plans.json holds.
"""

import json
import random
from dataclasses import replace

import numpy as np

from deepspeed_cad.cost import PAIRS, CostModel, count_pairs, window_start
from deepspeed_cad.layout import Layout, Segments, Tick
from deepspeed_cad.planner import HeadShape, Plan, PlanInput, make_plan
from deepspeed_cad.planner.core import Solution
from deepspeed_cad.planner.finish import alternate
from deepspeed_cad.planner.plan import BETWEEN, INSIDE, O_RECEIVED, O_SENT, QKV_RECEIVED, QKV_SENT, Flows
from deepspeed_cad.schedule import build_slices

SECONDS = CostModel("h", "seconds", pair=1e-9, row=2e-9, key=2.5e-7, task=1e-6)


def check_solution(problem: PlanInput, found: Solution) -> None:
    """Tasks, work and flows of a solution; what lies at a server is what its schedule says."""
    check_tasks(problem, found.tasks)
    np.testing.assert_allclose(found.work, work_of(problem, found.tasks), rtol=1e-12)
    np.testing.assert_allclose(found.work_before, work_at_home(problem), rtol=1e-12)
    expected = count_flows(problem, found.tasks)
    for name in ("bytes", "pairs", "parts"):
        np.testing.assert_array_equal(getattr(found.flows, name), getattr(expected, name), name)
    np.testing.assert_allclose(found.flows.waiting, expected.waiting, rtol=1e-12)
    slices = build_slices(problem.tick, found.tasks, problem.window)
    np.testing.assert_array_equal(found.flows.served, slices.served_rows.T)


def check_plan(problem: PlanInput, plan: Plan) -> None:
    """All that a plan says of itself, and that it is no worse than doing nothing."""
    check_tasks(problem, plan.tasks)
    # Own rows are split off after loads were summed: each cut adds a task, and its keys once more.
    work = work_of(problem, plan.tasks, joined=True)
    np.testing.assert_allclose(plan.load, work / problem.divisors + problem.floors, rtol=1e-9)
    np.testing.assert_allclose(plan.load_before, work_at_home(problem) / problem.divisors + problem.floors, rtol=1e-12)
    moved = count_flows(problem, plan.tasks).bytes
    assert plan.sent_bytes.tolist() == moved[[QKV_SENT, O_SENT]].sum((0, 1)).tolist()
    assert plan.received_bytes.tolist() == moved[[QKV_RECEIVED, O_RECEIVED]].sum((0, 1)).tolist()
    assert plan.between_bytes == moved[[QKV_SENT, O_SENT], BETWEEN].sum()
    assert plan.waves in (1, *problem.waves)
    assert (plan.finish >= plan.load * (1 - 1e-12)).all()
    if not problem.cost.byte_inside and not problem.cost.byte_between:
        assert plan.finish.tolist() == plan.load.tolist()
    running = problem.speeds > 0
    if not work_at_home(problem)[~running].any():
        assert plan.load.max() <= plan.load_before.max() * (1 + 1e-12)
    if not plan.notes:
        mean = _common_finish(problem, work)
        over = plan.load[running] > mean * (1 + problem.tolerance + 1e-9)
        under = plan.load[running] < mean * (1 - problem.tolerance - 1e-9)
        # Whoever begins later than all end has nothing to run, but for a row or two that are not worth a task.
        assert not under.any() and (work[running][over] <= 1e-9 * work.sum()).all()


def count_flows(problem: PlanInput, tasks: np.ndarray) -> Flows:
    """What tasks move, by who runs each row and where each row and key is at home; `served` stays empty."""
    tick, shape, ranks = problem.tick, problem.shape, problem.tick.ranks
    host = np.zeros(ranks, np.int64) if problem.hosts is None else np.asarray(problem.hosts)
    moved, waiting, parts = np.zeros((4, 2, ranks), np.int64), np.zeros(ranks), np.zeros(ranks)
    pairs: dict[tuple[int, int], bool] = {}

    def send(home: int, server: int, rows: int, keys: int) -> None:
        where = INSIDE if host[home] == host[server] else BETWEEN
        out, back = rows * shape.query_bytes + keys * shape.key_value_bytes, rows * shape.output_bytes
        moved[[QKV_SENT, O_RECEIVED], where, home] += out, back
        moved[[QKV_RECEIVED, O_SENT], where, server] += out, back
        pairs[home, server] = pairs.get((home, server), False) or rows > 0

    for document in np.unique(tasks[:, 0]):
        homes, key_homes = _homes(tick.query, document), _homes(tick.key, document)
        own = tasks[tasks[:, 0] == document]
        edges = np.unique(own[:, 3:5])
        # Head groups between two edges are in the same tasks.
        for group, groups in zip(edges[:-1], np.diff(edges), strict=True):
            running = own[(own[:, 3] <= group) & (group < own[:, 4])]
            for server in np.unique(running[:, 5]):
                mine = running[running[:, 5] == server]
                runs, reads = np.zeros(len(homes), bool), np.zeros(len(key_homes), bool)
                for begin, end in mine[:, 1:3]:
                    runs[begin:end] = True
                    reads[int(window_start(begin, problem.window)) : end] = True
                rows = np.bincount(homes[runs], minlength=ranks)
                keys = np.bincount(key_homes[reads & (key_homes >= 0)], minlength=ranks)
                others = keys.sum() - keys[server]
                rows[server] = keys[server] = 0
                for home in np.flatnonzero(rows + keys):
                    send(int(home), int(server), int(groups * rows[home]), int(groups * keys[home]))
                # Work in pieces: rows one behind the other that have one home.
                at = np.flatnonzero(runs)
                breaks = np.flatnonzero((np.diff(at) != 1) | (np.diff(homes[at]) != 0))
                begin, end = at[np.append(0, breaks + 1)], at[np.append(breaks, len(at) - 1)] + 1
                waits = np.full(len(begin), others > 0) | (homes[begin] != server)
                cost = float(problem.cost.of(begin, end, problem.window)[waits].sum())
                waiting[server] += groups * cost
                parts[server] += groups * (cost > 0)
    ordered = np.array(sorted((*pair, int(rows)) for pair, rows in pairs.items()), np.int64).reshape(-1, 3)
    return Flows(moved, waiting, ordered, parts, np.zeros((2, ranks), np.int64))


def work_of(problem: PlanInput, tasks: np.ndarray, joined: bool = False) -> np.ndarray:
    """[ranks]: work of tasks; with `joined` as if those of one server that continue each other were one."""
    if joined:
        order = np.lexsort((tasks[:, 1], tasks[:, 5], tasks[:, 4], tasks[:, 3], tasks[:, 0]))
        tasks = tasks[order]
        first = np.ones(len(tasks), bool)
        first[1:] = (tasks[1:, [0, 3, 4, 5]] != tasks[:-1, [0, 3, 4, 5]]).any(1) | (tasks[1:, 1] != tasks[:-1, 2])
        ends = tasks[np.append(np.flatnonzero(first)[1:], len(tasks)) - 1, 2] if len(tasks) else tasks[:, 2]
        tasks = tasks[first]
        tasks[:, 2] = ends
    cost = problem.cost.of(tasks[:, 1], tasks[:, 2], problem.window) * (tasks[:, 4] - tasks[:, 3])
    return np.bincount(tasks[:, 5], cost, problem.tick.ranks)


def work_at_home(problem: PlanInput) -> np.ndarray:
    own, none = problem.tick.query, np.zeros(len(problem.tick.query), np.int64)
    tasks = np.stack([own.document, own.begin, own.end, none, none + problem.shape.groups, own.rank], 1)
    return work_of(problem, tasks[own.begin < own.end], joined=True)


def check_coverage(tasks: np.ndarray, tick: Tick, groups: int) -> None:
    """The tasks run every (query row, head group) of the tick exactly once, and nothing else."""
    for _, begin, end, group, last_group, server in tasks.tolist():
        assert begin < end and 0 <= group < last_group <= groups and 0 <= server < tick.ranks
    for document in np.union1d(tick.query.document, tasks[:, 0]):
        wanted = _homes(tick.query, document) >= 0
        runs = np.zeros((groups, max(len(wanted), *tasks[:, 2])), np.int8)
        for _, begin, end, group, last_group, _ in tasks[tasks[:, 0] == document]:
            runs[group:last_group, begin:end] += 1
        assert (runs[:, : len(wanted)] == wanted).all() and not runs[:, len(wanted) :].any(), f"document {document}"


def check_cuts(tasks: np.ndarray, tick: Tick, granularity: int) -> int:
    """How many row boundaries are neither on the granularity from a document's or segment's begin nor an end."""
    wrong = 0
    for document, *cuts in tasks[:, :3].tolist():
        own = tick.query.select(tick.query.document == document)
        for at in cuts:
            inside = (own.begin <= at) & ((at - own.begin) % granularity == 0)
            wrong += bool(at % granularity) and not (inside | (own.end == at)).any()
    return wrong


def check_tasks(problem: PlanInput, tasks: np.ndarray) -> None:
    check_coverage(tasks, problem.tick, problem.shape.groups)
    assert check_cuts(tasks, problem.tick, problem.granularity) == 0
    assert tasks.tolist() == sorted(tasks.tolist())
    assert not np.isin(tasks[:, 5], np.flatnonzero(problem.speeds == 0)).any()


def _homes(segments: Segments, document: int) -> np.ndarray:
    own = segments.select(segments.document == document)
    homes = np.full(int(own.end.max(initial=0)), -1)
    for begin, end, rank in zip(own.begin, own.end, own.rank, strict=True):
        homes[begin:end] = rank
    return homes


def _common_finish(problem: PlanInput, work: np.ndarray) -> float:
    """When all work would be done if all ranks stopped together: ranks join one by one, the first to be free first."""
    ready = sorted((base, speed) for base, speed in zip(problem.floors, problem.speeds, strict=True) if speed > 0)
    speeds = done = finish = 0.0
    for base, speed in ready:
        if speeds and finish <= base:
            break
        speeds, done = speeds + speed, done + speed * base
        finish = (work.sum() + done) / speeds
    return finish


def random_problem(seed: int, part: int | None = None) -> PlanInput:
    """A question of any kind, the same on every machine: numbers are whole or come from a table. `part`: of one of two
    nano-batches, where the micro-batch can be cut."""
    rng = random.Random(seed)
    ranks, tokens = rng.choice((1, 2, 3, 4, 5, 8, 12)), rng.choice((60, 300, 300, 1024, 4096))
    lengths = [ranks * tokens] if seed % 16 == 5 else []
    while sum(lengths) < ranks * tokens:
        longest = min(rng.choice((1, 1, 3, 8)) * tokens, ranks * tokens - sum(lengths))
        lengths.append(rng.randrange(1, 1 + max(1, longest >> rng.randrange(0, 5))))
    if seed % 3:
        layout = Layout.from_stream(lengths, ranks, tokens, zigzag=seed % 3 == 2)
    else:
        layout = Layout.from_rank_lengths([lengths[rank::ranks] for rank in range(ranks)])
    servers = rng.choice((0, 0, 1, 3))
    layout = Layout(ranks + servers, layout.segments, np.append(layout.tokens, np.zeros(servers, np.int64)))
    ranks += servers
    groups = rng.choice((1, 2, 4, 8, 18))
    shape = HeadShape(groups * rng.choice((1, 4)), groups, 16, rng.choice((16, 8)), 2)
    cost = rng.choice((PAIRS, SECONDS, SECONDS))
    if cost is SECONDS:
        # Kernels that take long make waves worth their price.
        times, inside, between = rng.choice((1, 1000)), rng.choice((0.0, 1e-12, 1e-9)), rng.choice((0.0, 1e-11, 1e-8))
        cost = replace(
            cost, pair=cost.pair * times, row=cost.row * times, key=cost.key * times, task=cost.task * times,
            byte_inside=inside * times, byte_between=between * times,
        )  # fmt: skip
    mean = cost.pair * int(count_pairs(layout.segments.begin, layout.segments.end).sum()) * groups / ranks
    base = speed = hosts = alternation = None
    is_server = np.arange(ranks) >= ranks - servers
    if servers or rng.random() < 0.3:
        base = np.where(is_server, 0.0, [mean * rng.choice((0, 1, 2, 5)) for _ in range(ranks)])
    if rng.random() < 0.3:
        speed = np.array([*(rng.choice((0.0, 0.5, 1.0, 2.0)) for _ in range(ranks - 1)), 1.0])
    if rng.random() < 0.6:
        hosts = np.array([rng.randrange(3) for _ in range(ranks)]) if seed % 2 else np.arange(ranks) // 2
    if servers and rng.random() < 0.5:
        alternation = alternate(mean * ranks, base, np.ones(ranks), is_server)
    cut = layout.tokens // 2
    tick = layout.tick() if part is None or not layout.can_cut(cut) else layout.cut(cut)[part]
    return PlanInput(
        tick, shape, cost, window=rng.choice((None, None, None, 1, 64, 700)),
        tolerance=rng.choice((0.0, 0.01, 0.05, 0.2)), granularity=rng.choice((1, 16, 128, 128, 5000)), base_load=base,
        speed=speed, hosts=hosts, waves=rng.choice(((1,), (1, 2), (1, 2, 4, 8))), alternation=alternation,
    )  # fmt: skip


def fingerprint(seed: int) -> str:
    plan = make_plan(random_problem(seed))
    return f"{plan.fingerprint():016x} {plan.waves}"


if __name__ == "__main__":
    print(json.dumps([fingerprint(seed) for seed in range(96)], indent=0))
