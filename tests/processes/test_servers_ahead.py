"""Servers that die where an exchange starts without waiting for the others, as on GPUs: a trainer may be through with
the first step of passes that another trainer has not entered. They begin again there, in the order of the others.

The transport is that of CPUs, with one change: an exchange is begun at once, and whether all ranks are in the same one
is compared where it is waited for. Where a server dies as Q, K and V, or dO, go out, it dies when trainer 0 has begun
that pass, and trainer 1 enters it only when the death has halted it. No time is measured.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import test_servers_change as change
import torch
import torch.distributed as dist
from pool import WorkerPool

from deepspeed_cad.attention.surviving.call import SurvivingPass
from deepspeed_cad.attention.surviving.passes import Passes
from deepspeed_cad.exchange.failure.board import Liveness
from deepspeed_cad.exchange.failure.identity import compare
from deepspeed_cad.exchange.packed import ComparedFirst, GroupTransfer, Load


def _start_at_once(self: ComparedFirst, load: Load) -> GroupTransfer:
    self.alarm.check()
    numbers, mine = torch.zeros(self.group.size(), dtype=torch.int64), torch.tensor([load.identity.number])
    gathers = dist.all_gather(list(numbers.split(1)), mine, group=self.group, async_op=True)
    found = replace(self.move(load), numbers=gathers)
    found.compared = lambda: compare(dict(enumerate(numbers.tolist())))  # type: ignore[attr-defined]
    return found


_finish = ComparedFirst.finish


def _finish_both(self: ComparedFirst, under_way: Any) -> list[torch.Tensor]:
    with Liveness.watch(self.alarm.liveness, str(under_way.identity), with_servers=True):
        self._wait([under_way.numbers], under_way.identity)
    if found := under_way.compared():
        self.alarm.stop(found)
        self.alarm.check()
    return _finish(self, under_way)


_play, _die_at = change._play, change._die_at


def _play_ahead(
    rank: int, world: int, port: int, block: dict[str, Any], deaths: dict[int, tuple], later: int, folder: str,
    *args: Any
) -> Any:  # fmt: skip
    """As a rank of test_servers_change.py; where a server dies, trainer 0 is ahead of trainer 1."""
    kept = ComparedFirst.start, ComparedFirst.finish, SurvivingPass.begin, SurvivingPass._begin, Passes.undo
    begin, start, undo = SurvivingPass.begin, SurvivingPass._begin, Passes.undo
    undone, begun, halted = [0], Path(folder, "begun"), [False]
    what, turn, layer = deaths[2][:3]

    def is_last(one: Any) -> bool:
        """Whether a server dies as this pass goes out."""
        here = one._call.setup.turn == turn and one._call.setup.layer == layer
        return here and what == ("backward dispatch" if one._forward else "dispatch")

    def start_first(self: Any, generation: int) -> bool:
        started = start(self, generation)
        if started and is_last(self):
            begun.touch()
        return started

    def begin_late(self: Any) -> None:
        if is_last(self) and not halted[0]:
            halted[0] = True
            change._await(lambda: self._passes._halted or self._passes.generation)
        begin(self)

    def count(self: Passes, entered: int) -> None:
        undo(self, entered)
        undone[0] += len(self._undone)

    ComparedFirst.start, ComparedFirst.finish = _start_at_once, _finish_both  # type: ignore[method-assign]
    if rank == 0:
        SurvivingPass._begin = start_first  # type: ignore[method-assign]
    if rank == 1:
        SurvivingPass.begin = begin_late  # type: ignore[method-assign]
    Passes.undo = count  # type: ignore[method-assign]
    if "served" not in what and "return" not in what:
        change._die_at = partial(_die_at, first=lambda: change._await(begun.exists))
    try:
        found = _play(rank, world, port, block, deaths, later, folder, *args)
        return {**found, "undone": undone[0]} if isinstance(found, dict) else found
    finally:
        (
            ComparedFirst.start, ComparedFirst.finish, SurvivingPass.begin, SurvivingPass._begin, Passes.undo
        ) = kept  # type: ignore[method-assign]  # fmt: skip
        change._die_at = _die_at


@pytest.fixture(autouse=True)
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks play with exchanges that start at once."""
    monkeypatch.setattr(change, "_play", _play_ahead)


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
    found = change._run(workers, 2, servers, {2: change._moment(what, 1)}, tmp_path, overlap=overlap)
    if undone:
        assert found[0]["undone"] > 0 and found[1]["undone"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("what", ["dispatch", "backward dispatch"])
def test_while_several_micro_batches_are_in_flight(workers: WorkerPool, tmp_path: Path, what: str) -> None:
    """Their forwards ran with the server: what begins again may have to attend once more first."""
    change._run(workers, 2, 2, {2: change._moment(what, 1)}, tmp_path, train=change._many, forward_only="balanced")
