"""Links: how they are timed at the start, that all ranks know the same, and how they are corrected while training."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from deepspeed_cad.exchange import links, probe
from deepspeed_cad.exchange.links import Links, measure_links, peer_schedule
from deepspeed_cad.exchange.waits import BETWEEN, INSIDE, LEAST_S, Size, Transfers
from deepspeed_cad.feedback.link_speeds import ENOUGH, FASTER, SLOWER, LinkSpeeds
from deepspeed_cad.schedule import QUERY, SERVER

CPU = torch.device("cpu")
ROW = 2 * (4096 + 1024 + 1024)
"""Bytes of Q, K and V."""


class Clock:
    """A transport whose exchanges take a time of their size, and every third one longer, on a clock of its own."""

    def __init__(self, bytes_per_s: float, late_s: float) -> None:
        self.now, self.speed, self.late, self.sizes = 0.0, bytes_per_s, late_s, list[int]()
        self.bytes_sent, self.told = 77, list[int]()

    def dispatch(self, schedule: Any, fields: Any, nano_batch: int) -> Any:
        self.devices = {one.home.device.type for one in fields}
        size = sum(one.home.numel() * one.home.element_size() for one in fields)
        self.sizes.append(size)
        self.bytes_sent += size
        self.now += 1e-5 + size / self.speed + (0.0 if len(self.sizes) % 3 else self.late)
        return SimpleNamespace(wait=lambda: None)

    def of_all(self, value: int) -> list[int]:
        """Another rank moves as many bytes, which are told last, in twice the time; a third one none."""
        self.told.append(value)
        is_size = value and value % self.sizes[-1] == 0
        return [value, value, 0] if is_size else [value, 2 * value, 2 * value]


THREE = [1, 8, 8, 8, 80, 80, 80, 800, 800, 800]


@pytest.mark.parametrize("device, gigabytes, hosts, rows", [
    ("cpu", 1e-4, [1, 2], [1, 8]),  # the first one takes a second, and two there
    ("cpu", 0.0093, [1, 2], [1, 8, 8, 8]),  # ten times as much would take just too long
    ("cpu", 0.0096, [1, 2], [1, 8, 8, 8, 80, 80, 80, 80]),  # what is first may be a burst, however long it lasts
    ("cpu", 0.25, [1, 2], THREE),
    ("cpu", 0.25, [2, 2], [1, 8, 8, 8, 80, 80, 80, 80]),  # inside a host no exchange need last as long
    ("cpu", 20.0, [1, 2], THREE),
    ("cpu", 20.0, [2, 2, 1], THREE * 2),
    # As on a GPU; 800 rows take 1 ms on the other rank, so two of ten times as many 20 ms.
    ("meta", 20.0, [1, 2], [1, 8, 8, 8, *[80] * 48, *[800] * 48, *[8000] * 4]),
])  # fmt: skip
def test_exchanges_grow_until_they_last_and_stay_in_time(
    device: str, gigabytes: float, hosts: list[int], rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is late does not count. They are an even number: buffers that are taken in turn are as they were."""
    clock = Clock(gigabytes * 1e9, 2e-3 if device == "cpu" else 0.0)
    monkeypatch.setattr(links.time, "perf_counter", lambda: clock.now)
    monkeypatch.setitem(links.IN_ONE_GO, "meta", 16)
    monkeypatch.setitem(links.MOST_ROWS, "meta", 8000)
    found = measure_links(clock, torch.device(device), 0, hosts, clock.of_all)  # type: ignore[arg-type]
    assert [size / ROW for size in clock.sizes] == rows and clock.told[:4:2] == [0, 0], "all ranks begin together"
    assert clock.devices == {device}
    speeds = [speed for speed in (found.inside, found.between) if speed is not None]
    assert speeds == pytest.approx([gigabytes * 1e9 / 2] * (len(hosts) - 1), rel=0.1), "those of the slowest rank"
    assert (found.inside is None) == (hosts[0] == 1) and clock.bytes_sent == 77, "statistics speak of training"


def test_each_rank_has_a_document_for_each_of_its_peers() -> None:
    for rank, (sent, tokens) in enumerate([([0, 4, 4], 8), ([9, 0, 0], 9), ([0, 0, 0], 9)]):
        schedule = peer_schedule([[1, 2], [0], []], rank, 1, 9)
        assert schedule.rows_by_peer(schedule.sends, SERVER, QUERY).tolist() == sent
        assert schedule.query_tokens == tokens
    assert peer_schedule([[1, 2], [], []], 0, 1, 1).query_tokens == 2, "at least a token"


@pytest.mark.parametrize("given, deterministic, expected", [
    ({"inside": 300, "between": 25}, [0, 0], Links(3e11, 2.5e10, "given")),
    (None, [0, 1], Links(None, None, probe.DETERMINISTIC)),  # on one rank only
    (None, [0, 0], Links(5e9, None)),
])  # fmt: skip
def test_links_are_given_measured_or_unknown(given: Any, deterministic: Any, expected: Links, monkeypatch: Any) -> None:
    measure, agree = mock.Mock(return_value=Links(5e9, None)), lambda value: deterministic
    monkeypatch.setattr(probe, "measure_links", measure)
    opened = probe.Opened(SimpleNamespace(rank=0), "transport", [1, 1])  # type: ignore[arg-type]
    monkeypatch.setattr(probe, "rank_of", lambda group: group.rank)
    assert probe.with_links(opened, CPU, agree, given).links == expected
    asked = [] if given or any(deterministic) else [mock.call("transport", CPU, 0, [1, 1], agree)]
    assert measure.mock_calls == asked
    assert str(Links(3e11, 2.5e10, "given")) == "links inside a host 300 GB/s, between hosts 25 GB/s (given)"
    assert str(Links(None, None, probe.DETERMINISTIC)) == f"links {probe.DETERMINISTIC}"


