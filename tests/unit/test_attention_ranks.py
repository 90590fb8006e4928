"""Whole attention calls of several ranks, stepped in one process: exactness in every mode, precision, order, memory."""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import cases
import numpy as np
import pytest
import torch
from attention_ranks import DIM, GROUPS, HEADS, VALUE, LseTransposed, Ranks

from deepspeed_cad.attention import overlap
from deepspeed_cad.attention.call import AttentionCall, Released
from deepspeed_cad.attention.forward import HeldByAutograd, Kept
from deepspeed_cad.attention.layer import whole_rank_tasks
from deepspeed_cad.attention.serve import new_gradients
from deepspeed_cad.attention.setup import Modes
from deepspeed_cad.kernels.interface import MaskRule
from deepspeed_cad.layout import Layout

PLAIN = MaskRule(DIM**-0.5)
SINKS = torch.linspace(-1, 2, HEADS, dtype=torch.float64)


@pytest.fixture(autouse=True)
def new_memory_is_nan() -> Iterator[None]:
    """What is read before it was written shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("local_first", [True, False])
@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("name", ["two", "a rank with no tokens", "documents over borders", "a tail of padding"])
def test_every_mode_is_exact(name: str, local_first: bool, recompute: bool) -> None:
    ranks = Ranks(cases.layouts()[name], PLAIN, Modes(local_first, recompute), SINKS, seed=3)
    assert max(ranks.run().values()) < 1e-12
    for rank, counts in enumerate(ranks.counts):
        assert (counts.forwards, counts.backwards, counts.replays) == (1, 1, 0)
        assert counts.waits.seconds() >= 0
        resent = [HEADS // GROUPS * DIM, DIM, VALUE]
        assert ranks.network.transports[rank].shipped == [
            [HEADS // GROUPS * DIM, DIM, VALUE], [HEADS // GROUPS * VALUE, HEADS // GROUPS],
            [HEADS // GROUPS * VALUE, *resent], [HEADS // GROUPS * DIM, DIM, VALUE],
        ]  # fmt: skip


@pytest.mark.parametrize("window, softcap", [(None, 3.0), (19, None), (5, 2.0), (1, None)])
@pytest.mark.parametrize("sinks", [None, SINKS])
@pytest.mark.parametrize("name, cut", [("odd", True), ("two", False), ("one document over all ranks", False)])
def test_every_mask_is_exact(
    name: str, cut: bool, window: int | None, softcap: float | None, sinks: torch.Tensor | None
) -> None:
    ranks = Ranks(cases.layouts()[name], MaskRule(0.4, window, softcap), sinks=sinks, cut=cut, seed=5)
    assert max(ranks.run().values()) < 1e-12


@pytest.mark.parametrize("waves", [1, 2])
@pytest.mark.parametrize("cut", [True, False])
def test_who_serves_nothing_lets_results_come_at_once(monkeypatch: pytest.MonkeyPatch, waves: int, cut: bool) -> None:
    """Two trainers beside a server: one of them serves nothing, and its returns start before its own tasks."""
    passes: list[bool] = []
    run_own = overlap._run_own
    monkeypatch.setattr(overlap, "_run_own", lambda *given: passes.append(given[-1]) or run_own(*given))
    layout = Layout.from_rank_lengths([[150, 60], [170, 21], []])
    ticks = layout.cut(layout.tokens // 2) if cut else (layout.tick(),)
    tasks = []
    for tick in ticks:
        own = whole_rank_tasks(Layout(3, tick.query, tick.query_tokens), GROUPS)
        # Of all rows the first head group goes to the server and the second one to trainer 1.
        tasks.append(np.array([(*row[:3], g, g + 1, (2, 1, row[5])[g]) for row in own for g in range(GROUPS)]))
    ranks = Ranks(layout, PLAIN, Modes(), SINKS, cut, tasks=tasks, waves=waves)
    for transport in ranks.network.transports:
        transport.two_ways = True
    assert [call.setup.schedule.serves for call in ranks.calls[0]] == [False, True, True]
    assert max(ranks.run().values()) < 1e-12
    assert sorted(passes) == [False] * len(ticks) + [True] * len(ticks), "forward and backward of trainer 0"


def test_large_sinks_and_padding() -> None:
    """In padding O is 0 and LSE says nothing: what a sink would weigh there must not reach its gradient."""
    ranks = Ranks(cases.layouts()["a tail of padding"], PLAIN, sinks=SINKS + 120, dtype=torch.float32)
    outputs = ranks.forward()
    ranks.backward(outputs)
    assert all(leaf["sinks"].grad.isfinite().all() for leaf in ranks.leaves)
    assert all(output.abs().max() < 1e-30 for output in outputs)


@pytest.mark.parametrize("name, cut", [("two", False), ("odd", True), ("documents over borders", False)])
def test_bf16_is_as_exact_as_the_kernel(name: str, cut: bool) -> None:
    """dK and dV of tasks with common keys add up in fp32, at home and between ranks, and are rounded once each."""
    ranks = Ranks(cases.layouts()[name], PLAIN, Modes(), SINKS, cut, seed=2, dtype=torch.bfloat16)
    schedules = [call.setup.schedule for calls in ranks.calls for call in calls]
    assert any(one.local_keys_overlap for one in schedules) and any(one.waves[0].keys_overlap for one in schedules)
    for leaf, one in zip(ranks.leaves, schedules):  # those of the first tick
        _, *sums = new_gradients(one, *(leaf[name].detach() for name in "qkv"))
        assert {x.dtype for x in sums} == {torch.float32 if one.local_keys_overlap else torch.bfloat16}
    # What its errors are measured by: those of the kernel with every document whole.
    segments = ranks.layout.segments
    lengths = [int(segments.end[segments.document == number].max()) for number in range(ranks.layout.documents)]
    whole = Layout.from_rank_lengths([lengths])
    alone = Ranks(whole, PLAIN, sinks=SINKS, dtype=torch.bfloat16, tasks=[whole_rank_tasks(whole, GROUPS)]).run()
    for what, error in ranks.run().items():
        assert error <= 2 * alone[what], (what, error, alone[what])
    for leaf in ranks.leaves:
        assert all(x.grad.dtype == torch.bfloat16 for x in leaf.values())


class Logging(LseTransposed):
    """Says which batches run: those of rank 0 have all head groups or some, served ones have one and lie close."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def say(self, q: torch.Tensor) -> None:
        self.log.append("served" if q.shape[1] == HEADS // GROUPS and q.is_contiguous() else "local")

    def forward(self, q: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.say(q)
        return super().forward(q, *rest)

    def backward(self, do: torch.Tensor, q: torch.Tensor, *rest: Any) -> Any:
        self.say(q)
        return super().backward(do, q, *rest)


@pytest.mark.parametrize("local_first", [True, False])
def test_local_batches_hide_both_ways(local_first: bool) -> None:
    """About half of them run while Q, K, V travel, the others while results return."""
    # Rank 0 runs a document of its own and that of rank 1, which runs another of rank 0.
    layout = Layout.from_rank_lengths([[30, 10], [20]])
    tasks = np.array([(0, 0, 30, 0, GROUPS, 0), (1, 0, 10, 0, GROUPS, 1), (2, 0, 20, 0, GROUPS, 0)])
    log: list[str] = []
    ranks = Ranks(layout, PLAIN, Modes(local_first), kernel=Logging(log), log=log, tasks=[tasks])
    spans: list[Any] = []
    ranks.counts[0].tracer = types.SimpleNamespace(span=lambda *given: spans.append(given) or nullcontext())  # type: ignore[assignment]
    outputs = ranks.forward()
    forward = log[:]
    log.clear()
    ranks.backward(outputs)
    names = ["dispatch", *("local wait" if local_first else "wait local").split(), "served", "return", "local", "wait"]
    assert spans == [(name, 0, "layer on rank 0", way, False) for way in (False, True) for name in names]
    start, end, idle = ["dispatch"] * 2, ["wait back"] * 2, ["wait out", "served", "give_back"]
    begin = ["local", "wait out"] if local_first else ["wait out", "local"]
    busy = [*begin, "served", "give_back", "local"]
    assert forward == [*start, *busy, *idle, *end]
    # The backward runs the nodes that were made last first.
    assert log == [*start, *idle, *busy, *end]


def alive(references: list[weakref.ref[torch.Tensor]]) -> int:
    gc.collect()
    return sum(one() is not None for one in references)


def test_everything_is_freed_with_the_backward() -> None:
    ranks = Ranks(cases.layouts()["two"], PLAIN, Modes(), SINKS)
    outputs = ranks.forward()
    kept, inputs = [], []
    for call in ranks.calls[0]:
        assert isinstance(call.state, Kept) and len(call.state.served) == 1
        kept += [weakref.ref(x) for x in call.state.tensors()]
    assert len(kept) == 2 * 4
    # Nothing else is held: not the received Q, K, V, not what went back.
    ranks.network.sent.clear()
    inputs = [weakref.ref(x) for x in tensors_of(ranks.calls[0])]
    assert len(inputs) == len(kept) + 2  # and a copy of the sinks per rank
    ranks.backward(outputs)
    del outputs
    assert alive(kept) == alive(inputs) == 0
    assert all(isinstance(call.state, Released) for call in ranks.calls[0])
    assert not tensors_of(ranks.calls[0])


def test_recomputing_calls_hold_nothing_between_forward_and_backward() -> None:
    ranks = Ranks(cases.layouts()["two"], PLAIN, Modes(recompute=True), SINKS)
    outputs = ranks.forward()
    assert len(tensors_of(ranks.calls[0])) == 2  # copies of the sinks
    ranks.backward(outputs, retain_graph=True)
    first = [{n: x.grad.clone() for n, x in leaf.items()} for leaf in ranks.leaves]
    ranks.backward(outputs)  # autograd held all of it
    for leaf, grads in zip(ranks.leaves, first):
        assert all(torch.allclose(x.grad, 2 * grads[n], atol=1e-12) for n, x in leaf.items())
    del outputs
    assert all(isinstance(call.state, HeldByAutograd) for call in ranks.calls[0])


def tensors_of(calls: list[AttentionCall]) -> list[torch.Tensor]:
    found: dict[int, torch.Tensor] = {}
    todo: list[Any] = [call.state for call in calls]
    seen: set[int] = set()
    while todo:
        one = todo.pop()
        if id(one) in seen or isinstance(one, (type, str, types.FunctionType)):
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            found[id(one)] = one
        elif isinstance(one, (tuple, list)):
            todo += one
        elif hasattr(one, "__dict__"):
            todo += vars(one).values()
    return list(found.values())
