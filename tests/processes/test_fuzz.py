"""Fuzz and soak, as short as CI has time for; both by hand for longer: docs/testing.md."""

import os
from dataclasses import replace
from unittest import mock

import pytest
import torch
from fuzz.case import Case
from fuzz.fuzz import run
from fuzz.judge import judge
from fuzz.play import Played, play
from fuzz.soak import grown, soak
from pool import WorkerPool

from deepspeed_cad.exchange.packed import PackedTransport


@pytest.mark.slow
def test_random_loops(workers: WorkerPool) -> None:
    tally = run(workers, seed=0, seconds=600.0, ranks=(1, 3), cases=5)
    assert tally.steps > 0
    assert not tally.failures, "\n".join(f"{why}\n  --replay '{case.to_line()}'" for why, case in tally.failures)


@pytest.mark.long
def test_nothing_grows(workers: WorkerPool) -> None:
    count = int(os.environ.get("SOAK", 240))
    for rank, samples in enumerate(workers.run(soak, 2, count, 12, timeout=120.0 + count)):
        print(*(f"rank {rank}: {one}" for one in samples), sep="\n")
        assert not grown(samples), (rank, grown(samples))


SMALL = Case(5, batches=(2, 2), block={"granularity": 16, "tolerance": 0.02}, longest=120, gradients=1)


def _broken(rank: int, world: int, line: str, what: str) -> Played:
    """Play a case with rows that come back to the wrong places, forward or backward, or with an error of torch's."""
    before, calls = PackedTransport.give_back, iter(range(100))

    def broken(self: PackedTransport, schedule: object, fields: list, *rest: object) -> object:
        if what == "an error" and rank == 1:
            raise RuntimeError("raw")
        add = any(field.add for field in fields)
        if next(calls) >= 2 and what == ("backward" if add else "forward"):
            fields = [replace(field, served=torch.roll(field.served, 1, 0)) for field in fields]
        return before(self, schedule, fields, *rest)

    with mock.patch.object(PackedTransport, "give_back", broken):
        return play(rank, world, line)


@pytest.mark.parametrize(("what", "verify", "kind"), [
    ("forward", 0, "wrong: rank"), ("backward", 0, "gradients off by"), ("an error", 0, "raw: rank 1"),
    ("forward", 2, "CADError: verify: rank 0, micro-batch 1 (counted from 0): O of LlamaAttention of layer 0 differs"),
])  # fmt: skip
def test_a_defect_is_seen(workers: WorkerPool, what: str, verify: int, kind: str) -> None:
    """By the judge; or by `"verify"`, which stops all ranks."""
    case = replace(SMALL, block=SMALL.block | {"verify": verify})
    played = workers.run(_broken, 2, case.to_line(), what)
    assert kind in judge(case, played) and (not verify or all(one.error for one in played))
