"""One layer's attention in one process, as a model calls it: autocast, mistakes of a model, what is kept and freed."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cases import document_attention
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from deepspeed_cad.attention.backward import with_packed_heads
from deepspeed_cad.attention.call import AttentionCall, Calls, Released
from deepspeed_cad.attention.device_schedule import upload_schedule
from deepspeed_cad.attention.forward import ForwardServed, version_of
from deepspeed_cad.attention.layer import LayerInput, whole_rank_tasks
from deepspeed_cad.attention.microbatch import MaskDescriptor, MicroBatch
from deepspeed_cad.attention.serve import by_group
from deepspeed_cad.attention.setup import CallCounts, CallSetup, Modes
from deepspeed_cad.attention.surviving import SurvivingCall
from deepspeed_cad.errors import CADError
from deepspeed_cad.kernels.interface import Kernel, MaskRule
from deepspeed_cad.kernels.torch_math import TorchMath
from deepspeed_cad.layout import Layout
from deepspeed_cad.pipeline.phase import TickCall
from deepspeed_cad.planner.plan import Plan
from deepspeed_cad.schedule import build_slices, schedule_rank

CPU = torch.device("cpu")
HEADS, GROUPS, DIM = 4, 2, 8
LABEL = "Attention of layer 3"
SERVERS: Any = SimpleNamespace(generation=0, repeated=0, all_have=bool)


class Layer(torch.nn.Module):
    """Attention of one micro-batch of one rank; takes and gives what transformers' attention functions do."""

    def __init__(self, lengths: list[int], modes: Modes | None = None, kernel: Kernel | None = None) -> None:
        super().__init__()
        layout = Layout.from_rank_lengths([lengths])
        nothing = np.zeros(1, np.int64)
        self.micro_batch = MicroBatch(
            0, layout, (layout.tick(),), CPU,
            lambda tick, key: Plan(whole_rank_tasks(layout, key.shape.groups), nothing, nothing, nothing, nothing),
            lambda value, what: None, None, CallCounts(),
        )  # fmt: skip
        self.descriptor = MaskDescriptor(
            self.micro_batch, None, lambda *_: kernel or TorchMath(), Modes() if modes is None else modes
        )

    def forward(self, q: Any, k: Any, v: Any, sinks: torch.Tensor | None = None) -> torch.Tensor:
        rows = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        return self.descriptor.attend(LayerInput(self, *rows, MaskRule(1.0), sinks, LABEL))[None]


def inputs(rows: int, dtype: torch.dtype = torch.float64, spread: float = 1.0) -> list[torch.Tensor]:
    """Q, K, V as [1, heads, rows, DIM]; `spread` is the standard deviation of scores."""
    gen = torch.Generator().manual_seed(0)
    made = [torch.randn(1, heads, rows, DIM, generator=gen, dtype=torch.float64) for heads in (HEADS, GROUPS, GROUPS)]
    made[0] *= spread / DIM**0.5
    return [x.to(dtype).requires_grad_() for x in made]


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return document_attention(*(x[0].transpose(0, 1) for x in (q, k, v)), 1.0)[None]


def test_attention_runs_in_the_dtype_of_autocast() -> None:
    """Rotary embeddings leave Q and K in fp32, which no fast kernel takes; torch's own attention rounds them. Scores
    that autocast rounds in the forward only would make probabilities that are not those of the LSE."""
    given, rounded = inputs(96, torch.float32, 16.0), [x.detach().bfloat16() for x in inputs(96, torch.float32, 16.0)]
    layer, do = Layer([96]), torch.randn(1, 96, HEADS, DIM).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        o = layer(*given[:2], given[2].bfloat16())
        assert Layer([5, 3])(*inputs(8)).dtype == torch.float64
    assert [key.shape.bytes_per_element for key in layer.micro_batch.keys] == [2]
    expected = Layer([96])(*(x.requires_grad_() for x in rounded))
    assert o.dtype == torch.bfloat16 and torch.equal(o, expected)
    right = torch.autograd.grad(expected, rounded, do)
    for one, other in zip(torch.autograd.grad(o, given, do), right, strict=True):
        assert one.dtype == torch.float32 and torch.equal(one, other.float())


