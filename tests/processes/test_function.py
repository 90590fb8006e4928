"""`deepspeed_cad.open`: attention as a function, in 2 to 4 processes, compared with each document alone."""

from collections.abc import Callable
from functools import partial
from typing import Any

import cases
import own_model
import pytest
import served
import torch
import torch.distributed as dist
import torch.nn.functional as F
import training
from pool import WorkerPool
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import deepspeed_cad

BLOCK = {"granularity": 8, "tolerance": 0.05, "links": training.LINKS}
UNEVEN = [[90], [30, 7, 1, 52], [20, 20, 50], [3, 87]]
"""Lengths of the documents of each rank."""
SPANNING = [130, 120, 20]
"""Documents of three ranks together. Each rank has 90 rows, here and there."""

OPTIONS: list[tuple[int, int, int, int, dict[str, Any]]] = [
    (8, 4, 16, 16, {}),
    (8, 1, 16, 16, {}),
    (4, 4, 24, 16, {"softmax_scale": 0.3}),
    (8, 4, 16, 8, {"window": 21, "softcap": 2.0, "softmax_scale": 0.5, "sinks": torch.linspace(-1, 1, 8).double()}),
]
"""Query heads, key heads, sizes of theirs and of value heads, which are another's in MLA; options of a call."""


class EachAlone:
    """Stands for a step: each document of this rank attends by itself."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def attend(self, *rows: Any, softmax_scale: float | None = None, layer: object = None, **given: Any) -> Any:
        scale = rows[0].shape[2] ** -0.5 if softmax_scale is None else softmax_scale
        parts = zip(*(x.split(self.lengths) for x in rows))
        return torch.cat([cases.document_attention(*one, scale, **given) for one in parts])


def options(rank: int, world: int, block: dict[str, Any], spans: bool = False) -> int:
    """Every option, forward and backward, against whole documents; gives the layers that attended."""
    cad = deepspeed_cad.open(block)
    documents = SPANNING if spans else [n for own in UNEVEN[:world] for n in own]
    ends = None if spans else torch.tensor([0, *UNEVEN[rank]]).cumsum(0)
    positions = torch.cat([torch.arange(n) for n in documents]).split(90)[rank] if spans else None
    for heads, kv_heads, dim, value, given in OPTIONS:
        make = partial(torch.randn, sum(documents), dtype=torch.float64, generator=torch.Generator().manual_seed(7))
        whole = [make(*size).requires_grad_() for size in ((heads, dim), (kv_heads, dim), (kv_heads, value))]
        sinks, do = given.get("sinks"), make(heads, value)
        own_sinks, sinks = (None if sinks is None else sinks.clone().requires_grad_() for _ in range(2))
        right = EachAlone(documents).attend(*whole, **{**given, "sinks": sinks})
        right.backward(do)

        rows = [x.detach().split(90)[rank].requires_grad_() for x in whole]
        step = cad.plan(
            ends, positions, heads=heads, kv_heads=kv_heads, head_dim=dim, value_dim=value, dtype=torch.float64,
            windows=[given.get("window")],
        )  # fmt: skip
        for layer in range(2):
            o = step.attend(*rows, layer=layer, **{**given, "sinks": own_sinks})
            assert (o - right.split(90)[rank]).abs().max() < 1e-10, given
        o.backward(do.split(90)[rank])
        for ours, theirs in zip(rows, whole):
            assert (ours.grad - theirs.grad.split(90)[rank]).abs().max() < 1e-10, given
        if own_sinks is not None and sinks is not None:
            dist.all_reduce(own_sinks.grad)
            assert (own_sinks.grad - sinks.grad).abs().max() < 1e-10
    return cad.session.counts.forwards


@pytest.mark.parametrize(("world", "spans"), [(2, False), (4, False), (3, True)])
def test_every_option_is_exact(workers: WorkerPool, world: int, spans: bool) -> None:
    assert workers.run(options, world, BLOCK, spans) == [2 * len(OPTIONS)] * world


def test_reserved_servers(workers: WorkerPool) -> None:
    found, (server,) = served.run(workers, 2, 1, options, granularity=8)
    assert found == [2 * len(OPTIONS)] * 2 and server.micro_batches == len(OPTIONS)


def _divided(rank: int, world: int, by: str) -> int:
    """Ranks 0 and 1, and 2 and 3, have the same documents and half of the heads each; or none divides them."""
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
    (o.square().sum() + right.square().sum()).backward()
    assert all((x.grad - y.grad).abs().max() < 1e-10 for x, y in zip(rows, alone))
    assert cad.session.shares.count == shares and cad.session.statistics.imbalance < 1.1
    return cad.session.transport.bytes_sent


@pytest.mark.parametrize("by", ["mesh", "group", "one group"])
def test_ranks_that_divide_heads(workers: WorkerPool, by: str) -> None:
    assert sum(workers.run(_divided, 4, by)) > 0


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
    "as it is": (_straight, None), "reentrant checkpointing": (_reentrant, None),
    "selective checkpointing": (_selective, None), "compiled, checkpointing": (checkpoint, _compiled),
    "FSDP2, reentrant": (_reentrant, _sharded),
}  # fmt: skip


def _rows(lengths: list[int], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 64, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    return ids, torch.cat([torch.arange(n) for n in lengths])


def _loss(model: torch.nn.Module, ids: torch.Tensor, positions: torch.Tensor, step: Any) -> torch.Tensor:
    return F.cross_entropy(model(ids, positions, step).double()[:-1], ids[1:], reduction="sum")


def _model() -> own_model.Decoder:
    torch.manual_seed(1)
    return own_model.Decoder(64, layers=3, width=64, heads=8, kv_heads=4).double()


def train(rank: int, world: int, way: str) -> tuple[int, int]:
    """Three micro-batches, each planned ahead; gives how often attention ran and was taken from what was kept."""
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


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[pytest.mark.slow] if "compiled" in way else ()) for way in WAYS]
)
def test_a_model_of_ones_own_is_exact(workers: WorkerPool, way: str) -> None:
    """Three layers and micro-batches; what checkpointing runs again is taken from what was kept."""
    again = 0 if WAYS[way][0] is _straight else 9
    assert workers.run(train, 2, way, timeout=120.0) == [(9, again)] * 2


def make(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def _another_name(cad: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    step, names = cad.plan([0, 90]), iter("ab")
    again = lambda x: step.attend(x, k, v, layer=next(names)).sin()  # noqa: E731
    checkpoint(again, q, use_reentrant=False).sum().backward()


def _mesh_and_group(*_: Any) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    deepspeed_cad.open(BLOCK, mesh=mesh, group=mesh.get_group())


MISTAKES: dict[str, Callable[..., Any]] = {
    "missing 1 required keyword-only argument: 'layer'": lambda cad, *qkv: cad.plan([0, 90]).attend(*qkv),
    "layer b runs in a backward, but did not in the forward": _another_name,
    "neither cu_seqlens nor position_ids": lambda cad, *_: cad.plan(),
    "got a mesh and a group, which say the same": _mesh_and_group,
    "rank 1 passed none as its group": lambda *_: deepspeed_cad.open(
        BLOCK, group=None if dist.get_rank() else dist.group.WORLD
    ),
}


def _mistake(rank: int, world: int, words: str) -> None:
    MISTAKES[words](deepspeed_cad.open(BLOCK), make(90, 8, 16), make(90, 4, 16), make(90, 4, 16))


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes_are_named(workers: WorkerPool, words: str) -> None:
    errors, _ = workers.try_run(_mistake, 2, words)
    assert all(error is not None and words in error[1] for error in errors), errors


@pytest.mark.parametrize("block", [{"overlap": "interleave"}, {"verify": 1}, {"documents": "deal"}, {"enabled": False}])
def test_keys_that_a_function_cannot_serve_are_refused(block: dict[str, Any]) -> None:
    with pytest.raises(deepspeed_cad.CADConfigError, match=f'"{next(iter(block))}" is .*Leave the key out'):
        deepspeed_cad.open(block)
