"""A decoder of one's own, without transformers: `deepspeed_cad.open` attends in it, under FSDP2 and checkpointing.

    torchrun --nproc_per_node 2 examples/own_model.py

On GPUs and on CPUs. Documents begin where positions are 0; `cu_seqlens` of them would do as well.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from packing import pack, synthetic
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import deepspeed_cad
from deepspeed_cad.function import Step

ON_GPU = torch.cuda.is_available()


class Attention(nn.Module):
    """Grouped-query attention with rotary positions."""

    def __init__(self, number: int, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.number, self.size = number, width // heads
        self.q = nn.Linear(width, heads * self.size, bias=False)
        self.kv = nn.Linear(width, 2 * kv_heads * self.size, bias=False)
        self.o = nn.Linear(heads * self.size, width, bias=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, step: Step) -> torch.Tensor:
        """x [T, width]."""
        q, (k, v) = self.q(x).unflatten(-1, (-1, self.size)), self.kv(x).unflatten(-1, (2, -1, self.size)).unbind(1)
        o_THD = step.attend(rotate(q, positions), rotate(k, positions), v, layer=self.number)
        return self.o(o_THD.flatten(1))


class Layer(nn.Module):
    """Attention and a gated MLP, each behind a norm."""

    def __init__(self, number: int, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.attention = Attention(number, width, heads, kv_heads)
        self.norms = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)])
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, step: Step) -> torch.Tensor:
        """x [T, width]."""
        x = x + self.attention(self.norms[0](x), positions, step)
        gate, up = self.up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Decoder(nn.Module):
    """Logits of packed tokens; every layer is recomputed in backward, and its attention is not."""

    def __init__(self, vocabulary: int, layers: int, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList([Layer(i, width, heads, kv_heads) for i in range(layers)])
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, step: Step) -> torch.Tensor:
        """ids, positions [T]; gives [T, vocabulary]."""
        x = self.embed(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, positions, step, use_reentrant=False)
        return self.head(self.norm(x))


def rotate(x_THD: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary embedding."""
    half = x_THD.shape[-1] // 2
    angle = positions[:, None] * 10000.0 ** (-torch.arange(half, device=positions.device) / half)
    cos, sin = angle.cos()[:, None].to(x_THD), angle.sin()[:, None].to(x_THD)
    a, b = x_THD.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def main() -> None:
    """Train on random documents."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if ON_GPU else torch.device("cpu")
    if ON_GPU:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if ON_GPU else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Decoder(512, layers=2, width=64, heads=8, kv_heads=4).to(device)
    for layer in (*model.layers, model):
        fully_shard(layer)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    cad = deepspeed_cad.open({"tolerance": 0.05, "granularity": 16})
    rows = pack(synthetic(40, 1.2, 512), 512, 8 * world)[rank::world]
    # Each micro-batch is planned while the one before it trains.
    following = plan(cad, rows[0])
    for number, row in enumerate(rows):
        step, following = following, plan(cad, rows[number + 1]) if number + 1 < len(rows) else None
        ids, positions, labels = (row[name][0].to(device) for name in ("input_ids", "position_ids", "labels"))
        logits = model(ids, positions, step)
        loss = F.cross_entropy(logits[:-1], labels[1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach())
        figures = cad.session.take_statistics("own_model")
        if rank == 0:
            balance = f"attention max/mean {figures.imbalance_before:.2f} -> {figures.imbalance:.2f}"
            print(f"step {number + 1}  loss {float(loss.detach()) / world:.4f}  {balance}", flush=True)
    dist.destroy_process_group()


def plan(cad: deepspeed_cad.function.CAD, row: dict[str, torch.Tensor]) -> Step:
    """The plan of a packed row."""
    return cad.plan(position_ids=row["position_ids"], heads=8, kv_heads=4, head_dim=8)


if __name__ == "__main__":
    main()
