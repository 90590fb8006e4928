"""A tiny Llama in what wraps models for data parallelism, trained on CPUs and on GPUs."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import training
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import deepspeed_cad

MICRO = 2
"""Micro-batches of a step, whose gradients are accumulated."""


def layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    return list(model.get_decoder().layers)


def fsdp2(model: torch.nn.Module, **settings: Any) -> torch.nn.Module:
    for module in (*layers(model), model):
        fully_shard(module, **settings)
    return model


def _checkpoint_wrappers(model: torch.nn.Module) -> torch.nn.Module:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    apply_activation_checkpointing(model, check_fn=lambda module: type(module) in {type(layers(model)[0])})
    return fsdp2(model)


def _compiled(model: torch.nn.Module) -> torch.nn.Module:
    torch._dynamo.reset()
    for layer in layers(model):
        layer.compile(backend="eager")  # the accelerate tests compile the whole, with AOTAutograd
    return fsdp2(model)


def _fsdp1(model: torch.nn.Module, **settings: Any) -> torch.nn.Module:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={type(layers(model)[0])})
    settings = {"use_orig_params": True, "device_id": next(model.parameters()).device} | settings
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, **settings)


def _frozen_embedding(model: torch.nn.Module) -> torch.nn.Module:
    model.get_input_embeddings().requires_grad_(False)
    return DistributedDataParallel(model)


Wrap = Callable[[torch.nn.Module], torch.nn.Module]
WAYS: dict[str, Wrap] = {
    "FSDP2": fsdp2, "FSDP2, checkpointing": lambda model: fsdp2(training.checkpointed(model, True)),
    "FSDP2, checkpoint wrappers": _checkpoint_wrappers, "FSDP2, compiled layers": _compiled,
    "FSDP2, LoRA": lambda model: fsdp2(training.with_lora(model)), "FSDP2, root": fully_shard, "FSDP1": _fsdp1,
    "DDP, frozen embedding": _frozen_embedding,
}  # fmt: skip
LATE = ["FSDP2, checkpoint wrappers", "FSDP1"]
"""Ways that are tried with CAD turned on after the sharding, too, as -m deepspeed_cad.run does in plain torch."""
ON_GPUS: dict[str, Wrap] = {
    "FSDP2, on the host": functools.partial(fsdp2, offload_policy=CPUOffloadPolicy()),
    "FSDP2, kept": functools.partial(fsdp2, reshard_after_forward=False),
    "FSDP1, flat": functools.partial(_fsdp1, use_orig_params=False, forward_prefetch=True, limit_all_gathers=False),
    "FSDP1, on the host": functools.partial(_fsdp1, cpu_offload=CPUOffload(offload_params=True)),
    "DDP, static": functools.partial(DistributedDataParallel, static_graph=True, gradient_as_bucket_view=True),
}
"""What differs from these only on GPUs: in streams, and in what waits on the host."""


def train(
    way: str, batches: Iterable[dict[str, torch.Tensor]], note: Callable[[torch.Tensor], Any],
    block: dict[str, Any] | None, device: torch.device, late: bool = False,
) -> list[Any]:  # fmt: skip
    """What `note(loss)` gives after each micro-batch; `block`: None without CAD; `late`: turned on after wrapping."""
    model = training.sdpa_llama().to(device)
    if block is not None and not late:
        deepspeed_cad.apply(model, block)
    model = (WAYS | ON_GPUS)[way](model)
    if block is not None and late:
        deepspeed_cad.apply(model, block)
    model.train()
    optimizer, found = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2), []
    for i, batch in enumerate(batches, start=1):
        loss = model(**{name: value.to(device) for name, value in batch.items()}).loss
        (loss / MICRO).backward()
        found.append(note(loss))
        if i % MICRO == 0:
            optimizer.step()
            optimizer.zero_grad()
    return found
