"""Waiting for what other ranks do: until it is there, time is up, or a look around says that it is in vain."""

from __future__ import annotations

import math

import pytest

from deepspeed_cad.exchange.failure import patience
from deepspeed_cad.exchange.failure.patience import LATE_S, LOOK_S, wait_until


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses take no time; its last element is now."""
    ticks = [0.0]
    monkeypatch.setattr(patience.time, "monotonic", lambda: ticks[-1])
    monkeypatch.setattr(patience.time, "sleep", lambda seconds: ticks.append(ticks[-1] + seconds))
    return ticks


@pytest.mark.parametrize(("there_s", "longest_pause_s"), [(0.0, 0.25), (1e-4, 0.25), (60.0, 0.25), (0.1, 1e-3)])
def test_nobody_waits_much_longer_than_is_needed(clock: list[float], there_s: float, longest_pause_s: float) -> None:
    assert wait_until(lambda: clock[-1] >= there_s, math.inf, longest_pause_s=longest_pause_s)
    assert clock[-1] - there_s <= min(max(there_s / 8, 20e-6), longest_pause_s) + 1e-9


@pytest.mark.parametrize("timeout_s", [0.0, 1.0])
def test_time_is_up_and_it_was_asked_again(clock: list[float], timeout_s: float) -> None:
    assert wait_until(lambda: "", timeout_s) == "" and timeout_s <= clock[-1] <= timeout_s + 0.25


def test_it_looks_around_now_and_then_and_says_once_that_it_is_late(clock: list[float]) -> None:
    looked, late = [0.0], []

    def look_around() -> None:
        looked.append(clock[-1])
        if clock[-1] > 2 * LATE_S:
            raise LookupError

    with pytest.raises(LookupError):
        wait_until(lambda: False, math.inf, look_around, when_late=late.append)
    assert all(LOOK_S <= after - before < 2 * LOOK_S for before, after in zip(looked, looked[1:]))
    assert len(late) == 1 and LATE_S < late[0] < LATE_S + 0.3
