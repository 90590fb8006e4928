"""Ulysses for the training benchmark: DeepSpeed's as shipped, and one that repeats nothing under checkpointing.

In: a model and a kernel. Out: the model with attention by heads: every rank has its part of a sequence in all layers,
and all tokens of some heads in attention, between two all-to-alls.

Shapes: `T` tokens of this rank, `N` of all ranks, `H` query and `K` key heads, `D` head size; of one rank `h` and `k`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from train_attention import local_attention, use_attention
from train_kept import KeptOutput, KeptOutputs
from transformers import AttentionInterface, LlamaForCausalLM

from deepspeed_cad.kernels.interface import Kernel, MaskRule, Sequences


def use_ulysses(model: LlamaForCausalLM, kernel: Kernel, device: torch.device) -> None:
    """Sequence parallelism over all ranks by DeepSpeed's UlyssesSPAttentionHF, around the same kernel."""
    name = "benchmark_ulysses"
    if name in AttentionInterface._global_mapping:
        model.set_attn_implementation(name)
        return
    use_attention(model, name, local_attention(kernel))
    register_ulysses(model, name, device, dist.get_world_size())


def register_ulysses(model: LlamaForCausalLM, name: str, device: torch.device, ranks: int) -> None:
    """Let attention of this name be DeepSpeed's Ulysses around it, in groups of so many ranks."""
    import deepspeed.ops

    # Otherwise the first start on a CPU compiles a library for 80 s.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    backend = "nccl" if device.type == "cuda" else "gloo"
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False)
    UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model,
        core_attn_implementation=name,
        sequence_parallel_size=ranks,
        micro_batch_size=1,
        seq_length_is_variable=True,
    )


def use_kept_ulysses(
    model: LlamaForCausalLM, name: str, kernel: Kernel, outputs: KeptOutputs, group: dist.ProcessGroup | None = None
) -> None:
    """The same, with O kept behind the second all-to-all, where the rest of a layer reads it. `group`: default all.

    Raises ValueError where ranks do not divide the heads.
    """
    config, ranks = model.config, dist.get_world_size(group)
    if config.num_attention_heads % ranks or config.num_key_value_heads % ranks:
        raise ValueError(
            f"ulysses:kept: {config.num_attention_heads} query and {config.num_key_value_heads} key heads "
            f"cannot be divided among {ranks} ranks"
        )

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
        scaling: float | None = None, documents: Any = None, **_: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        q, k, v = (x.transpose(1, 2)[0] for x in (query, key, value))
        rule = MaskRule(query.shape[-1] ** -0.5 if scaling is None else scaling)
        return UlyssesAttention.apply(q, k, v, kernel, documents, rule, outputs.of(module), group)[None], None

    use_attention(model, name, attend)
    for layer in model.model.layers:
        # By then o_proj has hidden what a layer that runs again exchanges, and its MLP is about to need the memory.
        layer.mlp.register_forward_pre_hook(lambda *_: outputs.arrive())


class UlyssesAttention(torch.autograd.Function):
    """Attention by heads between two all-to-alls, each of one packed buffer: [T, H, D] to [T, H, D].

    A layer that runs again finds O of its tokens and LSE of its heads. Q, K, V and O travel again, for the backward
    alone, and nothing waits for them before the MLP: no more is kept than where nothing is exchanged.
    """

    @staticmethod
    def forward(
        ctx: Any, q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, kernel: Kernel, sequences: Sequences,
        rule: MaskRule, kept: KeptOutput, group: dist.ProcessGroup | None = None,
    ) -> torch.Tensor:  # fmt: skip
        heads, groups = (x.shape[1] // dist.get_world_size(group) for x in (q_THD, k_TKD))
        ctx.run, ctx.kept, ctx.split, ctx.group = (kernel, sequences, rule), kept, (heads, groups, groups), group
        found = kept.take()
        packed_NhD, work = to_heads(q_THD, k_TKD, v_TKD, group=group)
        if found is None:
            work.wait()
            o_NhD, lse_Nh = kernel.forward(*packed_NhD.split(ctx.split, 1), sequences, rule)
            (o_THD,) = to_tokens(o_NhD, group=group)
            kept.put(o_THD, lse_Nh)
        else:
            o_THD, lse_Nh = found
            o_NhD, other = to_heads(o_THD, group=group)
            kept.outputs.arriving += [work, other]
        ctx.save_for_backward(packed_NhD, o_NhD, lse_Nh)
        return o_THD

    @staticmethod
    def backward(ctx: Any, do_THD: torch.Tensor) -> tuple[Any, ...]:
        kernel, sequences, rule = ctx.run
        ctx.kept.outputs.arrive()
        ctx.kept.fetch_before()
        packed_NhD, o_NhD, lse_Nh = ctx.saved_tensors
        do_NhD, work = to_heads(do_THD, group=ctx.group)
        work.wait()
        qkv = packed_NhD.split(ctx.split, 1)
        gradients = kernel.backward(do_NhD, *qkv, o_NhD, lse_Nh, sequences, rule)
        return *to_tokens(*gradients, group=ctx.group), None, None, None, None, None


def to_heads(*parts_THD: torch.Tensor, group: dist.ProcessGroup | None = None) -> tuple[torch.Tensor, dist.Work]:
    """All tokens of this rank's heads, [N, h, D], those of all parts beside each other, once the exchange is done."""
    ranks = dist.get_world_size(group)
    by_rank = [x.unflatten(1, (ranks, -1)).transpose(0, 1) for x in parts_THD]
    widths = [x.shape[2] for x in by_rank]
    sent = parts_THD[0].new_empty(ranks, parts_THD[0].shape[0], sum(widths), parts_THD[0].shape[2])
    for room, x in zip(sent.split(widths, 2), by_rank):
        room.copy_(x)
    arrived = torch.empty_like(sent)
    work = dist.all_to_all_single(arrived, sent, group=group, async_op=True)
    return arrived.flatten(0, 1), work


def to_tokens(*parts_NhD: torch.Tensor, group: dist.ProcessGroup | None = None) -> tuple[torch.Tensor, ...]:
    """All heads of this rank's tokens, [T, H, D], of each part."""
    arrived = [torch.empty_like(x) for x in parts_NhD]
    works = [dist.all_to_all_single(there, x, group=group, async_op=True) for there, x in zip(arrived, parts_NhD)]
    for work in works:
        work.wait()
    return tuple(x.unflatten(0, (dist.get_world_size(group), -1)).transpose(0, 1).flatten(1, 2) for x in arrived)
