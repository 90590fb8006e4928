"""The reference planner's parts by themselves: what columns count while rows move, levels, offers and cuts."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from test_planner import SHAPE, problems

from deepspeed_cad.cost import PAIRS, CostModel, count_pairs
from deepspeed_cad.layout import Layout, Segments
from deepspeed_cad.planner import HeadShape, PlanInput
from deepspeed_cad.planner.checks import check_coverage
from deepspeed_cad.planner.columns import Columns, link_weights
from deepspeed_cad.planner.constants import LONGEST, SHORTEST
from deepspeed_cad.planner.cut import SMALLEST_SHARE, choose_cut
from deepspeed_cad.planner.levels import finish_time, settle_levels, work_until
from deepspeed_cad.planner.offers import Item, Levels, Move, Offer, Prices, counts_to_try
from deepspeed_cad.planner.round import Round
from deepspeed_cad.planner.traffic import count_bytes, keys_needed, traffic_matrix


@settings(max_examples=150, deadline=None)
@given(problems(), st.randoms(use_true_random=False))
def test_columns_count_what_their_tasks_are(problem: PlanInput, random) -> None:
    """After moves at random: rows, loads, bytes and what is left at home, as counted from the tasks."""
    state = Columns(problem)
    assume(state.segments)
    for _ in range(12):
        document, begin, end, _ = random.choice(state.segments)
        group, server = random.randrange(state.groups), random.randrange(state.ranks)
        cell = random.choice([one for one in state.cells[document][group] if begin <= one[0] < end])
        low = random.randint(cell[0], cell[1] - 1)
        state.move(document, group, low, random.randint(low + 1, cell[1]), server)
    tasks = np.array(state.tasks(), np.int64)
    check_coverage(tasks, problem.tick, state.groups)
    assert state.received == count_bytes(tasks, problem.tick, problem.shape, problem.window)[1].tolist()
    cost = problem.cost.of(tasks[:, 1], tasks[:, 2], problem.window) * (tasks[:, 4] - tasks[:, 3])
    assert state.load == pytest.approx(np.bincount(tasks[:, 5], cost, state.ranks).tolist())
    for index, (document, begin, end, home) in enumerate(state.segments):
        at_home = sum(
            min(cell[1], end) - max(cell[0], begin)
            for column in state.cells[document]
            for cell in column
            if cell[2] == home and begin <= cell[0] < end
        )
        assert state.left[index] == at_home
        assert state.segment_of(document, begin) == state.segment_of(document, end - 1) == index
    for rank in range(state.ranks):
        foreign = {d for d, columns in state.cells.items() for column in columns for c in column
                   if c[2] == rank != c[3]}  # fmt: skip
        assert foreign <= set(state.served[rank]) and len(set(state.served[rank])) == len(state.served[rank])


@settings(max_examples=100, deadline=None)
@given(problems(), st.integers(0, 3000), st.integers(1, 600))
def test_costs_of_columns_are_those_of_the_model(problem: PlanInput, begin: int, rows: int) -> None:
    state = Columns(problem)
    assert state.cost_of(begin, begin + rows) == pytest.approx(
        float(problem.cost.of(begin, begin + rows, problem.window))
    )
    assert state.cost_of(begin, begin) == 0.0
    keys = dataclasses.replace(problem.cost, key=0.0, task=0.0)
    assert state.density(begin) == pytest.approx(float(keys.of(begin, begin + 1, problem.window)))


@pytest.mark.parametrize(
    ("nodes", "cost", "weights"),
    [
        (None, CostModel(byte_inside=1.0, byte_between=5.0), (1.0, 1.0)),
        (4, CostModel(byte_inside=1.0, byte_between=5.0), (1.0, 1.0)),
        (5, PAIRS, (1.0, 1.0)),
        (2, PAIRS, (1.0, 8.0)),
        (2, CostModel(byte_inside=2.0, byte_between=5.0), (1.0, 2.5)),
        (2, CostModel(byte_inside=5.0, byte_between=2.0), (1.0, 1.0)),
        (2, CostModel(byte_inside=2.0, byte_between=2.0), (1.0, 1.0)),
        (2, CostModel(byte_inside=2.0), (1.0, 8.0)),
        (2, CostModel(byte_between=2.0), (1.0, 1.0)),
    ],
)
def test_weights_of_links(nodes: int | None, cost: CostModel, weights: tuple[float, float]) -> None:
    tick = Layout.from_rank_lengths([[1]] * 4).tick()
    problem = PlanInput(tick, SHAPE, cost, hosts=hosts_of(nodes, 4))
    assert link_weights(problem) == weights
    state = Columns(problem)
    assert state.link(1, 1) == 0.0 and state.link(0, 1) == 1.0
    assert state.link(1, 2) == (weights[1] if nodes == 2 else 1.0)


def hosts_of(nodes: int | None, ranks: int) -> np.ndarray | None:
    """Hosts of so many ranks each."""
    return None if nodes is None else np.arange(ranks) // nodes


# Levels

BASE, SPEED = [0.0, 6.0, 100.0, 1.0], [1.0, 2.0, 1.0, 0.0]


def test_all_ranks_stop_together() -> None:
    finish = finish_time(18.0, BASE, SPEED)
    assert finish == pytest.approx(10.0)
    assert work_until(finish, BASE, SPEED) == pytest.approx([10.0, 8.0, 0.0, 0.0])
    assert finish_time(5.0, BASE, SPEED) == pytest.approx(5.0)
    assert finish_time(5.0, [3.0], [0.0]) == 0.0
    assert finish_time(0.0, [0.0, 4.0], [1.0, 1.0]) == pytest.approx(0.0)
    assert work_until(6.0, BASE, SPEED) == [6.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("load", "give", "take"),
    [
        # 7 are above the upper bound of 11: the others rise as far as that needs, and no further.
        ([18.0, 8.0, 7.0, 7.0], 11.0, 29 / 3),
        # 7 are missing below the lower bound of 9, and only 5 above the upper: those above come down a little more.
        ([2.0, 12.0, 13.0, 13.0], 31 / 3, 9.0),
        ([10.0, 10.0, 10.0, 10.0], 11.0, 9.0),
    ],
)
def test_levels_that_move_no_more_than_must(load: list[float], give: float, take: float) -> None:
    gives, takes = settle_levels(load, [0.0] * 4, [1.0] * 4, 10.0, 0.1)
    assert gives == pytest.approx([give] * 4) and takes == pytest.approx([take] * 4)


# Rounds


def round_of(lengths: list[list[int]], give: float, take: float, nodes: int | None = None, slack: float = 0.0) -> Round:
    """A round in which every rank gives above `give` and takes below `take` pairs."""
    ranks = len(lengths)
    problem = PlanInput(
        Layout.from_rank_lengths(lengths).tick(), SHAPE, PAIRS, granularity=16, hosts=hosts_of(nodes, ranks)
    )
    same = [1.0] * ranks
    levels = Levels(
        [take] * ranks, [give] * ranks, [take] * ranks, [slack] * ranks, [0.0] * ranks, same, [math.inf] * ranks
    )
    return Round(Columns(problem), levels, range(ranks))


def test_so_many_segments_are_looked_at() -> None:
    lengths = [*range(100, 160)]
    one = round_of([lengths, []], 0.0, 1e9)
    assert [item.end for item in one.items(0)] == sorted(lengths, reverse=True)[:LONGEST]
    assert [item.end for item in one.short_items(0)] == lengths[:SHORTEST]
    one.state.move(0, 0, 0, 100, 1)
    assert [item.group_begin for item in one.short_items(0)][:2] == [1, 0]
    for group in range(1, 4):
        one.state.move(0, group, 0, 100, 1)
    assert [item.end for item in one.short_items(0)] == lengths[1 : SHORTEST + 1]
    assert one.received_items(1) == [Item(0, 0, 4, 0, 100)] and one.received_items(0) == []


def test_head_groups_in_the_same_state_are_one_item() -> None:
    one = round_of([[100, 90], []], 0.0, 1e9)
    one.state.move(0, 2, 50, 100, 1)
    assert one.state.classes(0) == [(0, 2), (2, 3), (3, 4)] and one.state.classes(1) == [(0, 4)]
    assert one.items(0) == [Item(0, 0, 2, 0, 100), Item(0, 3, 4, 0, 100), Item(1, 0, 4, 0, 90), Item(0, 2, 3, 0, 50)]


def test_the_water_level_sheds_the_surplus() -> None:
    one = round_of([[100, 60], []], 0.0, 1e9)
    items = one.items(0)
    # 4 head groups of 100 rows: the last 10 have 955 pairs each.
    assert one.water_level(items, 4 * 955.0) == 90 and one.water_level(items, 4 * 955.0 + 1) == 89
    assert one.water_level(items, 4 * (5050 - 1275 + 1830 - 1275.0)) == 50 and one.water_level(items, 1e9) == 0
    one.state.move(0, 0, 0, 100, 1)
    assert one.water_level(one.items(0), 3 * 955.0) == 90


def test_who_takes() -> None:
    """Ranks far enough below their level: the emptiest of all, and the emptiest of the donor's node."""
    one = round_of([[200], [60], [100], [50], [99], [10]], 0.0, 4 * 5050.0, nodes=3, slack=500.0)
    assert [one.takes(rank) for rank in range(6)] == [False, True, False, True, False, True]
    assert (
        one.emptiest(0) == [5, 1] and one.emptiest(4) == [5, 5] and one.emptiest(5) == [3, 3] and one.emptiest(1) == [5]
    )
    item = one.items(0)[0]
    assert one.receivers(0, item, [5]) == [5]
    one.state.move(0, 0, 0, 20, 3)
    assert one.receivers(0, one.items(0)[0], [5]) == [5]
    assert one.receivers(0, Item(0, 0, 1, 20, 200), [5]) == [3, 5] and one.receivers(3, item, []) == []


