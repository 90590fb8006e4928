"""What runs inside the stages of a DeepSpeed PipelineModule: attention of transformers' layers, and the layers of a
pipeline that `to_pipeline` makes.

Layers of a stage get tensors only, so no descriptor can travel with them as it does where a whole model runs. Each
attention module knows its engine's binding, and that knows which micro-batch runs. Between the layers of `to_pipeline`
travel hidden states and position ids.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from deepspeed_cad.integrations.functions import attend_layer, chunk_of
from deepspeed_cad.integrations.structure import decoder_layers, find_decoder, name_layer
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils import logging as hf_logging

from deepspeed_cad.errors import CADUnsupportedError

NAME = "cad_pipeline"
"""The attention name; see functions.NAME about what it must not contain."""
_BINDING = "cad_pipeline"
"""Attribute of attention modules."""


def install_attention(stage: torch.nn.Module, binding: Any) -> int:
    """Let all attention modules of a stage attend through a binding (PipelineBinding); gives how many there are."""
    AttentionInterface.register(NAME, pipeline_attention)
    AttentionMaskInterface.register(NAME, window_mask)
    found = 0
    for module in stage.modules():
        if (config := getattr(module, "config", None)) is not None and hasattr(config, "_attn_implementation"):
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
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
    scaling: float | None = None, dropout: float = 0.0, softcap: float | None = None, s_aux: torch.Tensor | None = None,
    sliding_window: int | None = None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """The attention function. query [B, H, S, D], key and value [B, K, S, D]; gives [B, S, H, V]."""
    label = name_layer(module)
    binding: Any = getattr(module, _BINDING, None)
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


# Layers of a pipeline that `to_pipeline` makes, where their weights come from, and one checkpoint of them again

Given = tuple[torch.Tensor, torch.Tensor]
"""Hidden states [batch, tokens, width] and position ids [batch, tokens]."""
Load = Callable[[set[int], bool, bool], PreTrainedModel]
"""Gives a model with at least what a stage asks for: decoder layers, whether the embedding and whether the head."""


class _Inner(torch.nn.Module):
    """A layer around a module of the model."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner


class Embedding(_Inner):
    """Token ids and position ids in."""

    def forward(self, given: Given) -> Given:
        ids, positions = given
        return self.inner(ids), positions

    def as_head(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(hidden, self.inner.weight)


class Part(torch.nn.Module):
    """One decoder layer, run by the model's own decoder."""

    def __init__(self, model: PreTrainedModel, index: int) -> None:
        super().__init__()
        decoder = find_decoder(model)
        layers = decoder_layers(decoder)
        assert layers is not None  # refuse_uncut looked
        self.inner = layers[index]
        config = self.config = cut_config(model.config, range(index, index + 1))
        # Around the layer, not above it: its weights have one name, and are one module of this stage.
        self.__dict__["_around"] = decoder_around(decoder, torch.nn.ModuleList([self.inner]), config)

    def forward(self, given: Given) -> Given:
        hidden, positions = given
        around: Any = self.__dict__["_around"]
        around.training = self.training
        return around(inputs_embeds=hidden, position_ids=positions, use_cache=False).last_hidden_state, positions

    def _apply(self, fn: Any, recurse: bool = True) -> Part:
        """What surrounds the layer moves to another device too, but keeps its type: rotary frequencies need fp32."""
        super()._apply(fn, recurse)
        around: torch.nn.Module = self.__dict__["_around"]
        for name, module in around.named_children():
            if name != "layers":
                for inner in module.modules():
                    for key, value in inner._buffers.items():
                        inner._buffers[key] = None if value is None else value.to(fn(value).device)
        return self


class Norm(_Inner):
    """The last norm; position ids end here."""

    def forward(self, given: Given) -> Any:
        return self.inner(given[0])


class Head(_Inner):
    def forward(self, hidden: torch.Tensor) -> Any:
        return self.inner(hidden)


def decoder_around(decoder: torch.nn.Module, layers: torch.nn.ModuleList, config: PretrainedConfig) -> torch.nn.Module:
    """A decoder with these layers only and without its last norm; everything else it shares with `decoder`."""
    around: Any = copy.copy(decoder)
    around.__dict__["_modules"] = dict(decoder._modules)
    around.layers, around.norm = layers, torch.nn.Identity()
    around.embed_tokens = None
    around.config = config
    return around


def cut_config(config: PretrainedConfig, layers: Sequence[int]) -> PretrainedConfig:
    """A config of these layers only: what it says of each layer, such as its kind of attention, is cut along."""
    cut = copy.deepcopy(config)
    count = config.num_hidden_layers
    for name, value in list(vars(cut).items()):
        if isinstance(value, list) and len(value) == count and name.endswith(("_types", "_layers", "_freq")):
            setattr(cut, name, [value[i] for i in layers])
    cut.num_hidden_layers = len(layers)
    return cut


def from_checkpoint(path: str, model_class: type[PreTrainedModel], loading: dict[str, Any]) -> Load:
    """From a checkpoint, of which only what is wanted is read."""

    def load(layers: set[int], embedding: bool, head: bool) -> PreTrainedModel:
        class Stage(model_class):  # type: ignore[valid-type, misc]
            """The model without the parts of other stages: `from_pretrained` reads what is there."""

            def __init__(self, config: PretrainedConfig, *args: Any, **kwargs: Any) -> None:
                super().__init__(config, *args, **kwargs)
                all_layers = decoder_layers(find_decoder(self))
                for i in range(len(all_layers or ())):
                    if i not in layers:
                        all_layers[i] = torch.nn.Identity()
                if not embedding:
                    self.set_input_embeddings(torch.nn.Identity())
                if not head and not config.tie_word_embeddings:
                    self.set_output_embeddings(torch.nn.Identity())

        Stage.__name__ = model_class.__name__
        before = hf_logging.get_verbosity()
        hf_logging.set_verbosity_error()  # without a report of the weights that other stages have
        try:
            return Stage.from_pretrained(path, **{"dtype": "auto", **loading})
        finally:
            hf_logging.set_verbosity(before)

    return load


def assemble(skeleton: PreTrainedModel, weights: dict[str, torch.Tensor]) -> PreTrainedModel:
    """The whole model, of the weights of all stages by their names in it."""
    config = copy.deepcopy(skeleton.config)
    config.dtype = next(iter(weights.values())).dtype
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    missing, unexpected = model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    model.generation_config = skeleton.generation_config
    missing = [name for name, p in model.named_parameters() if p.device.type == "meta"]
    if missing or unexpected:
        raise CADUnsupportedError(f"the stages lack {missing[:3]} and have {unexpected[:3]} beside what the model has")
    return model
