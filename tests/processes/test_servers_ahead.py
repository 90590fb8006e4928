"""Servers that die where trainers are apart: one that has its results, or has begun what another has not.

The transport is that of CPUs. Where trainers begin apart it has one change: an exchange is begun at once, as on GPUs,
and whether all ranks are in the same one is compared where it is waited for.
"""

from __future__ import annotations

import os
import signal
import time
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
from fuzz.fuzz import run_case
from fuzz.play import Played
from pool import WorkerPool
from ports import free_port
from test_loops import IN_FLIGHT, dying

import deepspeed_cad
from deepspeed_cad.errors import ServerLostError
from deepspeed_cad.exchange.failure.board import Liveness
from deepspeed_cad.exchange.failure.identity import Identity, compare
from deepspeed_cad.exchange.group import processes_of
from deepspeed_cad.exchange.packed import ComparedFirst, Counts, GroupTransfer

_finish = ComparedFirst._receive


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


def _finish_both(self: ComparedFirst, under_way: Any) -> list[torch.Tensor]:
    with Liveness.watch(self.alarm.liveness, str(under_way.identity), with_servers=True):
        self._wait([under_way.numbers], under_way.identity)
    if found := under_way.compared():
        self.alarm.stop(found)
        self.alarm.check()
    return _finish(self, under_way)


def _play_ahead(*given: Any) -> Played:
    with mock.patch.multiple(ComparedFirst, _send=_start_at_once, _receive=_finish_both):
        return roles.play_role(*given)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, IN_FLIGHT], ids=["one micro-batch", "several in flight"])
@pytest.mark.parametrize("what", ["dispatch", "backward dispatch"])
def test_what_one_trainer_had_begun_alone_begins_again(workers: WorkerPool, what: str, changes: dict[str, Any]) -> None:
    """Forwards that ran with the server attend again before their backward."""
    case = dying(what, **changes)
    failure, played = run_case(workers, case, _play_ahead)
    assert not failure and [one.changes for one in played[: case.world] if one] == [1] * case.world, failure


LENGTHS = [[260], [40, 30, 9, 1, 50]]


def _play(rank: int, world: int, port: int, block: dict[str, Any], folder: str) -> Any:
    if rank == world - 1:
        Path(folder, "pid").write_text(str(os.getpid()))
    return served.play(rank, world, port, block, _apart, folder)


def _apart(rank: int, trainers: int, block: dict[str, Any], folder: str) -> int:
    """Trainer 0 has its results of the last exchange of a backward, and those of trainer 1 are lost with the server.
    Gives the passes that ran again."""
    reference, model = training.tiny_llama(), training.tiny_llama()
    deepspeed_cad.apply(model, block).train()
    servers = deepspeed_cad.current_session().servers
    has, last = Path(folder, "has"), "return in the backward of micro-batch 1, layer 0"

    def lose(self: ComparedFirst, under_way: Any) -> Any:
        if last not in str(under_way.identity) or servers.generation:
            return _finish(self, under_way)
        if rank == 0:
            found = _finish(self, under_way)
            has.touch()
            return found
        while not has.exists():
            time.sleep(0.01)
        os.kill(int(Path(folder, "pid").read_text()), signal.SIGKILL)
        while not servers.why():
            time.sleep(0.01)
        raise ServerLostError(servers.why())

    with mock.patch.object(ComparedFirst, "_receive", lose):
        for step in range(2):
            own = training.documents(LENGTHS[(rank + step) % trainers], seed=100 * step + rank)
            training.step_as_alone(model, reference, own)
    return servers.repeated


def test_a_trainer_that_has_its_results_runs_again_with_the_others(workers: WorkerPool, tmp_path: Path) -> None:
    more = {"servers": {"reserved": 1}, "overlap": "local_first", "on_server_failure": "continue", "timeout_s": 60}
    errors, found = workers.try_run(
        _play, 3, free_port(), served.BLOCK | more, str(tmp_path), joined=False, mortal=[2], timeout=120.0
    )
    assert errors[:2] == [None] * 2 and errors[2] is not None and errors[2][0] == "Died", errors
    assert list(found[:2]) == [1, 1]
