"""`deepspeed_cad.open`: attention as a function, in 2 to 4 processes, compared with each document alone."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import served
import torch
import torch.distributed as dist
import torch.nn.functional as F
import training
from pool import WorkerPool
from ports import free_port
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import deepspeed_cad
from deepspeed_cad.ahead.gather import Gatherer
from deepspeed_cad.kernels.torch_math import TorchMath

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import own_model

BLOCK = {"granularity": 8, "tolerance": 0.05, "links": training.LINKS}
UNEVEN = [[90], [30, 7, 1, 52], [20, 20, 50], [3, 87]]
"""Lengths of the documents of each rank."""
SPANNING = [[90], [40, 50], [70, 20], [90]]
"""Likewise; the first of every rank but 0 goes on with the last of the rank before."""


@dataclass(frozen=True)
class Asked:
    """Options of a call, and sizes of heads."""

    heads: int = 8
    kv_heads: int = 4
    dim: int = 16
    value: int = 16
    window: int | None = None
    softcap: float | None = None
    scale: float | None = None
    sinks: bool = False


OPTIONS = {
    "plain": Asked(),
    "one KV head": Asked(kv_heads=1),
    "no groups": Asked(kv_heads=8),
    "window": Asked(window=13),
    "softcap": Asked(softcap=3.0),
    "sinks": Asked(sinks=True),
    "another value size, as MLA has": Asked(heads=4, kv_heads=4, dim=24, value=16, scale=0.3),
    "all": Asked(window=21, softcap=2.0, scale=0.5, sinks=True, value=8),
}


def dense(
    q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKV: torch.Tensor, *, softmax_scale: float | None = None,
    window: int | None = None, softcap: float | None = None, sinks: torch.Tensor | None = None, **_: Any,
) -> torch.Tensor:  # fmt: skip
    """O [T, H, V] of one document, by the definition."""
    k, v = (x.repeat_interleave(q_THD.shape[1] // x.shape[1], 1) for x in (k_TKD, v_TKV))
    scores = torch.einsum("qhd,khd->hqk", q_THD, k) * (
        q_THD.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
    )
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    away = torch.arange(len(q_THD))[:, None] - torch.arange(len(q_THD))
    hidden = (away < 0) | (away >= (len(q_THD) if window is None else window))
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(q_THD), 1)], -1)
    return torch.einsum("hqk,khv->qhv", scores.softmax(-1)[..., : len(q_THD)], v)


class EachAlone:
    """Stands for a step: each document of this rank attends by itself."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def attend(self, *rows: torch.Tensor, **given: Any) -> torch.Tensor:
        return torch.cat([dense(*one, **given) for one in zip(*(x.split(self.lengths) for x in rows))])


