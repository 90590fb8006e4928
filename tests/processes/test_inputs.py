"""Micro-batches in every form that transformers users pass: positions, cumulative lengths, padded batches, spans."""

from __future__ import annotations

import pytest
import torch
import training
from pool import WorkerPool
from torch.nn.parallel import DistributedDataParallel

import deepspeed_cad

BLOCK = {"granularity": 16, "tolerance": 0.02, "links": training.LINKS}
LENGTHS = [[200, 31], [40, 9, 1, 70]]


def _ddp(rank: int, world: int, overlap: str) -> None:
    reference = training.tiny_llama()
    model = deepspeed_cad.apply(training.tiny_llama(), {**BLOCK, "overlap": overlap})
    wrapped = DistributedDataParallel(model)
    docs = training.documents(LENGTHS[rank], seed=rank)
    session = deepspeed_cad.current_session()
    for _ in range(2):
        with wrapped.no_sync():
            training.loss_sum(wrapped, training.pack(docs)).backward()
    training.loss_sum(wrapped, training.pack(docs)).backward()
    gradients: dict[str, torch.Tensor] = {}
    for other in range(world):
        _, one = training.alone(reference, training.documents(LENGTHS[other], seed=other))
        gradients = {name: gradients.get(name, 0) + 3 * g / world for name, g in one.items()}
    training.assert_gradients(model, gradients, 1e-9)
    layers, parts = 2, 1 if overlap == "local_first" else 2
    assert session.transport.exchanges == 3 * layers * parts * 4


@pytest.mark.parametrize("overlap", ["local_first", "interleave"])
def test_data_parallel_wrapper_and_accumulation(workers: WorkerPool, overlap: str) -> None:
    workers.run(_ddp, 2, overlap)


def test_wrappers_pass_the_descriptor_on_as_it_is() -> None:
    """FSDP's mixed precision and DDP rebuild containers of tensors among arguments; a descriptor is none."""
    from torch.distributed.utils import _apply_to_tensors
    from torch.utils._pytree import tree_map

    from deepspeed_cad.attention.microbatch import MaskDescriptor
    from deepspeed_cad.attention.setup import Modes

    descriptor = MaskDescriptor(None, 7, None, Modes())
    assert _apply_to_tensors(lambda x: x, {"attention_mask": descriptor})["attention_mask"] is descriptor
    assert tree_map(lambda x: x, [descriptor])[0] is descriptor
