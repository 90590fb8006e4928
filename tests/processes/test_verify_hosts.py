"""`"verify": N` under host frameworks, beside servers, and of documents that span ranks."""

import re
from typing import Any

import pytest
import served
import torch
import training
from pool import WorkerPool
from torch.nn.parallel import DistributedDataParallel

import deepspeed_cad

VERIFY = {**training.BLOCK, "verify": 2}
LENGTHS = [[200, 31], [40, 9, 1, 70]]


def _said() -> list[str]:
    """Keep what is said from now on."""
    from deepspeed_cad.integrations import verify

    found: list[str] = []
    verify.notice = found.append
    return found


def _plain(rank: int, world: int, block: dict[str, Any]) -> list[str]:
    said, model = _said(), deepspeed_cad.apply(training.tiny_llama(torch.float32), {**VERIFY, **block}).train()
    model = DistributedDataParallel(model)
    for step in range(3):
        batch = training.pack(training.documents(LENGTHS[(rank + step) % 2], seed=10 * step + rank))
        model(**batch, use_cache=False).loss.backward()
    return said


@pytest.mark.parametrize("overlap", ["local_first", "interleave"])
@pytest.mark.parametrize("servers", [0, 1])
def test_ddp(workers: WorkerPool, overlap: str, servers: int) -> None:
    if servers:
        (first, second), _ = served.run(workers, 2, 1, _plain, overlap=overlap, verify=2)
    else:
        first, second = workers.run(_plain, 2, {"overlap": overlap})
    assert len(first) == 2 and second == []
    for line in first:
        assert "is the same without CAD: loss 4." in line
        assert ("dK" in line) == (overlap == "local_first") == ("nano-batches were not compared" not in line)


def _spanning(rank: int, world: int) -> list[str]:
    said, model = _said(), deepspeed_cad.apply(training.tiny_llama(torch.float32), VERIFY).train()
    part = deepspeed_cad.shard_stream(training.pack(training.documents([130, 90, 1, 79], seed=7)), rank, world)
    model(**part, use_cache=False).loss.backward()
    return said


def test_documents_that_span_ranks_are_left_out(workers: WorkerPool) -> None:
    line = workers.run(_spanning, 3)[0][0]
    assert "1 documents span ranks and were not compared" in line and "dK" not in line
    assert re.search(r"without CAD: loss \d\.\d+ with CAD, not computed without", line), line
