"""A micro-batch on its way through a model: its plans, its calls, its two nano-batches, and what layers pass to it."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from attention_ranks import CPU, GROUPS, HEADS, SHAPES
from cases import document_attention
from deepspeed_cad.integrations import pipeline
from deepspeed_cad.integrations.functions import as_alone, attend_layer

from deepspeed_cad.attention import microbatch
from deepspeed_cad.attention.layer import LayerInput, LayerKind
from deepspeed_cad.attention.memory import ExchangeMemory
from deepspeed_cad.attention.microbatch import MaskDescriptor, MicroBatch, PlanKey
from deepspeed_cad.attention.nano_batches import RandomStream, ThreadState, run_alternating
from deepspeed_cad.attention.setup import CallCounts, CallSetup, Modes
from deepspeed_cad.errors import CADDataError, CADError, CADUnsupportedError
from deepspeed_cad.feedback.layer_times import StretchTimes
from deepspeed_cad.kernels.interface import MaskRule
from deepspeed_cad.kernels.torch_math import TorchMath
from deepspeed_cad.layout import Layout, Tick
from deepspeed_cad.pipeline.step import Alone
from deepspeed_cad.planner.plan import HeadShape, Plan

SHAPE = HeadShape(HEADS, GROUPS, SHAPES["q"][1], SHAPES["v"][1], 8)
FULL, WINDOW = PlanKey(None, SHAPE), PlanKey(3, SHAPE)
LABEL = "Attention of layer 3"


def plan_of(tick: Tick, server: int = 0, load: float = 0.0) -> Plan:
    """Every segment of a tick whole, on one server."""
    rows = [(d, begin, end, 0, GROUPS, server) for d, begin, end, _, _ in tick.query.to_array()]
    return Plan(np.array(rows, np.int64).reshape(-1, 6), *[np.full(1, load)] * 4)


class Said(list[tuple[int, str]]):
    def __call__(self, value: int, what: str) -> None:
        self.append((value, what))


def micro_batch(lengths: list[list[int]], at: list[int] | None = None, server: int = 0, **more: Any) -> MicroBatch:
    layout = Layout.from_rank_lengths(lengths)
    ticks = (layout.tick(),) if at is None else layout.cut(np.array(at))
    return MicroBatch(0, layout, ticks, CPU, lambda tick, _: plan_of(tick, server), Said(), None, CallCounts(), **more)


def test_plans_are_compared_by_all_ticks_and_kinds() -> None:
    said = []
    for server, keys, at in [
        (0, [FULL], None), (0, [FULL], None), (1, [FULL], None), (0, [FULL, WINDOW], None), (0, [FULL], [3, 2]),
    ]:  # fmt: skip
        one = micro_batch([[6], [4]], at, server)
        one.plan_all(keys)
        ((value, what),) = one.agree  # type: ignore[misc]
        assert what == "plan" and 0 <= value < 1 << 62
        assert one.keys == keys and list(one.planned) == [(key, i) for key in keys for i in range(len(one.ticks))]
        assert all(0 < planned.seconds < 60 for planned in one.planned.values())
        said.append(value)
    assert said[0] == said[1] and len(set(said)) == 4


def test_a_kind_is_planned_and_uploaded_once() -> None:
    one = micro_batch([[6]])
    one.plan_all([FULL])
    found = one.schedule(FULL, 0)
    assert found is one.schedule(FULL, 0)
    assert tuple(wave.host for wave in found.waves) == one.planned[FULL, 0].schedules
    assert len(one.agree) == 1  # type: ignore[arg-type]
    assert one.schedule(WINDOW, 0).waves[0].host.window == 3  # met at the forward
    assert len(one.agree) == 2 and one.keys == [FULL, WINDOW]  # type: ignore[arg-type]


def test_who_cannot_plan_meets_the_others_first() -> None:
    """Ranks with other shares of heads may have a plan, and wait there."""
    one = micro_batch([[6]])
    one.make_plan = mock.Mock(side_effect=CADError("no room"))
    with pytest.raises(CADError, match="no room"):
        one.plan_all([FULL])
    assert len(one.agree) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize("limit, waves, planned, beside", [(1e9, 1, 1, True), (44e3, 16, 1, False), (1e9, 4, 4, True)])
def test_waves_that_memory_asks_for_run_in_turn(limit: float, waves: int, planned: int, beside: bool) -> None:
    """On two streams a rank would run all of its own tasks first, and whoever waits for its keys with it."""
    one = micro_batch([[64, 16], [8]], server=1, aside=object(), memory=ExchangeMemory(limit, "a test", granularity=8))
    plan = one.make_plan
    one.make_plan = lambda tick, key: replace(plan(tick, key), waves=planned)
    found = one.schedule(FULL, 0)
    assert len(found.waves) == waves and found.beside is beside
    setup = descriptor(one)._set_up(0, FULL, None, None, MaskRule(1.0), LABEL, False)  # type: ignore[arg-type]
    assert (setup.aside is one.aside) is beside


@pytest.mark.parametrize("lengths, trainers, meets", [([6, 4], 2, True), ([6, 0], 2, False), ([6, 0], 1, True)])
def test_who_is_met_and_what_is_timed(lengths: list[int], trainers: int, meets: bool) -> None:
    """Servers take part where nothing moves, too; between two nano-batches in turn lies attention of the other one."""
    orders = mock.Mock()
    one = micro_batch(
        [[n] if n else [] for n in lengths], orders=orders, loaded=np.zeros(trainers), speeds=np.array([0.5, 2.0]),
        stretch_times=StretchTimes(), turn=7,
    )  # fmt: skip
    one.transport = transport = mock.Mock()
    one.plan_all([FULL])
    one.planned[FULL, 0] = planned = replace(one.planned[FULL, 0], plan=plan_of(one.ticks[0], load=3.0))
    assert orders.plan.call_args_list == [mock.call(FULL, 0, mock.ANY, planned.cut)]
    for returns, part, interleaved, timed in (
        (True, None, False, True), (False, None, False, False), (True, 0, False, False), (True, 0, True, True),
    ):  # fmt: skip
        mask = MaskDescriptor(one, None, lambda *_: TorchMath(), Modes(returns=returns), part, interleaved)
        setup = mask._set_up(3, FULL, None, "kernel", MaskRule(1.0), LABEL, False)  # type: ignore[arg-type]
        call = one.schedule(FULL, 0), "kernel", transport if meets else None, MaskRule(1.0), mask.modes, one.counts
        rest: Any = orders.call.return_value, one.stretches(0) if timed else None, 1.5 if part is None else 0.0
        assert vars(setup) == vars(CallSetup(*call, 0, LABEL, None, 7, 3, *rest))  # type: ignore[arg-type]
        assert orders.call.call_args == mock.call((3, 0), FULL, None, MaskRule(1.0), mask.modes, False)


def descriptor(one: MicroBatch) -> MaskDescriptor:
    return MaskDescriptor(one, None, lambda *_: TorchMath(), Modes())


def inputs(batch: int, width: int) -> list[torch.Tensor]:
    gen = torch.Generator().manual_seed(1)
    return [
        torch.randn(batch, SHAPES[n][0], width, SHAPES[n][1], dtype=torch.float64, generator=gen).requires_grad_()
        for n in "qkv"
    ]


def attend(mask: MaskDescriptor, given: list[torch.Tensor], module: torch.nn.Module | None = None) -> torch.Tensor:
    rows = (x.transpose(1, 2).flatten(0, 1) for x in given)
    o_THV = mask.attend(LayerInput(module or torch.nn.Module(), *rows, MaskRule(0.5), None, LABEL))
    return o_THV.unflatten(0, (given[0].shape[0], given[0].shape[2]))


def test_a_rank_without_heads_of_a_layer_plans_and_takes_part() -> None:
    """By the size of heads, the window and the chunk; where nano-batches alternate it hands over as others do."""
    one, given, order = micro_batch([[6], [4]], [6, 0]), inputs(1, 6), []
    mask = MaskDescriptor(one, 3, lambda *_: TorchMath(), Modes(), chunk=4)

    def half(nano_batch: int) -> None:
        order.append(nano_batch)
        found = attend(mask.part(nano_batch), [given[0][:, :0], *given[1:]], module)
        order.append(nano_batch)
        assert found.shape == (1, 6, 0, SHAPES["v"][1]) and found.requires_grad
        assert not any(x.any() for x in torch.autograd.grad(found.sum(), given))

    module = torch.nn.Module()
    states = ThreadState(CPU, RandomStream(CPU)), ThreadState(CPU, RandomStream(CPU, 5))
    run_alternating(lambda: half(0), lambda: half(1), states)
    assert order == [0, 1, 0, 1] and len(one.agree) == 1
    assert one.layers == {PlanKey(3, HeadShape(1, 1, SHAPES["q"][1], SHAPES["v"][1], 8), 4): 1}


@pytest.mark.parametrize("at", [None, [3]])
def test_mistakes_name_the_layer(at: list[int] | None) -> None:
    with pytest.raises(CADError, match=f"{LABEL} got 5 tokens where its micro-batch has 6"):
        attend(descriptor(micro_batch([[6]], at)), inputs(1, 5))


@pytest.mark.parametrize("alternate", [True, False])
@pytest.mark.parametrize("at", [4, 0, 10])
def test_nano_batches_of_a_document(at: int, alternate: bool) -> None:
    """A document goes on in the second nano-batch; one may be empty, and then the model runs on a row whose output
    is dropped. Where they cannot alternate a layer attends both in turn."""
    one, given, module = micro_batch([[3, 7]], [at], aside=object(), turn=7), inputs(1, 10), torch.nn.Module()
    whole, order = descriptor(one), []

    def half(nano_batch: int) -> torch.Tensor:
        order.append(f"pre {nano_batch}")
        rows = [x[:, :, :at] if nano_batch == 0 else x[:, :, at:] for x in given]
        rows = [x if x.shape[2] else y[:, :, :1] for x, y in zip(rows, given)]
        found = attend(whole.part(nano_batch), rows, module)
        order.append(f"post {nano_batch}")
        return found

    if alternate:
        states = ThreadState(CPU, RandomStream(CPU)), ThreadState(CPU, RandomStream(CPU, 5))
        first, second = run_alternating(lambda: half(0), lambda: half(1), states)
        assert order == ["pre 0", "pre 1", "post 0", "post 1"]
        found = torch.cat([first[:, :at], second[:, : 10 - at]], dim=1)
    else:
        found = attend(whole, given, module)
    heads = [x[0].transpose(0, 1) for x in given]
    expected = torch.cat([document_attention(*one, 0.5) for one in zip(*(x.split([3, 7]) for x in heads))])
    assert torch.allclose(found[0], expected, atol=1e-12)
    do = torch.randn_like(found)
    right = torch.autograd.grad(expected, given, do[0], retain_graph=True)
    for x, y in zip(torch.autograd.grad(found, given, do), right):
        assert torch.allclose(x, y, atol=1e-12)
    assert one.counts.forwards == 2 and not one._first_keys
    for i in range(2):
        setup = one._calls[module, i].setup
        assert (setup.nano_batch, setup.label, setup.aside, setup.turn, setup.layer) == (i, LABEL, one.aside, 7, 0)
        assert setup.schedule is one.schedule(one.keys[0], i)


def heads(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Q and K in fp32, as rotary embeddings leave them under autocast, V in `dtype`; [B, heads, S, D]."""
    q, k = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8)
    return q, k, k.to(dtype)


