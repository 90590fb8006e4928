"""One process, with and without torch.distributed: nothing to exchange, the same result."""

import gc
import weakref
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import training
from torch.utils.checkpoint import checkpoint

import deepspeed_cad
from deepspeed_cad.attention.forward import HeldByAutograd
from deepspeed_cad.attention.microbatch import MicroBatch, PlanKey
from deepspeed_cad.errors import CADDataError, CADError
from deepspeed_cad.function import _read
from deepspeed_cad.planner import HeadShape


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


def test_what_a_function_is_asked_for_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """By sizes that are given, and then by the layers that attended."""
    cad, (q, k, v) = deepspeed_cad.open({"cost": "pairs"}), (torch.randn(9, heads, 8) for heads in (4, 2, 2))
    monkeypatch.setattr(cad.feed, "learn", learn := Mock(wraps=cad.feed.learn))
    step, sizes = cad.plan([0, 3, 9], heads=4, value_dim=8), {"heads": 4, "head_dim": 8}
    for wrong, said in (
        ((q, k, v[:, :1]), r"shapes \[9, 4, 8\], \[9, 2, 8\] and \[9, 1, 8\]"), ((q, k[..., 4:], v), "q, k and v have"),
        ((q[0], k, v), r"q has shape \[4, 8\]; .* expects \[9, 4, size\]"), ((q, q[:, 1:], q[:, 1:]), "q, k and v"),
        ((q[:, 1:], k, v), r"q has shape \[9, 3, 8\]"), ((q, k, v[..., 4:]), r"v has .* expects \[9, heads, 8\]"),
        ((q[1:], k, v), r"q has shape \[8, 4, 8\]"), ((q, k.double(), v), "k is torch.float64 on cpu; .*float32 on"),
        ((q, k, v, q[0, 1:, 0]), r"sinks have shape \[3\]; .* expects \[4\]"),
    ):  # fmt: skip
        with pytest.raises(CADDataError, match=f"rank 0, layer 1.*{said}"):
            step.attend(*wrong[:3], layer=1, sinks=wrong[3] if len(wrong) > 3 else None)
    for layer, window in ((1, None), (2, None), (3, 5)):
        step.attend(q, k, v, layer=layer, window=window)
    with pytest.raises(CADError, match="layer 1 was called twice in one forward. Each forward needs a plan of its own"):
        step.attend(q, k, v, layer=1)
    with torch.no_grad():
        (looked := cad.plan([0, 3, 9])).attend(q, k, v, layer=1)
    with pytest.raises(CADError, match=r"was planned under torch.no_grad\(\), and now a backward is to come"):
        looked.attend(q.clone().requires_grad_(), k, v, layer=2)
    assert (cad.session.statistics.micro_batches, cad.session.forward_only.micro_batches) == (1, 1)
    cad.plan([0, 3, 9], **sizes, kv_heads=2)
    cad.plan([0, 3, 9], **sizes, dtype=torch.bfloat16)
    cad.plan([0, 3, 9], **sizes, kv_heads=2, dtype=torch.bfloat16, windows=[None, 5])
    last = cad.plan([0, 3, 9], **sizes, kv_heads=2, dtype=torch.bfloat16, value_dim=16, layers=3)
    with pytest.raises(CADDataError, match="a micro-batch that was planned before this one was never attended"):
        last.attend(q, k, torch.randn(9, 2, 16), layer=1)
    known, short, tall = (HeadShape(4, 2, 8, *rest) for rest in ((8, 4), (8, 2), (16, 2)))
    first, then = {PlanKey(None, known): 2, PlanKey(5, known): 1}, {PlanKey(None, known): 1}
    given = {PlanKey(None, short): 1, PlanKey(5, short): 1}, {PlanKey(None, tall): 3}
    assert [one.args[0] for one in learn.mock_calls] == [first, then, then, then, given[0], then, given[1]]


@pytest.mark.parametrize("ends, positions, begins, tokens", [
    ([0, 3, 9], None, 2, 9), ([], None, 0, 0), ([0], None, 0, 0), (None, [0, 1, 2, 0, 1], 2, 5), (None, [], 0, 0),
    (None, [[0, 1], [0, 1], [0, 0]], 4, 6), (None, [[[0, 1, 0]], [[7, 7, 7]], [[7, 7, 7]], [[7, 7, 7]]], 2, 3),
    ([0, 1, 3], [[[0, 0, 1]]] * 3, 2, 3),
    (None, [[[0, 0, 1]]] * 3, "positions of several axes do not say where documents begin. Pass cu_seqlens", 0),
    ([0, 4.5, 9], None, r"cu_seqlens are \[0, 4.5, 9\]; expected whole numbers", 0), ([[0, 9]], None, "whole numb", 0),
    ([0, 5, 9], [0, 1, 2, 3, 0, 1, 2, 3, 4], "cu_seqlens and position_ids disagree", 0), (None, None, "neither", 0),
])  # fmt: skip
def test_documents_that_a_function_reads(ends: Any, positions: Any, begins: Any, tokens: int) -> None:
    """By lengths, by positions of one row or several, or by those of text, the first of four axes."""
    with pytest.raises(CADDataError, match=begins) if isinstance(begins, str) else nullcontext():
        local = _read(ends, positions).local
        assert (len(local.begin), local.tokens, int((local.end - local.begin).sum())) == (begins, tokens, tokens)


def test_cuda_is_the_gpu_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr("deepspeed_cad.function.open_session", lambda config, device, replica: device)
    monkeypatch.setattr("deepspeed_cad.function.CAD", lambda device: device)
    assert deepspeed_cad.open({}, device="cuda") == torch.device("cuda", 3)
