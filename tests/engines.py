"""DeepSpeed engines for tests: how they start on a CPU, a JSON, and a loop over micro-batches."""

import os
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch
import training


def import_deepspeed() -> ModuleType:
    """DeepSpeed with CAD's hook; without the library that it would compile for 80 s when it first starts on a CPU."""
    import deepspeed

    import deepspeed_cad

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if torch.cuda.is_initialized():  # ranks may share a GPU, and DeepSpeed takes the one of that number
        os.environ["LOCAL_RANK"] = str(torch.cuda.current_device())
    deepspeed_cad.install()
    return deepspeed


def engine_config(stage: int, **changes: Any) -> dict[str, Any]:
    """A JSON of a loop of one's own, one micro-batch a step."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "wall_clock_breakdown": False,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    return config | changes


def train_engine(config: dict, checkpoint: str | None, rows: Iterable[Any], note: Any, **changes: Any) -> list:
    """What `note(loss)` gives after each micro-batch of a tiny Llama; `rows`: the documents of each.

    `checkpoint`: "reentrant", "non-reentrant" or None; `changes`: to the model's config.
    """
    import deepspeed

    model = training.checkpointed(training.tiny_llama(torch.float32, **changes), checkpoint)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.train()
    found = []
    for docs in rows:
        batch = {name: value.to(engine.device) for name, value in training.pack(docs).items()}
        logits = engine(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), batch["labels"][:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        found.append(note(loss))
    engine.destroy()
    return found
