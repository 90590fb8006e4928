"""CAD with what trains long documents elsewhere: offloading of optimizer, parameters and activations, tiled MLP and
loss. Losses and weights after two steps against each document run alone, by the frameworks themselves."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import training
from engines import import_deepspeed
from launched import zero
from pool import WorkerPool

import deepspeed_cad
from deepspeed_cad.session import close_session

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

WORLD, STEPS, LR = 2, 2, 0.2
LENGTHS = [[220], [40, 30, 9, 1, 50, 90]]
"""Documents of each rank: equally many tokens, as tiles under ZeRO-3 need."""
TILE = 48
"""Tokens: 220 are five tiles, the last of them smaller."""

Trained = tuple[list[float], dict[str, torch.Tensor]]
"""Losses, and the weights at the end."""


def _batch(rank: int, step: int) -> list[torch.Tensor]:
    return training.documents(LENGTHS[(rank + step) % WORLD], seed=10 * step + rank)


def _alone(rank: int) -> Trained:
    """Losses of this rank and the weights at the end: every document alone, gradients averaged, plain SGD."""
    model = training.tiny_llama(torch.float32, attn_implementation="eager", use_cache=False)
    losses = []
    for step in range(STEPS):
        docs = _batch(rank, step)
        targets = sum(len(doc) - 1 for doc in docs)
        total, gradients = training.alone(model, docs)
        losses.append(total / targets)
        for name, p in model.named_parameters():
            gradient = gradients[name] / targets
            dist.all_reduce(gradient)
            p.data -= LR * gradient / WORLD
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


def _steps(rank: int, model: Any, update: Callable[[torch.Tensor], None], around: Any = contextlib.nullcontext) -> list:
    """Losses of steps; `update` has the backward and the optimizer, `around` is entered for each forward."""
    losses = []
    for step in range(STEPS):
        with around():
            loss = model(**training.pack(_batch(rank, step)), use_cache=False).loss
        update(loss)
        losses.append(float(loss.detach()))
    return losses


def _update(optimizer: torch.optim.Optimizer, averaged: Any, loss: torch.Tensor) -> None:
    loss.backward()
    for p in averaged:
        dist.all_reduce(p.grad)
        p.grad /= WORLD
    optimizer.step()
    optimizer.zero_grad()


@contextlib.contextmanager
def _deepspeed_checkpointing(model: Any) -> Iterator[None]:
    """DeepSpeed's own checkpointing, with activations on the CPU."""
    from deepspeed.runtime.activation_checkpointing import checkpointing

    # It empties what it copied to the host. On a CPU the copy is the tensor itself, so that training without CAD fails
    # too; here it gets real copies, as from a GPU.
    copy = checkpointing.copy_to_device
    checkpointing.copy_to_device = lambda *given, **names: tuple(
        x.clone() if isinstance(x, torch.Tensor) else x for x in copy(*given, **names)
    )
    checkpointing.configure(None, partition_activations=False, checkpoint_in_cpu=True, contiguous_checkpointing=False)
    model._set_gradient_checkpointing(True, checkpointing.checkpoint)
    yield
    checkpointing.copy_to_device = copy


def _deepspeed(rank: int, block: dict[str, Any], tiled: bool) -> Trained:
    """ZeRO-3 with the optimizer on the host; tiled, with torch's checkpoints there, or with DeepSpeed's."""
    from tiling import TiledLoss, tile_mlps
    from torch.autograd.graph import save_on_cpu

    deepspeed = import_deepspeed()
    model = training.sdpa_llama()
    if tiled:
        tile_mlps(model, TILE)
        TiledLoss(model, TILE)
        model.gradient_checkpointing_enable({"use_reentrant": False})
    offload = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
    config = zero(3, block, stage3_param_persistence_threshold=0, **offload) | {"zero_force_ds_cpu_optimizer": False}
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    engine.train()
    on_host, taken = save_on_cpu(), set[tuple[int, ...]]()
    pack, on_host.pack_hook = on_host.pack_hook, lambda one: (taken.add(tuple(one.shape)), pack(one))[1]
    with on_host if tiled else _deepspeed_checkpointing(model):
        losses = _steps(rank, engine, lambda loss: (engine.backward(loss), engine.step()))
    # A loss keeps a scalar beside its logits.
    assert bool(taken) == tiled and () not in taken, "the loss of a tile went to the host"
    with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=True):
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine.destroy()
    return losses, weights


