"""What a layer of transformers passes to its attention function, refused where CAD cannot reproduce it.

In: the arguments of an attention function of transformers. Out: O, by `function.attend`, or an error that names the
layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from deepspeed_cad.integrations.models import refuse_arguments
from deepspeed_cad.integrations.structure import name_layer

from deepspeed_cad.attention.layer import LayerInput
from deepspeed_cad.errors import CADError, CADUnsupportedError
from deepspeed_cad.function import attend


def attend_layer(
    run: Callable[[LayerInput], torch.Tensor],
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    window: int | None,
    scaling: float | None,
    dropout: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
    others: Mapping[str, Any],
) -> torch.Tensor:
    """O [B, S, H, V] of a layer. Raises CADUnsupportedError for dropout and arguments that change what is computed, and
    CADError where there are more keys than queries.

    Args:
        run: see function.attend.
        module: the attention module.
        query: [B, H, S, D].
        key: [B, K, S, D].
        value: [B, K, S, V].
        window: that of the layer's mask, in tokens.
        scaling: of scores; None for 1 / √D.
        dropout: of attention weights.
        softcap: of scores.
        sinks: [H].
        others: all else that the attention function received.
    """
    if dropout:
        raise CADUnsupportedError(
            f"attention dropout is {dropout}; CAD needs 0 (set attention_dropout=0.0 in the model's config)"
        )
    label = name_layer(module)
    refuse_arguments(label, others)
    if key.shape[2] != query.shape[2]:
        raise CADError(
            f"{label} got {key.shape[2]} keys for {query.shape[2]} queries: a KV cache is in use during training; "
            "pass use_cache=False"
        )
    o_THV = attend(
        run, flat(query), flat(key), flat(value), layer=module, label=label,
        softmax_scale=scaling, window=window, softcap=softcap, sinks=sinks,
    )  # fmt: skip
    return o_THV.unflatten(0, (query.shape[0], query.shape[2]))


def flat(x_BHSD: torch.Tensor) -> torch.Tensor:
    """[T, H, D] of [B, H, S, D]."""
    return x_BHSD.transpose(1, 2).flatten(0, 1)