def checkpointed(layer: Layer, change: Callable[[torch.Tensor], torch.Tensor], *given: torch.Tensor) -> torch.Tensor:
    """A layer that is run again in its backward, as transformers does it."""
    return checkpoint(run_whole, layer, change, *given, use_reentrant=False)


def run_whole(layer: Layer, change: Callable[[torch.Tensor], torch.Tensor], *given: torch.Tensor) -> torch.Tensor:
    return change(layer(*given))


def offloaded(layer: Layer, change: Callable[[torch.Tensor], torch.Tensor], *given: torch.Tensor) -> torch.Tensor:
    """As from a GPU, where what comes back is another tensor."""
    with saved_tensors_hooks(torch.clone, torch.clone):
        return run_whole(layer, change, *given)


RUNS = pytest.mark.parametrize("run", [run_whole, checkpointed])
RECOMPUTE = pytest.mark.parametrize("recompute", [False, True])


@RUNS
@RECOMPUTE
def test_output_changed_in_place_is_an_error(run: Callable[..., torch.Tensor], recompute: bool) -> None:
    """Training would go on with wrong gradients. What autograd itself holds it checks itself."""
    assert version_of(torch.zeros(3)) > 0, "0 would mean that torch does not count"
    # The square is of use to autograd, so that a recompute does not end before the change.
    o = run(Layer([5, 3], Modes(recompute=recompute)), lambda o: o.flatten(2).mul_(2).square(), *inputs(8))
    by_autograd = recompute and run is run_whole
    with pytest.raises(RuntimeError, match="inplace operation" if by_autograd else f"{LABEL}.*changed in place"):
        o.sum().backward()


@pytest.mark.parametrize("run", [run_whole, checkpointed, offloaded])
@RECOMPUTE
def test_gradients_of_a_layer(run: Callable[..., torch.Tensor], recompute: bool) -> None:
    given = inputs(8)
    layer = Layer([8], Modes(recompute=recompute))
    o = run(layer, lambda o: o * 2, *given)
    do = torch.randn_like(o)
    expected = plain(*given) * 2
    found = torch.autograd.grad(o, given, do)
    assert torch.allclose(o, expected, atol=1e-12)
    for one, other in zip(found, torch.autograd.grad(expected, given, do), strict=True):
        assert torch.allclose(one, other, atol=1e-12)
    counts, again = layer.micro_batch.counts, run is checkpointed
    assert (counts.forwards, counts.backwards, counts.replays) == (
        1 + (again and recompute), 1, int(again and not recompute),
    )  # fmt: skip


@RUNS
@RECOMPUTE
def test_second_backward_is_an_error(run: Callable[..., torch.Tensor], recompute: bool) -> None:
    layer, given = Layer([8], Modes(recompute=recompute)), inputs(8)
    with pytest.raises(CADError, match=f"{LABEL}: create_graph=True"):
        torch.autograd.grad(run(Layer([8], Modes(recompute=recompute)), abs, *given).sum(), given, create_graph=True)
    o = run(layer, lambda o: o * 2, *given)
    (first,) = torch.autograd.grad(o.sum(), given[:1], retain_graph=True)
    if recompute:  # autograd holds all of it, or has it made again
        assert torch.equal(torch.autograd.grad(o.sum(), given[:1])[0], first)
        return
    with pytest.raises(CADError, match=f"{LABEL}: a second backward.*retain_graph"):
        o.sum().backward()


@RUNS
@pytest.mark.parametrize("calls", [Calls(), Calls(lambda make: SurvivingCall(make, SERVERS))])
def test_sinks_are_trained_alone(calls: Calls, run: Callable[..., torch.Tensor]) -> None:
    """Q, K and V need no gradient: the call is not asked for theirs, and keeps nothing."""
    q, k, v = (x.detach() for x in inputs(8))
    sinks = torch.linspace(-1, 1, HEADS, dtype=torch.float64).requires_grad_()
    layer = Layer([8])
    layer.micro_batch.calls = calls
    o = run(layer, lambda o: o * 2, q, k, v, sinks)
    heads = [x[0].transpose(0, 1) for x in (q, k, v)]
    expected = torch.autograd.grad(document_attention(*heads, 1.0, sinks=sinks).sum() * 2, sinks)[0]
    o.sum().backward()
    assert torch.allclose(sinks.grad, expected, atol=1e-12)
    whole = Layer([8])
    whole.micro_batch.calls = calls
    whole(*inputs(8)).sum().backward()
    frozen = Layer([8])
    run(frozen, lambda o: o, q, k, v)
    for one in (layer, whole, *[frozen] * (run is run_whole)):
        (call,) = one.micro_batch._calls.values()
        assert isinstance(call.state, Released)
        if isinstance(call, SurvivingCall):
            with pytest.raises(CADError, match="a call whose backward is over"):
                call.make_setup()


