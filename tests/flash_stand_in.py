"""What OpenRLHF and verl import of flash-attn, on a CPU: its padding functions, and attention of each document alone.

Their sources name flash-attn's functions at the top, and `attn_implementation="flash_attention_2"`. transformers looks
for a GPU before it takes that, so the name is given an attention here that any machine has.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch
from einops import rearrange
from torch.nn.functional import pad, scaled_dot_product_attention


def index_first_axis(values: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Rows of the first axis."""
    return values[indices]


def unpad_input(hidden: torch.Tensor, mask: torch.Tensor) -> tuple[Any, ...]:
    """[rows, length, …] to [tokens, …]: also where they came from, cumulative lengths, the longest, and lengths."""
    lengths = mask.sum(dim=-1, dtype=torch.int32)
    indices = mask.flatten().nonzero()[:, 0]
    cumulative = pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return hidden.flatten(0, 1)[indices], indices, cumulative, int(lengths.max()), lengths


def pad_input(hidden: torch.Tensor, indices: torch.Tensor, batch: int, length: int) -> torch.Tensor:
    """The way back, with zeros where there was padding."""
    whole = hidden.new_zeros(batch * length, *hidden.shape[1:])
    return whole.index_put((indices,), hidden).unflatten(0, (batch, length))


def attend_alone(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None,
    scaling: float | None = None, position_ids: torch.Tensor | None = None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Attention of transformers for [rows, heads, tokens, size], each document alone; padding gives zeros."""
    out = torch.zeros_like(query)
    for row in range(len(query)):
        real = torch.arange(query.shape[2]) if mask is None else mask[row].nonzero()[:, 0]
        begins = torch.zeros(0, dtype=torch.long)
        if position_ids is not None and mask is None:
            begins = (position_ids[row % len(position_ids)] == 0).nonzero()[1:, 0]
        for rows in torch.tensor_split(real, begins.tolist()):
            q, k, v = (x[row : row + 1, :, rows] for x in (query, key, value))
            o = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
            out = out.index_put((torch.tensor([row])[:, None], torch.arange(out.shape[1])[:, None], rows), o[0])
    return out.transpose(1, 2).contiguous(), None


def install() -> None:
    """From now on `import flash_attn` finds the padding functions, and models take "flash_attention_2" on a CPU."""
    import transformers.modeling_utils as modeling

    package, padding, distributed = (
        types.ModuleType(f"flash_attn{name}") for name in ("", ".bert_padding", ".utils.distributed")
    )
    package.__path__ = []
    vars(padding).update(
        index_first_axis=index_first_axis, unpad_input=unpad_input, pad_input=pad_input, rearrange=rearrange
    )
    distributed.all_gather = None  # of ring attention
    utils = types.ModuleType("flash_attn.utils")
    sys.modules |= {module.__name__: module for module in (package, padding, utils, distributed)}
    modeling.lazy_import_flash_attention = lambda *args, **kwargs: None
    modeling.PreTrainedModel._flash_attn_can_dispatch = lambda *args, **kwargs: True
    modeling.AttentionInterface.register("flash_attention_2", attend_alone)
