"""What a server counts as attended: time in which calls of both nano-batches run counts once."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from deepspeed_cad.exchange.waits import Busy


class Event:
    """One of a GPU, at a moment in milliseconds; it is over once `now` has come."""

    now = 1e9

    def __init__(self, at: float) -> None:
        self.at = at

    def query(self) -> bool:
        return self.at <= Event.now

    def elapsed_time(self, later: Event) -> float:
        return later.at - self.at


def run(calls: list[tuple[float, float]]) -> Busy:
    busy = Busy()
    for first, last in calls:
        busy._expect(Event(last), partial(busy._between, Event(first), Event(last)))  # type: ignore[arg-type]
    return busy


@pytest.mark.parametrize(
    ("calls", "seconds"),
    [
        ([(0, 10), (5, 12)], 0.012),
        ([(0, 10), (2, 4), (12, 13)], 0.011),
        ([], 0.0),
    ],
)
def test_time_counts_once(calls: list[tuple[float, float]], seconds: float) -> None:
    busy = run(calls)
    assert busy.seconds() == busy.seconds() == pytest.approx(seconds)


def test_what_still_runs_is_counted_later(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = run([(0, 10), (20, 30)])
    monkeypatch.setattr(Event, "now", 15)
    assert busy.seconds() == pytest.approx(0.010)
    monkeypatch.setattr(Event, "now", 40)
    assert busy.seconds() == pytest.approx(0.020)


def test_on_a_cpu_the_clock_counts() -> None:
    busy = Busy()
    with busy.timed(torch.device("cpu")):
        sum(range(100_000))
    assert busy.seconds() > 0
