"""Where the weights of a pipeline's stages come from, and how they become one checkpoint again.

In: a checkpoint or a model. Out: a `Load`, which gives a model that has at least what a stage asks for.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed_cad.integrations.structure import decoder_layers, find_decoder
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from deepspeed_cad.errors import CADUnsupportedError

Load = Callable[[set[int], bool, bool], PreTrainedModel]
"""Of decoder layers, whether the embedding and whether the head is wanted."""


def from_memory(model: PreTrainedModel) -> Load:
    """From a model in memory, which is handed out whole."""
    return lambda layers, embedding, head: model


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
        with _quiet_loading():
            loaded: PreTrainedModel = Stage.from_pretrained(path, **{"dtype": "auto", **loading})
        return loaded

    return load


@contextmanager
def _quiet_loading() -> Iterator[None]:
    """Without a report of the weights that other stages have."""
    from transformers.utils import logging as hf_logging

    before = hf_logging.get_verbosity()
    hf_logging.set_verbosity_error()
    try:
        yield
    finally:
        hf_logging.set_verbosity(before)


def assemble(skeleton: PreTrainedModel, weights: dict[str, torch.Tensor]) -> PreTrainedModel:
    """The whole model, of the weights of all stages by their names in it."""
    dtype = next(iter(weights.values())).dtype
    config = copy.deepcopy(skeleton.config)
    config.dtype = dtype
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    missing, unexpected = model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    missing = [name for name, p in model.named_parameters() if p.device.type == "meta"]
    if missing or unexpected:
        raise CADUnsupportedError(f"the stages lack {missing[:3]} and have {unexpected[:3]} beside what the model has")
    return model
