"""Frames: what goes in comes out, and what is none is dropped; what servers are told when a micro-batch is over."""

from __future__ import annotations

import gc
import json
import random
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from deepspeed_cad.layout import Layout
from deepspeed_cad.server.orders import (
    BUSY,
    FAILED,
    LEAVE,
    OPEN,
    PLAN,
    REGROUP,
    RELEASE,
    TO_SERVERS,
    TO_TRAINERS,
    Leader,
)
from deepspeed_cad.server.wire import Form, Inbox, encode

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Both ends of a connection."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize("arrays", [(), (np.arange(6).reshape(2, 3),), (np.zeros((0, 6), int), np.array([-1, 2**62]))])
def test_frames(pair: Pair, arrays: tuple[np.ndarray, ...]) -> None:
    ours, theirs = pair
    inbox = Inbox(theirs, "a test", {"plan": Form({"scale": float}, tuple(one.ndim for one in arrays))})
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


def _mutate(frame: bytes, random_: random.Random) -> bytes:
    """A frame that somebody broke; its sizes are right, or it is so long that no end is found."""
    how = random_.randrange(5)
    body = bytearray(frame[8:])
    text = int.from_bytes(frame[:4], "big")
    if how == 0:
        body = bytearray(random_.randbytes(random_.randrange(200)))
        text = random_.randint(0, len(body))
    elif how == 1:  # cut
        body = body[: random_.randrange(len(body))]
        text = min(text, len(body))
    elif how == 2:  # reordered
        random_.shuffle(body)
    elif how == 3:  # another type, or another name
        words = [b"1", b"-1", b'"a"', b"[]", b"{}", b"null", b"1e999", b"[[1]]", b"NaN", b"9" * 30, b"9" * 5000]
        parts = bytes(body[:text]).split(b":")
        parts[random_.randrange(1, len(parts))] = random_.choice(words) + random_.choice([b"", b',"turn"', b"}"])
        joined = b":".join(parts)
        body, text = bytearray(joined) + body[text:], len(joined)
    else:
        depth = random_.choice([10, 1000, 10_000])
        opened = random_.choice([b"[", b'{"a":', b'{"do":"plan","turn":['])
        body = bytearray(opened * (depth // len(opened)))
        text = len(body)
    return text.to_bytes(4, "big") + (len(body) - text).to_bytes(4, "big") + bytes(body)


VALID = [
    encode({"do": OPEN, "turn": 1}, (np.zeros((2, 5), int), np.arange(3), np.zeros(0, int))),
    encode({"do": PLAN, "turn": 1, "key": [None, 4], "nano_batch": 0, "cut": [1, 0, 16]}, (np.ones((3, 9), int),)),
    encode({"do": REGROUP, "generation": 2, "servers": [3], "exchanges": 9}),
    encode({"do": LEAVE, "reason": "no more data"}),
    encode({"do": BUSY, "busy": 0.5, "total": 3}),
    encode({"do": FAILED, "reason": "no memory"}),
]


def test_a_fuzz_of_the_wire(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    """2,000 frames that somebody broke: each is dropped with one line or is a frame of these forms, and what is right
    among them arrives."""
    random_, (ours, theirs) = random.Random(26), pair
    inboxes = [Inbox(theirs, "a test", forms) for forms in (TO_SERVERS, TO_TRAINERS)]
    right = [encode({"do": RELEASE, "turns": [12345]}), encode({"do": BUSY, "busy": 1, "total": 12345})]
    for number in range(2_000):
        ours.sendall(_mutate(random_.choice(VALID), random_) + right[number % 2])
        *broken, last = inboxes[number % 2].read()
        assert last.head.popitem()[1] in ([12345], 12345)
        assert len(broken) + len(caplog.records) == 1
        caplog.clear()


PLANNED = {"do": PLAN, "turn": 1, "key": [], "nano_batch": 0, "cut": []}


@pytest.mark.parametrize(
    ("head", "raw", "words"),
    [
        (b"", 0, "Expecting value"),
        (b"\x80abc", 0, "codec can't decode"),
        ([], 0, "its head is a list"),
        ({}, 0, "nobody here does None"),
        ({"do": [PLAN]}, 0, "nobody here does ['plan']"),
        ({"do": BUSY, "busy": 0, "total": 0, "shapes": []}, 0, "nobody here does 'busy'"),
        ({"do": RELEASE, "turns": 5, "shapes": []}, 0, 'its field "turns" is 5'),
        ({"do": RELEASE, "turns": []}, 0, "its arrays have the shapes None"),
        ({**PLANNED, "shapes": [[1]]}, 8, "its arrays have the shapes [[1]]"),
        ({**PLANNED, "shapes": [1]}, 8, "object of type 'int' has no len()"),
        ({**PLANNED, "shapes": [["a", "b"]]}, 8, "can't multiply"),
        ({**PLANNED, "shapes": [[1, 1]]}, 16, "the shapes [[1, 1]] and 16 bytes"),
        ({**PLANNED, "shapes": [[2, 1]]}, 8, "the shapes [[2, 1]] and 8 bytes"),
        ({**PLANNED, "shapes": [[-1, -1]]}, 8, "the shapes [[-1, -1]] and 8 bytes"),
        ({**PLANNED, "shapes": [[0, 10**30]]}, 0, "Maximum allowed dimension exceeded"),
        (b"[" * 100_000, 0, "recursion"),
    ],
)
def test_what_is_none_is_dropped_with_the_reason(
    pair: Pair, caplog: pytest.LogCaptureFixture, head: Any, raw: int, words: str
) -> None:
    ours, theirs = pair
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    right = encode(PLANNED, (np.ones((3, 9), int),))
    inbox, sent = Inbox(theirs, "trainer 0", TO_SERVERS), len(text).to_bytes(4, "big") + raw.to_bytes(4, "big") + text
    ours.sendall(sent + bytes(raw) + right)
    frames = list(inbox.read())
    while inbox._bytes:
        frames += inbox.read()
    assert [frame.head["do"] for frame in frames] == [PLAN]
    (line,) = [record.message for record in caplog.records]
    assert line.startswith(f"dropped a frame of {len(text) + raw} bytes from trainer 0: ") and words in line


def test_a_micro_batch_is_over_when_no_call_of_it_is_left() -> None:
    heads: list[dict[str, Any]] = []
    leader = Leader(lambda head, arrays, generation: heads.append(head))
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
