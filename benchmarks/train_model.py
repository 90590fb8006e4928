"""The model of the training benchmark and all that is the same in every mode: loss, parameters, optimizer.

One Llama of the given size with random weights. The modes' models are copies that share its parameters, so that the
optimizer state exists once and every mode trains the same weights.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

LOSS_ROWS = 4096
"""Rows whose logits exist at a time."""
ALIGNED = 128
"""Every parameter begins at a multiple of so many values in the flat buffer: 256 bytes in bf16. The matrix products of
gpt-oss's experts want 16 bytes."""


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Options for the sizes of `make_model`; the defaults are 8 layers of an 8B Llama."""
    for name, size in (
        ("layers", 8), ("hidden", 4096), ("heads", 32), ("kv-heads", 8), ("ffn", 14336), ("vocab", 32000),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=size)


def make_model(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, longest: int,
    device: torch.device, dtype: torch.dtype,
) -> LlamaForCausalLM:  # fmt: skip
    """A Llama with random weights, the same on every rank."""
    config = LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, max_position_embeddings=longest,
        tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    return random_weights(lambda: LlamaForCausalLM(config), device, dtype)


def random_weights(build: Callable[[], Any], device: torch.device, dtype: torch.dtype) -> Any:
    """What `build` gives on the device, the same on every rank, in training mode."""
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    try:
        torch.set_default_dtype(dtype)
        with torch.device(device):
            model = build()
    finally:
        torch.set_default_dtype(before)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, 0)
    return model.train()


def share_parameters(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """A copy with buffers and config of its own and the same parameter tensors."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


def matrix_parameters(model: LlamaForCausalLM) -> int:
    """Parameters that every token is multiplied with: all but the input embedding."""
    return sum(p.numel() for p in model.parameters()) - model.get_input_embeddings().weight.numel()


class ChunkedLoss(torch.autograd.Function):
    """Sum of the cross entropy of `hidden @ weight.T`, without ever holding the logits of all rows.

    The gradients are made in the forward pass, from the same logits.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_TE: torch.Tensor, weight_VE: torch.Tensor, targets_T: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """`scale` × the sum over targets other than −100."""
        hidden_grad = torch.empty_like(hidden_TE)
        weight_grad = torch.zeros(weight_VE.shape, dtype=torch.float32, device=weight_VE.device)
        total = torch.zeros((), dtype=torch.float32, device=hidden_TE.device)
        for begin in range(0, len(hidden_TE), LOSS_ROWS):
            rows = slice(begin, begin + LOSS_ROWS)
            hidden, targets = hidden_TE[rows], targets_T[rows]
            valid = (targets >= 0).unsqueeze(1)
            index = targets.clamp(min=0).unsqueeze(1)
            logits = (hidden @ weight_VE.t()).float()
            log_sum = torch.logsumexp(logits, 1, keepdim=True)
            total += ((log_sum - logits.gather(1, index)) * valid).sum()
            grad = logits.sub_(log_sum).exp_()
            grad.scatter_add_(1, index, -torch.ones_like(log_sum))
            grad = grad.mul_(valid * scale).to(hidden.dtype)
            hidden_grad[rows] = grad @ weight_VE
            weight_grad += grad.t() @ hidden
        ctx.save_for_backward(hidden_grad, weight_grad.to(weight_VE.dtype))
        return total * scale

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_grad, weight_grad = ctx.saved_tensors
        return hidden_grad * grad, weight_grad * grad, None, None


class ShardedAdamW:
    """AdamW with its fp32 state sharded over the ranks (ZeRO stage 1), the same code in every mode.

    Parameters and gradients are views of two flat buffers. A step reduce-scatters the gradients, updates this rank's
    shard in fp32 and all-gathers the parameters.
    """

    def __init__(self, parameters: list[torch.nn.Parameter], lr: float) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        device, dtype = parameters[0].device, parameters[0].dtype
        sizes = [-(-p.numel() // ALIGNED) * ALIGNED for p in parameters]
        self.shard = -(-sum(sizes) // (self.ranks * ALIGNED)) * ALIGNED
        self.weights = torch.zeros(self.shard * self.ranks, dtype=dtype, device=device)
        self.gradients = torch.zeros_like(self.weights)
        begin = 0
        for p, size in zip(parameters, sizes):
            view = self.weights[begin : begin + p.numel()].view_as(p)
            view.copy_(p.data)
            p.data = view
            p.grad = self.gradients[begin : begin + p.numel()].view_as(p)
            begin += size
        own = slice(self.rank * self.shard, (self.rank + 1) * self.shard)
        self.own_weights, self.own_gradients = self.weights[own], self.gradients[own]
        self.master = torch.nn.Parameter(self.own_weights.float())
        self.adam = torch.optim.AdamW([self.master], lr=lr, weight_decay=0.0, fused=device.type == "cuda")
        # NCCL reduces into, and gathers from, shards of the buffer itself.
        self.in_place = device.type == "cuda"

    def zero_grad(self) -> None:
        """Set the gradients to zero."""
        self.gradients.zero_()

    def step(self) -> torch.Tensor:
        """Sum the gradients over the ranks, update, and give the norm of the gradient."""
        self.scatter()
        self.master.grad = self.own_gradients.float()
        norm = self.master.grad.pow(2).sum()
        dist.all_reduce(norm)
        self.adam.step()
        self.master.grad = None
        self.own_weights.copy_(self.master.data)
        self.gather()
        return norm.sqrt()

    def scatter(self) -> None:
        """Sum the gradients over the ranks, each its own shard."""
        if self.in_place:
            dist.reduce_scatter_tensor(self.own_gradients, self.gradients)
        else:
            dist.all_reduce(self.gradients)

    def gather(self) -> None:
        """Give all ranks the weights of all shards."""
        if self.in_place:
            dist.all_gather_into_tensor(self.weights, self.own_weights)
        else:
            parts = list(self.weights.clone().view(self.ranks, -1).unbind())
            dist.all_gather(parts, self.own_weights.clone())
            self.weights.copy_(torch.cat(parts))