def _fsdp2(rank: int, block: dict[str, Any]) -> Trained:
    """Parameters on the host, and layers in torch's offloading wrapper."""
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    model = deepspeed_cad.apply(training.sdpa_llama(), block).train()
    kind = type(model.get_decoder().layers[0])
    wrappers.apply_activation_checkpointing(
        model, checkpoint_wrapper_fn=wrappers.offload_wrapper, check_fn=lambda one: isinstance(one, kind)
    )
    for one in (*model.get_decoder().layers, model):
        fully_shard(one, offload_policy=CPUOffloadPolicy(pin_memory=False))
    losses = _steps(rank, model, partial(_update, torch.optim.SGD(model.parameters(), lr=LR), ()))
    weights = {n.replace("_checkpoint_wrapped_module.", ""): p.full_tensor() for n, p in model.named_parameters()}
    return losses, {name: p.detach().clone() for name, p in weights.items()}


def _trl(rank: int, block: dict[str, Any]) -> Trained:
    """The context that SFTTrainer enters around its forward with `activation_offloading=True`, and checkpointing."""
    from trl.models.activation_offloading import get_act_offloading_ctx_manager

    # It asks torch for an accelerator, and a CPU is none.
    torch.accelerator.current_accelerator = lambda *_: torch.device("cpu")  # type: ignore[assignment]
    model = training.checkpointed(deepspeed_cad.apply(training.sdpa_llama(), block).train(), True)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    context = get_act_offloading_ctx_manager(
        model=model, use_pin_memory=False, use_streams=False, min_offload_size=1, max_fwd_stash_size=2
    )
    losses = _steps(rank, model, partial(_update, optimizer, list(model.parameters())), lambda: context)
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}


WAYS: dict[str, Callable[[int, dict[str, Any]], Trained]] = {
    "ZeRO-3, tiled MLP and loss, checkpoints on the CPU": lambda rank, block: _deepspeed(rank, block, True),
    "ZeRO-3, DeepSpeed's checkpointing on the CPU": lambda rank, block: _deepspeed(rank, block, False),
    "FSDP2, offloaded layers": _fsdp2,
    "TRL's activation offloading, checkpointing": _trl,
}


def _compare(rank: int, world: int, name: str) -> tuple[float, float, tuple[int, ...]]:
    """Largest differences of losses and weights; forwards, backwards and replays of attention."""
    losses, weights = _alone(rank)
    found, trained = WAYS[name](rank, {**training.BLOCK, "keep": "host"})
    session = deepspeed_cad.current_session()
    counts, statistics = session.counts, session.statistics
    assert statistics.imbalance_before > 1.2 and statistics.imbalance < 1.05
    assert session.parking.host_bytes > 0
    assert f"{session.parking.host_bytes >> 20} MiB of host memory" in session.report()
    close_session()
    assert trained.keys() == weights.keys()
    return (
        max(abs(one - other) for one, other in zip(found, losses, strict=True)),
        max(float((trained[name] - weights[name]).abs().max()) for name in weights),
        (counts.forwards, counts.backwards, counts.replays),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", WAYS)
def test_same_losses_and_weights(fresh_workers: WorkerPool, name: str) -> None:
    if "TRL" in name:
        pytest.importorskip("trl")
    for loss, weight, counts in fresh_workers.run(_compare, WORLD, name, timeout=120.0):
        assert loss < 1e-5 and weight < 1e-5, (loss, weight)
        assert counts == (2 * STEPS, 2 * STEPS, 2 * STEPS if "checkpoint" in name else 0)
