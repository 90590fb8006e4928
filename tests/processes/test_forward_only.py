"""Forwards without backward: all ranks together or each alone, no training micro-batch, and generation is local."""

from dataclasses import replace
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch
import training
from deepspeed_cad.integrations.forward_only import install_worker_hooks
from pool import WorkerPool
from torch.distributed.fsdp import FullyShardedDataParallel
from trainers import PackedRows, Stream, collate, training_arguments
from transformers import LlamaForCausalLM, Trainer

import deepspeed_cad

TOGETHER = {**training.BLOCK, "forward_only": "balanced"}


def _alone(reference: torch.nn.Module, docs: list[torch.Tensor]) -> torch.Tensor:
    """Logits of documents that are each run alone, by the reference's own attention, which it has with gradients."""
    with torch.enable_grad():
        return torch.cat([reference(input_ids=doc[None]).logits[0].detach() for doc in docs])


def _fsdp1(rank: int, world: int, late: bool) -> int:
    """Policy and reference in wrappers that gather parameters; rank 0 has one batch in each pass."""
    wrap = partial(FullyShardedDataParallel, use_orig_params=True, device_id=torch.device("cpu"))
    plain, policy = training.tiny_llama(), cast(Any, training.tiny_llama())
    policy = policy if late else deepspeed_cad.apply(policy, TOGETHER)
    policy.model.layers[0] = wrap(policy.model.layers[0])
    model, reference = wrap(policy), wrap(training.tiny_llama().eval())
    deepspeed_cad.apply(model, TOGETHER)
    session = deepspeed_cad.current_session()
    session.plans.cost = replace(session.plans.cost, unit="seconds")  # plans go by what ranks learn of each model
    for passes in range(2):
        mine = [training.documents([70 if rank else 9, 30], seed) for seed in range(1 + (1 + passes) * rank)]
        with torch.no_grad():
            for i, batch in enumerate(session.look_ahead([training.pack(docs) for docs in mine], model)):
                for one in (model.train(i % 2 == 0), reference)[passes:]:
                    found = one(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits[0]
                    assert (found - _alone(plain, mine[i])).abs().max() < 1e-10
        docs = training.documents([40, 9], seed=passes + rank)
        loss = training.forward_backward(model.train(), training.pack(docs))
        assert abs(loss - training.alone(plain, docs)[0]) < 1e-8
    assert session.statistics.micro_batches == 2
    return session.forward_only.micro_batches


@pytest.mark.parametrize("late", [False, True])
def test_fsdp1_with_unequal_numbers_of_batches(workers: WorkerPool, late: bool) -> None:
    """A rank that ran out calls the wrapper, which gathers parameters with the others."""
    assert workers.run(_fsdp1, 2, late) == 2 * [2 * 2 + 3]


class _Critic(LlamaForCausalLM):
    """As OpenRLHF's: without its output it would need to know the actions."""

    def forward(self, *args: Any, return_output: bool = False, **given: Any) -> Any:
        assert return_output
        return super().forward(*args, **given)


class _Worker:
    def execute_batch(self, run: Any, batches: list[Any]) -> list[torch.Tensor]:
        return [run(one) for one in batches]


def _experience(rank: int, world: int) -> int:
    """What OpenRLHF's experience maker runs, in a worker that Ray has given a copy of what it inherits."""
    copied = type("Copied", (), {"execute_batch": lambda self, *given: _Worker.execute_batch(self, *given)})
    module: Any = ModuleType("openrlhf.trainer.ray.launcher")
    module.BaseModelActor = _Worker
    module.Critic = SimpleNamespace(__ray_metadata__=SimpleNamespace(modified_class=copied))
    install_worker_hooks(module)
    plain = training.tiny_llama()
    model: Any = _Critic(plain.config).double()
    model.load_state_dict(plain.state_dict())
    deepspeed_cad.apply(model, TOGETHER)
    mine = [training.documents([70 if rank else 9, 30], seed) for seed in range(1 + 2 * rank)]

    def run(docs: list[torch.Tensor]) -> torch.Tensor:
        batch = training.pack(docs)
        del batch["labels"]
        return model(**batch, return_output=True).logits[0]

    with torch.no_grad():
        for docs, found in zip(mine, copied().execute_batch(run, mine), strict=True):
            assert (found - _alone(plain, docs)).abs().max() < 1e-10
    return deepspeed_cad.current_session().forward_only.micro_batches


def test_workers_of_openrlhf_with_unequal_numbers_of_batches(fresh_workers: WorkerPool) -> None:
    assert fresh_workers.run(_experience, 2) == [3, 3]


def _generate(rank: int, world: int, block: dict[str, Any]) -> None:
    """As GRPO does: in train mode, without gradients, answers of another length on each rank, then a step."""
    model, reference = deepspeed_cad.apply(training.tiny_llama(), block), training.tiny_llama()
    session, prompts = deepspeed_cad.current_session(), torch.stack(training.documents([12, 12], seed=rank))
    mask = torch.ones_like(prompts)
    prompts[0, :5], mask[0, :5] = 0, 0  # padding on the left
    for cache in (True, False):
        given: dict[str, Any] = {"max_new_tokens": 3 + 4 * rank, "do_sample": False, "use_cache": cache}
        with torch.no_grad():
            wanted = reference.eval().generate(prompts, attention_mask=mask, pad_token_id=0, **given)
            for training_mode in (True, False):
                found = model.train(training_mode).generate(prompts, attention_mask=mask, pad_token_id=0, **given)
                assert torch.equal(found, wanted)
    assert session.transport.exchanges == session.statistics.micro_batches == session.forward_only.micro_batches == 0
    reference.train()
    training.step_as_alone(model.train(), reference, training.documents([40 if rank else 7], seed=rank))


@pytest.mark.parametrize("block", [training.BLOCK, TOGETHER], ids=["local", "balanced"])
def test_generation_is_local(workers: WorkerPool, block: dict[str, Any]) -> None:
    workers.run(_generate, 2, block)


def _trainer(rank: int, world: int, folder: str, kind: str) -> tuple[dict[str, float], int]:
    """What an evaluation says, and how many of its forwards all ranks ran together."""
    model: Any = training.tiny_llama(torch.float32, use_cache=False)
    if kind != "plain":
        deepspeed_cad.apply(model, training.BLOCK)
    arguments = training_arguments(folder, per_device_eval_batch_size=1, accelerator_config={"dispatch_batches": False})
    trainer = Trainer(model=model, args=arguments, data_collator=collate)
    found = trainer.evaluate(Stream() if kind == "unknown" else PackedRows(16))
    session = deepspeed_cad.current_session()
    return found, 0 if session is None else session.forward_only.micro_batches


@pytest.mark.slow
def test_evaluations_of_the_trainer(fresh_workers: WorkerPool, tmp_path: Any) -> None:
    expected = 0.0
    for kind, looks in (("plain", 0), ("even", 8), ("unknown", 0)):
        for said, count in fresh_workers.run(_trainer, 2, str(tmp_path), kind, timeout=100.0):
            expected = said["eval_loss"] if kind == "plain" else expected
            assert count == looks and abs(said["eval_loss"] - expected) < 1e-5
