"""Links: how they are timed at the start, and that all ranks know the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from pool import WorkerPool

from deepspeed_cad import session as sessions
from deepspeed_cad.config import CADConfig
from deepspeed_cad.exchange import links, probe
from deepspeed_cad.exchange.links import ROW_BYTES, Links, busiest_rows, measure_links, slowest_speed
from deepspeed_cad.session import Session

CPU = torch.device("cpu")


def test_rows_of_the_busier_direction() -> None:
    """Two ranks here, one there: it receives from both, and sends each a half."""
    assert busiest_rows([[2], [2], [0, 1]], 8).tolist() == [8, 8, 16]
    assert busiest_rows([[1], [0], []], 8).tolist() == [8, 8, 0]


def test_the_slowest_rank_counts_and_ranks_without_peers_do_not() -> None:
    """Rank 0 is slowest: 8 rows in a median of 4 s."""
    seconds = np.array([[4.0, 3.0, 9.0], [4.0, 3.0, 9.0], [90.0, 3.0, 9.0]])
    assert slowest_speed(np.array([8.0, 16.0, 0.0]), seconds * 1e9) == pytest.approx(8 * ROW_BYTES / 4.0)


class Clock:
    """A transport whose exchanges take a time of their size, on a clock of its own."""

    name = "clock"

    def __init__(self, bytes_per_s: float, latency_s: float) -> None:
        self.now, self.speed, self.latency, self.sizes = 0.0, bytes_per_s, latency_s, []
        self.bytes_sent = 77

    def dispatch(self, schedule: Any, fields: Any, nano_batch: int) -> Any:
        size = sum(one.home.numel() * one.home.element_size() for one in fields)
        self.sizes.append(size)
        self.bytes_sent += size
        self.now += self.latency + size / self.speed
        return SimpleNamespace(wait=lambda: None)


@pytest.mark.parametrize("gigabytes", [1e-4, 0.0125, 0.5, 20.0])
def test_exchanges_grow_until_they_last_and_stay_in_time(gigabytes: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(gigabytes * 1e9, 1e-5)
    monkeypatch.setattr(links.time, "perf_counter", lambda: clock.now)
    found = measure_links(clock, CPU, 0, [1, 2], lambda value: [value, value])  # type: ignore[arg-type]
    assert len(clock.sizes) % 2 == 0  # buffers that are taken in turn are as they were
    assert found.inside is None and found.between == pytest.approx(gigabytes * 1e9, rel=0.2)
    assert clock.bytes_sent == 77, "statistics speak of training"
    assert clock.now < 1.5
    assert max(clock.sizes) <= links.MOST_ROWS["cpu"] * ROW_BYTES


def links_of_two_nodes(rank: int, world: int) -> tuple[Links, Links]:
    transport = probe.choose_transport("c10d", dist.group.WORLD, CPU)

    def gather(value: int) -> list[int]:
        found = [0] * world
        dist.all_gather_object(found, value)
        return found

    pairs = measure_links(transport, CPU, rank, [7, 7, 9], gather)
    lone = measure_links(transport, CPU, rank, [7, 8, 9], gather)
    transport.close()
    return pairs, lone


def test_both_kinds_are_measured_and_all_ranks_say_the_same(workers: WorkerPool) -> None:
    found = workers.run(links_of_two_nodes, 3)
    assert found[0] == found[1] == found[2]
    pairs, lone = found[0]
    assert pairs.inside and pairs.between and lone.inside is None and lone.between


def what_sessions_say(rank: int, world: int) -> list[str]:
    """Measured; given; deterministic on one rank only, with a profile that knows a link."""
    said = []
    profile = sessions.share_cost
    for number, block in enumerate(({}, {"links": {"inside": 300, "between": 25}}, {}, {})):
        torch.use_deterministic_algorithms(number == 2 and rank == 1)
        if number == 3:
            sessions.share_cost = lambda *given: profile(*given).with_links(7e9, None)  # type: ignore[assignment]
        torch.use_deterministic_algorithms(number >= 2 and rank == 1)
        try:
            session = Session(CADConfig.from_dict(block), CPU)
            now = session.learned.links.now if session.learned.links else None
            said.append(f"{session.describe()} | {now}")
            session.close()
        finally:
            torch.use_deterministic_algorithms(False)
            sessions.share_cost = profile
    return said


def test_a_session_says_its_links_and_where_they_come_from(workers: WorkerPool) -> None:
    first, second = workers.run(what_sessions_say, 2)
    assert [line.split(", links")[1] for line in first] == [line.split(", links")[1] for line in second]
    measured, given, deterministic, profiled = first
    assert "links inside a host" in measured and "GB/s (measured)" in measured
    assert "links inside a host 300 GB/s, between hosts 25 GB/s (given)" in given
    assert f"links {sessions.DETERMINISTIC}" in deterministic and "inside=None, between=None" in deterministic
    assert "links inside a host 7 GB/s" in profiled and "of the profile pairs" in profiled
