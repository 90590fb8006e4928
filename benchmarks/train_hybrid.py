"""A hybrid for the training benchmark: three gated delta nets to one layer of attention, as Qwen3.5 and Qwen3-Next.

In: the sizes of `train_model.make_model`. Out: a model of these sizes, and for modes without CAD what keeps its state
inside documents: the same code that CAD uses, so that all but attention is the same in every mode.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from deepspeed_cad.integrations import recurrent
from deepspeed_cad.integrations.borders import NAME, Borders
from deepspeed_cad.integrations.recurrent import Ways, find_recurrent, watch_state
from train_attention import Stopwatch
from train_model import random_weights
from train_split import MicroBatch, Setting, own_row

from deepspeed_cad.errors import CADError

EVERY = 4
"""Of so many layers one attends."""


def make_hybrid(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, longest: int,
    device: torch.device, dtype: torch.dtype,
) -> Any:  # fmt: skip
    """A Qwen3.5 with random weights, the same on every rank; every fourth layer attends, the last of all does."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    size = min(128, hidden // 4)
    config = Qwen3_5TextConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=hidden // heads,
        max_position_embeddings=longest, tie_word_embeddings=False, use_cache=False,
        layer_types=["linear_attention" if (layers - 1 - i) % EVERY else "full_attention" for i in range(layers)],
        linear_key_head_dim=size, linear_value_head_dim=size, linear_num_value_heads=hidden // size,
        linear_num_key_heads=hidden // size // 2, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return random_weights(lambda: Qwen3_5ForCausalLM(config), device, dtype)


def with_borders(
    model: Any, setting: Setting, split: Callable[[int], list[MicroBatch]]
) -> Callable[[int], list[MicroBatch]]:
    """`split` of a mode that trains whole rows, for a model whose layers may carry state.

    Of a stream each rank takes what it holds of a document for all of it.
    """
    if not find_recurrent(model):
        return split
    watch_state(model.model, model.model.layers)
    ways = Ways(_stop)

    def split_with_borders(step: int) -> list[MicroBatch]:
        borders = Borders.of_lengths(own_row(setting, step).lengths)
        return [dataclasses.replace(one, inputs={**one.inputs, NAME: (borders, ways)}) for one in split(step)]

    return split_with_borders


def attending_layers(model: Any) -> int:
    """How many layers attend."""
    return len(model.model.layers) - len(find_recurrent(model))


def time_state(model: Any, watch: Stopwatch) -> None:
    """Spans "state forward", recompute included, and "state backward" around each layer that carries state."""

    def open_forward(module: Any, args: tuple[Any, ...], given: dict[str, Any]) -> None:
        module.ends_span = watch.begin("state forward")

    def close_forward(module: Any, args: tuple[Any, ...], given: dict[str, Any], output: torch.Tensor) -> None:
        module.ends_span()
        hidden = args[0] if args else given["hidden_states"]
        if watch.on and torch.is_grad_enabled() and hidden.requires_grad:
            under_way: list[Callable[[], None]] = []
            output.register_hook(lambda grad: under_way.append(watch.begin("state backward")))
            hidden.register_hook(lambda grad: under_way.pop()())

    for module in find_recurrent(model).values():
        module.register_forward_pre_hook(open_forward, with_kwargs=True)
        module.register_forward_hook(close_forward, with_kwargs=True)


def _stop(error: CADError) -> None:
    raise error


def gather_rows(on: bool) -> None:
    """From now on layers that carry state gather the rows of a document that lies on all ranks, in equal pieces, and
    every rank runs all of them; or no longer."""
    recurrent.run_over_ranks = _run_all_rows if on else _OVER_RANKS


_OVER_RANKS = recurrent.run_over_ranks


def _run_all_rows(
    module: torch.nn.Module, run: Callable[[torch.Tensor], torch.Tensor], hidden_1TD: torch.Tensor, spanning: Any
) -> torch.Tensor:
    rows = hidden_1TD.shape[1]
    return run(_AllRows.apply(hidden_1TD[0])[None])[:, dist.get_rank() * rows :][:, :rows]


class _AllRows(torch.autograd.Function):
    """Rows [T, D] of each rank to those of all, [N, D]; their gradients are summed where they lie."""

    @staticmethod
    def forward(ctx: Any, own_TD: torch.Tensor) -> torch.Tensor:
        everyone = own_TD.new_empty(dist.get_world_size() * own_TD.shape[0], own_TD.shape[1])
        dist.all_gather_into_tensor(everyone, own_TD.contiguous())
        return everyone

    @staticmethod
    def backward(ctx: Any, gradient_ND: torch.Tensor) -> torch.Tensor:
        ranks, rank = dist.get_world_size(), dist.get_rank()
        if not gradient_ND.is_cuda:
            gradient_ND = gradient_ND.clone(memory_format=torch.contiguous_format)
            dist.all_reduce(gradient_ND)
            return gradient_ND.chunk(ranks)[rank]
        own_TD = gradient_ND.new_empty(gradient_ND.shape[0] // ranks, gradient_ND.shape[1])
        dist.reduce_scatter_tensor(own_TD, gradient_ND.contiguous())
        return own_TD
