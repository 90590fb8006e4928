"""`Accelerator(kwargs_handlers=[CADPlugin(...)])`: DDP, DeepSpeed, accumulation, evaluation, save and resume, LoRA."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import training
from pool import WorkerPool
from torch.utils.data import DataLoader
from trainers import BEFORE, BLOCK, STEPS, PackedRows, assert_same_and_balanced, collate, step_entry, unbalanced

WORLD = 4


def _model(**changes: Any) -> torch.nn.Module:
    return training.tiny_llama(torch.float32, attn_implementation="sdpa", use_cache=False, **changes)


def _accelerator(cad: bool, **settings: Any) -> Any:
    from accelerate import Accelerator
    from deepspeed_cad.integrations.accelerate import CADPlugin

    handlers = [CADPlugin(**BLOCK)] if cad else []
    return Accelerator(cpu=True, kwargs_handlers=handlers, **settings)


def _loop(accelerator: Any, model: Any, rows: int = 1, evaluate: bool = False) -> list[dict[str, Any]]:
    """The loop of Accelerate's documentation; gives an entry for every micro-batch and for every evaluation."""
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


def _ddp(cad: bool) -> list[dict[str, Any]]:
    return _loop(_accelerator(cad), _model())


def _accumulation(cad: bool) -> list[dict[str, Any]]:
    return _loop(_accelerator(cad, gradient_accumulation_steps=2), _model(), rows=2)


def _evaluation(cad: bool) -> list[dict[str, Any]]:
    return _loop(_accelerator(cad), _model(), evaluate=True)


def _deepspeed(stage: int) -> Any:
    def run(cad: bool) -> list[dict[str, Any]]:
        from accelerate import DeepSpeedPlugin

        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
            "zero_allow_untested_optimizer": True,
        }
        return _loop(_accelerator(cad, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config)), _model())

    return run


def _lora(cad: bool) -> list[dict[str, Any]]:
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, init_lora_weights=False)
    model = get_peft_model(_model(), lora)
    losses = _loop(_accelerator(cad), model)
    assert not any(p.requires_grad for name, p in model.named_parameters() if "lora" not in name)
    return losses


def _frozen_inputs(cad: bool) -> list[dict[str, Any]]:
    """LoRA of the last layer alone, under checkpointing: the hidden states of the first need no gradient."""
    from peft import LoraConfig, get_peft_model

    model = _model()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    lora = LoraConfig(r=4, target_modules=["o_proj"], layers_to_transform=[1], init_lora_weights=False)
    return _loop(_accelerator(cad), get_peft_model(model, lora))


def _compiled(cad: bool) -> list[dict[str, Any]]:
    from accelerate.utils import TorchDynamoPlugin

    torch._dynamo.reset()
    plugin = TorchDynamoPlugin(backend="aot_eager", use_regional_compilation=False)
    return _loop(_accelerator(cad, dynamo_plugin=plugin), _model())


CASES = {
    "DDP": _ddp, "accumulation, two rows": _accumulation, "evaluation": _evaluation, "ZeRO-1": _deepspeed(1),
    "ZeRO-2": _deepspeed(2), "ZeRO-3": _deepspeed(3), "LoRA": _lora, "frozen inputs": _frozen_inputs,
    "compiled": _compiled,
}  # fmt: skip


def _compare(rank: int, world: int, names: list[str]) -> dict[str, Any]:
    import deepspeed
    from accelerate.state import AcceleratorState

    import deepspeed_cad
    from deepspeed_cad.session import close_session

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    found = {}
    for name in names:
        AcceleratorState._reset_state(True)
        plain = CASES[name](False)
        assert deepspeed_cad.current_session() is None
        AcceleratorState._reset_state(True)
        cad = CASES[name](True)
        assert deepspeed_cad.current_session() is not None
        found[name] = (plain, cad)
        close_session()
    return found


@pytest.mark.slow
def test_same_losses_and_balance(fresh_workers: WorkerPool) -> None:
    for found in fresh_workers.run(_compare, WORLD, [*CASES], timeout=140.0):
        for name, (plain, cad) in found.items():
            accumulated = 2 if "accumulation" in name else 1
            assert_same_and_balanced(name, plain, cad, losses=STEPS * accumulated)
            lengths = unbalanced(STEPS * accumulated, WORLD, rows=accumulated)
            assert [entry[BEFORE] for entry in cad if "loss" in entry] == pytest.approx(lengths), name


def _refusals(rank: int, world: int) -> None:
    from accelerate import Accelerator, DataLoaderConfiguration
    from accelerate.state import AcceleratorState
    from deepspeed_cad.integrations.accelerate import CADPlugin

    from deepspeed_cad.errors import CADConfigError, CADError, CADUnsupportedError

    AcceleratorState._reset_state(True)
    with pytest.raises(CADUnsupportedError, match="dispatch_batches=False"):
        _accelerator(True, dataloader_config=DataLoaderConfiguration(dispatch_batches=True))
    AcceleratorState._reset_state(True)
    with pytest.raises(CADConfigError, match="more than one CADPlugin"):
        Accelerator(cpu=True, kwargs_handlers=[CADPlugin(), CADPlugin()])
    AcceleratorState._reset_state(True)
    accelerator = _accelerator(True)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    accelerator.backward(model(torch.ones(1, 2)).sum())
    with pytest.raises(CADError, match="not active at the first optimizer step: no transformers model"):
        optimizer.step()
    AcceleratorState._reset_state(True)
    Accelerator(cpu=True)  # one without the plugin, in the same process, is left alone


@pytest.mark.slow
def test_refusals(fresh_workers: WorkerPool) -> None:
    fresh_workers.run(_refusals, 2, timeout=60.0)
