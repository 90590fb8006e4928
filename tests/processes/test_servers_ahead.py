"""Servers that die where one trainer has begun what another has not.

The transport is that of CPUs with one change: an exchange is begun at once, as on GPUs, and whether all ranks are in
the same one is compared where it is waited for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fuzz import roles
from fuzz.fuzz import run_case
from fuzz.play import Played
from pool import WorkerPool
from test_loops import IN_FLIGHT, dying

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
