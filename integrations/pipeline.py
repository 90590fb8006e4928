"""Attention of pipeline stages: the functions that transformers' layers call inside a DeepSpeed PipelineModule.

Layers of a stage get tensors only, so no descriptor can travel with them as it does where a whole model runs. Each
attention module knows its engine's binding, and that knows which micro-batch runs.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from deepspeed_cad.integrations.functions import attend_layer, chunk_of
from deepspeed_cad.integrations.structure import name_layer
from transformers import AttentionInterface, AttentionMaskInterface

from deepspeed_cad.attention.layer import LayerInput
from deepspeed_cad.errors import CADUnsupportedError

NAME = "cad_pipeline"
"""The attention name; see functions.NAME about what it must not contain."""
_BINDING = "cad_pipeline"
"""Attribute of attention modules."""


class Attends(Protocol):
    """What runs the attention of a stage."""

    def attend(self, layer: LayerInput) -> torch.Tensor:
        """O [B, S, H, V]."""

    def see_mask(self, window: int | None, given: dict[str, Any]) -> None:
        """A layer made this mask; raises where the plan does not agree with it."""


def install_attention(stage: torch.nn.Module, binding: Attends) -> int:
    """Let all attention modules of a stage attend through a binding; gives how many there are."""
    AttentionInterface.register(NAME, pipeline_attention)
    AttentionMaskInterface.register(NAME, window_mask)
    found = 0
    for module in stage.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            refuse_dropout(config)
            config._attn_implementation = NAME
            if "Attention" in type(module).__name__:
                setattr(module, _BINDING, binding)
                found += 1
    return found


def refuse_dropout(config: Any) -> None:
    """Raise CADUnsupportedError where attention weights would be dropped at random."""
    for name in ("attention_dropout", "attn_dropout", "attn_pdrop", "attention_probs_dropout_prob"):
        if getattr(config, name, 0.0):
            raise CADUnsupportedError(
                f"{name} is {getattr(config, name)} in the model's config: attention weights would be dropped at "
                f"random on another rank than without CAD. Set {name}=0.0; dropout elsewhere in the model is fine"
            )


class Window:
    """Stands where layers expect a mask: plans know the documents, only the window is the layer's own."""

    __slots__ = ("given", "size")

    def __init__(self, size: int | None, given: dict[str, Any]) -> None:
        """`given`: what the mask function got. Which micro-batch it is for is not known before a layer attends."""
        self.size, self.given = size, given


def window_mask(*args: Any, **kwargs: Any) -> Window:
    """The mask function. Raises CADUnsupportedError for chunks."""
    if chunk_of(kwargs) is not None:
        raise CADUnsupportedError("layers of this model attend in chunks, which CAD does not plan in pipelines")
    return Window(kwargs.get("local_size"), kwargs)


@torch.compiler.disable
def pipeline_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function. query [B, H, S, D], key and value [B, K, S, D]; gives [B, S, H, V]."""
    label = name_layer(module)
    binding: Attends | None = getattr(module, _BINDING, None)
    if binding is None:
        raise CADUnsupportedError(f"{label} is not part of a stage on which CAD was turned on")
    if isinstance(attention_mask, Window):
        if sliding_window not in (None, attention_mask.size):
            raise CADUnsupportedError(
                f"{label} has a window of {sliding_window} tokens, its mask one of {attention_mask.size}"
            )
        sliding_window = attention_mask.size
        binding.see_mask(attention_mask.size, attention_mask.given)
    elif attention_mask is not None:
        raise CADUnsupportedError(
            f"{label} got a ready-made mask; in a pipeline documents are read from position ids: pass none"
        )
    given = (module, query, key, value, sliding_window, scaling, dropout, softcap, s_aux, kwargs)
    return attend_layer(binding.attend, *given), None
