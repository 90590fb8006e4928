"""Several models of one process in turn: actor, critic, reference and reward, as a PPO step calls them."""

import copy
import re
from typing import Any

import pytest
import torch
import training
from pool import WorkerError, WorkerPool
from transformers import LlamaForTokenClassification, Qwen2Config, Qwen2ForTokenClassification, set_seed

import deepspeed_cad

BLOCK = {"granularity": 4, "tolerance": 0.02, "links": training.LINKS}
TOGETHER = {**BLOCK, "forward_only": "balanced"}
ROOM = 240
"""Tokens of a micro-batch."""


def _models() -> dict[str, Any]:
    """Actor and reference with the same weights, a critic of another size, a reward model of another family."""
    set_seed(1)
    small = {"hidden_size": 32, "num_attention_heads": 4, "num_labels": 1, "classifier_dropout": 0.0}
    config = training.tiny_llama(**small, num_key_value_heads=1).config
    other = Qwen2Config(**{**config.to_dict(), "model_type": "qwen2", "num_key_value_heads": 2})
    models = {
        "actor": training.tiny_llama(), "reference": training.tiny_llama(),
        "critic": LlamaForTokenClassification(config), "reward": Qwen2ForTokenClassification(other),
    }  # fmt: skip
    for name in ("reference", "reward"):
        models[name].eval().requires_grad_(False)
    return {name: model.double() for name, model in models.items()}


def _rollouts(rank: int, world: int) -> list[list[torch.Tensor]]:
    """This rank's micro-batches, as many as its lengths need; the longest rollout is 20 x the median."""
    gen = torch.Generator().manual_seed(3)
    lengths = torch.randn(8 * world, generator=gen).mul(0.8).exp().mul(15).long().clamp(4, 200)
    lengths[5] = 20 * lengths.median()
    docs = training.documents(lengths.tolist(), seed=3)
    mine: list[list[torch.Tensor]] = [[]]
    for doc in docs[rank::world]:
        if sum(map(len, mine[-1])) + len(doc) > ROOM and mine[-1]:
            mine.append([])
        mine[-1].append(doc)
    return mine


