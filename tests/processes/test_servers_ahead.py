"""Servers that die where trainers are apart.

Where an exchange starts without waiting for the others, as on GPUs, a trainer may be through with the first step of
passes that another trainer has not entered. They begin again there, in the order of the others.

The transport is that of CPUs, with one change: an exchange is begun at once, and whether all ranks are in the same one
is compared where it is waited for. Where a server dies as Q, K and V, or dO, go out, it dies when trainer 0 has begun
that pass, and trainer 1 enters it only when the death has halted it. No time is measured.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import served
import torch
import torch.distributed as dist
import training
from fuzz import roles
from fuzz.case import Case
from fuzz.fuzz import run_case
from fuzz.play import Played
from pool import WorkerPool
from ports import free_port
from test_loops import IN_FLIGHT, dying

import deepspeed_cad
from deepspeed_cad.attention.surviving.call import SurvivingPass
from deepspeed_cad.attention.surviving.passes import Passes
from deepspeed_cad.errors import ServerLostError
from deepspeed_cad.exchange.failure.board import Liveness
from deepspeed_cad.exchange.failure.identity import Identity, compare
from deepspeed_cad.exchange.group import processes_of
from deepspeed_cad.exchange.packed import ComparedFirst, Counts, GroupTransfer


def _await(what: Callable[[], Any]) -> None:
    while not what():
        time.sleep(0.01)


def _start_at_once(
    self: ComparedFirst, packed: list[torch.Tensor], counts: Counts, identity: Identity, is_return: bool
) -> GroupTransfer:
    self.alarm.check()
    group = processes_of(self.group)
    numbers, mine = torch.zeros(group.size(), dtype=torch.int64), torch.tensor([identity.number])
    gathers = dist.all_gather(list(numbers.split(1)), mine, group=group, async_op=True)
    found = replace(self._move(packed, counts, identity), numbers=gathers)
    found.compared = lambda: compare(dict(enumerate(numbers.tolist())))  # type: ignore[attr-defined]
    return found


_finish = ComparedFirst._receive


def _finish_both(self: ComparedFirst, under_way: Any) -> list[torch.Tensor]:
    with Liveness.watch(self.alarm.liveness, str(under_way.identity), with_servers=True):
        self._wait([under_way.numbers], under_way.identity)
    if found := under_way.compared():
        self.alarm.stop(found)
        self.alarm.check()
    return _finish(self, under_way)


def _play_ahead(rank: int, processes: int, port: int, line: str, folder: str) -> Played:
    """As play_role; where a server dies, trainer 0 is ahead of trainer 1. Gives how many passes began again, too."""
    (fate,) = Case.from_line(line).fates
    begin, start, undo, strike = SurvivingPass.begin, SurvivingPass._begin, Passes.undo, roles._strike
    undone, begun, halted = [0], Path(folder, "begun"), [False]

    def is_last(one: Any) -> bool:
        """Whether a server dies as this pass goes out."""
        here = one._call.setup.turn == fate.turn and one._call.setup.layer == fate.layer
        return here and fate.what == ("backward dispatch" if one._forward else "dispatch")

    def start_first(self: Any, generation: int) -> bool:
        started = start(self, generation)
        if started and is_last(self):
            begun.touch()
        return started

    def begin_late(self: Any) -> None:
        if is_last(self) and not halted[0]:
            halted[0] = True
            _await(lambda: self._passes._halted or self._passes.generation)
        begin(self)

    def count(self: Passes, entered: int) -> None:
        undo(self, entered)
        undone[0] += len(self._undone)

    def strike_late(fate: Any) -> None:
        _await(begun.exists)
        strike(fate)

    changes: list[Any] = [(ComparedFirst, "_send", _start_at_once), (ComparedFirst, "_receive", _finish_both)]
    changes += [(Passes, "undo", count), *([(SurvivingPass, "_begin", start_first)] if rank == 0 else [])]
    changes += [(SurvivingPass, "begin", begin_late)] if rank == 1 else []
    changes += [(roles, "_strike", strike_late)] if fate.what.endswith("dispatch") else []
    with ExitStack() as stack:
        for where, name, new in changes:
            stack.enter_context(mock.patch.object(where, name, new))
        played = roles.play_role(rank, processes, port, line)
    played.caught = undone[0]
    return played


def _run(workers: WorkerPool, folder: Path, case: Case) -> list[int]:
    """How many passes began again on each trainer."""
    failure, played = run_case(workers, case, _play_ahead, str(folder))
    assert not failure, failure
    (fate,) = case.fates
    assert played[case.world + fate.server] is None
    trainers = [one for one in played[: case.world] if one is not None]
    assert all(one.error is None and one.changes == 1 for one in trainers), trainers
    return [one.caught for one in trainers]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("servers", "overlap"),
    [(1, "interleave"), pytest.param(2, "local_first", marks=pytest.mark.long)],
)  # fmt: skip
@pytest.mark.parametrize(
    ("what", "undone"),
    [("dispatch", True), pytest.param("dispatch served", False, marks=pytest.mark.long), ("return", False),
     ("backward dispatch", True), pytest.param("backward return", False, marks=pytest.mark.long)],
)  # fmt: skip
def test_what_one_trainer_had_begun_alone_begins_again(
    workers: WorkerPool, tmp_path: Path, servers: int, overlap: str, what: str, undone: bool
) -> None:
    found = _run(workers, tmp_path, dying(what, servers=servers, block={"overlap": overlap}))
    assert not undone or (found[0] > 0 and found[1] == 0)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["dispatch", "backward dispatch"])
def test_while_several_micro_batches_are_in_flight(workers: WorkerPool, tmp_path: Path, what: str) -> None:
    """Their forwards ran with the server: what begins again may have to attend once more first."""
    _run(workers, tmp_path, dying(what, **IN_FLIGHT))


LENGTHS = [[260], [40, 30, 9, 1, 50]]


def _play(rank: int, world: int, port: int, block: dict[str, Any], folder: str) -> Any:
    if rank == world - 1:
        Path(folder, "pid").write_text(str(os.getpid()))
    return served.play(rank, world, port, block, _apart, folder)


def _apart(rank: int, trainers: int, block: dict[str, Any], folder: str) -> int:
    """Trainer 0 is through with its backward and waits for trainer 1 in a collective of the script's own, while the
    results of trainer 1 are lost with the server. Gives the passes that ran again."""
    reference, model = training.tiny_llama(), training.tiny_llama()
    deepspeed_cad.apply(model, block).train()
    servers = deepspeed_cad.current_session().servers
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: grad)
    for step in range(2):
        own = training.documents(LENGTHS[(rank + step) % trainers], seed=100 * step + rank)
        loss = training.loss_sum(model, training.pack(own))
        if step == 1 and rank == 1:
            _lose_last(Path(folder), servers)
        loss.backward()
        if step == 1 and rank == 0:
            assert servers.members.generation == 0
            Path(folder, "through").touch()
        expected, gradients = training.alone(reference, own)
        for name, parameter in model.named_parameters():
            mine, wanted = parameter.grad.clone(), gradients[name].clone()
            dist.all_reduce(mine)
            dist.all_reduce(wanted)
            assert (mine - wanted).abs().max() < 1e-10 * (1 + wanted.abs().max()), name
        model.zero_grad()
    return servers.repeated


def _lose_last(folder: Path, servers: Any) -> None:
    """What comes back in the last exchange of a backward is lost, because the server dies before all of it is sent, but
    after trainer 0 has its part."""
    finish = ComparedFirst._receive

    def lose(self: ComparedFirst, under_way: Any) -> Any:
        if "return in the backward of micro-batch 1, layer 0" not in str(under_way.identity):
            return finish(self, under_way)
        ComparedFirst._receive = finish  # type: ignore[method-assign]
        _await((folder / "through").exists)
        os.kill(int((folder / "pid").read_text()), signal.SIGKILL)
        _await(servers.why)
        raise ServerLostError(servers.why())

    ComparedFirst._receive = lose  # type: ignore[method-assign]


def test_a_trainer_that_is_ahead_helps(workers: WorkerPool, tmp_path: Path) -> None:
    more = {"servers": {"reserved": 1}, "overlap": "local_first", "on_server_failure": "continue", "timeout_s": 60}
    errors, (first, *_) = workers.try_run(
        _play, 3, free_port(), served.BLOCK | more, str(tmp_path), joined=False, mortal=[2], timeout=120.0
    )
    assert errors[:2] == [None] * 2 and errors[2] is not None and errors[2][0] == "Died", errors
    assert first == 1
