"""Two ticks in turn beside reserved servers: what plans take for hidden is what the simulator's rounds hide."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_cad.ahead.crew import Crew, Servers
from deepspeed_cad.ahead.plan import Gathered
from deepspeed_cad.attention.microbatch import PlanKey
from deepspeed_cad.config import CADConfig
from deepspeed_cad.exchange.transport import Transport
from deepspeed_cad.forecast.exchanges import Part, alternating_seconds
from deepspeed_cad.layout import Layout
from deepspeed_cad.planner import HeadShape
from deepspeed_cad.planner.constants import WAVES_IN_TURN
from deepspeed_cad.planner.finish import Routes, Trip, alternate, end_of_pass
from deepspeed_cad.planner.plan import Alternation
from deepspeed_cad.profiles.profile import Profile, ShapeCost
from deepspeed_cad.session import Session

SERVER = np.array([False, True])
SHAPE = HeadShape(8, 2, 64, 64, 2)
KEY = PlanKey(None, SHAPE)


def end_of_tick(linear: float, own: float, served: float, out: float, back: float, waves: int) -> float:
    """By the planner's model, beside a tick that is like it: when the last of a trainer and a server is done."""
    nothing = np.zeros((2, 2))
    there, home = nothing.copy(), nothing.copy()
    there[0], home[0] = [out, 0.0], [back, 0.0]
    routes = Routes(np.array([0]), np.array([1]), np.array([0]), np.full(2, float(waves)))
    trips = (Trip(x, x[:, ::-1], np.array([True])) for x in (there, home))
    turns = Alternation(SERVER, max(linear + own, served) - linear)
    done = end_of_pass(
        routes, *trips, np.array([own, served]), np.array([0.0, served]), np.array([linear, 0.0]), turns
    )  # fmt: skip
    return float(done.max())


def round_of(linear: float, own: float, served: float, out: float, back: float, waves: int, backward: bool) -> float:
    """What one more layer of two such parts takes in the simulator."""

    part = Part(*(np.full((2, 1), one) for one in (linear, own, served)), (out, out), (back, back), waves)
    return one_more_layer(part, backward)


def one_more_layer(part: Part, backward: bool) -> float:
    more, less = (alternating_seconds([part, part], layers, 0.5, backward) for layers in (41, 40))
    return more - less


@pytest.fixture
def waves_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepspeed_cad.forecast.exchanges.WAVE_SECONDS", 0.0)


@pytest.mark.usefixtures("waves_cost_nothing")
@settings(max_examples=80, deadline=None)
@given(*(st.floats(lowest, 2.0) for lowest in (0.1, 0.0, 0.1)), st.booleans(), st.sampled_from(WAVES_IN_TURN))
@pytest.mark.parametrize("trip", [(0.0, 0.0), (0.02, 0.01), (0.3, 0.2), (0.6, 0.9)])
def test_what_is_hidden_in_the_plan_is_hidden_in_the_round(
    trip: tuple[float, float], linear: float, own: float, served: float, backward: bool, waves: int
) -> None:
    """A tick that the planner takes to end with its work costs a round nothing more."""
    work = max(linear + own, served)
    found = end_of_tick(linear, own, served, *trip, waves)
    took = round_of(linear, own, served, *trip, waves, backward) / 2
    # Where both have nearly as much to do, it takes more than 40 layers until the one with more is never idle.
    either = min(linear + own, served)
    nearly = 60 * (work - either) < linear + own + served + sum(trip)
    assert took >= (either if nearly else work) - 1e-9
    if found <= work + 1e-9:
        assert took <= work + 1e-9
    # Half a round takes no longer than the planner takes the tick for.
    assert took <= found + 1e-9


def test_how_late_results_may_come() -> None:
    # Of 3 of work a server does 2 while the trainer does 1 after 1 of linear layers: the other tick ends after 2.
    assert alternate(3.0, np.array([1.0, 0.0]), np.ones(2), SERVER).later == pytest.approx(1.0)
    # Trainers that attend nothing: what linear layers take is all of the other tick, those of the slowest at least.
    only_server = np.array([0.0, 0.0, 1.0]), np.array([False, False, True])
    assert alternate(1.0, np.array([4.0, 3.0, 0.0]), *only_server).later == 0.0
    assert alternate(6.0, np.array([4.0, 3.0, 0.0]), *only_server).later == 2.0


@pytest.fixture
def session() -> Iterator[Session]:
    """Planning for a trainer and a server on links of 1 GB/s, a nanosecond per pair."""
    opened = Session(CADConfig.from_dict({"granularity": 64}), torch.device("cpu"))
    costs = (ShapeCost(SHAPE, pair=1e-9),)
    opened.plans.cost = Profile("test", "test", costs, unit="seconds", inside=1e9, between=1e9)
    opened.plans.crew = Crew(1, None, None, None, Servers(1, 1, 1))
    yield opened
    opened.close()


def _transport(two_ways: bool = True) -> Transport:
    return cast(
        Transport, SimpleNamespace(most_waves=8, two_ways=two_ways, close=lambda: None, bytes_sent=0, landing_bytes=0)
    )


@pytest.mark.parametrize(("waves", "chosen"), [("auto", 2), (1, 1), (4, 4)])
def test_plans_beside_servers_choose_waves(session: Session, waves: str | int, chosen: int) -> None:
    plans = session.plans
    plans.config = replace(plans.config, waves=waves, overlap="interleave")
    crew = plans.crew = replace(plans.crew, transport=_transport())
    gathered = Gathered(0, Layout.from_rank_lengths([[8192]]), np.array([4864]), np.array([1e-6]), None)
    for tick in crew.widen(gathered.layout).cut(np.array([4864, 0])):
        assert plans.plan_tick(gathered, crew, tick, KEY).waves == chosen
        # Without another tick nobody knows how late results may come.
        alone = replace(gathered, cut=None)
        assert plans.plan_tick(alone, crew, tick, KEY).waves == (1 if waves == "auto" else waves)