def read(*given: Any) -> LayerInput:
    """What a layer hands on; `given`: from the module on, as attend_layer has it."""
    handed: list[LayerInput] = []

    def run(layer: LayerInput) -> torch.Tensor:
        handed.append(layer)
        return layer.q_THD

    assert attend_layer(run, *given).shape == (1, 6, 4, 8)
    return handed[0]


class Stage:
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def see_mask(self, window: int | None, given: dict[str, Any]) -> None:
        self.seen.append((window, given["mask_function"]))

    def attend(self, layer: LayerInput) -> Any:
        self.seen.append(layer.rule.window)
        return layer.q_THD


@pytest.mark.parametrize("window", [None, 5])
def test_a_layer_of_a_pipeline_shows_its_mask(window: int | None) -> None:
    """Where it makes one; the window of the mask is that of the layer."""
    module, stage = torch.nn.Module(), Stage()
    setattr(module, pipeline._BINDING, stage)
    tensors = module, *heads()
    mask = pipeline.window_mask(mask_function=len, **({} if window is None else {"local_size": window}))
    pipeline.pipeline_attention(*tensors, mask)
    pipeline.pipeline_attention(*tensors, None, sliding_window=window)
    assert stage.seen == [(window, len), window, window]


def test_the_first_look_at_a_pipeline_sees_layers_as_autocast_makes_them() -> None:
    """Ticks are planned for the kinds that it sees, and a layer of another kind is an error in training."""
    first = Alone(lambda window: mock.Mock(**{"attend.return_value": window}), [])
    with torch.autocast("cpu", torch.bfloat16):
        assert first.attend(read(torch.nn.Module(), *heads(torch.bfloat16), 5, 1.0, 0.0, None, None, {})) == 5
    assert first.seen == [LayerKind(HeadShape(4, 2, 8, 8, 2), MaskRule(1.0, 5), torch.bfloat16)]


