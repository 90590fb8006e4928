"""What a user is told where servers or trainers are idle, and when."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from deepspeed_cad import words as lines
from deepspeed_cad.config import CADConfig
from deepspeed_cad.server.idle import EVERY, advise
from deepspeed_cad.session import Session


@pytest.mark.parametrize(
    ("servers_idle", "trainers_idle", "servers", "trainers", "words"),
    [
        (0.14, 0.14, 2, 2, ""),
        (0.3, 0.0, 2, 2, "reserve fewer of them, 1 servers"),
        (0.3, 0.0, 1, 3, 'none ("servers": "all")'),
        (0.0, 0.3, 2, 2, "reserve more servers, 3"),
        (0.0, 0.3, 1, 1, "Add servers, or train in place"),
        (0.3, 0.3, 2, 2, "wait for each other"),
    ],
)
def test_which_way_to_change(
    servers_idle: float, trainers_idle: float, servers: int, trainers: int, words: str
) -> None:
    found = advise(servers_idle, trainers_idle, servers, trainers)
    assert words in found and bool(found) == bool(words)


@pytest.fixture
def session() -> Iterator[Session]:
    opened = Session(CADConfig(), torch.device("cpu"))
    yield opened
    opened.reserved = None
    opened.close()


def test_it_is_said_once_and_not_of_the_first_micro_batches(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(lines, "notice", said.append)
    times = [0.0, 0.0]
    session.reserved = SimpleNamespace(  # type: ignore[assignment]
        link=SimpleNamespace(busy=lambda: tuple(times), leave=lambda reason: None),
        role=SimpleNamespace(servers=2, trainers=2, ranks=4),
        changes=None,
    )
    micro_batch = SimpleNamespace(planned={})

    def train(busy: float, total: float) -> None:
        for _ in range(EVERY):
            session.count(micro_batch)  # type: ignore[arg-type]
        times[0], times[1] = times[0] + busy, times[1] + total

    train(0.0, 10.0)  # warming up: idle all the time
    train(9.5, 10.0)
    train(7.0, 10.0)
    assert said == []
    train(7.0, 10.0)
    train(7.0, 10.0)
    assert len(said) == 1 and "servers were idle for 30%" in said[0] and "reserve fewer of them, 1 servers" in said[0]
