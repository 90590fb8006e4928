"""Nano-batches that alternate over the whole decoder: exact, and exchanges in the order that servers need."""

import functools
import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import training
from pool import WorkerPool
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import LlamaModel

import deepspeed_cad
from deepspeed_cad.attention.call import AttentionCall
from deepspeed_cad.exchange.transport import UNNAMED

BLOCK = training.BLOCK | {"overlap": "interleave"}
LENGTHS = [[[200, 31], [40, 9, 1, 70], [33]], [[7], [], [1]]]
"""Documents of each rank, of two micro-batches: most are cut inside, one rank has none, one has one token."""
LAYERS = 3


def _apply(model: torch.nn.Module, **block: Any) -> torch.nn.Module:
    return deepspeed_cad.apply(model, {**BLOCK, **block}).train()


def _reason(model: torch.nn.Module) -> str:
    """Why its nano-batches do not alternate; empty where they do."""
    return deepspeed_cad.current_session().find_binding(model).in_turn


def _note(transport: Any, events: list[str]) -> None:
    """Note what starts and what is waited for."""

    def start(begin: Any, what: str, schedule: Any, fields: Any, nano_batch: int, moment: Any = UNNAMED) -> Any:
        name = f"{what} {'AB'[nano_batch]}{moment.layer}{' backward' if moment.backward else ''}"
        events.append(name)
        under_way = begin(schedule, fields, nano_batch, moment)
        return SimpleNamespace(wait=lambda: events.append(f"wait for {name}") or under_way.wait())

    transport.dispatch = functools.partial(start, transport.dispatch, "dispatch")
    transport.give_back = functools.partial(start, transport.give_back, "return")


def _keys_kept() -> int:
    """Layers of which keys of the first nano-batch are kept for the second."""
    return sum(isinstance(one, AttentionCall) and one.first_keys is not None for one in gc.get_objects())


def _record(rank: int, world: int, checkpoint: bool) -> list[str]:
    model = training.checkpointed(_apply(training.tiny_llama(num_hidden_layers=LAYERS)), checkpoint)
    events: list[str] = []
    _note(deepspeed_cad.current_session().transport, events)
    loss = training.loss_sum(model, training.pack(training.documents(LENGTHS[0][rank], seed=rank)))
    assert _keys_kept() == LAYERS
    loss.backward()
    assert _keys_kept() == 0
    return events


@pytest.mark.parametrize("checkpoint", [False, True])
def test_one_part_is_on_its_way_while_the_other_has_its_linear_layers(workers: WorkerPool, checkpoint: bool) -> None:
    """Between a dispatch and the wait for it lies the other part's stretch from its attention to the next one."""

    def there_and_back(name: str, returned: bool = True) -> list[str]:
        return [f"wait for dispatch {name}", f"return {name}"] + ([f"wait for return {name}"] if returned else [])

    forward = ["dispatch A0", "dispatch B0"]
    for layer in range(LAYERS):
        for part in "AB":
            forward += there_and_back(f"{part}{layer}")
            forward += [f"dispatch {part}{layer + 1}"] if layer < LAYERS - 1 else []
    backward = []
    for layer in reversed(range(LAYERS)):
        for part in "BA":
            backward += [f"wait for return {part}{layer + 1} backward"] if layer < LAYERS - 1 else []
            name = f"{part}{layer} backward"
            backward += [f"dispatch {name}", *there_and_back(name, returned=False)]
    backward += ["wait for return B0 backward", "wait for return A0 backward"]
    for events in workers.run(_record, 2, checkpoint):
        assert events == forward + backward


class Counting(LlamaModel):
    """It gives a number beside its hidden states."""

    @functools.wraps(LlamaModel.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output["norm"] = output.last_hidden_state.square().sum()
        return output


def _steps(rank: int, world: int, counts: bool) -> str:
    model: Any = training.tiny_llama()
    model.model.__class__ = Counting if counts else LlamaModel
    kept = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    selective = functools.partial(create_selective_checkpoint_contexts, kept)
    _apply(model).gradient_checkpointing_enable({"use_reentrant": False, "context_fn": selective})
    for step in range(2):
        training.step_as_alone(model, training.tiny_llama(), training.documents(LENGTHS[step][rank], seed=rank))
    return _reason(model)


@pytest.mark.parametrize("counts", [pytest.param(False, marks=pytest.mark.slow), True])
def test_selective_checkpointing_and_outputs_that_cannot_be_joined(workers: WorkerPool, counts: bool) -> None:
    """With the latter parts do not alternate."""
    assert all(('"norm"' in reason) if counts else not reason for reason in workers.run(_steps, 3, counts))


def _follow(rank: int, world: int) -> str:
    """An evaluation for which rank 1 has nothing, of a model whose parts cannot alternate."""
    model = _apply(training.tiny_llama(), forward_only="balanced").eval()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    expected = training.alone(training.tiny_llama(), docs := training.documents([200, 31], seed=3))[0]
    with torch.no_grad():
        for batch in deepspeed_cad.current_session().look_ahead([training.pack(docs)][rank:], model):
            assert abs(float(training.loss_sum(model, batch)) - expected) < 1e-8
    return _reason(model)


def test_a_rank_that_only_follows(workers: WorkerPool) -> None:
    assert all("reentrant" in reason for reason in workers.run(_follow, 2))