def test_what_waits_for_a_backward_keeps_no_larger_tensor_alive() -> None:
    whole = torch.zeros(8, 6)
    assert microbatch._own(whole[:4]).data_ptr() == whole.data_ptr(), "half of it is not worth a copy"
    assert microbatch._own(whole[:3]).untyped_storage().nbytes() == 3 * 6 * 4


def test_what_a_layer_asks_for_is_read() -> None:
    sinks, tensors = torch.zeros(4), heads()
    module = torch.nn.Module()
    module.layer_idx = 7  # type: ignore[assignment]
    found = read(module, *tensors, 3, None, 0.0, 50.0, sinks, {"position_ids": None})
    assert found[:1] + found[4:] == (module, MaskRule(8**-0.5, 3, 50.0), sinks, "Module of layer 7")
    for rows, given in zip(found[1:4], tensors):
        assert torch.equal(rows, given[0].transpose(0, 1))
    found = read(module, *[x.mT.contiguous().mT for x in tensors], None, 2, 0.0, 0.0, None, {})
    assert found.rule == MaskRule(2.0) and {x.stride(-1) for x in found.rows()} == {1}
    none = LayerInput(module, *[torch.zeros(0, 4, 8, 2)[..., 0]] * 3, MaskRule(1.0), None, "without tokens")
    assert {x.stride(-1) for x in none.rows()} == {1}


