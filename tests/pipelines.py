"""A tiny pipeline that a user might write by hand, its data, and the same model in one process."""

from typing import Any

import torch
import training
from engines import import_deepspeed


class Embedding(torch.nn.Module):
    """Token ids and positions in, hidden states and positions out."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.embed_tokens = model.model.embed_tokens

    def forward(self, given: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        ids, positions = given
        return self.embed_tokens(ids), positions


class Decoder(torch.nn.Module):
    """One decoder layer, with the model's own mask of packed documents."""

    def __init__(self, model: torch.nn.Module, index: int) -> None:
        super().__init__()
        self.layer, self.rotary = model.model.layers[index], model.model.rotary_emb

    def forward(self, given: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        from transformers.masking_utils import create_causal_mask

        hidden, positions = given
        mask = create_causal_mask(
            config=self.layer.self_attn.config, inputs_embeds=hidden, attention_mask=None, past_key_values=None,
            position_ids=positions,
        )  # fmt: skip
        hidden = self.layer(
            hidden, attention_mask=mask, position_ids=positions, position_embeddings=self.rotary(hidden, positions)
        )
        return (hidden[0] if isinstance(hidden, tuple) else hidden), positions


class Head(torch.nn.Module):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.norm, self.lm_head = model.model.norm, model.lm_head

    def forward(self, given: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return self.lm_head(self.norm(given[0]))


def loss_fn(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def start() -> Any:
    """DeepSpeed with CAD's hook, and its groups over gloo."""
    deepspeed = import_deepspeed()
    deepspeed.init_distributed("gloo")
    return deepspeed


def config(count: int, **changes: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": count,
        "zero_allow_untested_optimizer": True, **changes,
    }  # fmt: skip


def summed_gradients(engine: Any) -> dict[str, torch.Tensor]:
    """Of all steps from now on, by name and layer, the mean of replicas; they take the place of the optimizer's."""
    from deepspeed.runtime.pipe.schedule import OptimizerStep

    engine.pipeline_enable_backward_allreduce = False  # it refuses fp64
    group, replicas = engine.grid.get_data_parallel_group(), engine.grid.get_data_parallel_world_size()
    total = {name: torch.zeros_like(p) for name, p in engine.module.named_parameters()}

    def add(engine: Any) -> None:
        for name, p in engine.module.named_parameters():
            if p.requires_grad:
                gradient = torch.zeros_like(p) if p.grad is None else p.grad
                torch.distributed.all_reduce(gradient, group=group)
                total[name] += gradient / replicas
                p.grad = None

    engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, OptimizerStep: add}
    return total


def layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [Embedding(model), *(Decoder(model, i) for i in range(model.config.num_hidden_layers)), Head(model)]


def by_hand(model: Any, stages: int, parts: Any = None, interval: int = 0, topology: Any = None) -> Any:
    """A PipelineModule of a Llama; `parts`: where stages begin; `topology`: in place of a number of stages."""
    from deepspeed.pipe import PipelineModule

    class Pipeline(PipelineModule):
        def _partition_layers(self, method: str = "uniform") -> None:
            super()._partition_layers(method)
            if parts is not None:
                self.parts = parts
                stage = self._topo.get_coord(self.global_rank).pipe
                self._set_bounds(parts[stage], parts[stage + 1])

    return Pipeline(
        layers(model), num_stages=None if topology else stages, topology=topology, loss_fn=loss_fn,
        partition_method="uniform", activation_checkpoint_interval=interval, checkpointable_layers=["Decoder"],
    )  # fmt: skip


def documents_of(replica: int, micro_batch: int, step: int = 0) -> list[torch.Tensor]:
    """Documents of one micro-batch: long and short ones, never as many tokens as the one before.

    None of one token: alone, its norms would add up in another order than in a longer row.
    """
    lengths = [[90], [30, 9, 2, 40], [50, 50], [17], [64, 3, 20], [5, 5, 110]]
    own = lengths[(micro_batch + 2 * replica + step) % len(lengths)]
    return training.documents(own, 1000 * step + 100 * replica + micro_batch)


def pairs(replica: int, count: int, step: int = 0) -> list[tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]]:
    packed = [training.pack(documents_of(replica, m, step)) for m in range(count)]
    return [((one["input_ids"], one["position_ids"]), one["labels"]) for one in packed]


def in_one_process(model: torch.nn.Module, replicas: int, count: int, step: int = 0) -> float:
    """Loss of a step, each document alone; gradients in the model are added up, `replicas` times those of the mean.

    Norms compute in fp32 also in backward, so only what DeepSpeed scales before it may be scaled before it here.
    """
    total = 0.0
    for replica in range(replicas):
        for m in range(count):
            docs = documents_of(replica, m, step)
            places = [torch.arange(len(doc))[None] for doc in docs]
            alone = [model(doc[None], position_ids=at, use_cache=False).logits for doc, at in zip(docs, places)]
            loss = loss_fn(torch.cat(alone, 1), training.pack(docs)["labels"]) / count
            loss.backward()
            total += float(loss.detach()) / replicas
    return total
