"""A decoder of transformers as a DeepSpeed PipelineModule, and back: no code by the user.

Layers are the embedding, every decoder layer, the last norm and the head. A decoder layer runs inside the model's own
decoder class, which holds that layer alone: masks and rotary embeddings are its own code. Each stage loads its own
weights only. What a model does outside of these layers would be lost, so a tiny copy of it is compared with its
pipeline before anything is loaded.
"""

import copy
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from deepspeed.runtime.utils import partition_balanced
from deepspeed_cad.integrations.forward_only import generating, within
from deepspeed_cad.integrations.models import refuse_model
from deepspeed_cad.integrations.pipeline import (
    Embedding,
    Head,
    Load,
    Norm,
    Part,
    assemble,
    cut_config,
    decoder_around,
    from_checkpoint,
)
from deepspeed_cad.integrations.structure import decoder_layers, find_decoder
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedModel

from deepspeed_cad.errors import CADConfigError, CADUnsupportedError


def to_pipeline(model: str | os.PathLike[str] | PreTrainedModel, stages: int, **settings: Any) -> PipelineModule:
    """A pipeline of a causal model; pass it to `deepspeed.initialize` as any PipelineModule.

    Args:
        model: a folder or name that `from_pretrained` takes, of which each stage loads its part; or a model in memory.
        stages: pipeline stages; must divide the number of ranks.
        settings: of DeepSpeed's PipelineModule (activation_checkpoint_interval, loss_fn, topology…); and of
            from_pretrained `dtype` (default: that of the checkpoint) and `attn_implementation`.

    Batches are (inputs, labels) with inputs (input_ids, position_ids), or with CAD also the dicts of transformers'
    collators. The loss is the mean cross-entropy over the labels of a micro-batch. Raises CADUnsupportedError for a
    model that cannot be cut, CADConfigError where stages would be empty."""
    loading = {name: settings.pop(name) for name in ("dtype", "attn_implementation") if name in settings}
    source = model if isinstance(model, PreTrainedModel) else None
    config = model.config if isinstance(model, PreTrainedModel) else AutoConfig.from_pretrained(model)
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    with suppress(OSError, ValueError):  # there may be none, or one that transformers would not save
        own = source.generation_config if source else GenerationConfig.from_pretrained(str(model))
        own.validate(strict=True)
        skeleton.generation_config = own
    refuse_model(skeleton)
    refuse_uncut(skeleton)
    count = len(decoder_layers(find_decoder(skeleton)) or ())
    if not 1 <= stages <= count:
        raise CADConfigError(
            f"{stages} pipeline stages for a model with {count} decoder layers: every stage needs one layer or "
            f"more, so take 1 to {count} stages"
        )
    load = (lambda *wanted: source) if source is not None else from_checkpoint(str(model), type(skeleton), loading)
    return _Pipeline(skeleton, load, num_stages=stages, **settings)


def to_hf(engine: Any, path: str | os.PathLike[str]) -> None:
    """Write the model of an engine whose module `to_pipeline` made, so that `from_pretrained` loads it.

    Called by all ranks. Every stage writes its weights beside the checkpoint; rank 0 puts them together in CPU memory,
    saves them as transformers does, and takes the parts away. All hosts must see the folder."""
    module = engine.module
    if not isinstance(module, _Pipeline):
        raise CADConfigError(f"to_hf takes an engine with a module of to_pipeline; this is {type(module).__name__}")
    folder = Path(path) / ".stages"
    folder.mkdir(parents=True, exist_ok=True)
    if engine.grid.get_data_parallel_id() == 0:
        torch.save(module.named_weights(), folder / f"{engine.stage_id}.pt")
    dist.barrier()
    if dist.get_rank() == 0:
        weights: dict[str, torch.Tensor] = {}
        for stage in range(engine.num_stages):
            weights.update(torch.load(folder / f"{stage}.pt", map_location="cpu", mmap=True))
        assemble(module.skeleton, weights).save_pretrained(path)
        shutil.rmtree(folder)
    dist.barrier()


