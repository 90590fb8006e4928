"""Statistics: readers change nothing, nobody is late has a number of its own, and what rank 0 says of itself."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import training

import deepspeed_cad
from deepspeed_cad.config import CADConfig
from deepspeed_cad.notice import notice
from deepspeed_cad.session import _say_last, close_session


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    close_session()


def train(steps: int = 1) -> Any:
    model = deepspeed_cad.apply(training.tiny_llama(), {}).train()
    for step in range(steps):
        training.loss_sum(model, training.pack(training.documents([9, 30], seed=step))).backward()
    return deepspeed_cad.current_session()


def test_reading_during_a_forward_changes_nothing() -> None:
    """Plans that are made after a reader looked are counted all the same."""
    model = deepspeed_cad.apply(training.tiny_llama(), {}).train()
    session: Any = deepspeed_cad.current_session()
    seen = []
    model.model.layers[0].self_attn.register_forward_pre_hook(lambda *_: seen.append(session.statistics))
    training.loss_sum(model, training.pack(training.documents([9, 30], seed=0)))
    assert seen[0].micro_batches == 1 and seen[0].mean == 0.0  # no plan yet
    pairs = 4 * (9 * 10 / 2 + 30 * 31 / 2)  # of four head groups
    assert session.statistics.mean == session.statistics.mean == pairs
    for _ in range(20):
        training.loss_sum(model, training.pack(training.documents([9, 30], seed=0)))
    assert session.statistics.mean == session.take_statistics("test").mean == 21 * pairs


def test_nobody_is_late() -> None:
    """Rank 0 is a rank; where nobody is late there is none."""
    session = train()
    assert session.statistics.late_rank == -1 and session.statistics.as_events()["cad/late_rank"] == -1.0
    session.pace._late = np.array([1e-3])
    assert session.statistics.late_rank == 0 and session.statistics.late_s == 1e-3


def test_two_lines_of_rank_0(capfd: pytest.CaptureFixture[str]) -> None:
    """What to expect after the first forward, and the sums at the end, each once, and not through the root logger."""
    session = train(3)
    begin = capfd.readouterr().err.splitlines()
    assert [line for line in begin if "CAD is on" in line] == [
        "deepspeed_cad: CAD is on: 1 rank, nothing to exchange, kernel torch_math; attention max/mean 1.00 → 1.00 in "
        "the first micro-batch, rank 0 sent 0.0 MiB in its forward"
    ]
    assert session.report().startswith("3 micro-batches, attention max/mean 1.00 → 1.00, 0.0 MiB sent for each")
    _say_last()
    close_session()
    end = capfd.readouterr().err
    assert end.count("CAD is done: 3 micro-batches") == 1


@pytest.mark.parametrize(
    ("block", "used"),
    [({}, "local_first"), ({"servers": {"reserved": 1}}, "interleave"), ({"overlap": "pingpong"}, "pingpong")],
)
def test_the_overlap_that_is_used_is_described(block: dict[str, Any], used: str) -> None:
    deepspeed_cad.apply(training.tiny_llama(), {})
    session: Any = deepspeed_cad.current_session()
    session.config = CADConfig.from_dict(block)
    assert f", overlap {used}, tolerance" in session.describe()


def test_other_ranks_say_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    model = deepspeed_cad.apply(training.tiny_llama(), {}).train()
    session: Any = deepspeed_cad.current_session()
    session.rank = 1
    training.loss_sum(model, training.pack([torch.arange(9)]))
    close_session()
    assert "CAD is" not in capfd.readouterr().err


def test_nothing_is_said_where_nothing_was_trained(capfd: pytest.CaptureFixture[str]) -> None:
    deepspeed_cad.apply(training.tiny_llama(), {})
    close_session()
    assert "CAD is" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("level", "handler_level", "shown"),
    [(logging.INFO, logging.INFO, True), (logging.WARNING, logging.INFO, False), (logging.INFO, logging.ERROR, False)],
)
def test_a_notice_is_seen_once(level: int, handler_level: int, shown: bool, capfd: Any, monkeypatch: Any) -> None:
    """Through the logger where a handler shows it, on stderr where none does."""
    ours = logging.getLogger("deepspeed_cad")
    records: list[str] = []

    class Keeps(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    monkeypatch.setattr(ours, "handlers", [logging.NullHandler(), Keeps(handler_level)])
    monkeypatch.setattr(ours, "propagate", False)
    monkeypatch.setattr(ours, "level", level)
    ours.manager._clear_cache()  # type: ignore[attr-defined]
    notice("100 % of it")
    ours.manager._clear_cache()  # type: ignore[attr-defined]
    assert records == (["100 % of it"] if shown else [])
    assert capfd.readouterr().err == ("" if shown else "deepspeed_cad: 100 % of it\n")
