"""Frames: what goes in comes out; and what servers are told of when a micro-batch is over."""

from __future__ import annotations

import gc
import socket
from typing import Any

import numpy as np
import pytest

from deepspeed_cad.layout import Layout
from deepspeed_cad.server.orders import OPEN, RELEASE, Leader
from deepspeed_cad.server.wire import encode, receive


@pytest.mark.parametrize("arrays", [(), (np.arange(6).reshape(2, 3),), (np.zeros((0, 6), int), np.array([-1, 2**62]))])
def test_frames(arrays: tuple[np.ndarray, ...]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for _ in range(2):
            ours.sendall(encode({"do": "plan", "scale": 0.1 + 0.2}, arrays))
        for _ in range(2):
            frame = receive(theirs)
            assert frame is not None and frame.head == {"do": "plan", "scale": 0.1 + 0.2}
            assert [one.tolist() for one in frame.arrays] == [one.tolist() for one in arrays]
            assert [one.shape for one in frame.arrays] == [one.shape for one in arrays]
        ours.close()
        assert receive(theirs) is None


def test_what_is_no_frame_of_ours() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(OSError, match="not deepspeed_cad"):
            receive(theirs)


class Link:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.heads: list[dict[str, Any]] = []

    def tell(self, head: dict[str, Any], arrays: tuple[Any, ...] = (), generation: int = 0) -> None:
        self.heads.append(head)


def test_a_micro_batch_is_over_when_no_call_of_it_is_left() -> None:
    link = Link()
    leader = Leader(link)
    layout = Layout.from_rank_lengths([[3], []])
    first = leader.open(0, layout, None)
    held = [first]
    del first
    leader.open(1, layout, None)
    gc.collect()
    leader.open(2, layout, None)
    assert [head["do"] for head in link.heads] == [OPEN, OPEN, RELEASE, OPEN]
    assert link.heads[2] == {"do": RELEASE, "turns": [1]}
    held.clear()
    gc.collect()
    leader.tell({"do": OPEN})
    assert sorted(link.heads[-2]["turns"]) == [0, 2]
