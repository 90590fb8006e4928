"""Speeds of links that are corrected while training, equally on all ranks."""

from __future__ import annotations

import numpy as np
import pytest

from deepspeed_cad.exchange.links import Links
from deepspeed_cad.exchange.waits import BETWEEN, INSIDE, LEAST_S, Size, Transfers
from deepspeed_cad.feedback.link_speeds import ENOUGH, FASTER, GAIN, LinkSpeeds

START, RULE = Links(1e11, 1e10), Links(4e11, None, "of the profile")


def link_speeds(ranks: int = 2, paused: bool = False) -> LinkSpeeds:
    return LinkSpeeds(START, RULE, None, [f"host-{rank}" for rank in range(ranks)], lambda: paused)


def reports(nanoseconds: list[int], size: list[int], inside: int = 0, paused: int = 0) -> np.ndarray:
    """[ranks, columns]: of transfers between hosts; `inside`: a nanosecond for so many on every rank."""
    return np.array([[paused, inside, 0, *each] for each in zip(nanoseconds, size)], np.int64)


# Transfers


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
    class Event:
        over = False

        def query(self) -> bool:
            return self.over

        def elapsed_time(self, other: object) -> float:
            return 3.0

    found, first, last = Transfers(0, [5, 6], 1e9, 1e6), Event(), Event()
    found.note(Size(BETWEEN, 1000), 0.25)
    found.expect(first, last, Size(INSIDE, 50))  # type: ignore[arg-type]
    assert found.take().tolist() == [0, 0, 250_000_000, 1000]
    last.over = True
    assert found.take().tolist() == [3_000_000, 50, 0, 0] and not found.take().any()


# Corrections


def test_speeds_are_corrected_slowly_and_bounded() -> None:
    speeds = link_speeds()
    slow = reports([10**9, 3 * 10**9], [10**9, 10**9])  # 2 GB in 4 s: 0.5 GB/s instead of 10
    for _ in range(ENOUGH - 1):
        speeds.hear(0, slow)
    assert speeds.links == START and speeds.now.between == 1e10
    speeds.hear(0, slow)
    assert speeds.now.between == pytest.approx(1e10 ** (1 - GAIN) * 5e8**GAIN) and speeds.now.inside == 1e11
    assert speeds.links.source == "measured, corrected"
    for _ in range(40 * ENOUGH):
        speeds.hear(0, slow)
    assert speeds.now.between == pytest.approx(5e8, rel=1e-3)
    for _ in range(40 * ENOUGH):
        speeds.hear(0, reports([10**6, 10**6], [10**9, 10**9], inside=1))
    assert speeds.now.between == FASTER * 1e10 and speeds.now.inside == 1e11


def test_paused_ranks_use_the_rule() -> None:
    speeds = link_speeds()
    speeds.hear(0, reports([0, 0], [0, 0], paused=1))
    assert speeds.now == (4e11, None) and speeds.links is RULE
    speeds.hear(0, reports([0, 0], [0, 0]))
    assert speeds.now == (1e11, 1e10)
    assert link_speeds(paused=True).report(0)[0] == 1


@pytest.mark.parametrize(
    ("nanoseconds", "size", "named"),
    [
        ([[10**9, 0, 2 * 10**9]], [10**9, 0, 10**7], "rank 2 on host-2 (0.005 GB/s)"),
        ([[10**8, 5 * 10**9], *[[10**8, 10**8]] * (ENOUGH - 1)], [10**9, 10**9], ""),  # one late packet
    ],
)
def test_a_broken_link_is_named_once(nanoseconds: list[list[int]], size: list[int], named: str) -> None:
    speeds = link_speeds(len(size))
    for each in nanoseconds * (3 * ENOUGH // len(nanoseconds)):
        speeds.hear(0, reports(each, size))
    text = speeds.take_warning()
    assert named in text and bool(named) == ("the link between hosts is more than" in text) and "rank 0" not in text
    assert not speeds.take_warning(), "a user is told once"
