"""Schedules: the exchange simulated in numpy, row by row, and counted bytes against moved bytes."""

from __future__ import annotations

import cases
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from test_planner import problems

from deepspeed_cad import schedule as room
from deepspeed_cad.cost import window_start
from deepspeed_cad.layout import Tick
from deepspeed_cad.planner import PlanInput, make_plan
from deepspeed_cad.schedule import GROUP, HOME, HOME_ROW, KEY, KIND, QUERY, ROWS, SERVER, SERVER_ROW, STAGE_ROW


def _home_labels(tick: Tick, kind: int) -> list[np.ndarray]:
    """What each rank's query or key buffer holds: (document, position) of every row, −1 where padded."""
    labels = [np.full((int(n), 2), -1) for n in (tick.query_tokens if kind == QUERY else tick.key_tokens)]
    for d, b, e, r, o in (tick.query if kind == QUERY else tick.key).to_array():
        labels[r][o : o + e - b] = np.stack([np.full(e - b, d), np.arange(b, e)], axis=1)
    return labels


def _check(tick: Tick, tasks: np.ndarray, window: int | None, groups: int) -> list[room.Schedule]:
    """Every row of every head group is computed once, from exactly the keys before it, wherever they come from."""
    slices = room.build_slices(tick, tasks, window)
    schedules = [room.schedule_rank(tick, slices, rank, groups, window) for rank in range(tick.ranks)]
    queries, keys = _home_labels(tick, QUERY), _home_labels(tick, KEY)
    done = {document: np.zeros((end, groups), int) for document, _, end, *_ in sorted(tick.query.to_array().tolist())}

    def run(server: int, query: np.ndarray, key: np.ndarray, group: np.ndarray) -> None:
        """One sequence: every query row finds its document's keys up to itself, aligned at the end."""
        document, last = query[-1]
        assert (query[:, 0] == document).all() and (key[:, 0] == document).all()
        assert (np.diff(query[:, 1]) == 1).all() and (np.diff(key[:, 1]) == 1).all()
        assert key[-1, 1] == last and key[0, 1] <= window_start(query[0, 1], window)
        done[int(document)][query[0, 1] : last + 1, group] += 1

    for schedule in schedules:
        rank = schedule.rank
        for batch in schedule.local:
            for i in range(len(batch.cu_q) - 1):
                q = queries[rank][batch.q_row + batch.cu_q[i] : batch.q_row + batch.cu_q[i + 1]]
                k = keys[rank][batch.k_row + batch.cu_k[i] : batch.k_row + batch.cu_k[i + 1]]
                run(rank, q, k, np.arange(batch.group_begin, batch.group_end))
        # Receive: what every other home sends lands where this server expects it.
        served = [np.full((int(n), 3), -7) for n in schedule.served_rows[rank]]
        for row in np.concatenate([schedule.own] + [s.sends[s.sends[:, SERVER] == rank] for s in schedules]):
            labels = (queries if row[KIND] == QUERY else keys)[row[HOME]]
            target = served[row[KIND]][row[SERVER_ROW] : row[SERVER_ROW] + row[ROWS]]
            assert (target == -7).all(), "two slices land on one row"
            target[:, :2] = labels[row[HOME_ROW] : row[HOME_ROW] + row[ROWS]]
            target[:, 2] = row[GROUP]
        assert all((rows != -7).all() for rows in served)
        received = np.concatenate([s.sends[s.sends[:, SERVER] == rank] for s in schedules])
        assert sorted(map(tuple, received)) == sorted(map(tuple, schedule.receives))
        for batch in schedule.served:
            for i in range(len(batch.cu_q) - 1):
                q = served[QUERY][batch.q_row + batch.cu_q[i] : batch.q_row + batch.cu_q[i + 1]]
                k = served[KEY][batch.k_row + batch.cu_k[i] : batch.k_row + batch.cu_k[i + 1]]
                assert len(set(q[:, 2]) | set(k[:, 2])) == 1
                run(rank, q[:, :2], k[:, :2], q[:1, 2])
        for batch in schedule.half_local:
            assert len(batch.cu_q) == len(batch.cu_k) == 2 and batch.k_step >= batch.k_rows
            q = queries[rank][batch.q_row : batch.q_row + batch.q_rows]
            for group in range(batch.group_begin, batch.group_end):
                k_row = batch.k_row + (group - batch.group_begin) * batch.k_step
                k = served[KEY][k_row : k_row + batch.k_rows]
                assert set(k[:, 2]) == {group}
                run(rank, q, k[:, :2], np.array([group]))
        # What comes back lands once, without gaps.
        for kind in (QUERY, KEY):
            mine = schedule.sends[schedule.sends[:, KIND] == kind]
            assert mine[:, ROWS].sum() == schedule.landed_rows[rank, kind]
            assert np.array_equal(mine[:, STAGE_ROW], np.cumsum(mine[:, ROWS]) - mine[:, ROWS])
    assert len({s.digest for s in schedules}) == 1
    for document, begin, end, *_ in tick.query.to_array().tolist():
        assert (done[document][begin:end] == 1).all()
        done[document][begin:end] = 0
    assert not any(rows.any() for rows in done.values())
    return schedules


@settings(max_examples=60)
@given(problems(), st.integers(0, 1000))
def test_random_questions(problem: PlanInput, seed: int) -> None:
    """Planner, schedule and exchange agree on every byte that leaves and reaches a rank, whatever the tasks."""
    shape, tick = problem.shape, problem.tick
    _check(tick, cases.random_tasks(tick, shape.groups, np.random.default_rng(seed)), problem.window, shape.groups)
    plan = make_plan(problem)
    sent, received = np.zeros((2, tick.ranks), np.int64)
    width = {QUERY: shape.query_bytes, KEY: shape.key_value_bytes}
    for schedule in _check(tick, plan.tasks, problem.window, shape.groups):
        for row in schedule.sends:
            moved = int(row[ROWS]) * width[row[KIND]]
            back = int(row[ROWS]) * shape.output_bytes if row[KIND] == QUERY else 0
            sent[row[HOME]] += moved
            received[row[SERVER]] += moved
            sent[row[SERVER]] += back
            received[row[HOME]] += back
    assert sent.tolist() == plan.sent_bytes.tolist()
    assert received.tolist() == plan.received_bytes.tolist()
