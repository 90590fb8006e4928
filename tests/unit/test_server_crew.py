"""What a rank holds of its attention passes, and what servers are there: without processes."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from deepspeed_cad.attention.surviving.passes import Passes
from deepspeed_cad.config import CADConfig
from deepspeed_cad.errors import CADPeerError, ServerLostError
from deepspeed_cad.exchange.failure.board import Liveness
from deepspeed_cad.server.servers import speeds_of
from deepspeed_cad.server.surviving.members import Members, why_not_change


class Pass:
    """Counts what happens to it."""

    def __init__(self) -> None:
        self.index, self.runs, self.has_result, self.forgot = 0, 0, False, 0

    def repeat(self) -> None:
        self.runs += 1

    def run_again(self) -> None:
        self.repeat()
        self.has_result = True

    def forget_progress(self) -> None:
        self.forgot += 1


def _enter(passes: Passes, met: bool = True) -> Pass:
    one = Pass()
    with passes.inside():
        passes.enter(one)
        if met:
            passes.met(one)
    return one


def _leave(passes: Passes, one: Pass) -> None:
    with passes.inside():
        one.has_result = True
        passes.leave(one)


def test_a_pass_is_held_until_all_ranks_have_left_it() -> None:
    passes = Passes()
    first = _enter(passes)
    second = _enter(passes)
    _leave(passes, first)
    third = _enter(passes, met=False)
    passes.run_again([1])
    assert first.runs == 1 and passes.without_result == [2, 3]
    passes.met(third)  # who is in the third one has left the first one, not the second
    with pytest.raises(CADPeerError, match="pass 1 has to run again"):
        passes.run_again([1])
    passes.run_again([2])
    assert second.runs == 1 and passes.without_result == [3]


def test_what_one_rank_entered_alone_begins_anew() -> None:
    passes = Passes()
    first, second = _enter(passes), _enter(passes, met=False)
    passes.undo(1)
    assert second.index == 0 and second.forgot == 1 and first.index == 1
    assert passes.entered == 1 and passes.without_result == [1]
    assert _enter(passes).index == 2


def test_the_training_thread_waits_while_halted() -> None:
    passes, seen = Passes(), []
    passes.halt()

    def train() -> None:
        with passes.inside() as generation:
            seen.append(generation)

    thread = threading.Thread(target=train)
    thread.start()
    time.sleep(0.05)
    assert not seen
    passes.change(3)
    time.sleep(0.05)
    assert not seen
    passes.go_on()
    thread.join(5)
    assert seen == [3]


def test_halting_waits_for_the_step_that_runs() -> None:
    passes, halted = Passes(), threading.Event()

    def halt() -> None:
        passes.halt()
        halted.set()

    with passes.inside():
        thread = threading.Thread(target=halt)
        thread.start()
        assert not halted.wait(0.05)
    assert halted.wait(5)


def test_a_change_that_failed_ends_the_training_thread() -> None:
    passes = Passes()
    passes.halt()
    passes.go_on(CADPeerError("trainer 1 died"))
    with pytest.raises(CADPeerError, match="trainer 1 died"), passes.inside():
        pass
    with pytest.raises(CADPeerError, match="trainer 1 died"):
        passes.wait_for_change(0)


@pytest.mark.parametrize(
    ("policy", "device", "transport", "refused"),
    [
        ("stop", "cuda", "c10d", ""),
        ("continue", "cpu", "c10d", ""),
        ("continue", "cuda", "auto", ""),
        ("continue", "cuda", "nvlink", ""),
        ("continue", "cuda", "c10d", 'key "transport" is "c10d", of which nothing can be given up'),
    ],
)
def test_where_servers_may_change(policy: str, device: str, transport: str, refused: str) -> None:
    config = CADConfig(servers={"reserved": 1}, on_server_failure=policy, transport=transport)
    found = why_not_change(config, torch.device(device))
    assert refused in found and bool(refused) == bool(found)


def test_passes_that_others_had_not_entered_begin_again_in_their_order() -> None:
    passes = Passes()
    before, first, second = _enter(passes), _enter(passes, met=False), _enter(passes, met=False)
    for one in (second, first):  # in whatever order their first steps ended
        passes.begun(one)
    passes.undo(1)
    assert not passes.has_undone(before) and passes.take_undone(before) is None, "what came before them goes on"
    again = Pass()
    assert passes.has_undone(again), "what is new comes behind them"
    assert passes.take_undone(first) is first and passes.take_undone(first) is None
    # The first one needs a forward first, which the second one, not begun again yet, must not overtake.
    passes.follows(again, first)
    assert not passes.has_undone(again)
    passes.enter(again)
    passes.begun(again)
    passes.undo(1)
    assert [passes.take_undone(second) for _ in range(3)] == [again, second, None]


def test_what_all_ranks_have_met_in_is_not_taken_back_twice() -> None:
    passes = Passes()
    one = _enter(passes, met=False)
    passes.begun(one)
    passes.met(one)
    passes.met(one)
    passes.undo(1)
    assert not passes.has_undone(one)


class _Lost:
    def why(self) -> str:
        return "server 2 ended"

    def wait(self) -> str:
        return "server 2 ended"


def test_only_what_servers_take_part_in_is_lost_with_one() -> None:
    board = Liveness(dist.HashStore(), 0, 3)
    board.losses = _Lost()
    with pytest.raises(ServerLostError, match="server 2"), Liveness.watch(board, "an exchange", with_servers=True):
        raise RuntimeError("connection closed by peer")
    assert board.reason(0) is None  # this rank has not stopped
    board.watched = range(1)
    with pytest.raises(CADPeerError) as caught, Liveness.watch(board, "lengths"):
        raise RuntimeError("connection closed by peer")
    assert not isinstance(caught.value, ServerLostError)


def test_a_server_that_is_not_watched_ends_nobody_s_hope() -> None:
    store = dist.HashStore()
    board = Liveness(store, 0, 3)
    Liveness(store, 2, 3).report("no memory")
    assert "rank 2 stopped" in board.why_hopeless()
    board.watched = range(2)
    assert board.why_hopeless() == ""


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ((2, 3), [1.0, 2.0, 0.5, 0.25]),
        ((3,), [1.0, 2.0, 0.25]),  # server 2 died
        ((3, 4), [1.0, 2.0, 0.25, 0.375]),  # and another came, of which nobody knows how fast it is
        ((), [1.0, 2.0]),
    ],
)
def test_speeds_follow_servers_that_change(numbers: tuple[int, ...], expected: list[float]) -> None:
    found = speeds_of(Members(1, 2, numbers), np.array([1.0, 2.0, 0.5, 0.25]))
    assert found.tolist() == expected
