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


@pytest.mark.parametrize(
    ("calls", "now", "seconds"),
    [([(0, 10), (2, 4), (5, 12), (13, 14)], 1e9, 0.013), ([(0, 10), (20, 30)], 15, 0.010), ([], 1e9, 0.0)],
)
def test_time_counts_once_and_when_it_is_over(
    monkeypatch: pytest.MonkeyPatch, calls: list[tuple[float, float]], now: float, seconds: float
) -> None:
    monkeypatch.setattr(Event, "now", now)
    busy = Busy()
    for first, last in calls:
        busy._expect(Event(last), partial(busy._between, Event(first), Event(last)))  # type: ignore[arg-type]
    assert busy.seconds() == busy.seconds() == pytest.approx(seconds)


def test_on_a_cpu_the_clock_counts() -> None:
    busy = Busy()
    with busy.timed(torch.device("cpu")):
        sum(range(100_000))
    assert busy.seconds() > 0
