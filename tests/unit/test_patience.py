"""Waiting for what other ranks do: until it is there, time is up, or a look around says that it is in vain."""

from __future__ import annotations

import math

import pytest

from deepspeed_cad.exchange.failure import patience
from deepspeed_cad.exchange.failure.patience import wait_until


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses take no time; its last element is now."""
    ticks = [0.0]
    monkeypatch.setattr(patience.time, "monotonic", lambda: ticks[-1])
    monkeypatch.setattr(patience.time, "sleep", lambda seconds: ticks.append(ticks[-1] + seconds))
    return ticks


def test_what_is_there_is_given_at_once(clock: list[float]) -> None:
    assert wait_until(lambda: "here", 0.0, 1.0) == "here" and clock == [0.0]


def test_it_is_asked_until_it_is_there(clock: list[float]) -> None:
    assert wait_until(lambda: len(clock) if clock[-1] >= 3 else 0, math.inf, 0.25) == 13


@pytest.mark.parametrize("timeout_s", [0.0, 1.0])
def test_time_is_up_and_it_was_asked_again(clock: list[float], timeout_s: float) -> None:
    assert wait_until(lambda: "", timeout_s, 0.25) == "" and timeout_s <= clock[-1] <= timeout_s + 0.25


def test_it_looks_around_now_and_then(clock: list[float]) -> None:
    looked: list[float] = []

    def look_around() -> None:
        looked.append(clock[-1])
        if clock[-1] > 2:
            raise LookupError

    with pytest.raises(LookupError):
        wait_until(lambda: False, math.inf, 0.25, look_around)
    assert looked == [0.75, 1.5, 2.25]
