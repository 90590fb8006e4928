"""torchtitan's own Trainer on CPUs, first with plain attention, then with CAD: a script for ranks, with a model, the
degree of tensor parallelism and a file for what rank 0 saw.

torchtitan takes a GPU for granted, and flex attention has no backward on CPUs. So here devices are CPUs, memory is not
watched, gloo adds gradients up instead of scaling them on the way, and the plain run attends document by document.
Everything is in fp64.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
import torch._utils
import torch.distributed as dist

torch._utils._get_available_device_type = lambda: "cpu"  # before torchtitan asks
# ruff: noqa: E402

from torch.distributed.fsdp import FSDPModule
from torchtitan.components import metrics
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.config import TORCH_DTYPE_MAP, derive, override
from torchtitan.distributed import utils
from torchtitan.models.common.attention import BaseAttention, VarlenAttention

import deepspeed_cad
from deepspeed_cad.session import close_session

BLOCK = {"granularity": 16, "tolerance": 0.02, "links": {"inside": 100, "between": 10}}
TOKENS, STEPS = 128, 3


class Plain(VarlenAttention):
    """Each document alone, by torch's own attention."""

    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        """As its base."""

    def forward(
        self, q_BLNH: Any, k_BLNH: Any, v_BLNH: Any, *, attention_masks: Any, scale: Any = None, **_: Any
    ) -> Any:
        q, k, v = (x.flatten(0, 1) for x in (q_BLNH, k_BLNH, v_BLNH))
        ends = attention_masks.cu_seq_q.tolist()
        found = [
            torch.nn.functional.scaled_dot_product_attention(
                *(x[begin:end].transpose(0, 1) for x in (q, k, v)), is_causal=True, scale=scale, enable_gqa=True
            ).transpose(0, 1)
            for begin, end in zip(ends, ends[1:])
        ]
        return torch.cat(found).unflatten(0, q_BLNH.shape[:2])


@override(target=BaseAttention.Config)
def plain(config: Any) -> Any:
    """The override of the run without CAD."""
    return replace(config, inner_attention=derive(config.inner_attention, Plain.Config))


class Documents(BaseDataLoader):
    """Two rows of packed documents for each step: long ones on even ranks, short ones on odd ones."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """As its base."""

    def __init__(self, config: Any, *, dp_rank: int, **_: Any) -> None:
        self.rank = dp_rank

    def __iter__(self) -> Iterator[Any]:
        gen = torch.Generator().manual_seed(self.rank)
        lengths = [[TOKENS], [TOKENS - 40, 40]] if self.rank % 2 == 0 else [[9] * 14 + [2], [TOKENS // 4] * 4]
        while True:
            ids = torch.randint(0, 2000, (2, TOKENS + 1), generator=gen)
            positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
            yield {"input": ids[:, :-1], "positions": positions}, ids[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class Memory:
    """Stands for torchtitan's monitor of a GPU's memory."""

    device_name = "CPU"

    def get_peak_stats(self) -> Any:
        return metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)

    def reset_peak_stats(self) -> None:
        pass


def arrange() -> None:
    """Let torchtitan run here."""
    metrics.build_device_memory_monitor = Memory
    utils.set_pg_timeouts = lambda **given: None  # by a function of a newer torch
    for name in ("float32", "bfloat16"):
        TORCH_DTYPE_MAP[name] = torch.float64
    HuggingFaceTokenizer.Config.build = lambda self, **given: None


def train(model: str, tensor: int, imports: list[Any]) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """Losses and gradient norms of the steps, and this rank's parameters after them."""
    package = import_module(f"torchtitan.models.{model}")
    config = getattr(import_module(f"{package.__name__}.config_registry"), f"{model}_debugmodel")()
    config.model_spec = package.model_registry("debugmodel")
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    config.override.imports, config.dataloader = imports, Documents.Config()
    training, parallelism = config.training, config.parallelism
    training.local_batch_size, training.seq_len, training.steps, training.disable_cuda_graphs = 2, TOKENS, STEPS, True
    parallelism.spmd_backend, parallelism.tensor_parallel_degree = "partial_dtensor", tensor
    config.checkpoint.enable = config.validator.enable = False
    config.debug.seed = 1
    trainer = config.build()
    for module in trainer.model_parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    seen: list[list[float]] = []
    trainer.metrics_processor.log = lambda step, *figures, **_: seen.append([float(one) for one in figures])
    trainer.train()
    found = {name: value.detach().clone() for name, value in trainer.model_parts[0].named_parameters()}
    trainer.close()
    return seen, found


def main() -> None:
    """Train twice and compare."""
    model, tensor, out = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    arrange()
    expected, right = train(model, tensor, ["__main__.plain"])
    cad = ("deepspeed_cad.integrations.torchtitan.cad", BLOCK)
    seen, found = train(model, tensor, [cad])
    to_local = lambda x: x.to_local() if hasattr(x, "to_local") else x  # noqa: E731
    error = max(float((to_local(found[name]) - to_local(right[name])).abs().max()) for name in right)
    session = deepspeed_cad.current_session()
    assert session is not None
    counts, statistics = session.counts, session.statistics
    if dist.get_rank() == 0:
        result = {
            "seen": seen, "expected": expected, "error": error, "shares": session.shares.count,
            "before": statistics.imbalance_before, "after": statistics.imbalance, "forwards": counts.forwards,
            "backwards": counts.backwards, "replays": counts.replays, "micro_batches": statistics.micro_batches,
        }  # fmt: skip
        with open(out, "w", encoding="utf-8") as file:
            json.dump(result, file)
    close_session()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