def test_homes_of_keys_are_looked_at() -> None:
    tick = Layout.from_stream([1200], 12, 100).tick()
    same, levels = [1.0] * 12, [1e9] * 12
    state = Columns(PlanInput(tick, SHAPE, PAIRS))
    one = Round(state, Levels(levels, [0.0] * 12, levels, [0.0] * 12, [0.0] * 12, same, [math.inf] * 12), range(12))
    item = one.items(5)[0]
    assert one.receivers(5, item, []) == [0, 1, 2, 3, 8, 9, 10, 11] and one.receivers(0, item, [6]) == [
        1,
        2,
        3,
        4,
        6,
        8,
        9,
        10,
        11,
    ]


# Offers, traffic, cuts


@pytest.mark.parametrize(
    ("owner", "home", "memory", "fits"),
    [
        # Rank 2 would receive 2 head groups of 5 query rows and 7 KV rows, rank 0 the O of 3 rows.
        (0, 0, [2 * 3, math.inf, 2 * (5 + 7)], True),
        (0, 0, [2 * 3 - 1, math.inf, 2 * (5 + 7)], False),
        (0, 0, [2 * 3, math.inf, 2 * (5 + 7) - 1], False),
        # O comes home already where another rank runs the rows, and need not travel where the server is their home.
        (1, 0, [0, 0, 2 * (5 + 7)], True),
        (1, 0, [0, 0, 2 * (5 + 7) - 1], False),
        (2, 2, [0, 0, 2 * (5 + 7)], True),
    ],
)
def test_memory_of_server_and_home(owner: int, home: int, memory: list[float], fits: bool) -> None:
    shape = HeadShape(4, 4, 1, 1, 1)
    assert (shape.query_bytes, shape.output_bytes, shape.key_value_bytes) == (1, 1, 2)
    state = Columns(PlanInput(Layout.from_rank_lengths([[32], [], []]).tick(), shape, PAIRS))
    zeros, far = [0.0] * 3, [1e9] * 3
    levels = Levels(
        far, zeros, far, zeros, zeros, [1.0] * 3, [one + 7.0 * 2 * (at == 2) for at, one in enumerate(memory)]
    )
    item, prices = Item(0, 0, 4, 0, 32), Prices(1.0, 0, 1.0, 1.0, 1.0)
    offer = Offer(state, levels, 0, item, 2, prices)
    assert offer.has_room(owner, home, 2, 5, 7, 3) is fits


