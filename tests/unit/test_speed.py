"""Speeds of ranks: what is measured, what it is relative to, and when it is left out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from deepspeed_cad.profiles import speed
from deepspeed_cad.profiles.profile import PAIRS, Profile, ShapeCost
from deepspeed_cad.profiles.speed import TOKENS, call_shape, find_speeds, in_words

CPU = torch.device("cpu")
PER_PAIR = 1e-9
SECONDS = Profile("test", "test", (ShapeCost(call_shape(CPU), pair=PER_PAIR),), unit="seconds")
EXPECTED = PER_PAIR * TOKENS["cpu"] * (TOKENS["cpu"] + 1) / 2


def _find(wanted: Any, took: list[float], cost: Profile | None = PAIRS, deterministic: list[bool] | None = None) -> Any:
    """What rank 0 finds where ranks take so many seconds."""
    answers = iter([[int(one) for one in deterministic or [False] * len(took)], [round(one * 1e9) for one in took]])
    return find_speeds(wanted, CPU, "torch_math", lambda mine: next(answers), False, cost)


@pytest.mark.parametrize(
    ("cost", "expected"),
    [
        (PAIRS, [1.0, 0.5, 2.0]),  # beside rank 0
        (None, [1.0, 0.5, 2.0]),
        (SECONDS, [0.5, 0.25, 1.0]),  # beside what the costs say: rank 0 is slow itself
    ],
)
def test_what_speeds_are_relative_to(cost: Profile | None, expected: list[float]) -> None:
    found = _find("measure", [2 * EXPECTED, 4 * EXPECTED, EXPECTED], cost)
    assert found == pytest.approx(np.array(expected), rel=1e-4)


def test_in_words() -> None:
    assert in_words(np.array([1.0, 0.25])) == "speeds 1 0.25, "


def test_nothing_is_measured_where_any_rank_is_deterministic(caplog: pytest.LogCaptureFixture) -> None:
    assert _find("measure", [1.0, 2.0], deterministic=[False, True]) is None
    assert '"speeds" is "measure" and does nothing' in caplog.text


def test_a_rank_that_cannot_time_its_kernel_leaves_all_equal(caplog: pytest.LogCaptureFixture) -> None:
    assert _find("measure", [1.0, 0.0, 1.0]) is None
    assert "did not run at the start on ranks 1" in caplog.text
    told: list[int] = []

    def gather(mine: int) -> list[int]:
        told.append(mine)
        return [mine]

    assert find_speeds("measure", CPU, "flash_attn_4", gather, False) is None
    assert told == [0, speed.FAILED]
