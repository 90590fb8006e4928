"""Which models CAD reproduces exactly, and why it refuses the others.

In: a model of transformers. Out: nothing, or a CADUnsupportedError that says what was found, why CAD cannot reproduce
it and what to do instead. The checks look at what the model is made of (its config, its modules, the names its code
imports), so that they also hold for models that nobody here has seen; `model_table.py` lists those that were tried.
"""

import functools
import json
import logging
import re
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from deepspeed_cad.integrations.model_table import REFUSED, SEEING, SUPPORTED
from deepspeed_cad.integrations.recurrent import CARRYING, find_recurrent
from deepspeed_cad.integrations.structure import KIND, has_attention, has_chunks, text_part
from torch import nn
from transformers import PreTrainedModel

from deepspeed_cad.ahead.step import batch_rope
from deepspeed_cad.errors import CADUnsupportedError
from deepspeed_cad.session import Session

logger = logging.getLogger("deepspeed_cad")

LAYER_TYPES = {
    "full_attention", "sliding_attention", "attention", "full", "sliding", "dense", "sparse", "moe", "mlp", KIND,
}  # fmt: skip
"""Kinds of decoder layers that CAD reproduces (an MLP's kind is of no interest to attention)."""

_LAYER_FIELDS = ("layer_types", "layers_block_type", "block_types", "attn_type_list", "hybrid_layer_pattern")
_EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts")
_MASK_NAMES = ("create_causal_mask", "create_sliding_window_causal_mask", "create_masks_for_generate")
_ATTENTION_DROPOUT = re.compile(r"att(entio)?n.*drop|drop.*att(entio)?n")
_BIDIRECTIONAL = "tokens would see later tokens, and CAD computes causal attention"
_CROSSING = "cross-attention reads tokens that are in no document"
_STATE = re.compile(r"(^|\.)(A_log|dt_bias|time_decay)$")
_MACHINE_FIELDS = {"_name_or_path", "name_or_path", "_commit_hash", "transformers_version", "auto_map"}


class Refusal(NamedTuple):
    found: str
    """What it is in the model: a config field with its value, or a module."""
    reason: str
    instead: str = "Train this model without CAD"


def find_model(model: nn.Module) -> PreTrainedModel:
    """The transformers model inside wrappers; of several side by side, as a vision tower and a decoder, the first that
    CAD can have."""
    if not (found := _side_by_side(model)):
        raise CADUnsupportedError(
            f"{type(model).__name__} contains no transformers model: attention of your own calls deepspeed_cad.open"
        )
    return found[0] if len(found) == 1 else next((one for one in found if not any(_refusals(one))), found[0])


def _side_by_side(model: nn.Module) -> list[PreTrainedModel]:
    found, inside = list[PreTrainedModel](), set[nn.Module]()
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and module not in inside:
            found.append(module)
            inside.update(module.modules())
    return found


def warn_of_others(model: nn.Module, bound: PreTrainedModel) -> None:
    """Say which models beside the one that has CAD are trained without it, though they could have it."""
    for one in _side_by_side(model):
        if one is not bound and any(each.requires_grad for each in one.parameters()) and not any(_refusals(one)):
            logger.warning(
                "deepspeed_cad: of the models inside %s one has CAD, a %s; a %s beside it keeps its attention",
                type(model).__name__, type(bound).__name__, type(one).__name__,
            )  # fmt: skip


def _refusals(model: PreTrainedModel) -> Iterator[Refusal]:
    for check in (_of_family, _of_layers, _of_modules, _of_interface, _of_scores):
        yield from check(text_part(model))


def refuse_model(model: PreTrainedModel) -> None:
    """Raise CADUnsupportedError with the reason if CAD cannot reproduce the model exactly. A model that passes every
    check but was never tried is accepted with a warning."""
    kind = getattr(model.config, "model_type", "")
    for found, reason, instead in _refusals(model):
        raise CADUnsupportedError(
            f"CAD does not support {type(model).__name__} ({kind or 'no model_type'}): {found}: {reason}. {instead}"
        )
    if kind not in SUPPORTED | SEEING:
        logger.warning(
            "deepspeed_cad: %s (%s) was never tested with CAD. It passes the checks of its structure, and the sampled "
            'check compares its attention mask with the plan while it trains ("check": "sampled")',
            type(model).__name__, kind,
        )  # fmt: skip