START, RULE = Links(1e11, 1e10), Links(4e11, None, "of the profile")


def link_speeds(ranks: int = 2, paused: bool = False) -> LinkSpeeds:
    return LinkSpeeds(START, RULE, None, [f"rank {rank} on host-{rank}" for rank in range(ranks)], lambda: paused)


def reports(nanoseconds: list[int], size: list[int], inside: int = 0, paused: int = 0) -> np.ndarray:
    """[ranks, columns]: of transfers between hosts; `inside`: a nanosecond for so many on every rank."""
    return np.array([[paused, inside, 0, *each] for each in zip(nanoseconds, size)], np.int64)


def test_a_transfer_is_of_the_kind_that_is_slow() -> None:
    found = Transfers(1, [5, 5, 6], 1e9, 1e6)
    assert found.size([4e6, 0, 600], [0, 0, 500]) == Size(BETWEEN, 600), "what stays inside is over before"
    assert found.size([4e6, 0, 0], [5e6, 0, 0]) == Size(INSIDE, 5_000_000)
    assert found.size([0, 0, LEAST_S * 1e6 - 1], [0, 0, 0]) is None, "too small to tell of the link"
    assert found.size([LEAST_S * 1e9 - 1, 0, 0], [0, 0, 0]) is None
    assert Transfers(0, [5, 6], None, None).size([0, 1 << 40], [0, 0]) is None
    messages = np.array([[1, 2, 0, 700], [0, 2, 0, 900], [1, 0, 0, 10_000_000]], np.int64)
    assert found.size_of_messages(messages) == Size(BETWEEN, 900)


def test_transfers_are_summed_until_taken() -> None:
    found = Transfers(0, [5, 6], 1e9, 1e6)
    first, last = (mock.Mock(**{"query.return_value": False, "elapsed_time.return_value": 3.0}) for _ in range(2))
    found.note(Size(BETWEEN, 1000), 0.25)
    found.expect(first, last, Size(INSIDE, 50))
    assert found.take().tolist() == [0, 0, 250_000_000, 1000]
    last.query.return_value = True
    assert found.take().tolist() == [3_000_000, 50, 0, 0] and not found.take().any()


def test_speeds_are_corrected_slowly_and_bounded() -> None:
    speeds = link_speeds()
    slow = reports([10**9, 3 * 10**9], [10**9, 10**9])  # 2 GB in 4 s: 0.5 GB/s instead of 10
    for _ in range(ENOUGH - 1):
        speeds.hear(0, slow)
    assert speeds.links == START and speeds.now.between == 1e10
    speeds.hear(0, slow)
    assert speeds.now.between == pytest.approx(1e10**0.75 * 5e8**0.25) and speeds.now.inside == 1e11
    assert speeds.links.source == "measured, corrected"
    for _ in range(40 * ENOUGH):
        speeds.hear(0, slow)
    assert speeds.now.between == pytest.approx(5e8, rel=1e-3)
    for _ in range(40 * ENOUGH):
        speeds.hear(0, reports([10**6, 10**6], [10**9, 10**9], inside=1))
    assert speeds.now.between == FASTER * 1e10 and speeds.now.inside == 1e11
    for heard in range(40 * ENOUGH):
        assert (speeds.now.inside == 1e11) == (heard < ENOUGH)
        speeds.hear(0, np.array([[0, 2 * 10**9, 10**9, 10**9, 1]] * 2))
    assert speeds.now.between == SLOWER * 1e10 and speeds.now.inside == pytest.approx(5e8, rel=1e-3)


def test_paused_ranks_use_the_rule() -> None:
    speeds = link_speeds()
    assert speeds.links == START and speeds.now == (1e11, 1e10), "nobody has said anything yet"
    assert speeds.report(0).tolist() == [0] * 5 and speeds.columns == 5 == reports([0], [0]).shape[1]
    speeds.watch(mock.Mock(**{"take.return_value": [1, 2, 3, 4]}))
    assert speeds.report(0).tolist() == [0, 1, 2, 3, 4]
    speeds.hear(0, reports([0, 0], [0, 0], paused=1))
    assert speeds.now == (4e11, None) and speeds.links is RULE
    speeds.hear(0, reports([0, 0], [0, 0]))
    assert speeds.now == (1e11, 1e10) and link_speeds(paused=True).report(0)[0] == 1


@pytest.mark.parametrize("nanoseconds, size, named", [
    ([[10**9, 0, 2 * 10**9]], [10**9, 0, 10**7], "at start, for rank 2 on host-2 (0.005 GB/s): plans"),
    ([[10**8, 5 * 10**9], *[[10**8, 10**8]] * (ENOUGH - 1)], [10**9, 10**9], ""),  # one late packet
    ([[10**7, 10**7]], [4 * 10**6] * 2, ""),  # little in hardly any time
])  # fmt: skip
def test_a_broken_link_is_named_once(nanoseconds: list[list[int]], size: list[int], named: str) -> None:
    speeds = link_speeds(len(size))
    for each in nanoseconds * (3 * ENOUGH // len(nanoseconds)):
        speeds.hear(0, reports(each, size))
    text = speeds.warning
    assert named in text and bool(named) == ("the link between hosts is more than" in text)
