"""What a model of transformers is made of: the model inside wrappers, its decoder, its layers, its own attention.

In: a module. Out: parts of it, found by structure and by the conventions of transformers; or the same module with a
subclass of its own class, whose code, parameters and names stay while a mixin runs around them.
"""

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed_cad.integrations.model_table import SEEING
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

CACHES = ("cache", "past_key_values", "past_key_value", "cache_params")
"""How versions of transformers call the argument that holds keys or state of tokens before; since 5.24 all "cache"."""
_WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module")
KIND = "chunked_attention"
"""In `layer_types`."""


def has_chunks(config: Any) -> bool:
    """Whether some layers of a model attend in chunks."""
    return KIND in (getattr(config, "layer_types", None) or ())


def has_cache(given: Mapping[str, Any]) -> bool:
    """Whether the arguments of a decoder or layer hold what tokens before left."""
    return any(given.get(name) is not None for name in CACHES)


def find_decoder(model: PreTrainedModel) -> nn.Module:
    """The module whose forward makes the masks and runs the layers."""
    decoder = getattr(model, model.base_model_prefix, model)
    for name in ("decoder", "model", "language_model"):
        inner = getattr(decoder, name, None)
        if decoder_layers(decoder) is None and isinstance(inner, nn.Module):
            decoder = inner
    return decoder


def text_part(model: PreTrainedModel) -> PreTrainedModel:
    """The decoder of text inside a model of several modalities; the model itself where it has only text."""
    if getattr(model.config, "model_type", "") not in SEEING:
        return model
    decoder = find_decoder(model)
    return decoder if isinstance(decoder, PreTrainedModel) else model


def decoder_layers(decoder: nn.Module) -> nn.ModuleList | None:
    found = (getattr(decoder, name, None) for name in ("layers", "h", "blocks"))
    return next((layers for layers in found if isinstance(layers, nn.ModuleList)), None)


def name_layer(module: nn.Module) -> str:
    """How errors and the timeline call a module of a decoder layer."""
    return f"{type(module).__name__} of layer {getattr(module, 'layer_idx', '?')}"


def has_attention(layer: nn.Module) -> bool:
    """Whether a decoder layer calls the attention interface."""
    names = (inspect.unwrap(type(module).forward).__code__.co_names for module in layer.modules())
    return any("ALL_ATTENTION_FUNCTIONS" in found for found in names)


def training_device(model: nn.Module) -> torch.device:
    """Where the model will train: its own device, or the local GPU for a model that is still on the CPU or sharded."""
    on_gpu = any(one.is_cuda for one in (*model.parameters(), *model.buffers()))
    if torch.cuda.is_available() and torch.distributed.is_initialized():
        backend = str(torch.distributed.get_backend_config())
        on_gpu = on_gpu or "cuda" in backend or "nccl" in backend
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def default_attention(config: Any) -> str:
    """What transformers would choose for a model without an explicit attention name, such as a copy of a bound one."""
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return "sdpa" if model_class is None or getattr(model_class, "_supports_sdpa", True) else "eager"


def local_attention(module: nn.Module, name: str) -> Callable[..., Any]:
    eager: Callable[..., Any] | None = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if name == "eager" and eager is not None:
        return eager
    return ALL_ATTENTION_FUNCTIONS[name if name in ALL_ATTENTION_FUNCTIONS else "sdpa"]


def mix_in(module: nn.Module, mixin: type) -> nn.Module:
    """Give a module a subclass of its own class with the mixin before it; gives the module. Idempotent."""
    if not isinstance(module, mixin):
        module.__class__ = subclass_of(type(module), mixin)  # type: ignore[arg-type]
    return module


@functools.cache
def subclass_of(cls: type, mixin: type, **more: Any) -> type:
    """One class for all modules of a class: FSDP's wrapping policies look layers up by it, transformers by its name.
    `more`: what else is in its body."""
    body = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, **more}
    return types.new_class(cls.__name__, (mixin, cls), exec_body=lambda names: names.update(body))


@contextmanager
def replaced(names: dict[str, Any], others: Mapping[str, Any]) -> Iterator[None]:
    """Inside, these names of a module or an object stand for others."""
    kept = {name: names[name] for name in others if name in names}
    names.update(others)
    try:
        yield
    finally:
        for name in others.keys() - kept.keys():
            del names[name]
        names.update(kept)


def inside_wrappers(layer: nn.Module) -> nn.Module:
    """The layer inside of FSDP and checkpointing, which pass arguments on: what runs there is gathered once, and
    recomputed as a whole."""
    for name in _WRAPPERS:
        layer = getattr(layer, name, layer)
    return layer
