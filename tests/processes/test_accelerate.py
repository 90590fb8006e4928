"""`Accelerator(kwargs_handlers=[CADPlugin(...)])`: DDP, DeepSpeed, accumulation, evaluation, LoRA, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import trainers
import training
from engines import import_deepspeed
from launched import zero
from pool import WorkerPool
from torch.utils.data import DataLoader
from trainers import BEFORE, BLOCK, STEPS, PackedRows, assert_same_and_balanced, collate, step_entry, unbalanced

WORLD = 2


def _accelerator(cad: bool, **settings: Any) -> Any:
    from accelerate import Accelerator
    from deepspeed_cad.integrations.accelerate import CADPlugin

    handlers = [CADPlugin(**BLOCK)] if cad else []
    return Accelerator(cpu=True, kwargs_handlers=handlers, **settings)


def _run(
    cad: bool, rows: int = 1, evaluate: bool = False, lora: dict[str, Any] | None = None, checkpoint: bool = False,
    **settings: Any,
) -> list[dict[str, Any]]:  # fmt: skip
    """The loop of Accelerate's documentation; gives an entry for every micro-batch and for every evaluation."""
    from accelerate import DeepSpeedPlugin
    from accelerate.utils import TorchDynamoPlugin
    from peft import LoraConfig, get_peft_model

    model: Any = training.sdpa_llama()
    if checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if lora is not None:
        model = get_peft_model(model, LoraConfig(r=4, init_lora_weights=False, **lora))
    if "stage" in settings:
        config = zero(settings.pop("stage"), stage3_param_persistence_threshold=0)
        settings["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=config)
    if settings.pop("compiled", False):
        torch._dynamo.reset()
        settings["dynamo_plugin"] = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=False)
    accelerator = _accelerator(cad, **settings)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    accumulation = accelerator.gradient_accumulation_steps
    loader = DataLoader(PackedRows(WORLD * STEPS * rows * accumulation), batch_size=rows, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    model.train()
    found = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        found.append(step_entry(loss))
        if evaluate:
            model.eval()
            with torch.no_grad():
                found.append({"eval_loss": float(model(**collate([PackedRows(9)[8]])).loss)})
            model.train()
    return found


CASES: dict[str, dict[str, Any]] = {
    "DDP": {}, "accumulation, two rows": {"rows": 2, "gradient_accumulation_steps": 2},
    "evaluation": {"evaluate": True}, "ZeRO-2": {"stage": 2}, "ZeRO-3": {"stage": 3},
    "LoRA": {"lora": {"target_modules": ["q_proj", "v_proj"]}},
    # LoRA of the last layer alone, under checkpointing: the hidden states of the first need no gradient.
    "frozen inputs": {"lora": {"target_modules": ["o_proj"], "layers_to_transform": [1]}, "checkpoint": True},
    "compiled": {"compiled": True},
}  # fmt: skip


def _compare(rank: int, world: int) -> dict[str, Any]:
    import_deepspeed()
    return {name: trainers.without_and_with(_run, **case) for name, case in CASES.items()}


@pytest.mark.slow
def test_same_losses_and_balance(fresh_workers: WorkerPool) -> None:
    for found in fresh_workers.run(_compare, WORLD, timeout=140.0):
        for name, (plain, cad) in found.items():
            accumulated = 2 if "accumulation" in name else 1
            assert_same_and_balanced(name, plain, cad, losses=STEPS * accumulated)
            lengths = unbalanced(STEPS * accumulated, WORLD, rows=accumulated)
            assert [entry[BEFORE] for entry in cad if "loss" in entry] == pytest.approx(lengths), name
