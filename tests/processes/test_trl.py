"""TRL: SFTTrainer with packing and without padding, DPO and KTO with a reference model, LoRA, GRPO, RLOO."""

from typing import Any

import pytest
import torch
import training
from engines import import_deepspeed
from pool import WorkerPool
from trainers import STEPS, assert_same_and_balanced, settings, tokenizer, without_and_with, zero

import deepspeed_cad

pytest.importorskip("trl")

WORLD = 3
LENGTHS = [180, 20, 60, 9, 120, 40, 200, 5, 30, 150, 70, 11, 90, 25, 160, 33]


def _lora(**changes: Any) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **changes)


def _trained(cad: bool, kind: str, folder: str, model: Any, data: dict, given: dict, **more: Any) -> list[Any]:
    """The log of a trainer of TRL; `cad`: turned on by its own key."""
    import trl
    from datasets import Dataset

    if cad:
        deepspeed_cad.apply(model, training.BLOCK)
    arguments = settings(folder, max_steps=STEPS, gradient_checkpointing=False) | given
    trainer = getattr(trl, f"{kind}Trainer")(
        model=model, args=getattr(trl, f"{kind}Config")(**arguments), train_dataset=Dataset.from_dict(data),
        processing_class=tokenizer(), **more,
    )  # fmt: skip
    trainer.train()
    return trainer.state.log_history


def _sft(cad: bool, folder: str, lora: bool = False, **changes: Any) -> list[dict[str, Any]]:
    data = {"input_ids": [doc.tolist() for doc in training.documents(LENGTHS * 4, seed=0)]}
    more = {"peft_config": _lora(init_lora_weights=False)} if lora else {}
    return _trained(cad, "SFT", folder, training.sdpa_llama(), data, {"max_length": 200, **changes}, **more)


def _values(model: Any) -> list[torch.Tensor]:
    """Copies of all parameters, gathered where ZeRO-3 shards them."""
    import deepspeed

    parameters = [] if model is None else list(model.parameters())
    with deepspeed.zero.GatheredParameters(parameters, enabled=any(hasattr(p, "ds_id") for p in parameters)):
        return [p.detach().clone() for p in parameters]


