"""TRL: SFTTrainer with packing and without padding, DPOTrainer with a reference model, LoRA."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import training
from pool import WorkerPool
from trainers import BLOCK, STEPS, assert_same_and_balanced, zero

pytest.importorskip("trl")

WORLD = 4
LENGTHS = [180, 20, 60, 9, 120, 40, 200, 5, 30, 150, 70, 11, 90, 25, 160, 33]


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(62)} | {"<pad>": 62, "</s>": 63}
    core = Tokenizer(models.WordLevel(words, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="</s>", unk_token="w0")


def _model() -> Any:
    return training.tiny_llama(torch.float32, attn_implementation="sdpa", use_cache=False)


def _settings(folder: str, **changes: Any) -> dict[str, Any]:
    return {
        "output_dir": folder, "use_cpu": True, "bf16": False, "max_steps": STEPS, "per_device_train_batch_size": 1,
        "logging_steps": 1, "save_strategy": "no", "report_to": [], "learning_rate": 1e-2,
        "lr_scheduler_type": "constant", "disable_tqdm": True, "gradient_checkpointing": False,
        "optim": "adamw_torch",
    } | changes  # fmt: skip


def _sft(folder: str, cad: bool, lora: bool = False, **changes: Any) -> list[dict[str, Any]]:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    import deepspeed_cad

    docs = training.documents(LENGTHS * 4, seed=0)
    data = Dataset.from_dict({"input_ids": [doc.tolist() for doc in docs]})
    settings = _settings(folder, **{"max_length": 200, **changes})
    model = _model()
    if cad:
        deepspeed_cad.apply(model, BLOCK)
    peft = None
    if lora:
        from peft import LoraConfig

        peft = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    trainer = SFTTrainer(
        model=model, args=SFTConfig(**settings), train_dataset=data, processing_class=_tokenizer(), peft_config=peft
    )
    trainer.train()
    return trainer.state.log_history


def _values(model: Any) -> list[torch.Tensor]:
    """Copies of all parameters, gathered where ZeRO-3 shards them."""
    import deepspeed

    parameters = [] if model is None else list(model.parameters())
    with deepspeed.zero.GatheredParameters(parameters, enabled=any(hasattr(p, "ds_id") for p in parameters)):
        return [p.detach().clone() for p in parameters]


def _dpo(folder: str, cad: bool, lora: bool = False, stage: int | None = None, **changes: Any) -> list[dict[str, Any]]:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    import deepspeed_cad

    def words(length: int, seed: int) -> str:
        return " ".join(f"w{i % 62}" for i in training.documents([length], seed)[0].tolist())

    rows = [(words(n, i), words(n // 2 + 3, 100 + i), words(n // 3 + 2, 200 + i)) for i, n in enumerate(LENGTHS * 2)]
    data = Dataset.from_dict(dict(zip(("prompt", "chosen", "rejected"), map(list, zip(*rows)))))
    model, reference, peft = _model(), None, None
    if lora:
        from peft import LoraConfig

        peft = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    else:
        reference = _model()
    if stage is not None:
        changes["deepspeed"] = {**zero(stage), **({"cad": BLOCK} if cad else {})}
    elif cad:
        deepspeed_cad.apply(model, BLOCK)
    trainer = DPOTrainer(
        model=model, ref_model=reference, args=DPOConfig(**_settings(folder, max_length=400, **changes)),
        train_dataset=data, processing_class=_tokenizer(), peft_config=peft,
    )  # fmt: skip
    before = _values(reference)
    trainer.train()
    if reference is not None:
        assert before and all(torch.equal(a, b) for a, b in zip(before, _values(reference), strict=True))
        assert reference.config._attn_implementation == "sdpa"
        if cad:
            assert reference not in deepspeed_cad.current_session().bindings
    return trainer.state.log_history


CASES: dict[str, Any] = {
    "packing": lambda folder, cad: _sft(folder, cad, packing=True, packing_strategy="bfd"),
    "packing, accumulation": lambda folder, cad: _sft(folder, cad, packing=True, gradient_accumulation_steps=2),
    "padding-free": lambda folder, cad: _sft(
        folder, cad, padding_free=True, max_length=None, per_device_train_batch_size=4
    ),
    "padding": lambda folder, cad: _sft(folder, cad, per_device_train_batch_size=4),
    "packing, LoRA, checkpointing": lambda folder, cad: _sft(
        folder, cad, lora=True, packing=True, gradient_checkpointing=True
    ),
    "DPO": lambda folder, cad: _dpo(folder, cad, per_device_train_batch_size=2),
    "DPO, ZeRO-2": lambda folder, cad: _dpo(folder, cad, stage=2, per_device_train_batch_size=2),
    "DPO, ZeRO-3": lambda folder, cad: _dpo(folder, cad, stage=3, per_device_train_batch_size=2),
    "DPO, LoRA as its own reference": lambda folder, cad: _dpo(folder, cad, lora=True, gradient_accumulation_steps=2),
}


def _compare(rank: int, world: int, names: list[str], folder: str) -> dict[str, Any]:
    import deepspeed
    from accelerate.state import AcceleratorState

    import deepspeed_cad
    from deepspeed_cad.session import close_session

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed_cad.install()
    found = {}
    for name in names:
        logged = []
        for cad in (False, True):
            AcceleratorState._reset_state(True)
            logged.append(CASES[name](folder, cad))
            assert (deepspeed_cad.current_session() is not None) == cad
            close_session()
        found[name] = logged
    return found


OFTEN = ("packing", "padding-free", "packing, LoRA, checkpointing", "DPO")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["often", *(pytest.param(one, marks=pytest.mark.long) for one in ("other", "ZeRO"))])
def test_same_losses_and_balance(fresh_workers: WorkerPool, tmp_path, kind: str) -> None:
    """DeepSpeed's cases in processes of their own: transformers does not forget a DeepSpeed JSON."""
    names = [name for name in CASES if ("ZeRO" if "ZeRO" in name else "often" if name in OFTEN else "other") == kind]
    for found in fresh_workers.run(_compare, WORLD, names, str(tmp_path), timeout=140.0):
        for name, (plain, cad) in found.items():
            assert_same_and_balanced(name, plain, cad)