@pytest.mark.parametrize(
    ("most_loss", "most_gain", "cuts"),
    [
        # Rows [16, 48) are what may go at most: that cut is tried, and the one behind it.
        (count_pairs(16, 48), math.inf, [48, 64]),
        (math.inf, count_pairs(16, 48), [48, 64]),
        (count_pairs(16, 48) - 1, math.inf, [32, 48]),
        (math.inf, math.inf, [80]),
        (-1.0, -1.0, [32]),
    ],
)
def test_where_first_rows_may_end(most_loss: float, most_gain: float, cuts: list[int]) -> None:
    one = round_of([[96], []], 0.0, 1e9)
    offer = Offer(one.state, one.levels, 0, Item(0, 0, 4, 16, 96), 1, Prices(1.0, 0, 1.0, 1.0, 1.0))
    assert offer.head_cuts(float(most_loss), float(most_gain)) == cuts


@pytest.mark.parametrize(
    ("most_loss", "most_gain", "level", "cuts"),
    [
        (count_pairs(64, 96), math.inf, -1, [0, 48, 64]),
        (math.inf, count_pairs(64, 96), -1, [0, 48, 64]),
        (count_pairs(64, 96) - 1, math.inf, -1, [0, 64, 80]),
        (count_pairs(64, 96), math.inf, 24, [0, 48, 64, 32]),
        (math.inf, math.inf, -1, [0, 16]),
        (-1.0, -1.0, -1, [0, 80]),
    ],
)
def test_where_last_rows_may_begin(most_loss: float, most_gain: float, level: int, cuts: list[int]) -> None:
    one = round_of([[96], []], 0.0, 1e9)
    offer = Offer(one.state, one.levels, 0, Item(0, 0, 4, 0, 96), 1, Prices(1.0, 0, 1.0, 1.0, 1.0))
    assert offer.tail_cuts(0, 96, float(most_loss), float(most_gain), level) == cuts


