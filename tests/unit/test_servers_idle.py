"""What a server counts as attended, and what a user is told where servers or trainers are idle, and when."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from deepspeed_cad import session as sessions
from deepspeed_cad.cli.trace import say_idle
from deepspeed_cad.config import CADConfig
from deepspeed_cad.exchange.waits import Busy, Waits
from deepspeed_cad.layout import Layout
from deepspeed_cad.report.session_lines import EVERY, advise
from deepspeed_cad.session import Session
from deepspeed_cad.trace import COMPUTE, STEP, Span, covered, find_idle, to_events


@pytest.mark.parametrize("idle, servers, trainers, words", [
    ([0.14, 0.14], 2, 2, ""), ([0.3, 0.0], 2, 2, "reserve fewer of them, 1 servers"),
    ([0.3, 0.0], 1, 3, 'none ("servers": "all")'), ([0.0, 0.3], 2, 2, "reserve more servers, 3"),
    ([0.0, 0.3], 1, 1, "Add servers, or train in place"), ([0.3, 0.3], 2, 2, "wait for each other"),
])  # fmt: skip
def test_which_way_to_change(idle: list[float], servers: int, trainers: int, words: str) -> None:
    """`idle`: shares of servers and of trainers."""
    found = advise(*idle, servers, trainers)
    assert words in found and bool(found) == bool(words)


@pytest.mark.parametrize("busy, waits, words", [
    (7.0, 0.7, ["servers were idle for 30% and trainer 0 for 14%", "reserve fewer of them, 1 servers"]),
    (9.5, 1.5, ["servers were idle for 5% and trainer 0 for 30%", "Add servers, or train in place"]),
])  # fmt: skip
def test_idle_ranks_are_told_once_and_not_at_first(busy: float, waits: float, words: Any, monkeypatch: Any) -> None:
    said: list[str] = []
    monkeypatch.setattr(sessions, "notice", said.append)
    times = [0.0, 0.0, 0.0]
    session = Session(CADConfig(), torch.device("cpu"))
    monkeypatch.setattr(session.servers, "at_start", 2)
    monkeypatch.setattr(session.servers, "busy", lambda: tuple(times[:2]))
    monkeypatch.setattr(session.counts, "waits", SimpleNamespace(seconds=lambda: times[2]))
    micro_batch = SimpleNamespace(planned={}, loaded=np.ones(2), layout=Layout.from_rank_lengths([[1], [1]]))

    def train(*spent: float) -> None:
        for _ in range(EVERY):
            session.count(micro_batch)  # type: ignore[arg-type]
        times[:] = np.add(times, spent)

    train(0.0, 10.0, 9.0)  # warming up: idle all the time
    train(9.5, 10.0, 0.2)
    train(busy, 10.0, waits)
    assert said == []
    train(busy, 10.0, waits)
    train(busy, 10.0, waits)
    session.close()
    assert len(said) == 1 and all(one in said[0] for one in words)


def _timeline(*, serves: bool = True) -> dict:
    """10 s of two micro-batches: trainer 0 waits 1 + 1 s, trainer 1 never, server 2 attends 6.5 s."""
    steps = [Span(STEP, "micro-batch 2", None, False, 1.0, 6.0), Span(STEP, "micro-batch 3", None, False, 6.0, 11.0)]
    waits = [Span(COMPUTE, "wait", 0, False, 2.0, 3.0), Span(COMPUTE, "return", 1, True, 7.0, 8.0)]
    events = to_events(0, steps + waits) + to_events(1, [*steps, Span(COMPUTE, "local", 0, False, 2.0, 9.0)])
    if serves:
        served = [(0, 2.0, 4.0), (1, 3.0, 5.0), (0, 6.0, 9.5)]
        spans = [Span(f"serving {'AB'[part]}", "served", part, False, begin, end) for part, begin, end in served]
        # It hears of micro-batches early, and its waits are no work.
        early = [Span(STEP, "micro-batch 2", None, False, 0.0, 11.0), Span("serving A", "wait", 0, False, 9.5, 11.0)]
        events += to_events(2, [*early, *spans], serves=True)
    return {"traceEvents": events}


def test_idle_in_a_timeline() -> None:
    trainers, servers = find_idle(_timeline())
    assert trainers == pytest.approx({0: 0.2, 1: 0.0}) and servers == pytest.approx({2: 0.35})
    assert find_idle({"traceEvents": []}) == ({}, {})
    longer = to_events(2, [Span("serving A", "served", 0, False, 0.0, 12.0)], serves=True)
    assert find_idle({"traceEvents": _timeline(serves=False)["traceEvents"] + longer})[1] == {2: 0.0}
    assert covered([(3.0, 4.0), (0.0, 2.0), (1.0, 1.5)]) == 3.0


def test_who_is_idle_in_words() -> None:
    first, second = say_idle(*find_idle(_timeline()))
    assert first == "idle: trainer 0 20%, trainer 1 0%, server 2 35%"
    assert "servers were idle for 35% and trainers waited for 10% of these micro-batches" in second
    assert 'none ("servers": "all")' in second
    assert say_idle(*find_idle(_timeline(serves=False))) == ["idle: rank 0 20%, rank 1 0%"]


class Event:
    """One of a GPU, at a moment in milliseconds; it is over once `now` has come."""

    now, record = 1e9, Mock()

    def __init__(self, at: float) -> None:
        self.at, self.query, self.elapsed_time = at, lambda: at <= Event.now, lambda later: later.at - at


@pytest.mark.parametrize("kind, calls, now, seconds", [
    (Busy, [(0, 10), (2, 4), (5, 12), (13, 14)], 1e9, 0.013), (Busy, [(0, 10), (20, 30)], 15, 0.010),
    (Busy, [], 1e9, 0.0), (Waits, [(0, 10), (12, 14)], 1e9, 0.012),
])  # fmt: skip
def test_time_counts_once_and_when_it_is_over(kind: Any, calls: Any, now: Any, seconds: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(Event, "now", now)
    moments = iter([at for call in calls for at in call])
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: Event(next(moments) if enable_timing else math.nan))
    busy = kind()
    for _ in calls:
        with busy.timed(torch.device("cuda", 0)):
            pass
    assert busy.seconds() == busy.seconds() == pytest.approx(seconds)


def test_a_rank_is_idle_where_neither_of_its_streams_has_work() -> None:
    """Own tasks end at 10 ms and served ones at 12; results are back at 15. Waves come at 9, 11 and 14, of which the
    last is waited for from 13 on."""
    waits, waves = Waits(), [(Event(2), Event(9)), (None, Event(11)), (Event(13), Event(14))]
    waits.beside(Event(10), waves, Event(12), Event(15))  # type: ignore[arg-type]
    assert waits.seconds() == pytest.approx(0.003 + 0.001 + 0.001)
    for _ in range(5000):
        waits._expect(Event(0), float)  # type: ignore[arg-type]
    assert len(waits._open) < 5000, "where nobody reads them, memory does not grow"
