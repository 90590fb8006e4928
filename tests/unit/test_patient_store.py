"""A store that does not answer: whoever asks goes on in time, and so does the error board."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist

from deepspeed_cad.exchange.failure.board import Liveness
from deepspeed_cad.exchange.failure.store import PatientStore, SilentStoreError


class Lost:
    """A store behind a link that can die, and come back."""

    def __init__(self) -> None:
        self.inner, self.alive = dist.HashStore(), threading.Event()
        self.alive.set()

    def __getattr__(self, name: str) -> object:
        def ask(*given: object) -> object:
            self.alive.wait()
            return getattr(self.inner, name)(*given)

        return ask


def test_errors_are_the_stores_own() -> None:
    class Gone:
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("connection closed")

    with pytest.raises(RuntimeError, match="connection closed"):
        PatientStore(Gone(), 5.0).check(["key"])  # type: ignore[arg-type]


def test_whoever_asks_goes_on_in_time_and_again_when_it_is_back() -> None:
    lost = Lost()
    store = PatientStore(lost, 0.2)  # type: ignore[arg-type]
    lost.alive.clear()
    with pytest.raises(SilentStoreError, match="did not answer within 0.2 s"):
        store.set("key", "value")
    with pytest.raises(SilentStoreError, match="has not answered for more than 0.2 s"):  # the second fails at once
        store.check(["key"])
    lost.alive.set()
    while True:
        try:
            assert store.get("key") == b"value"
            break
        except SilentStoreError:
            time.sleep(0.01)


def test_a_board_that_does_not_answer_ends_waits() -> None:
    lost = Lost()
    store = PatientStore(lost, 60.0)  # type: ignore[arg-type]
    board = Liveness(store, 1, 2)
    assert board.why_hopeless() == ""
    lost.alive.clear()
    store._limit_s = 0.1
    assert "did not answer within 0.1 s: the host that holds it" in board.why_hopeless()
    board.report("stopped")
    assert "the host that holds it" in str(board.explain("an exchange", RuntimeError("timed out")))
    lost.alive.set()
