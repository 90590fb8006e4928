"""Pace: ranks that the others wait for get less attention, bounded, and equally learned on every rank."""

import numpy as np
import pytest
import torch

from deepspeed_cad.ahead.held_up import begins
from deepspeed_cad.ahead.pace import ENOUGH, GAIN, PAUSED, TICKS_PER_LOAD, Pace
from deepspeed_cad.config import CADConfig
from deepspeed_cad.cost import CostModel
from deepspeed_cad.exchange.waits import Gain, Waits
from deepspeed_cad.layout import Layout
from deepspeed_cad.planner import make_plan
from deepspeed_cad.planner.plan import HeadShape, PlanInput
from deepspeed_cad.profiles.choice import SHIPPED
from deepspeed_cad.session import Session
from deepspeed_cad.statistics import Statistics

SHAPE = HeadShape(32, 8, 128, 128, 2)
COST = CostModel("test", "seconds", pair=1e-11)
LENGTHS = [[16384] * 4, [65536], [4096] * 16, [1024] * 64]


def run(extra_s: list[float], most: float, steps: int = 30, noise: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    """Waits and attention of the last step of ranks that compute `extra_s` seconds besides in every load."""
    tick = Layout.from_rank_lengths(LENGTHS).tick()
    ranks = len(extra_s)
    waited = np.zeros(ranks)
    paces = [Pace(ranks, lambda rank=rank: (float(waited[rank]), ENOUGH), most) for rank in range(ranks)]
    random = np.random.default_rng(0)
    mean = float(COST.of(tick.query.begin, tick.query.end).sum()) * SHAPE.groups / ranks
    for _ in range(steps):
        reports = np.array([pace.report() for pace in paces])
        for pace in paces:
            pace.hear(reports[:, 0], reports[:, 1])
            pace.expect(mean)
        bases = [pace.base_load(pace.late, mean) for pace in paces]
        assert all(base is None or np.array_equal(base, bases[0]) for base in bases)
        plan = make_plan(PlanInput(tick, SHAPE, COST, tolerance=0.002, base_load=bases[0]))
        attention = plan.load - (0 if bases[0] is None else bases[0])
        finish = attention * (1 + noise * random.standard_normal(ranks)) + np.array(extra_s)
        waited[:] = (finish.max() - finish) / 2 * ENOUGH
    return finish.max() - finish, attention


def test_waits_become_equal() -> None:
    before, _ = run([0.0, 1e-3, 4e-4, 0.0], most=0.0)
    after, attention = run([0.0, 1e-3, 4e-4, 0.0], most=0.1)
    assert before.max() > 9e-4
    assert after.max() < 2.5e-4
    assert attention[1] < attention[2] < attention[0]


def test_relief_is_bounded() -> None:
    """A rank that is late by more than attention should make up for keeps nearly all of its share."""
    _, attention = run([0.0, 1.0, 0.0, 0.0], most=0.03)
    mean = attention.mean()
    assert 0.95 * mean < attention[1] < 0.98 * mean
    assert attention.max() < 1.035 * mean


def run_of_one_document(extra_s: list[float], speed: list[float], steps: int) -> tuple[np.ndarray, ...]:
    """Lateness as learned, and waits, attention and seconds of the last step, of ranks that share one document."""
    ranks, there, speeds = len(extra_s), np.array(extra_s), np.array(speed)
    tick = Layout.from_stream([16384 * ranks], ranks, 16384).tick()
    waits = [Waits() for _ in range(ranks)]
    paces = [Pace(ranks, one.take, 0.6) for one in waits]
    mean = float(COST.of(tick.query.begin, tick.query.end).sum()) * SHAPE.groups / sum(speed)
    for _ in range(steps):
        reports = np.array([pace.report() for pace in paces])
        for pace in paces:
            pace.hear(reports[:, 0], reports[:, 1])
            pace.expect(mean)
        base = paces[0].base_load(paces[0].late, mean)
        base = np.zeros(ranks) if base is None else base
        begin = begins(base, tick, COST, SHAPE.groups, None, speeds)
        plan = make_plan(PlanInput(tick, SHAPE, COST, tolerance=0.002, base_load=begin, speed=speeds))
        attention = plan.load - begin
        # Rows of a rank read keys of all ranks before it; what else it serves needs no less.
        finish = np.maximum.accumulate(there) + attention
        idle = (finish.max() - attention - there) / TICKS_PER_LOAD
        for rank, one in enumerate(waits):
            gain = Gain(0.0, 0, float(begin[rank] - base[rank]) / TICKS_PER_LOAD)
            for _ in range(ENOUGH):
                with one.timed(torch.device("cpu"), True, gain):
                    pass
                one._add(float(idle[rank]), 0, None)
    return paces[0].late, finish.max() - finish, attention, finish.max()


def test_no_attention_is_taken_from_a_rank_whose_keys_the_others_wait_for() -> None:
    """All rows behind it read its keys, so from when they are there all have the same time to the end."""
    speed, extra = [0.5, 1.0], [8e-3, 0.0]
    late, waits, attention, took = run_of_one_document(extra, speed, steps=40)
    total = float(attention @ speed)
    assert attention == pytest.approx([total / 1.5] * 2, rel=0.01)
    assert took == pytest.approx(8e-3 + total / 1.5, rel=0.01)
    assert waits.max() < 0.01 * took
    # What is learned is how late it is, and no more however long it takes: the waits are those that plans know of.
    assert late == pytest.approx([4e-3, -4e-3], rel=0.15)


def test_a_rank_that_reads_no_keys_of_the_late_one_works_meanwhile() -> None:
    """The second half of the document is late: rows of the first do not wait for it."""
    late, _, attention, _ = run_of_one_document([0.0, 8e-3], [1.0, 1.0], steps=40)
    assert attention[0] - attention[1] == pytest.approx(8e-3, rel=0.15)
    assert late == pytest.approx([-4e-3, 4e-3], rel=0.15)


def test_when_ranks_begin() -> None:
    """Of three ranks the first two share document 1, the last two document 3; each part of that has 2048 rows."""
    tick = Layout.from_stream([4096, 16384, 2048, 4096], 3, 12288).tick()
    assert tick.query.rank.tolist() == [0, 0, 1, 1, 1, 2]
    # What rank 1 can do without rank 0: document 2, and its part of document 3.
    meanwhile = 2 * COST.of([0], [2048])[0] * SHAPE.groups

    def of(*late: float, window: int | None = None, speed: list[float] | None = None) -> list[float]:
        speeds = None if speed is None else np.array(speed)
        return begins(np.array(late), tick, COST, SHAPE.groups, window, speeds).tolist()

    assert of(0.0, 0.0, 0.0) == [0.0, 0.0, 0.0]
    assert of(1.0, 0.0, 0.0) == pytest.approx([1.0, 1.0 - meanwhile, 0.0], rel=1e-9)
    assert of(1.0, 0.0, 0.0, speed=[1.0, 0.5, 1.0])[1] == pytest.approx(1.0 - 2 * meanwhile, rel=1e-9)
    assert of(1.0, 1.0 - meanwhile / 2, 0.0)[1] == 1.0 - meanwhile / 2  # it has more to do than it has to wait
    assert of(0.0, 1.0, 0.0) == [0.0, 1.0, 1.0]  # earlier rows read no later ones, and rank 2 has nothing else
    assert of(1.0, 0.0, 0.0, window=1) == [1.0, 0.0, 0.0]  # with such a window nobody reads another rank's keys


def test_nothing_learned_where_it_is_off_or_too_little_was_measured() -> None:
    never = Pace(2, lambda: pytest.fail("measured though it is off"), 0.0)
    assert never.report() == (0, 0)
    never.hear([5, 0], [100, 100])
    assert never.base_load(never.late, 1.0) is None
    soon = Pace(2, lambda: (0.5, 3), 0.1)
    soon.expect(1.0)
    assert soon.report() == (500_000_000, 3)
    soon.hear([int(5e8), 0], [ENOUGH, ENOUGH - 1])
    assert soon.base_load(soon.late, 1.0) is None
    soon.hear([0, 0], [0, 1])
    base = soon.base_load(soon.late, 1.0)
    assert base is not None and base[0] == 0 and base[1] > 0


def test_what_is_learned_by_arithmetic() -> None:
    """GAIN of the difference from the mean wait, in seconds per load, at most a tenth of the largest mean attention."""
    pace = Pace(3, lambda: (0.0, 0), 0.1)
    pace.expect(10.0)
    pace.expect(4.0)
    waited = np.array([0.0, 1.0, 2.0]) * 1e9
    pace.hear(waited * 4, [4, 4, 4])
    step = GAIN * TICKS_PER_LOAD
    assert pace.late == pytest.approx([step, 0.0, -step])
    # A wait over more ticks is a smaller one, and sums go on until every rank has enough.
    pace.hear(waited * 8, [8, 8, 3])
    assert pace.late == pytest.approx([step, 0.0, -step])
    pace.hear([0, 0, 0], [8, 8, 1])
    wait = np.array([0.0, 8 / 16, 16 / 4])
    late = np.array([step, 0.0, -step]) + step * (wait.mean() - wait)
    assert pace.late == pytest.approx(np.clip(late - late.mean(), -1.0, 1.0))
    for _ in range(5):
        pace.hear(waited * 4, [4, 4, 4])
    assert pace.late.max() == pytest.approx(1.0) and pace.late.min() == pytest.approx(-1.0)
    assert pace.base_load(pace.late, 5.0) == pytest.approx(np.clip(pace.late, -0.5, 0.5) + 0.5)
    assert pace.base_load(np.zeros(3), 5.0) is None


def test_reports_are_whole_nanoseconds() -> None:
    pauses = False
    pace = Pace(2, lambda: (1.5e-9, 7), 0.1, lambda: pauses)
    assert pace.report() == (2, 7) and not pace.paused
    pauses = True
    assert pace.report() == (2, PAUSED)
    late = pace.late
    late[0] = 5.0
    assert not pace.late.any(), "what is handed out is a copy"


def test_noise_does_not_build_up() -> None:
    after, attention = run([0.0, 0.0, 0.0, 0.0], most=0.05, noise=0.01)
    assert np.abs(attention / attention.mean() - 1).max() < 0.03


def test_one_deterministic_rank_pauses_all() -> None:
    """Ranks read the flag at different moments of their look-ahead threads; what they told each other decides."""
    deterministic = True
    paces = [Pace(2, lambda: (0.5, ENOUGH), 0.1, lambda rank=rank: deterministic and rank == 1) for rank in range(2)]

    def gather() -> None:
        reports = np.array([pace.report() for pace in paces])
        for pace in paces:
            pace.hear(*reports.T)

    for pace in paces:
        pace.expect(1.0)
        pace.hear([int(5e8), 0], [ENOUGH, ENOUGH])
        assert pace.late.any()
    gather()
    assert not any(pace.late.any() for pace in paces)
    deterministic = False
    gather()
    assert all(pace.late.any() for pace in paces)


def test_statistics_name_the_latest_rank() -> None:
    first = Statistics(waited_s=1.0, late_s=1e-3, late_rank=2)
    now = Statistics(waited_s=3.0, late_s=2e-3, late_rank=3)
    events = now.since(first).as_events()
    assert events["cad/waited_s"] == 2.0
    assert events["cad/late_ms"] == pytest.approx(2.0) and events["cad/late_rank"] == 3.0


@pytest.mark.parametrize(
    ("block", "warns"),
    [
        ({"straggler_relief": 0.1}, True),
        ({}, False),
        ({"straggler_relief": 0.1, "cost": str(SHIPPED / "h200_flash_attn_4.json")}, False),
    ],
)
def test_relief_that_cannot_act_is_said(block: dict, warns: bool, caplog: pytest.LogCaptureFixture) -> None:
    session = Session(CADConfig.from_dict(block), torch.device("cpu"))
    try:
        assert ("straggler_relief" in caplog.text) == warns
        assert ("no straggler relief" in session.describe()) == (session.cost.unit != "seconds")
    finally:
        session.close()