class _Pipeline(PipelineModule):
    """Stages balanced by the work of their linear layers; attention is balanced over all ranks anyway."""

    def __init__(self, skeleton: PreTrainedModel, load: Load, **settings: Any) -> None:
        """`load` gives the model with at least these decoder layers, and embedding and head where these are wanted."""
        self.__dict__["skeleton"] = skeleton  # not a submodule: it has no weights
        self.__dict__["_load"] = load
        count = len(decoder_layers(find_decoder(skeleton)) or ())
        self.__dict__["_kinds"] = ["embedding", *range(count), "norm", "head"]
        checkpointable = {"checkpointable_layers": ["Part"], "dynamic_shape": True, "loss_fn": token_loss}
        super().__init__([None] * (count + 3), **{**checkpointable, **settings})

    def _partition_layers(self, method: str = "uniform") -> None:
        self.parts = partition_balanced(weights=layer_work(self.skeleton), num_parts=self.num_stages)
        if not all(any(isinstance(k, int) for k in self._kinds[a:b]) for a, b in zip(self.parts, self.parts[1:])):
            raise CADConfigError(
                f"a stage of {self.num_stages} would hold no decoder layer (they begin at {self.parts[:-1]} of "
                f"{len(self._kinds)} layers, embedding, norm and head included): take fewer stages"
            )
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(self.parts[stage], self.parts[stage + 1])

    def _build(self) -> None:
        mine = self._kinds[self._local_start : self._local_stop]
        tied = bool(self.skeleton.config.tie_word_embeddings)
        model = self._load(
            {kind for kind in mine if isinstance(kind, int)}, "embedding" in mine or tied, "head" in mine
        )
        decoder = find_decoder(model)
        embedding = model.get_input_embeddings()
        made: dict[Any, Any] = {
            "embedding": lambda: Embedding(embedding),
            "norm": lambda: Norm(decoder.norm),
            "head": lambda: Head(model.get_output_embeddings()),
        }
        specs: list[Any] = []
        for kind in self._kinds:
            if kind not in mine:
                # Only what is tied matters on other stages: they make groups of all that are.
                specs.append(_Tied(None) if tied and kind in ("embedding", "head") else None)
            elif isinstance(kind, int):
                specs.append(Part(model, kind))
            elif tied and kind in ("embedding", "head"):
                specs.append(_Tied(made["embedding"], as_head=kind == "head"))
            else:
                specs.append(made[kind]())
        self._layer_specs = specs
        # What other stages have of a model in memory is let go.
        del self.__dict__["_load"]
        super()._build()

    def named_weights(self) -> dict[str, torch.Tensor]:
        """The weights of this stage by their names in the model."""
        found: dict[str, torch.Tensor] = {}
        names = {id(module): name for name, module in self.skeleton.named_modules()}
        parts = {
            "embedding": names[id(self.skeleton.get_input_embeddings())],
            "norm": names[id(find_decoder(self.skeleton).norm)],
            "head": names[id(self.skeleton.get_output_embeddings())],
        }
        layers = names[id(decoder_layers(find_decoder(self.skeleton)))]
        for kind, part in zip(self._kinds[self._local_start : self._local_stop], self.forward_funcs, strict=True):
            if hasattr(part, "args"):  # a tied head is a partial of the embedding, which has its weight
                continue
            prefix = f"{layers}.{kind}" if isinstance(kind, int) else parts[kind]
            for name, value in part.inner.state_dict().items():
                found[f"{prefix}.{name}"] = value.detach().cpu().clone()
        return found


class _Tied(TiedLayerSpec):
    """The embedding where it is also the head."""

    def __init__(self, build: Callable[[], torch.nn.Module] | None, as_head: bool = False) -> None:
        forward = Embedding.as_head if as_head else None
        super().__init__("embedding", Embedding, forward_fn=forward, tied_weight_attr="inner.weight")
        self._make = build

    def build(self, log: bool = False) -> Any:
        return None if self._make is None else self._make()


def token_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the next token over the labels that are not -100."""
    logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def layer_work(skeleton: PreTrainedModel) -> list[float]:
    """Matrix products of every layer per token, in weights read: experts that a token does not visit are not."""
    config = skeleton.config
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None) or 1
    visited = getattr(config, "num_experts_per_tok", None) or 1

    def of(module: torch.nn.Module) -> float:
        return sum(
            p.numel() * (visited / experts if ".experts." in f".{name}" and experts > 1 else 1.0)
            for name, p in module.named_parameters()
        )

    layers = [of(layer) for layer in decoder_layers(find_decoder(skeleton)) or ()]
    return [0.0, *layers, 0.0, of(skeleton.get_output_embeddings())]


# What cannot be cut


def refuse_uncut(skeleton: PreTrainedModel) -> None:
    """Raise CADUnsupportedError for a model that is more than embedding, layers, norm and head.

    A small copy runs as a whole and as a pipeline with two empty parts; both must agree."""
    config, name, decoder = skeleton.config, type(skeleton).__name__, find_decoder(skeleton)
    small, norm = cut_config(config, range(1)), getattr(decoder, "norm", None)
    if decoder_layers(decoder) is None or small.num_hidden_layers != 1 or not isinstance(norm, torch.nn.Module):
        raise CADUnsupportedError(
            f"{name} cannot be cut into stages: its decoder has no list of as many layers as its config says, and a "
            "last norm"
        )
    if getattr(config, "output_router_logits", False):
        raise CADUnsupportedError(
            f"{name} cannot be cut into stages with output_router_logits=True: the auxiliary loss of its routers needs "
            "all layers in one place. Set it to False"
        )
    small.update({"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0})
    try:
        agree = _agree(small)
    except Exception as error:
        raise CADUnsupportedError(f"{name} cannot be cut into stages: {type(error).__name__}: {error}") from error
    if not agree:
        raise CADUnsupportedError(
            f"{name} cannot be cut into stages: it does more between token ids and logits than embedding, layers, norm "
            "and head (scaled embeddings, dropout of them, capped logits…)"
        )


def _agree(small: PretrainedConfig) -> bool:
    """Whether a model of this config, without layers, gives the same as a whole and in two parts, dropout included."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(small, dtype=torch.float32)
    inner = find_decoder(model)
    inner.layers = torch.nn.ModuleList()
    model = model.to_empty(device="cpu").train()
    generator = torch.Generator().manual_seed(0)
    # Not a model that is looked at, although no gradients are on.
    with torch.no_grad(), torch.random.fork_rng(), within(generating):
        for value in [*model.parameters(), *model.buffers()]:
            if value.is_floating_point():
                value.uniform_(0.5, 1.5, generator=generator)
        ids = torch.randint(0, 64, (1, 4), generator=generator)
        positions = torch.arange(4)[None]
        # Without its norm first: a norm takes factors out that are applied once too often.
        norm, inner.norm = inner.norm, torch.nn.Identity()
        torch.manual_seed(0)
        hidden = inner(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
        inner.norm = norm
        torch.manual_seed(0)
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        torch.manual_seed(0)
        given: Any = Embedding(model.get_input_embeddings())((ids, positions))
        for _ in range(2):
            empty = decoder_around(inner, torch.nn.ModuleList(), small)
            given = empty(inputs_embeds=given[0], position_ids=positions, use_cache=False).last_hidden_state, positions
        cut = given[0], Head(model.get_output_embeddings())(Norm(norm)(given))
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-4) for a, b in zip((hidden, logits), cut, strict=True))