@pytest.mark.parametrize(("at_server", "at_home", "follows"), [(0, 0, True), (-1, 0, False), (0, -1, False)])
def test_a_short_document_follows_where_memory_just_holds_it(at_server: int, at_home: int, follows: bool) -> None:
    one = round_of([[16, 16], []], 0.0, 1e9)
    state = one.state
    for group in range(4):
        state.move(0, group, 0, 16, 1)
    rows = 16 * 4
    one.levels.memory[:] = [
        state.received[0] + rows * state.output_bytes + at_home,
        state.received[1] + rows * (state.query_bytes + state.key_value_bytes) + at_server,
    ]
    one.follow(0, Move(1.0, 0, 0, 4, 0, 16, 1))
    assert (state.load[0] == 0.0) is follows


def test_keys_that_a_rank_need_not_receive_any_more() -> None:
    """A document of two ranks. Rank 0 runs the rows of rank 1 too: without them it needs no keys of rank 1."""
    tick = Layout.from_stream([64], 2, 32).tick()
    state = Columns(PlanInput(tick, SHAPE, PAIRS))
    for group in range(state.groups):
        state.move(0, group, 32, 64, 0)
    zeros, far = [0.0] * 2, [math.inf] * 2
    levels = Levels(far, zeros, far, zeros, zeros, [1.0] * 2, far)
    offer = Offer(state, levels, 0, Item(0, 0, 4, 32, 64), 1, Prices(1.0, 0, 1.0, 1.0, 1.0))
    assert offer.freed(32, 0) == 32 * state.key_value_bytes and offer.freed(0, 0) == 0.0


def test_numbers_of_head_groups() -> None:
    assert counts_to_try(1) == [1] and counts_to_try(4) == [1, 2, 3, 4]
    assert counts_to_try(40) == [*range(1, 17), 18, 20, 22, 24, 27, 30, 33, 37, 40]