def options(rank: int, world: int, lengths: list[list[int]], spans: bool, block: dict[str, Any]) -> int:
    """Every option, forward and backward, against whole documents; gives the layers that attended."""
    cad = deepspeed_cad.open(block)
    documents = [n for own in lengths[:world] for n in own]
    positions = torch.cat([torch.arange(n) for n in lengths[rank]])
    if spans:
        documents = [lengths[0][0]]
        for own in lengths[1:world]:
            documents[-1] += own[0]
            documents += own[1:]
        stream = torch.cat([torch.arange(n) for n in documents])
        positions = stream.split([sum(own) for own in lengths[:world]])[rank]
    ends = torch.tensor([0, *lengths[rank]]).cumsum(0)
    for asked in OPTIONS.values():
        gen = torch.Generator().manual_seed(7)
        make = partial(torch.randn, dtype=torch.float64, generator=gen)
        sizes = [(asked.heads, asked.dim), (asked.kv_heads, asked.dim), (asked.kv_heads, asked.value)]
        whole = [make(sum(documents), *size).requires_grad_() for size in sizes]
        sinks = make(asked.heads).requires_grad_() if asked.sinks else None
        do = make(sum(documents), asked.heads, asked.value)
        given = {"softmax_scale": asked.scale, "window": asked.window, "softcap": asked.softcap, "sinks": sinks}
        right = EachAlone(documents).attend(*whole, **given)
        right.backward(do)

        mine = [sum(own) for own in lengths[:world]]
        rows = [x.detach().split(mine)[rank].requires_grad_() for x in whole]
        own_sinks = None if sinks is None else sinks.detach().clone().requires_grad_()
        step = cad.plan(
            None if spans else ends, positions if spans else None, heads=asked.heads, kv_heads=asked.kv_heads,
            head_dim=asked.dim, value_dim=asked.value, dtype=torch.float64, windows=[asked.window],
        )  # fmt: skip
        for layer in range(2):
            o = step.attend(*rows, layer=layer, **{**given, "sinks": own_sinks})
            assert (o - right.split(mine)[rank]).abs().max() < 1e-10, asked
        o.backward(do.split(mine)[rank])
        for ours, theirs in zip(rows, whole):
            assert (ours.grad - theirs.grad.split(mine)[rank]).abs().max() < 1e-10, asked
        if own_sinks is not None and sinks is not None:
            dist.all_reduce(own_sinks.grad)
            assert (own_sinks.grad - sinks.grad).abs().max() < 1e-10
    return cad.session.counts.forwards


@pytest.mark.parametrize(("world", "spans"), [(2, False), (3, True), (4, False), (4, True)])
def test_every_option_is_exact(workers: WorkerPool, world: int, spans: bool) -> None:
    found = workers.run(options, world, SPANNING if spans else UNEVEN, spans, BLOCK)
    assert found == [2 * len(OPTIONS)] * world


def _with_server(rank: int, world: int, port: int, block: dict[str, Any]) -> Any:
    return served.play(rank, world, port, block, _options_of_trainers)


def _options_of_trainers(rank: int, world: int, block: dict[str, Any]) -> int:
    return options(rank, world, UNEVEN, False, block)


def test_reserved_servers(fresh_workers: WorkerPool) -> None:
    block = {**BLOCK, "servers": {"reserved": 1}}
    *trainers, server = fresh_workers.run(_with_server, 3, free_port(), block, joined=False, timeout=120.0)
    assert trainers == [2 * len(OPTIONS)] * 2 and server.code == 0 and server.micro_batches == len(OPTIONS)