def _dpo(cad: bool, folder: str, lora: bool = False, stage: int | None = None, **changes: Any) -> list[dict[str, Any]]:
    rows = [(_words(n, i), _words(n // 2 + 3, 100 + i), _words(n // 3 + 2, 200 + i)) for i, n in enumerate(LENGTHS * 2)]
    data = dict(zip(("prompt", "chosen", "rejected"), map(list, zip(*rows))))
    model, reference = training.sdpa_llama(), None if lora else training.sdpa_llama()
    if stage is not None:
        changes["deepspeed"] = {**zero(stage), **({"cad": training.BLOCK} if cad else {})}
    more = {"peft_config": _lora()} if lora else {"ref_model": reference}
    before, by_key = _values(reference), cad and stage is None
    log = _trained(by_key, "DPO", folder, model, data, {"max_length": 400, **changes}, **more)
    if reference is not None:
        assert before and all(torch.equal(a, b) for a, b in zip(before, _values(reference), strict=True))
        assert reference.config._attn_implementation == ("cad" if cad else "sdpa")
        assert not cad or reference not in deepspeed_cad.current_session().bindings
    return log


def _words(length: int, seed: int) -> str:
    return " ".join(f"w{i % 61}" for i in training.documents([length], seed)[0].tolist())


def _policy(folder: str) -> Any:
    """A policy in a folder, from where a trainer loads its reference too."""
    from transformers import AutoModelForCausalLM

    start = f"{folder}/policy"
    if torch.distributed.get_rank() == 0:
        training.sdpa_llama().save_pretrained(start)
    torch.distributed.barrier()
    return AutoModelForCausalLM.from_pretrained(start, attn_implementation="sdpa")


def _rollouts(cad: bool, folder: str, kind: str = "GRPO", **changes: Any) -> list[dict[str, Any]]:
    """It generates in train mode, then asks the policy and a reference for log-probabilities, then trains."""
    given = {
        "per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 12, "beta": 0.1,
        "temperature": 0.7, "num_iterations": 2, **changes,
    }  # fmt: skip
    log = _trained(
        cad, kind, folder, _policy(folder), {"prompt": [_words(n, seed) for seed, n in enumerate(LENGTHS)]}, given,
        reward_funcs=lambda completions, **_: [float(len(set(one.split()))) for one in completions],
    )  # fmt: skip
    if cad:
        session = deepspeed_cad.current_session()
        assert session.statistics.micro_batches == STEPS and session.forward_only.micro_batches >= 2
        # The policy is the reference yet, to the last bit.
        assert log[0]["kl"] == 0 and log[0]["cad/forward_only_max_over_mean"] <= 1.05
    return log


def _kto(cad: bool, folder: str, **changes: Any) -> list[dict[str, Any]]:
    """Its loss takes a mean over the micro-batches that ranks train at the same time."""
    data = {
        "prompt": [_words(n, i) for i, n in enumerate(LENGTHS * 2)], "label": [i % 2 == 0 for i in range(32)],
        "completion": [_words(n // 2 + 3, 100 + i) for i, n in enumerate(LENGTHS * 2)],
    }  # fmt: skip
    model, reference = _policy(folder).double(), _policy(folder).double()
    given = {"per_device_train_batch_size": 2, "max_length": 400, **changes}
    log = _trained(cad, "KTO", folder, model, data, given, ref_model=reference)
    assert not cad or (log[0]["loss"], log[0]["kl"]) == (0.5, 0)
    return log


OFTEN: dict[str, Any] = {
    "packing": (_sft, {"packing": True, "packing_strategy": "bfd"}),
    "padding-free": (_sft, {"padding_free": True, "max_length": None, "per_device_train_batch_size": 4}),
    "DPO": (_dpo, {"per_device_train_batch_size": 2}),
    "GRPO": (_rollouts, {}),
}
OTHER: dict[str, Any] = {
    "KTO, accumulation": (_kto, {"gradient_accumulation_steps": 2}),
    "packing, LoRA, checkpointing": (_sft, {"lora": True, "packing": True, "gradient_checkpointing": True}),
    "padding": (_sft, {"per_device_train_batch_size": 4}),
    "RLOO, checkpointing": (_rollouts, {"kind": "RLOO", "gradient_checkpointing": True}),
    "DPO, padding-free": (_dpo, {"padding_free": True, "max_length": None, "per_device_train_batch_size": 2}),
    "DPO, LoRA as its own reference": (_dpo, {"lora": True, "gradient_accumulation_steps": 2}),
}
ZERO: dict[str, Any] = {"DPO, ZeRO-3": (_dpo, {"stage": 3, "per_device_train_batch_size": 2})}
"""In processes of its own: transformers does not forget a DeepSpeed JSON."""


def _compare(rank: int, world: int, cases: dict[str, Any], folder: str) -> dict[str, Any]:
    import_deepspeed()
    return {name: without_and_with(train, folder, **given) for name, (train, given) in cases.items()}


@pytest.mark.slow
@pytest.mark.parametrize("cases", [OFTEN, *(pytest.param(one, marks=pytest.mark.long) for one in (OTHER, ZERO))])
def test_same_losses_and_balance(fresh_workers: WorkerPool, tmp_path, cases: dict[str, Any]) -> None:
    for found in fresh_workers.run(_compare, WORLD, cases, str(tmp_path), timeout=300.0):
        for name, (plain, cad) in found.items():
            assert_same_and_balanced(name, plain, cad)
            if name == "padding-free":  # documents are dealt out
                before, after = (sum(one[f"cad/tokens_max_over_mean{which}"] for one in cad if "loss" in one)
                                 for which in ("_before", ""))  # fmt: skip
                assert after < before - 0.02 * STEPS