def _run(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of each token: its value, or the log-probability of the next token."""
    ids = batch["input_ids"][0]
    logits = model(input_ids=ids[None], position_ids=batch["position_ids"]).logits[0]
    return logits[:, 0] if logits.shape[1] == 1 else logits.log_softmax(-1).gather(-1, ids.roll(-1)[:, None])[:, 0]


def _alone(model: torch.nn.Module, docs: list[torch.Tensor]) -> torch.Tensor:
    """The same of documents that are each run alone, by a model's own attention, which it has with gradients."""
    with torch.enable_grad():
        return torch.cat([_run(model, training.pack([doc])) for doc in docs])


def _weights(docs: list[torch.Tensor]) -> torch.Tensor:
    """0 at the last token of each document, whose next is of another one."""
    return torch.cat([torch.arange(len(doc), 0, -1) > 1 for doc in docs]).double()


def _move(model: torch.nn.Module, away: bool) -> None:
    """Offload a model as trainers do: its parameters give up their memory, and get it back elsewhere."""
    for parameter in model.parameters():
        if away:
            parameter.kept, parameter.data = parameter.data.clone(), torch.empty(0, dtype=parameter.dtype)
        else:
            parameter.data = parameter.__dict__.pop("kept")


def _looks(models: dict[str, Any], plain: dict[str, Any], mine: list[Any], how: str) -> dict[str, list[torch.Tensor]]:
    """What each model says of all micro-batches, without gradients: one model after the other, or all for each."""
    session = deepspeed_cad.current_session()
    found: dict[str, list[torch.Tensor]] = {name: [] for name in models}
    batches = [training.pack(docs) for docs in mine]
    with torch.no_grad():
        if how == "each":
            for batch in session.look_ahead(batches, models["actor"]):
                for name, model in models.items():
                    found[name].append(_run(model, batch))
        else:
            for model in models.values():
                _move(model, away=True)
            for name, model in models.items():
                _move(model, away=False)
                for batch in session.look_ahead(batches, model):
                    found[name].append(_run(model, batch))
                _move(model, away=True)
            for model in models.values():
                _move(model, away=False)
    for name, values in found.items():
        for value, docs in zip(values, mine, strict=True):
            assert ((value - _alone(plain[name], docs)) * _weights(docs)).abs().max() < 1e-10, name
    return found


def _ppo(rank: int, world: int, block: dict[str, Any], how: str, checkpointing: bool) -> dict[str, Any]:
    models = _models()
    plain = copy.deepcopy(models)
    for model in models.values():
        deepspeed_cad.apply(model, {**BLOCK, **block})
        if checkpointing and model.model.embed_tokens.weight.requires_grad:
            model.gradient_checkpointing_enable({"use_reentrant": False})
    session = deepspeed_cad.current_session()
    mine = _rollouts(rank, world)
    for name in ("actor", "critic"):
        models[name].eval() if how == "each" else models[name].train()
    old = _looks(models, plain, mine, how)
    assert all(torch.equal(a, b) for a, b in zip(old["actor"], old["reference"], strict=True))
    looks = session.forward_only
    rewards = [value.mean() for value in old["reward"]]
    models["actor"].train()
    models["critic"].train()
    # Training takes as many micro-batches on every rank.
    count = torch.tensor(len(mine))
    torch.distributed.all_reduce(count, torch.distributed.ReduceOp.MIN)
    trained = mine[: int(count)]
    batches = [{**training.pack(docs), "at": torch.tensor(i)} for i, docs in enumerate(trained)]
    for batch in session.look_ahead(batches, models["actor"]):
        i = int(batch.pop("at"))
        docs, weights = trained[i], _weights(trained[i])
        advantage = rewards[i] - old["critic"][i]
        logps, values = _run(models["actor"], batch), _run(models["critic"], batch)
        ratio = (logps - old["actor"][i]).exp()
        assert torch.equal(ratio, torch.ones_like(ratio))
        with torch.no_grad():
            for name in ("reference", "actor"):  # between a forward and its backward
                assert torch.equal(_run(models[name].train(i % 2 == 0), batch), logps)
            models["actor"].train()
        for name, value in (("critic", values), ("actor", ratio * advantage)):
            (value.square() * weights).sum().backward()
            again = _alone(plain[name], docs)
            again = again if name == "critic" else (again - again.detach()).exp() * advantage
            (again.square() * weights).sum().backward()
            training.assert_gradients(models[name], training.gradients(plain[name]))
            models[name].zero_grad()
            plain[name].zero_grad()
    assert session.statistics.micro_batches == 2 * len(trained)
    return {
        "looks": looks.micro_batches, "mine": len(mine), "before": looks.imbalance_before, "now": looks.imbalance,
        "logged": session.take_statistics("test").as_events(),
    }  # fmt: skip


@pytest.mark.parametrize("world, block, how, checkpointing", [
    (3, TOGETHER, "one after the other", False), (4, TOGETHER, "each", True), (2, BLOCK, "each", True),
], ids=["offloaded", "each", "local"])  # fmt: skip
def test_a_ppo_step(workers: WorkerPool, world: int, block: dict[str, Any], how: str, checkpointing: bool) -> None:
    """Ranks have unequal numbers of micro-batches; those that ran out follow the others from model to model."""
    found = workers.run(_ppo, world, block, how, checkpointing, timeout=100.0)
    most = max(one["mine"] for one in found)
    assert most > min(one["mine"] for one in found)
    for one in found:
        assert one["looks"] == 4 * most * (block == TOGETHER)
        if block == TOGETHER:
            assert one["now"] <= 1.05 < 1.3 < one["before"]
            assert one["logged"]["cad/forward_only_max_over_mean"] <= 1.05


def _apart(rank: int, world: int, how: str) -> None:
    models = _models()
    for model in models.values():
        deepspeed_cad.apply(model, {**TOGETHER, "timeout_s": 6.0})
    batch = training.pack(training.documents([30, 4], seed=rank))
    with torch.no_grad():
        for name in ("actor", "reference") if how == "order" else ("actor",):
            _run(models[name], batch)
        if how == "order":
            _run(models["critic" if rank else "reward"], batch)
        elif rank:
            # Rank 0 has no further one, and never ran this model.
            _run(training.tiny_llama(), batch)
        else:
            deepspeed_cad.current_session().find_binding(models["actor"]).follow()


@pytest.mark.parametrize("how, words", [
    ("order", "rank 0 at the .*without backward number 0 of model [23]"), ("unknown", "it never ran"),
])  # fmt: skip
def test_ranks_that_run_other_models(fresh_workers: WorkerPool, how: str, words: str) -> None:
    """Each rank says where the other one is."""
    with pytest.raises(WorkerError) as caught:
        fresh_workers.run(_apart, 2, how, timeout=60.0)
    for error in caught.value.errors:
        assert error is not None and re.search(words, error[1]), caught.value
