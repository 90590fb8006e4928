"""Pace: ranks that the others wait for get less attention, bounded, and equally learned on every rank."""

import numpy as np
import pytest
import torch

from deepspeed_cad.ahead.pace import ENOUGH, GAIN, PAUSED, TICKS_PER_LOAD, Pace
from deepspeed_cad.config import CADConfig
from deepspeed_cad.cost import CostModel
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