def _divided(rank: int, world: int, by: str) -> int:
    """Ranks 0 and 1, and 2 and 3, have the same documents and half of the heads each; or none divides them."""
    from torch.distributed.device_mesh import init_device_mesh

    shares = 1 if by == "one group" else 2
    mesh = init_device_mesh("cpu", (world // shares, shares), mesh_dim_names=("dp", "tp"))
    cad = deepspeed_cad.open(BLOCK, **({"mesh": mesh} if by == "mesh" else {"group": mesh.get_group("dp")}))
    own, sizes = UNEVEN[rank // shares], [(8, 16), (4, 16), (4, 16)]
    gen = torch.Generator().manual_seed(rank // shares)
    whole = [torch.randn(sum(own), *size, dtype=torch.float64, generator=gen) for size in sizes]
    rows = [x.chunk(shares, 1)[rank % shares].requires_grad_() for x in whole]
    alone = [x.detach().clone().requires_grad_() for x in rows]
    o, right = cad.plan([0, *torch.tensor(own).cumsum(0)]).attend(*rows, layer=0), EachAlone(own).attend(*alone)
    assert (o - right).abs().max() < 1e-10
    for one in (o, right):
        one.square().sum().backward()
    assert all((x.grad - y.grad).abs().max() < 1e-10 for x, y in zip(rows, alone))
    assert cad.session.shares.count == shares and cad.session.statistics.imbalance < 1.1
    return cad.session.transport.bytes_sent


@pytest.mark.parametrize("by", ["mesh", "group", "one group"])
def test_ranks_that_divide_heads(workers: WorkerPool, by: str) -> None:
    assert sum(workers.run(_divided, 4, by)) > 0


# In a model


def _straight(layer: torch.nn.Module, *given: Any, use_reentrant: bool) -> Any:
    return layer(*given)


def _reentrant(layer: torch.nn.Module, *given: Any, use_reentrant: bool) -> Any:
    return checkpoint(layer, *given, use_reentrant=True)


def _selective(layer: torch.nn.Module, *given: Any, use_reentrant: bool) -> Any:
    """Keeps products and sums: attention's own are none of the layer's, which are taken again by their order."""
    kept = [torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.mul.Tensor, torch.ops.aten.add.Tensor]
    context = partial(create_selective_checkpoint_contexts, kept)
    return checkpoint(layer, *given, use_reentrant=False, context_fn=context)


def _compiled(model: own_model.Decoder) -> None:
    torch._dynamo.reset()
    for layer in model.layers:
        layer.compile(backend="aot_eager")


def _sharded(model: own_model.Decoder) -> None:
    for layer in (*model.layers, model):
        torch.distributed.fsdp.fully_shard(layer)


WAYS: dict[str, tuple[Any, Callable[[own_model.Decoder], Any] | None]] = {
    "as it is": (_straight, None),
    "reentrant checkpointing": (_reentrant, None),
    "selective checkpointing": (_selective, None),
    "compiled": (_straight, _compiled),
    "compiled, checkpointing": (checkpoint, _compiled),
    "FSDP2": (checkpoint, _sharded),
    "FSDP2, reentrant": (_reentrant, _sharded),
}


def _rows(lengths: list[int], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 64, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    return ids, torch.cat([torch.arange(n) for n in lengths])


def _loss(model: torch.nn.Module, ids: torch.Tensor, positions: torch.Tensor, step: Any) -> torch.Tensor:
    return F.cross_entropy(model(ids, positions, step).double()[:-1], ids[1:], reduction="sum")


def _model(dtype: torch.dtype = torch.float64) -> own_model.Decoder:
    torch.manual_seed(1)
    return own_model.Decoder(64, layers=3, width=64, heads=8, kv_heads=4).to(dtype)


def train(rank: int, world: int, way: str) -> tuple[int, int]:
    """Three micro-batches, each planned ahead; gives how often attention ran and was taken from what was kept."""
    from torch._dynamo.utils import counters

    run, wrap = WAYS[way]
    model, reference = _model(), _model()
    if wrap is not None:
        wrap(model)
    cad = deepspeed_cad.open(BLOCK)
    lengths = [UNEVEN[(rank + turn) % len(UNEVEN)] for turn in range(3)]
    plans = [cad.plan([0, *torch.tensor(lengths[0]).cumsum(0)])]
    for turn, own in enumerate(lengths):
        if turn < 2:
            plans.append(cad.plan(position_ids=_rows(lengths[turn + 1], turn + 1)[1]))
        rows = _rows(own, turn)
        own_model.checkpoint = run
        loss = _loss(model, *rows, plans[turn])
        loss.backward()
        own_model.checkpoint = _straight
        expected = _loss(reference, *rows, EachAlone(own))
        expected.backward()
        assert abs(float(loss) - float(expected)) < 1e-9 * float(expected), way
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        grad, right = ours.grad, theirs.grad
        if wrap is _sharded:
            grad = grad.full_tensor()
            dist.all_reduce(right)
            right = right / world
        assert (grad - right).abs().max() < 1e-10 * (1 + right.abs().max()), way
    assert (counters["stats"]["calls_captured"] > 0) == ("compiled" in way)
    counters.clear()
    return cad.session.counts.forwards, cad.session.counts.replays


SELDOM = {"compiled": [pytest.mark.slow, pytest.mark.long], "compiled, checkpointing": [pytest.mark.slow]}


@pytest.mark.parametrize("way", [pytest.param(way, marks=SELDOM.get(way, ())) for way in WAYS])
def test_a_model_of_ones_own_is_exact(workers: WorkerPool, way: str) -> None:
    """Three layers and micro-batches; what checkpointing runs again is taken from what was kept."""
    again = 0 if WAYS[way][0] is _straight else 9
    assert workers.run(train, 2, way, timeout=120.0) == [(9, again)] * 2


def _autocast(rank: int, world: int) -> float:
    """The error of a loss in bf16 with CAD, as a share of that without."""
    own = UNEVEN[rank]
    right = float(_loss(_model(), *_rows(own, 0), EachAlone(own)))
    model, cad = _model(torch.float32), deepspeed_cad.open(BLOCK)
    errors = []
    for step in (EachAlone(own), cad.plan([0, *torch.tensor(own).cumsum(0)], dtype=torch.bfloat16)):
        with torch.autocast("cpu", torch.bfloat16):
            loss = _loss(model, *_rows(own, 0), step)
        loss.backward()
        errors.append(abs(float(loss) - right))
    assert [key.shape.bytes_per_element for key in cad.feed.keys | cad._last.layers] == [2]
    return errors[1] / max(errors[0], 1e-4 * right)


def test_autocast(workers: WorkerPool) -> None:
    assert max(workers.run(_autocast, 2)) < 2


def _evaluate(rank: int, world: int) -> tuple[int, int]:
    """The loss of a forward without backward; gives the micro-batches counted as trained and as looked at."""
    model, cad, own = _model(), deepspeed_cad.open(BLOCK), UNEVEN[rank]
    with torch.no_grad():
        loss = _loss(model, *_rows(own, 0), cad.plan([0, *torch.tensor(own).cumsum(0)]))
        right = _loss(model, *_rows(own, 0), EachAlone(own))
    assert abs(float(loss) - float(right)) < 1e-9 * float(right)
    return cad.session.statistics.micro_batches, cad.session.forward_only.micro_batches


def test_evaluation(workers: WorkerPool) -> None:
    assert workers.run(_evaluate, 2) == [(0, 1)] * 2


# As many launches as by transformers


def _count(rank: int, world: int, by: str) -> dict[str, int]:
    """What attention of a model does in the second of two micro-batches: by transformers, or by the function."""
    seen: Counter[str] = Counter()
    own = UNEVEN[rank]

    def count(home: Any, name: str) -> Any:
        original = getattr(home, name)

        def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
            seen[f"{home.__name__}.{name}"] += 1
            return original(self, *args, **kwargs)

        return mock.patch.object(home, name, counted)

    if by == "transformers":
        model = deepspeed_cad.apply(training.tiny_llama(num_hidden_layers=3), BLOCK)
    else:
        model, cad = _model(), deepspeed_cad.open(BLOCK)
    with count(TorchMath, "forward"), count(TorchMath, "backward"), count(Gatherer, "gather"):
        for _ in range(2):
            seen.clear()
            before = deepspeed_cad.current_session().transport.exchanges
            if by == "transformers":
                loss = training.loss_sum(model, training.pack(training.documents(own, 0)))
            else:
                loss = _loss(model, *_rows(own, 0), cad.plan([0, *torch.tensor(own).cumsum(0)]))
            loss.backward()
    return {**seen, "exchanges": deepspeed_cad.current_session().transport.exchanges - before}


def test_as_many_launches_as_by_transformers(workers: WorkerPool) -> None:
    """Kernels, exchanges and collectives of the host, of a model with the same layers and heads."""
    ours, theirs = (workers.run(_count, 2, by) for by in ("function", "transformers"))
    assert ours == theirs and ours[0]["exchanges"] == 4 * 3, ours


# Mistakes


def _twice(cad: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    step = cad.plan([0, 90])
    for _ in range(2):
        step.attend(q, k, v, layer=0).sum().backward()


def _never(cad: Any, *qkv: torch.Tensor) -> None:
    cad.plan([0, 90])
    cad.plan([0, 90]).attend(*qkv, layer=0)


def _no_gradients(cad: Any, *qkv: torch.Tensor) -> None:
    with torch.no_grad():
        step = cad.plan([0, 90])
    step.attend(*qkv, layer=0)


def _another_name_in_backward(cad: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    step, names = cad.plan([0, 90]), iter("ab")
    again = lambda x: step.attend(x, k, v, layer=next(names)).sin()  # noqa: E731
    checkpoint(again, q, use_reentrant=False).sum().backward()


def _attends(change: Callable[..., tuple[torch.Tensor, ...]], **given: Any) -> Callable[..., Any]:
    sizes = {"heads": 8, "kv_heads": 4, "head_dim": 16}
    return lambda cad, *qkv: cad.plan([0, 90], **sizes).attend(*change(*qkv), layer=3, **given)


MISTAKES: dict[str, tuple[Callable[..., Any], str]] = {
    "twice": (_twice, "layer 0 was called twice in one forward. Each forward needs a plan of its own"),
    "never": (_never, "a micro-batch that was planned before this one was never attended"),
    "no gradients": (_no_gradients, "planned under torch.no_grad(), and now a backward is to come"),
    "name": (_another_name_in_backward, "layer b runs in a backward, but did not in the forward"),
    "nothing": (lambda cad, *_: cad.plan(), "neither cu_seqlens nor position_ids"),
    "axes": (lambda cad, *_: cad.plan(position_ids=torch.zeros(3, 1, 90)), "axes do not say where documents begin"),
    "both": (lambda cad, *_: cad.plan([0, 50], torch.arange(50) % 40), "cu_seqlens and position_ids disagree"),
    "sinks": (_attends(lambda *qkv: qkv, sinks=torch.zeros(4)), "sinks have shape [4]; the plan of this micro-batch"),
    "tokens": (_attends(lambda q, k, v: (q[1:], k, v)), "layer 3: q has shape [89, 8, 16]; the plan"),
    "axes of q": (_attends(lambda q, k, v: (q[None], k, v)), "layer 3: q has shape [1, 90, 8, 16]; the plan"),
    "values": (_attends(lambda q, k, v: (q, k, v[..., :12])), "layer 3: v has shape [90, 4, 12]; the plan"),
    "dtype": (_attends(lambda q, k, v: (q, k.float(), v)), "layer 3: k is torch.float32 on cpu; the plan"),
}


def _mistake(rank: int, world: int, which: str) -> None:
    qkv = (torch.randn(90, heads, 16, dtype=torch.float64, requires_grad=True) for heads in (8, 4, 4))
    MISTAKES[which][0](deepspeed_cad.open(BLOCK), *qkv)


def _grouped(rank: int, world: int, both: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",)) if both else None
    deepspeed_cad.open(BLOCK, mesh=mesh, group=dist.group.WORLD if both or not rank else None)


@pytest.mark.parametrize(
    ("both", "words"),
    [(True, "got a mesh and a group, which say the same"), (False, "rank 1 passed none as its group")],
)
def test_groups_that_say_too_much_or_too_little(workers: WorkerPool, both: bool, words: str) -> None:
    errors, _ = workers.try_run(_grouped, 2, both)
    assert all(error is not None and words in error[1] for error in errors), errors


@pytest.mark.parametrize("which", MISTAKES)
def test_mistakes_are_named(workers: WorkerPool, which: str) -> None:
    errors, _ = workers.try_run(_mistake, 2, which)
    assert all(error is not None and MISTAKES[which][1] in error[1] for error in errors), errors


@pytest.mark.parametrize("block", [{"overlap": "interleave"}, {"verify": 1}, {"documents": "deal"}, {"enabled": False}])
def test_keys_that_a_function_cannot_serve_are_refused(block: dict[str, Any]) -> None:
    with pytest.raises(deepspeed_cad.CADConfigError, match=f'"{next(iter(block))}" is .*Leave the key out'):
        deepspeed_cad.open(block)
