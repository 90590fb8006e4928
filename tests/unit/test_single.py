"""One process, with and without torch.distributed: nothing to exchange, the same result."""

import gc
import weakref

import pytest
import torch
import training
from torch.utils.checkpoint import checkpoint

import deepspeed_cad
from deepspeed_cad.attention.forward import HeldByAutograd
from deepspeed_cad.attention.microbatch import MicroBatch


@pytest.mark.parametrize("overlap", ["local_first", "interleave"])
def test_without_torch_distributed(overlap: str) -> None:
    assert not torch.distributed.is_initialized()
    model, reference = training.tiny_llama(), training.tiny_llama()
    deepspeed_cad.apply(model, {"overlap": overlap})
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    training.step_as_alone(model, reference, training.documents([40, 3, 1, 77], seed=5))
    session = deepspeed_cad.current_session()
    assert session is not None and session.transport is None and session.ranks == 1
    assert session.statistics.imbalance == pytest.approx(1.0)


def test_forwards_without_backward_leave_nothing_behind() -> None:
    """A reference's answers in DPO, in training mode and without gradients; and a loss that is never used."""
    model = training.tiny_llama()
    deepspeed_cad.apply(model, {})
    model.train()
    session = deepspeed_cad.current_session()
    seen: list[MicroBatch] = []
    count, open_local = session.count, session.plans.open_local
    session.count = lambda *given: (seen.append(given[0]), count(*given))[1]  # type: ignore[method-assign, func-returns-value]
    session.plans.open_local = lambda local: (seen.append(one := open_local(local)), one)[1]  # type: ignore[method-assign, func-returns-value]
    batch = training.pack(training.documents([40, 3], seed=5))
    with torch.no_grad():
        training.loss_sum(model, batch)
    calls = list(seen[0]._calls.values())
    assert len(calls) == 2 and all(isinstance(call.state, HeldByAutograd) for call in calls)
    training.loss_sum(model, batch)
    session.worker.run(lambda: None)  # the worker holds the last result until it waits for a job again
    dropped = [weakref.ref(micro_batch) for micro_batch in seen]
    del calls
    seen.clear()
    gc.collect()
    assert not any(one() for one in dropped)
    assert session.statistics.micro_batches == 1 and session.statistics.imbalance == pytest.approx(1.0)


def test_a_reference_inside_of_what_is_checkpointed() -> None:
    model, other = (training.tiny_llama() for _ in range(2))
    batch = training.pack(training.documents([40, 3], seed=5))
    with torch.no_grad():
        expected = other(**batch, use_cache=False).logits
    deepspeed_cad.apply(model, {})
    seen: list[torch.Tensor] = []

    def answer(logits: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            seen.append(other.eval()(**batch, use_cache=False).logits)
        return (logits * seen[-1]).sum()

    checkpoint(answer, model.train()(**batch).logits, use_reentrant=False).backward()
    assert len(seen) == 2 and all(torch.allclose(one, expected, atol=1e-12) for one in seen)


def test_cuda_is_the_gpu_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr("deepspeed_cad.function.open_session", lambda config, device, replica: device)
    monkeypatch.setattr("deepspeed_cad.function.CAD", lambda device: device)
    assert deepspeed_cad.open({}, device="cuda") == torch.device("cuda", 3)