def test_traffic_by_example() -> None:
    """Rank 0 keeps head group 0 of rows 0 to 8, rank 1 runs the rest of a document that begins on rank 0."""
    tick = Layout.from_stream([12], 2, 8).tick()
    tasks = np.array([[0, 0, 8, 0, 1, 0], [0, 0, 12, 1, 4, 1], [0, 8, 12, 0, 1, 1]])
    q, o, kv = SHAPE.query_bytes, SHAPE.output_bytes, SHAPE.key_value_bytes
    assert traffic_matrix(tasks, tick, SHAPE) == {(0, 1): 8 * 3 * q + 8 * 4 * kv, (1, 0): 8 * 3 * o}
    assert traffic_matrix(tasks, tick, SHAPE, window=3)[0, 1] == 8 * 3 * q + (8 * 3 + 2) * kv
    assert keys_needed(tasks, 3) == [(0, 0, 1, [(0, 8)]), (0, 1, 1, [(6, 12)]), (0, 1, 3, [(0, 12)])]
    assert keys_needed(np.zeros((0, 6), np.int64), None) == []
    apart = np.array(
        [[0, 0, 4, 0, 4, 1], [0, 5, 8, 0, 4, 1], [0, 11, 12, 0, 4, 1], [0, 4, 5, 0, 4, 0], [0, 8, 11, 0, 4, 0]]
    )
    assert keys_needed(apart, 3) == [(0, 1, 4, [(0, 8), (9, 12)]), (0, 0, 4, [(2, 5), (6, 11)])]
    assert keys_needed(apart, None) == [(0, 1, 4, [(0, 12)]), (0, 0, 4, [(0, 11)])]


@pytest.mark.parametrize(
    ("lengths", "unit", "cut"),
    [
        ([[64, 64], [64, 64]], 1, [64, 64]),
        # Rounded to whole sequences where a batch has several, to 128 rows where there are many.
        ([[64] * 3, [64] * 3], 64, [128, 128]),
        ([[2048, 2048], [64, 64]], 1, [2048, 64]),
        ([[2000, 2000], [500, 500]], 1, [2048, 500]),
        ([[65536], [65536]], 1, [41984, 41984]),
        ([[65536]], 1, None),
        ([[], []], 1, None),
        ([[100], [100]], 100, None),
    ],
)
def test_where_a_micro_batch_is_cut(lengths: list[list[int]], unit: int, cut: list[int] | None) -> None:
    layout = Layout.from_rank_lengths(lengths)
    found = choose_cut(layout, np.full(layout.ranks, unit))
    assert (None if found is None else found.tolist()) == cut
    if cut is not None:
        assert np.array_equal(choose_cut(layout, np.zeros(layout.ranks, np.int64) + unit), cut)


@pytest.mark.parametrize(
    ("lengths", "unit", "cut"),
    [
        ([100, 100], [80, 80], [80, 80]),
        ([100, 100], [81, 81], None),
        ([60, 40], [61, 1], [0, 30]),
        ([60, 22], [61, 1], None),
    ],
)
def test_a_part_that_is_too_small_is_not_cut_off(lengths: list[int], unit: list[int], cut: list[int] | None) -> None:
    """Each part has a fifth of all tokens or more, also where whole sequences leave no other choice."""
    found = choose_cut(Layout.from_rank_lengths([[length] for length in lengths]), np.array(unit))
    assert (None if found is None else found.tolist()) == cut
    assert cut is None or SMALLEST_SHARE <= sum(cut) / sum(lengths) <= 1 - SMALLEST_SHARE


def test_columns_of_a_tick_in_any_order_and_with_pieces() -> None:
    """Neighbouring segments on one rank are one; empty ones are none."""
    columns = np.array([[0, 5, 9, 1], [0, 0, 2, 0], [0, 2, 5, 0], [1, 3, 3, 0], [2, 0, 4, 1]]).T
    segments = Segments(*columns, [0] * 5)
    tick = dataclasses.replace(Layout.from_rank_lengths([[5], [8]]).tick(), query=segments, key=segments)
    state = Columns(PlanInput(tick, SHAPE, PAIRS))
    assert state.segments == [(0, 0, 5, 0), (0, 5, 9, 1), (2, 0, 4, 1)]
    assert state.of_rank == [[0], [1, 2]] and state.left == [20, 16, 16]
    assert state.received == [0, 5 * 4 * SHAPE.key_value_bytes]
    assert math.isclose(state.load[1], 4 * (5 * 4 + 10 + 10))
