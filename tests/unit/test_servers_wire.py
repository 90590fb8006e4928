"""Frames: what goes in comes out, what is none ends its connection; what servers are told when a micro-batch ended."""

from __future__ import annotations

import gc
import json
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from deepspeed_cad.layout import Layout
from deepspeed_cad.server.orders import LEAVE, OPEN, PLAN, RELEASE, Leader
from deepspeed_cad.server.sockets import Inbox, encode

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize("arrays", [(), (np.arange(6).reshape(2, 3),), (np.zeros((0, 6), int), np.array([-1, 2**62]))])
def test_frames(pair: Pair, arrays: tuple[np.ndarray, ...]) -> None:
    ours, theirs = pair
    inbox = Inbox(theirs)
    sent, frames = encode({"do": "plan", "scale": 0.1 + 0.2}, arrays) * 2, []
    for begin in range(0, len(sent), 7):
        ours.sendall(sent[begin : begin + 7])
        frames += inbox.read()
    for frame in frames:
        assert frame.head == {"do": "plan", "scale": 0.1 + 0.2}
        assert [one.tolist() for one in frame.arrays] == [one.tolist() for one in arrays]
        assert [one.shape for one in frame.arrays] == [one.shape for one in arrays]
    ours.close()
    with pytest.raises(ConnectionError):
        list(inbox.read())
    assert len(frames) == 2


@pytest.mark.parametrize(
    ("head", "raw", "words"),
    [
        (b"", 0, "Expecting value"),
        ([], 0, "as an integer"),
        ({"do": RELEASE}, 0, "shapes"),
        ({"do": PLAN, "shapes": [[1, 1]]}, 16, "cannot reshape"),
        ({"do": PLAN, "shapes": [["a", "b"]]}, 8, "can't multiply"),
        ({"do": PLAN, "shapes": [[1]]}, 7, "buffer size must be a multiple"),
        (b"[" * 100_000, 0, "recursion"),
    ],
)
def test_what_is_no_frame_ends_the_connection_with_the_reason(pair: Pair, head: Any, raw: int, words: str) -> None:
    ours, theirs = pair
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    inbox = Inbox(theirs)
    ours.sendall(encode({"do": LEAVE}))
    assert [frame.head for frame in inbox.read()] == [{"do": LEAVE}]
    ours.sendall(len(text).to_bytes(4, "big") + raw.to_bytes(4, "big") + text + bytes(raw))
    with pytest.raises(OSError, match=f"{8 + len(text) + raw} bytes came that are none of our frames: .*({words})"):
        while True:
            assert list(inbox.read()) == []


def test_a_micro_batch_is_over_when_no_call_of_it_is_left() -> None:
    heads: list[dict[str, Any]] = []
    leader = Leader(lambda head, arrays: heads.append(head))
    layout = Layout.from_rank_lengths([[3], []])
    first = leader.open(0, layout, None)
    held = [first]
    del first
    leader.open(1, layout, None)
    gc.collect()
    leader.open(2, layout, None)
    assert [head["do"] for head in heads] == [OPEN, OPEN, RELEASE, OPEN]
    assert heads[2] == {"do": RELEASE, "turns": [1]}
    held.clear()
    gc.collect()
    leader.tell({"do": OPEN})
    assert sorted(heads[-2]["turns"]) == [0, 2]
