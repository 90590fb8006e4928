"""Links: how they are timed at the start, and that all ranks know the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import WorkerPool

from deepspeed_cad.exchange import links, probe
from deepspeed_cad.exchange.links import Links, measure_links

CPU = torch.device("cpu")


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
    assert max(clock.sizes) <= 1 << 23


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


@pytest.mark.parametrize(
    ("given", "deterministic", "expected"),
    [
        ({"inside": 300, "between": 25}, [0, 0], Links(3e11, 2.5e10, "given")),
        (None, [0, 1], Links(None, None, probe.DETERMINISTIC)),  # on one rank only
        (None, [0, 0], Links(5e9, None)),
    ],
)
def test_links_are_given_measured_or_not_asked_for(
    given: Any, deterministic: list[int], expected: Links, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "measure_links", lambda *given: Links(5e9, None))
    opened = probe.Opened(SimpleNamespace(rank=0), None, [1, 1])  # type: ignore[arg-type]
    monkeypatch.setattr(probe, "rank_of", lambda group: group.rank)
    assert probe.with_links(opened, CPU, lambda value: deterministic, given).links == expected


def test_links_in_words() -> None:
    assert str(Links(3e11, 2.5e10, "given")) == "links inside a host 300 GB/s, between hosts 25 GB/s (given)"
    assert str(Links(None, None, probe.DETERMINISTIC)) == f"links {probe.DETERMINISTIC}"