def why_kept(model: PreTrainedModel) -> str:
    """Why a model keeps its attention, which a warning says, too; empty where it can have CAD."""
    try:
        refuse_model(model)
    except CADUnsupportedError as error:
        logger.warning("deepspeed_cad: %s keeps its attention: %s", type(model).__name__, error)
        return str(error)
    return ""


def _of_family(model: PreTrainedModel) -> Iterator[Refusal]:
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        yield Refusal("is_encoder_decoder is True", "an encoder and cross-attention do not fit causal documents")
    kind = getattr(config, "model_type", "")
    reason = REFUSED.get(kind)
    several = ("audio_config", "decoder_config", "text_config", "vision_config")
    parts = {name: vars(config)[name] for name in several if name in vars(config)}
    if other := [name for name, part in parts.items() if isinstance(part, dict) or hasattr(part, "to_dict")]:
        yield Refusal(
            f"its config has {', '.join(other)}",
            reason
            or "models of several modalities use cross-attention, or attention that is not causal inside an image, and "
            "nobody tried this one",
            "Train its text decoder alone (its ...ForCausalLM class on the text config), or train without CAD",
        )
    if reason is not None:
        yield Refusal(f'model_type is "{kind}"', reason)
    if getattr(config, "is_causal", None) is False:
        yield Refusal("is_causal is False", _BIDIRECTIONAL)
    if getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision"):
        yield Refusal(f"use_bidirectional_attention is {config.use_bidirectional_attention!r}", _BIDIRECTIONAL)
    if getattr(config, "add_cross_attention", False):
        yield Refusal("add_cross_attention is True", _CROSSING)


def _of_layers(model: PreTrainedModel) -> Iterator[Refusal]:
    config, recurrent = model.config, find_recurrent(model)
    if getattr(config, "attention_chunk_size", None) and not has_chunks(config):
        yield Refusal(
            f"attention_chunk_size is {config.attention_chunk_size}",
            "chunked attention cuts documents at fixed positions, and layer_types does not say in which layers",
        )
    for field in _LAYER_FIELDS:
        kinds = getattr(config, field, None)
        named = [kind for kind in kinds if isinstance(kind, str)] if isinstance(kinds, (list, tuple)) else []
        # Of layers with state CAD keeps that of all it knows inside documents.
        known = CARRYING if sum(kind in CARRYING for kind in named) == len(recurrent) else set()
        if foreign := set(named) - LAYER_TYPES - known:
            yield Refusal(
                f"{field} has {', '.join(sorted(foreign))}",
                "such layers either carry state from token to token, which CAD's documents do not reset, or choose "
                "their keys by content",
            )
    if shared := getattr(config, "num_kv_shared_layers", 0):
        yield Refusal(f"num_kv_shared_layers is {shared}", "layers that read the keys of other layers are not planned")
    owned = tuple(f"{name}." for name in recurrent)
    for name, parameter in model.named_parameters():
        if _STATE.search(name) and not name.startswith(owned):
            yield Refusal(f"{name} of shape {tuple(parameter.shape)}", "a state-space layer leaks across documents")
    for name, module in model.named_modules():
        if isinstance(module, (nn.modules.conv._ConvNd, nn.RNNBase)) and not name.startswith(owned):
            leaks = "it mixes neighbouring tokens and so leaks across documents"
            yield Refusal(f"{name} is a {type(module).__name__}", leaks)


