"""The same bits of a forward in train and eval mode, with and without gradients, wherever attention ran.

A DPO loss before the first update is ln 2 to the last bit then, and a ratio of probabilities 1.
"""

import copy
from typing import Any

import pytest
import torch
import training
from pool import WorkerPool
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import deepspeed_cad


def _logps(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits[0, :-1]
    return logits.log_softmax(-1).gather(-1, batch["input_ids"][0, 1:, None])[:, 0]


def _two_models(rank: int, world: int, dtype: str, block: dict[str, Any], how: str) -> tuple[int, float]:
    """A plain loop of a policy and a reference; gives how much was sent and the last loss."""
    policy, reference = (training.tiny_llama(getattr(torch, dtype), attn_implementation="sdpa") for _ in range(2))
    model = deepspeed_cad.apply(policy, {**training.BLOCK, **block}).train()
    if how == "a copy":
        reference = copy.deepcopy(model)
    elif how == "wrappers":
        model = DistributedDataParallel(model)
        fully_shard(reference, mesh=init_device_mesh("cpu", (world,)))
    session = deepspeed_cad.current_session()
    for step in range(3):
        batch = training.pack(training.documents([230, 31] if rank == step % world else [20, 9, 44], 10 * step + rank))
        trained = _logps(model, batch)
        with torch.no_grad():
            looked = [_logps(model, batch), _logps(model.eval(), batch), _logps(reference.eval(), batch)]
        model.train()
        for one in looked:
            assert torch.equal(one, trained.detach()), (one - trained).abs().max()
        loss = -torch.nn.functional.logsigmoid((trained - looked[-1]).sum())
        assert float(loss.detach()) == float(-torch.nn.functional.logsigmoid(torch.zeros((), dtype=loss.dtype)))
        loss.backward()
    assert reference not in session.bindings and len(session.references) == 1
    # Where gradients are on, and where it generates, a reference has its own attention.
    _logps(reference.train(), batch).sum().backward()
    assert session.statistics.micro_batches == 3
    return session.transport.bytes_sent, float(loss.detach())


@pytest.mark.parametrize("block", [{}, {"forward_only": "balanced"}], ids=["local", "balanced"])
@pytest.mark.parametrize("dtype, how", [("bfloat16", "another model"), ("float32", "a copy"), ("bfloat16", "wrappers")])
def test_a_policy_and_its_reference(workers: WorkerPool, dtype: str, how: str, block: dict[str, Any]) -> None:
    assert all(sent > 0 for sent, _ in workers.run(_two_models, 3, dtype, block, how))


def _trained_after_all(rank: int, world: int) -> None:
    """Models of the policy's class, for which nobody turned CAD on; eager attention is not what others get."""
    policy = deepspeed_cad.apply(training.tiny_llama(), training.BLOCK)
    batch = training.pack(training.documents([40, 9], seed=rank))
    model, plain = (training.tiny_llama(attn_implementation="eager", use_cache=False) for _ in range(2))
    with torch.no_grad():
        _logps(model, batch)
    assert model.config._attn_implementation == "cad"
    for one in (model, plain):
        one.train().gradient_checkpointing_enable({"use_reentrant": False})
        _logps(one, batch).sum().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    with torch.no_grad():
        _logps(model, batch)
    assert model.config._attn_implementation == "eager" and policy.config._attn_implementation == "cad"


def test_a_model_that_is_looked_at_and_trained_later(workers: WorkerPool) -> None:
    """It keeps its own attention from then on, in what checkpointing computes again too."""
    workers.run(_trained_after_all, 1)