def test_servers_that_stay_attend_once(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, start = [], AttentionCall.start_forward
    monkeypatch.setattr(AttentionCall, "start_forward", lambda self, *given: begun.append(1) or start(self, *given))
    layer = Layer([8])
    layer.micro_batch.calls = Calls(lambda make: SurvivingCall(make, SERVERS))
    layer(*inputs(8)).sum().backward()
    assert len(begun) == 1
    layer.descriptor.modes, layer.micro_batch._calls = Modes(returns=False), {}
    layer(*inputs(8))
    with pytest.raises(CADError, match="a call whose backward is over"):
        layer.micro_batch._calls[layer, 0].make_setup()


def tick_call() -> TickCall:
    """One layer in a pipeline's ticks."""
    tick = Layout.from_rank_lengths([[8]]).tick()
    slices = build_slices(tick, whole_rank_tasks(Layout.from_rank_lengths([[8]]), GROUPS), None)
    schedule = upload_schedule(schedule_rank(tick, slices, 0, GROUPS, None), CPU)
    setup = CallSetup(schedule, TorchMath(), None, MaskRule(1.0), Modes(results_travel=True), CallCounts(), label=LABEL)
    return TickCall(setup, lambda: setup)


@pytest.mark.parametrize("tick", [False, True])
def test_gradients_of_the_sinks_that_the_forward_used(tick: bool) -> None:
    """A sharded parameter is gathered for the forward, and its memory is another's by the backward."""
    given, sinks = inputs(8), torch.linspace(-1, 1, HEADS, dtype=torch.float64).requires_grad_()
    heads = [x[0].transpose(0, 1) for x in given]
    expected = torch.autograd.grad(document_attention(*heads, 1.0, sinks=sinks).sum(), [*given, sinks])
    o = tick_call()(*(x.contiguous() for x in heads), sinks) if tick else Layer([8])(*given, sinks)
    sinks.data.fill_(float("nan"))
    for one, other in zip(torch.autograd.grad(o.sum(), [*given, sinks]), expected, strict=True):
        assert torch.allclose(one, other, atol=1e-12)


def test_steps_out_of_order_are_an_error() -> None:
    """Whoever catches an error of one step and goes on meets another that says so, not an AttributeError."""
    layer, (q, k, v) = Layer([8]), inputs(8)
    layer(q, k, v)
    (call,) = layer.micro_batch._calls.values()
    with pytest.raises(CADError, match=f"{LABEL}: its steps ran out of order: Kept where ForwardServed"):
        call.expect(ForwardServed)
    wide = torch.ones(5, 2 * HEADS, DIM)
    packed = wide[:, :HEADS]
    assert with_packed_heads(packed) is packed, "no copy for gaps between rows"
    for x in (wide[:1].expand(5, -1, -1), wide[:, ::2], wide[..., :1].expand(-1, -1, DIM)):
        assert with_packed_heads(x).is_contiguous(), "as of o.sum(0)"


def test_rows_leave_with_the_heads_of_a_group_side_by_side() -> None:
    wide = torch.arange(5 * 2 * HEADS * DIM).view(5, 2 * HEADS, DIM)
    gaps = wide[:, :HEADS]
    for x, is_view in ((gaps, True), (wide[:, ::2], False), (gaps[..., :1].expand(-1, -1, DIM), False)):
        for groups in (GROUPS, HEADS):
            found = by_group(x, wide[:, :groups])
            assert torch.equal(found, x.reshape(5, groups, -1)) and found.stride(2) == 1
            assert (found.data_ptr() == x.data_ptr()) is is_view


def test_one_of_q_k_and_v_is_trained_alone() -> None:
    for only in range(3):
        given = [x.detach().requires_grad_(at == only) for at, x in enumerate(inputs(8))]
        found, expected = (torch.autograd.grad(run(*given).square().sum(), given[only]) for run in (Layer([8]), plain))
        assert torch.allclose(found[0], expected[0], atol=1e-12)
