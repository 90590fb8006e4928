"""Traffic: speeds of links corrected while training, and the brake, equally on all ranks."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from deepspeed_cad.ahead.brake import DROPPED, FACTORS, LONGEST_PROBE, PROBE, WINDOW, Brake
from deepspeed_cad.ahead.traffic import COLUMNS, ENOUGH, FASTER, GAIN, Traffic
from deepspeed_cad.cost import CostModel
from deepspeed_cad.exchange.links import AT_MOST, STARTED_S, Links
from deepspeed_cad.exchange.transfers import BETWEEN, INSIDE, LEAST_S, Size, Transfers
from deepspeed_cad.exchange.waits import Balance, Gain, Waits
from deepspeed_cad.layout import Layout
from deepspeed_cad.planner import make_plan
from deepspeed_cad.planner.plan import HeadShape, Plan, PlanInput

START, RULE = Links(1e11, 1e10), Links(4e11, None, "of the profile")
CPU = torch.device("cpu")


def traffic(ranks: int = 2, brakes: bool = False, paused: bool = False) -> Traffic:
    hosts = [f"host-{rank}" for rank in range(ranks)]
    return Traffic(START, RULE, None, Waits() if brakes else None, hosts, lambda: paused)


def reports(ranks: int = 2, **columns: object) -> np.ndarray:
    """[ranks, COLUMNS] with some columns filled, by their place."""
    found = np.zeros((ranks, COLUMNS), np.int64)
    for name, values in columns.items():
        found[:, int(name[1:])] = values
    return found


# Transfers


def test_a_transfer_is_of_the_kind_that_is_slow() -> None:
    found = Transfers(1, [5, 5, 6], 1e9, 1e6)
    assert found.size([4e6, 0, 600], [0, 0, 500]) == Size(BETWEEN, 600), "what stays inside is over before"
    assert found.size([4e6, 0, 0], [5e6, 0, 0]) == Size(INSIDE, 5_000_000)
    assert found.size([0, 0, LEAST_S * 1e6 - 1], [0, 0, 0]) is None, "too small to tell of the link"
    assert found.size([LEAST_S * 1e9 - 1, 0, 0], [0, 0, 0]) is None
    assert Transfers(0, [5, 6], None, None).size([0, 1 << 40], [0, 0]) is None
    messages = np.array([[1, 2, 0, 700], [0, 2, 0, 900], [1, 0, 0, 10_000_000]], np.int64)
    assert found.size_of_messages(messages) == Size(BETWEEN, 900)


def test_transfers_are_summed_until_taken() -> None:
    class Event:
        over = False

        def query(self) -> bool:
            return self.over

        def elapsed_time(self, other: object) -> float:
            return 3.0

    found, first, last = Transfers(0, [5, 6], 1e9, 1e6), Event(), Event()
    found.note(Size(BETWEEN, 1000), 0.25)
    found.expect(first, last, Size(INSIDE, 50))  # type: ignore[arg-type]
    assert found.take().tolist() == [0, 0, 250_000_000, 1000]
    last.over = True
    assert found.take().tolist() == [3_000_000, 50, 0, 0] and not found.take().any()


# Waits against gains


def test_waits_are_weighed_by_era() -> None:
    waits = Waits()
    with waits.timed(CPU):
        pass
    assert waits.take_balance() == Balance(0, 0.0, 0.0, 0), "nothing moves: waits say nothing of links"
    with waits.timed(CPU, False, Gain(0.5, 1)):
        pass
    with waits.timed(CPU, True, Gain(0.5, 1)):
        pass
    with waits.timed(CPU, True, Gain(9.0, 0)):
        pass
    era, gained, waited, ticks = waits.take_balance()
    assert (era, gained, ticks) == (1, 0.5, 1) and 0 < waited < 0.1
    assert waits.take_balance() == Balance(1, 0.0, 0.0, 0)


def test_waits_that_plans_know_of_are_no_cost_of_exchanges_and_no_news_of_pace() -> None:
    waits = Waits()
    for _ in range(2):
        with waits.timed(CPU, False, Gain(0.5, 0, 10.0)):  # on the way out; the tick ends with the way back
            pass
        with waits.timed(CPU, True, Gain(0.5, 0, 10.0)):
            pass
    assert waits.seconds() > 0
    seconds, ticks = waits.take()
    assert seconds == pytest.approx(-20.0, abs=0.1) and ticks == 2
    _, gained, waited, ticks = waits.take_balance()
    assert (gained, ticks) == (1.0, 2) and waited == pytest.approx(-20.0, abs=0.1)


def test_longer_waits_than_exchanges_can_take_are_not_their_cost() -> None:
    """A rank that is slower than plans may relieve makes the others wait, in every tick, with CAD and without."""
    links = Links(2e9, 1e9)
    assert links.longest(10**9, crosses=False) == pytest.approx(AT_MOST / 2 + STARTED_S)
    assert links.longest(10**9, crosses=True) == pytest.approx(AT_MOST + STARTED_S)
    assert links.longest(10**9, crosses=False) < links.longest(2 * 10**9, crosses=False)
    assert math.isinf(Links(None, 1e9).longest(10**9, crosses=False))
    waits = Waits()
    waits._add(5.0, 1, Gain(0.5, 0, most=0.25))
    assert waits.take_balance() == Balance(0, 0.5, 0.25, 1)
    assert waits.take() == (5.0, 1), "it is what others are late"
    waits._add(5.0, 1, Gain(0.5, 0, held_up=3.0, most=0.25))
    assert waits.take_balance() == Balance(0, 0.5, 0.25, 1)
    assert waits.take() == (2.0, 1)


def test_small_messages_that_take_long_are_braked() -> None:
    """Of 8 MB a network of 20 GB/s makes 0.4 ms, which is not noted; here they take 40, for a gain of 5."""
    links, waits = Links(None, 20e9), Waits()
    transfers, size = Transfers(0, [0, 1], None, 20e9), 8_000_000
    one = Traffic(links, links, transfers, waits, ["a", "b"], lambda: False)
    moved = np.array([size, size])
    plan = Plan(np.zeros((0, 6), np.int64), np.zeros(2), np.zeros(2), moved, moved, between_bytes=2 * size)
    for _ in range(2 * WINDOW):
        if (noted := transfers.size([0, size], [0, size])) is not None:
            transfers.note(noted, 0.04)
        waits._add(0.04, 1, Gain(0.005, one.brake.era, most=one.longest(plan, copies=False)))
        one.hear(np.stack([one.report()] * 2))
    assert one.brake.level > 0 or one.links.between < 2e9


# Corrections


def test_speeds_are_corrected_slowly_and_bounded() -> None:
    found = traffic()
    slow = reports(_3=[10**9, 3 * 10**9], _4=[10**9, 10**9])  # 2 GB in 4 s: 0.5 GB/s instead of 10
    for _ in range(ENOUGH - 1):
        found.hear(slow)
    assert found.links == START and found.now.between == 1e10
    found.hear(slow)
    expected = 1e10 ** (1 - GAIN) * 5e8**GAIN
    assert found.now.between == pytest.approx(expected) and found.now.inside == 1e11
    assert found.links.source == "measured, corrected"
    for _ in range(40 * ENOUGH):
        found.hear(slow)
    assert found.now.between == pytest.approx(5e8, rel=1e-3)
    for _ in range(40 * ENOUGH):
        found.hear(reports(_3=[10**6, 10**6], _4=[10**9, 10**9], _1=[1, 1], _2=[0, 0]))
    assert found.now.between == FASTER * 1e10 and found.now.inside == 1e11


def test_paused_ranks_use_the_rule() -> None:
    found = traffic()
    found.hear(reports(_0=[0, 1]))
    assert found.now == (4e11, None, None) and found.links is RULE
    found.hear(reports())
    assert found.now == (1e11, 1e10, None)
    assert traffic(paused=True).report()[0] == 1


def test_a_broken_link_is_named_once() -> None:
    found = traffic(3)
    broken = reports(3, _3=[10**9, 0, 2 * 10**9], _4=[10**9, 0, 10**7])
    for _ in range(3 * ENOUGH):
        found.hear(broken)
    ((text, notable),) = found.news
    assert notable and "rank 2 on host-2 (0.005 GB/s)" in text and "10 GB/s measured at start" in text
    assert "between hosts" in text and "rank 0" not in text


def test_one_late_packet_is_no_broken_link() -> None:
    found = traffic()
    for nanoseconds in (5 * 10**9, *[10**8] * (ENOUGH - 1)):
        found.hear(reports(_3=[10**8, nanoseconds], _4=[10**9, 10**9]))
    assert not found.news


# The brake


def hear(brake: Brake, gained: float, waited: float, times: int = 1, ranks: int = 2) -> list[str]:
    """What changed; rank 1 is the one that gains less."""
    said = []
    for _ in range(times):
        change = brake.hear(
            np.full(ranks, brake.era), np.array([2.0, gained]), np.array([0.0, waited]), np.ones(ranks)
        )  # fmt: skip
        said += [change.text] if change else []
    return said


def test_waits_that_eat_the_gain_tighten_the_brake() -> None:
    brake = Brake()
    assert hear(brake, 0.008, 0.012, WINDOW - 1) == [] and brake.factor == 1.0
    (text,) = hear(brake, 0.008, 0.012)
    assert "balance gains 8 ms a micro-batch and exchanges make rank 1 wait 12 ms: plans move less" in text
    assert (brake.level, brake.era, brake.factor) == (1, 1, FACTORS[1])
    said = hear(brake, 0.008, 0.012, WINDOW * 10)
    assert brake.level == len(FACTORS) - 1 and "plans move nothing" in said[-1] and len(said) == 3


def test_a_few_late_steps_do_not_brake() -> None:
    brake = Brake()
    hear(brake, 0.001, 60.0, DROPPED)
    assert hear(brake, 0.012, 0.008, WINDOW * 20 - DROPPED) == [] and brake.level == 0


def test_ticks_of_another_era_do_not_count() -> None:
    brake = Brake()
    for eras in ([0, 1], [1, 1]):
        for _ in range(2 * WINDOW):
            assert brake.hear(np.array(eras), np.zeros(2), np.ones(2), np.ones(2)) is None
    for _ in range(2 * WINDOW):
        assert brake.hear(np.zeros(2), np.zeros(2), np.ones(2), np.array([1.0, 0.0])) is None


def test_it_loosens_to_see_and_for_good() -> None:
    brake = Brake()
    hear(brake, 0.008, 0.012, WINDOW)
    assert hear(brake, 0.008, 0.001, PROBE - 1) == [] and brake.level == 1
    assert "plans move more again" in hear(brake, 0.008, 0.001)[0] and brake.level == 0
    assert "plans move all that they promise to gain by again" in hear(brake, 0.008, 0.001, WINDOW)[0]
    assert hear(brake, 0.008, 0.001, 3 * PROBE) == []


def test_tries_that_fail_become_rare() -> None:
    brake = Brake()
    hear(brake, 0.008, 0.012, WINDOW)
    waits = []
    for _ in range(7):
        count = 0
        while brake.level == 1:
            hear(brake, 0.008, 0.007)
            count += 1
        waits.append(count)
        hear(brake, 0.008, 0.012, WINDOW)
        assert brake.level == 1
    assert waits[0] == PROBE and waits[1] == 2 * PROBE and waits[-1] == LONGEST_PROBE


def test_nothing_moves_where_nothing_is_reported_and_is_tried_again() -> None:
    brake = Brake()
    hear(brake, 0.008, 0.012, WINDOW * 4)
    assert brake.level == len(FACTORS) - 1
    for _ in range(PROBE):
        change = brake.hear(np.zeros(2), np.zeros(2), np.zeros(2), np.zeros(2))
    assert change is not None and brake.level == len(FACTORS) - 2


def test_the_last_level_moves_nothing_and_each_moves_no_more_than_the_one_before() -> None:
    tick = Layout.from_rank_lengths([[60000], [20000] * 3, [10000] * 6, [1000] * 60]).tick()
    shape = HeadShape(32, 8, 128, 128, 2)
    moved = []
    for factor in FACTORS:
        cost = CostModel("test", "seconds", pair=1e-11, byte_inside=2 * factor / 1e11, byte_between=2 * factor / 2e10)
        moved.append(int(make_plan(PlanInput(tick, shape, cost, hosts=np.array([0, 0, 1, 1]))).sent_bytes.sum()))
    assert moved[0] > 0 and moved[-1] == 0 and moved == sorted(moved, reverse=True)


def test_ranks_know_the_same_and_news_are_theirs_to_say() -> None:
    ranks = [traffic(brakes=True) for _ in range(2)]
    for _ in range(WINDOW):
        for rank in ranks:
            rank.hear(reports(_5=0, _6=8_000_000, _7=12_000_000, _8=4))
    assert ranks[0].now == ranks[1].now == (1e11 / FACTORS[1], 1e10 / FACTORS[1], 1)
    assert len(ranks[0].news) == 1