def test_a_scale_that_is_learned_and_a_broken_window_are_refused() -> None:
    module, learned = torch.nn.Module(), torch.ones(1, requires_grad=True)
    with pytest.raises(CADUnsupportedError, match="softmax_scale is learned"):
        read(module, *heads(), None, learned, 0.0, None, None, {})
    assert read(module, *heads(), 1, None, 0.0, None, None, {}).rule.window == 1
    for wrong in (2.5, 0):
        with pytest.raises(CADDataError, match=f"window is {wrong}; expected at least 1"):
            read(module, *heads(), wrong, None, 0.0, None, None, {})
    with pytest.raises(CADDataError, match="are torch.float16, torch.float32, torch.float32; expected one dtype"):
        q, *others = heads()
        read(module, q.half(), *others, None, None, 0.0, None, None, {})


@pytest.mark.parametrize("dropout, others, rows, kind, text", [
    (0.1, {}, 1, CADUnsupportedError, "attention dropout is 0.1"),
    (0.0, {"position_bias": torch.zeros(1)}, 1, CADUnsupportedError, r"Module of layer \? passes position_bias"),
    (0.0, {"alibi_slopes": torch.zeros(1)}, 1, CADUnsupportedError, "passes alibi_slopes"),
    (0.0, {}, 2, CADError, "12 keys for 6 queries: a KV cache is in use"),
])  # fmt: skip
def test_what_cannot_be_reproduced_is_refused(dropout: float, others: dict, rows: int, kind: type, text: str) -> None:
    q, k, v = heads()
    with pytest.raises(kind, match=text):
        read(torch.nn.Module(), q, *(x.repeat(1, 1, rows, 1) for x in (k, v)), None, None, dropout, None, None, others)


@pytest.mark.parametrize("at, changes, scaled", [
    ([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, -1, -1]], {}, True), ([[0, 1, 2, 0, 1, 2], [0, 1]], {}, False),
    ([[0, 1, 0, 1, 0, 1]], {"floor_scale": 6}, True), ([[4, 5, 6, 7, 8, 9]], {"floor_scale": 10}, True),
    ([[4, 5, 6, 7, 8, 9]], {"floor_scale": 11}, False),
    ([[0] * 6], {"use_rope": True}, False), ([[0] * 6], {"use_rope": None}, False),
    ([[0] * 6], {"attn_temperature_tuning": False}, False), ([[0] * 6], {"attn_temperature_tuning": None}, False),
])  # fmt: skip
def test_temperatures_are_those_of_documents(at: list[list[int]], changes: dict[str, Any], scaled: bool) -> None:
    """Of Llama 4, which takes them by places in rows; those of padding stay, and all of what it did not scale."""
    given = {"attn_temperature_tuning": True, "use_rope": False, "floor_scale": 2, "attn_scale": 0.5} | changes
    module = SimpleNamespace(**{name: one for name, one in given.items() if one is not None})
    rows = SimpleNamespace(positions=lambda: np.concatenate([np.array(row) for row in at]))
    descriptor: Any = SimpleNamespace(nano_batch=1, micro_batch=SimpleNamespace(local={1: rows}.__getitem__))
    query = torch.rand(len(at), 2, 6, 3, dtype=torch.float64)
    found = as_alone(module, query, descriptor)
    assert scaled or found is query
    if scaled:
        of, in_row = (1 + 0.5 * np.log1p((p + 1) // given["floor_scale"]) for p in (np.array(at), np.arange(6)))
        factor = torch.from_numpy(np.where(np.array(at) < 0, 1.0, of / in_row))[:, None, :, None]
        torch.testing.assert_close(found, query * factor, atol=0.0, rtol=1e-6)