def _of_modules(model: PreTrainedModel) -> Iterator[Refusal]:
    seen: dict[int, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        kind = type(module).__name__
        if getattr(module, "is_cross_attention", False) is True or "CrossAttention" in kind:
            yield Refusal(f"{name} is cross-attention", _CROSSING)
        if "Indexer" in kind:
            yield Refusal(f"{name} is a {kind}", "sparse attention chooses its keys by content")
        if (share := getattr(module, "layerdrop", None) or 0) > 0:
            reason = "each rank would leave out other layers, and all ranks attend in the same ones"
            yield Refusal(f"{name}.layerdrop is {share}".lstrip("."), reason, "Load the model with layerdrop=0.0")
        if "Attention" not in kind:
            continue
        if getattr(module, "is_causal", None) is False:
            yield Refusal(f"{name}.is_causal is False", _BIDIRECTIONAL)
        if seen.setdefault(id(module), name) != name:
            yield Refusal(f"{name} is the same module as {seen[id(module)]}", "layers share one attention module")
        # The config may have been changed after the modules were made from it.
        yield from _dropout(f"{name}.attention_dropout", getattr(module, "attention_dropout", 0.0), "attention_dropout")


def _of_interface(model: PreTrainedModel) -> Iterator[Refusal]:
    recurrent = find_recurrent(model)
    named = (module for module in model.modules() if type(module).__name__.endswith("Attention"))
    attention = [module for module in named if module not in recurrent.values()]
    if recurrent and not attention:
        yield Refusal(
            f"{len(recurrent)} layers carry state from token to token and none attends",
            "such layers cost the same on every rank, so there is nothing to balance",
        )
    # Of most hybrids transformers leaves the flag unset.
    calls = bool(recurrent) and all(has_attention(module) for module in attention)
    if not getattr(model, "_supports_attention_backend", False) and not calls:
        yield Refusal(
            "_supports_attention_backend is False",
            "it does not call the attention interface of transformers, through which CAD takes over attention",
            "Use a newer version of transformers if it supports this model there, or train without CAD",
        )
    for names, what in ((("ALL_ATTENTION_FUNCTIONS", "AttentionInterface"), "attention"), (_MASK_NAMES, "mask")):
        if not any(hasattr(home, name) for home in _homes(model) for name in names):
            yield Refusal(
                f"the code of {type(model).__module__} imports none of {', '.join(names)}",
                f"custom code that bypasses the {what} interface of transformers hides its documents from CAD",
                "Load the model without trust_remote_code, or train without CAD",
            )


def _of_scores(model: PreTrainedModel) -> Iterator[Refusal]:
    for name, value in _fields(model.config):
        key = name.rsplit(".", 1)[-1]
        if (
            (key in ("alibi", "use_alibi", "relative_attention_num_buckets") and value)
            or (key == "position_embedding_type" and value in ("alibi", "relative_key", "relative_key_query"))
        ):  # fmt: skip
            yield Refusal(f"{name} is {value!r}", "it adds a bias to the attention scores; CAD's kernels add none")
        if _ATTENTION_DROPOUT.search(key):
            yield from _dropout(name, value, name)
    layer_scaled = getattr(model.config, "scale_attn_by_inverse_layer_idx", False)
    if layer_scaled or getattr(model.config, "scale_attn_weights", True) is False:
        if not any(hasattr(m, "scaling") for m in model.modules()):
            yield Refusal(
                "scale_attn_by_inverse_layer_idx" if layer_scaled else "scale_attn_weights is False",
                "this version of transformers passes the scale to its own eager attention only",
                "Use transformers 5.20 or newer, or train without CAD",
            )


def _dropout(name: str, value: Any, key: str) -> Iterator[Refusal]:
    if isinstance(value, (int, float)) and value > 0:
        yield Refusal(
            f"{name} is {value}",
            "attention weights would be dropped at random on another rank than without CAD",
            f"Load the model with from_pretrained(..., {key}=0.0); dropout elsewhere in the model is fine",
        )


def refuse_beside_chunks(session: Session) -> None:
    """Raise CADUnsupportedError for what knows documents and windows only."""
    for found, what in (
        (session.servers.at_start > 0, 'reserved servers ("servers")'), (session.shares.pieces, "Ulysses"),
        (session.config.verify > 0, '"verify"'),
    ):  # fmt: skip
        if found:
            raise CADUnsupportedError(f"layers of this model attend in chunks, beside which {what} cannot be had")


def refuse_checkpointing(decoder: nn.Module) -> None:
    """Raise CADUnsupportedError for reentrant checkpointing of a mixture of experts. `decoder`: the module whose layers
    are checkpointed. Reentrant checkpointing runs the first forward without autograd, so the router's logits, which
    leave the layer on the side, lose the gradient of the auxiliary loss."""
    if (config := getattr(decoder, "config", None)) is None or not is_mixture(config):
        return
    for module in decoder.modules():
        if getattr(module, "gradient_checkpointing", False):
            if is_reentrant(getattr(module, "_gradient_checkpointing_func", None)):
                raise CADUnsupportedError(
                    f"{type(decoder).__name__} is a mixture of experts under gradient checkpointing with "
                    "use_reentrant=True, which drops the gradient of the router's auxiliary loss. Set "
                    'gradient_checkpointing_kwargs={"use_reentrant": False} (of gradient_checkpointing_enable or of '
                    "TrainingArguments)"
                )
            return


def refuse_spanning(config: Any, state: str = "") -> None:
    """Raise CADUnsupportedError if documents of this model must not span ranks. `state`: why that of its layers cannot
    travel from rank to rank; empty where it can, or has none. With the RoPE types "dynamic" and "longrope" the
    frequencies depend on the largest position in the batch, so the parts of one document would be rotated differently
    on different ranks."""
    if state:
        raise CADUnsupportedError(
            f"a document begins on another rank than it ends, and {state}. Give every rank whole documents: cut none "
            "at the end of a row, or let what is left of it be a document of its own, whose positions begin at 0 "
            "(examples/packing.py). Ranks may have unequal numbers of tokens"
        )
    if kind := batch_rope(config):
        raise CADUnsupportedError(
            f'rope_type is "{kind}": its frequencies depend on the largest position on a rank, so a document that '
            "spans ranks would be rotated in two ways. Keep every document on one rank, or use another rope_type"
        )


def is_mixture(config: Any) -> bool:
    """Whether a config describes a mixture of experts."""
    own = any((getattr(config, name, 0) or 0) > 1 for name in _EXPERT_FIELDS)
    feed_forward = getattr(config, "ffn_config", None)
    return own or (feed_forward is not None and is_mixture(feed_forward))


def describe(model: PreTrainedModel) -> str:
    """A text that is equal on all ranks exactly where the models are: class and config without paths and versions."""

    def plain(value: Any) -> Any:
        if isinstance(value, (set, frozenset)):
            return sorted(map(str, value))
        return str(value) if isinstance(value, torch.dtype) else type(value).__name__

    def stable(found: dict[str, Any]) -> dict[str, Any]:
        return {key: found[key] for key in found if key not in _MACHINE_FIELDS and not key.startswith("_attn_impl")}

    fields = json.loads(json.dumps(model.config.to_dict(), default=plain, skipkeys=True), object_hook=stable)
    return f"{type(model).__name__} {json.dumps(fields, sort_keys=True)}"


def _fields(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every field of a config and of the configs inside it, by dotted name."""
    for name, value in vars(config).items():
        if hasattr(value, "to_dict") and not name.startswith("_"):
            yield from _fields(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _homes(model: PreTrainedModel) -> Iterator[Any]:
    """The Python modules in which the classes of a model's parts are written."""
    classes = dict.fromkeys(base for module in model.modules() for base in type(module).__mro__)
    for name in dict.fromkeys(cls.__module__ for cls in classes):
        # Of torch and transformers only the models: their base classes import much that a model does not use.
        shared = name.startswith(("torch.", "builtins", "transformers."))
        if name in sys.modules and (not shared or name.startswith("transformers.models.")):
            yield sys.modules[name]


def is_reentrant(function: Any) -> bool:
    """Whether a model's `_gradient_checkpointing_func` is reentrant checkpointing."""
    keywords: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        keywords = {**function.keywords, **keywords}
        function = function.func
    if "use_reentrant" in keywords:
        return bool(keywords["use_reentrant"])
    # torch's default, and the only kind that DeepSpeed's `checkpoint` knows.
    return getattr(function, "__name__", "") != "non_reentrant_checkpoint"
