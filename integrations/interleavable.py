"""Whether a decoder can run as two nano-batches that alternate over its layers, or why not.

In: a decoder at its first forward, when every wrapper is on it. Out: a reason in words, empty where it can. Nothing is
looked at but the model and what wraps its modules, so every rank finds the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import transformers
from deepspeed_cad.integrations.chunks import KIND
from deepspeed_cad.integrations.models import batch_rope, is_reentrant
from deepspeed_cad.integrations.structure import decoder_layers
from torch import nn

ATTENTION_LAYERS = {
    "full_attention", "sliding_attention", "attention", "full", "sliding", "dense", "sparse", "moe", KIND,
}  # fmt: skip
"""Kinds of layers in which nothing but attention looks at other tokens."""


def why_not_twice(decoder: nn.Module) -> str:
    """Why the decoder's forward cannot run twice at a time, each on a part of the tokens; empty where it can."""
    return next(filter(None, (check(decoder) for check in _CHECKS)), "")


def _sharding(decoder: nn.Module) -> str:
    # Each call of a layer gathers its parameters and gives them back, while the other nano-batch is inside.
    if any(hasattr(parameter, "ds_id") for parameter in decoder.parameters()):
        return "ZeRO-3 shards the parameters, and a layer that ran gives them back"
    for module in decoder.modules():
        if hasattr(module, "_get_fsdp_state") or hasattr(module, "_fsdp_wrapped_module"):
            return "FSDP wraps its layers, and a layer that ran gives its parameters back or reduces their gradients"
    return ""


def _checkpointing(decoder: nn.Module) -> str:
    for module in decoder.modules():
        function = getattr(module, "_gradient_checkpointing_func", None)
        if getattr(module, "gradient_checkpointing", False) and function is not None and is_reentrant(function):
            return (
                "reentrant checkpointing runs the backward of a layer in one piece; set use_reentrant to false "
                "(gradient_checkpointing_kwargs)"
            )
    return ""


def _layers(decoder: nn.Module) -> str:
    config = getattr(decoder, "config", None)
    other = sorted(map(str, set(getattr(config, "layer_types", None) or ()) - ATTENTION_LAYERS))
    if other:
        return f"layers of type {', '.join(other)} look at earlier tokens by other ways than attention"
    for index, layer in enumerate(decoder_layers(decoder) or ()):
        names = [type(module).__name__ for module in layer.modules()]
        if not any("Attention" in name for name in names):
            return f"layer {index} has no attention, and nobody knows which tokens it looks at"
        if any(isinstance(module, nn.Conv1d) for module in layer.modules()):
            return f"layer {index} has a convolution over tokens"
    return ""


def _positions(decoder: nn.Module) -> str:
    config = getattr(decoder, "config", None)
    kind = batch_rope(config)
    if kind:
        return f'rope_type is "{kind}": its frequencies depend on the largest position in the batch'
    if getattr(config, "model_type", "") == "opt":
        return "OPT counts positions by its padding mask"
    return ""


def _images(decoder: nn.Module) -> str:
    if "deepstack_visual_embeds" in inspect.signature(decoder.forward).parameters:
        return "features of images are added between its layers"
    return ""


ONE_AT_A_TIME = not hasattr(transformers.utils, "output_capturing")
"""Before that file was there, a forward replaced the forwards of its layers to record what they return."""


def records(decoder: nn.Module, given: Mapping[str, Any]) -> bool:
    """Whether a forward with these arguments records outputs of layers in a way that two at a time would disturb."""
    if not ONE_AT_A_TIME:
        return False
    config = getattr(decoder, "config", None)
    names = ("output_hidden_states", "output_router_logits")
    return any(getattr(config, name, False) if given.get(name) is None else given[name] for name in names)


_CHECKS: tuple[Callable[[nn.Module], str], ...] = (
    _sharding, _checkpointing, _layers, _positions, _images,
)  # fmt: skip
