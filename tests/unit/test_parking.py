"""What attention keeps, in host memory until backward: copies there and back, memory, order on streams, errors."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import cases
import pytest
import torch
from attention_ranks import DIM, HEADS, Ranks
from test_attention_call import LABEL, Layer, checkpointed, inputs, offloaded, run_whole
from test_streams import Stream
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from deepspeed_cad.attention import parking as parking_room
from deepspeed_cad.attention.call import Parked
from deepspeed_cad.attention.forward import Kept, ServedOutputs
from deepspeed_cad.attention.parking import Parking, available_host_memory, in_memory_order
from deepspeed_cad.attention.setup import Modes
from deepspeed_cad.errors import CADError
from deepspeed_cad.kernels.interface import MaskRule

CPU = torch.device("cpu")
BLOCK = 1024
"""Bytes: small, so that tensors lie in several blocks."""


def parking() -> Parking:
    return Parking(CPU, BLOCK)


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "one block": lambda: numbers(4, 8), "many blocks": lambda: numbers(300, 7, dtype=torch.float64),
    "as large as a block": lambda: numbers(BLOCK // 4), "no rows": lambda: numbers(0, 3, 8),
    "transposed": lambda: numbers(40, 33).t(),
    "heads first": lambda: numbers(4, 50, 8, dtype=torch.bfloat16).transpose(0, 1),
    "with gaps": lambda: numbers(50, 3, 8)[:, 1], "one column": lambda: numbers(50, 3)[:, 1:2],
}  # fmt: skip


@pytest.mark.parametrize("name", TENSORS)
def test_what_comes_back_is_what_left(name: str) -> None:
    """Values and strides: a kernel that gave LSE transposed takes it back so. Only gaps are closed."""
    lot, given = parking(), TENSORS[name]()
    expected, strides, dense = given.clone(), given.stride(), in_memory_order(given)[0].numel() == given.numel()
    before, after = numbers(5), numbers(6, dtype=torch.bfloat16)
    parcel = lot.park([before, given, after], LABEL)
    lot.settle()
    assert parcel.is_away
    for block in lot.free:
        block.fill_(255)
    found = parcel.take()
    assert torch.equal(found[1], expected) and torch.equal(found[0], before) and torch.equal(found[2], after)
    assert found[1].dtype == given.dtype and found[1].data_ptr() != given.data_ptr() or not given.numel()
    assert dense and (name in ("with gaps", "one column") or found[1].stride() == strides)


def test_backward_of_a_layer_fetches_the_one_before() -> None:
    """By order of parking; what is back already, or was taken, is passed over."""
    lot = parking()
    parcels = [lot.park([numbers(10 + i)], LABEL) for i in range(4)]
    lot.settle()
    lot.fetch_before(parcels[3].number)
    assert [one.is_away for one in parcels] == [True, True, False, True]
    lot.fetch_before(parcels[3].number)
    assert [one.is_away for one in parcels] == [True, False, False, True]
    parcels[0].take()
    lot.fetch_before(parcels[1].number)
    assert torch.equal(parcels[2].take()[0], numbers(12))


@pytest.mark.parametrize("when", ["before it left", "where it never left", "after it came back"])
def test_a_change_in_place_is_an_error(when: str) -> None:
    lot, given = parking(), numbers(16)
    parcel = lot.park([numbers(3), given], LABEL)
    with pytest.raises(CADError, match=f"{LABEL}.*changed in place"):
        if when == "after it came back":
            lot.settle()
            parcel.fetch()
            parcel._here[1].mul_(2)
            parcel.take()
        given.mul_(2)
        lot.settle() if when == "before it left" else parcel.take()


def test_host_memory_that_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    lot = parking()
    lot.park([numbers(BLOCK)], LABEL)
    monkeypatch.setattr(parking_room, "available_host_memory", lambda: parking_room.RESERVE + BLOCK)
    lot = Parking(CPU, 1 << 30)
    expected = f'{LABEL}: "keep": "host" needs 1024 MiB more host memory beside the 0 MiB .* and 1024 MiB is available'
    with pytest.raises(CADError, match=expected + r" on this host \(1024 MiB are left to others\)"):
        lot.park([numbers(3)], LABEL)
    monkeypatch.setattr(parking_room, "available_host_memory", lambda: None)
    monkeypatch.setattr(torch, "empty", Mock(side_effect=RuntimeError("none is left\nmore")))
    with pytest.raises(CADError, match=r"and an unknown amount is available on this host \(none is left\)"):
        lot.park([numbers(3)], LABEL)


HOST = {"proc/meminfo": "MemTotal: 1000 kB\nMemAvailable: 800 kB\n"}
GROUP = "sys/fs/cgroup/memory"


@pytest.mark.parametrize("files, expected", [
    (HOST, 800 << 10), ({**HOST, f"{GROUP}.max": "max\n", f"{GROUP}.current": "5\n"}, 800 << 10),
    (
        {**HOST, f"{GROUP}.max": "5000\n", f"{GROUP}.current": "4500\n", f"{GROUP}.stat": "a 1\ninactive_file 300\n"},
        800,
    ),
    ({f"{GROUP}/memory.limit_in_bytes": "900\n", f"{GROUP}/memory.usage_in_bytes": "100\n"}, 800), ({}, None),
], ids=["a host", "no limit", "a control group", "one of the first version", "unknown"])  # fmt: skip
def test_available_host_memory(files: dict[str, str], expected: int | None, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_host_memory(tmp_path) == expected


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Parking, Stream, Stream]]:
    """A parking whose copies run on a stream of clocks, beside the training stream."""
    training, side = Stream(), Stream()
    running = [training]

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        running.append(stream)
        stream.work()
        yield
        stream.work()
        running.pop()

    monkeypatch.setattr(parking_room.torch, "cuda", SimpleNamespace(current_stream=lambda _: running[-1], stream=on))
    lot = parking()
    lot._stream = side  # type: ignore[assignment]
    yield lot, training, side


def test_order_of_copies_and_work(clocks: tuple[Parking, Stream, Stream]) -> None:
    """Copies follow what made the tensors, and memory of the training stream is used again only behind them."""
    lot, training, side = clocks
    training.work()
    first = lot.park([numbers(8)], LABEL)
    assert side.is_after(training) and not training.is_after(side)
    training.work()
    lot.settle()
    assert training.is_after(side), "memory that is given back is still read"
    last = lot.park([numbers(9)], LABEL)
    training.work()
    last.take()
    assert training.is_after(side), "backward frees what a copy still reads"
    training.work()
    lot.fetch_before(last.number)
    assert side.is_after(training), "new memory is written while earlier work still reads it"
    assert not training.is_after(side), "the host or the training stream waits too early"
    first.take()
    assert training.is_after(side), "a tensor is read before it arrived"


WAYS: dict[str, Callable[..., Any]] = {
    "plain": run_whole, "checkpointed": checkpointed, "offloaded": offloaded,
    "reentrant": partial(checkpoint, run_whole, use_reentrant=True),
}  # fmt: skip
LAYERS = 3


def train(way: str, lot: Parking | None) -> tuple[list[Layer], torch.Tensor, list[torch.Tensor]]:
    layers, given = [Layer([8], Modes(parking=lot)) for _ in range(LAYERS)], inputs(8)
    q, k, v = given
    for layer in layers:
        # What comes behind attention in a model saves its input.
        o = WAYS[way](layer, lambda o: o * o.detach().sum() + o.square(), q, k, v)
        q = o.transpose(1, 2)
    return layers, q, given


@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_parked_layers(way: str) -> None:
    """Bit by bit those of layers that keep all on the device."""
    lot = parking()
    _, right, given = train(way, None)
    expected = torch.autograd.grad(right.sum(), given) if way != "reentrant" else backward(right, given)
    layers, found, mine = train(way, lot)
    calls = [next(iter(layer.micro_batch._calls.values())) for layer in layers]
    assert all(isinstance(call.state, Parked) for call in calls)
    assert [call.state.is_away for call in calls] == [True] * (LAYERS - 1) + [False]
    gradients = torch.autograd.grad(found.sum(), mine) if way != "reentrant" else backward(found, mine)
    assert torch.equal(found, right)
    assert all(torch.equal(one, other) for one, other in zip(gradients, expected, strict=True))
    assert len(lot.free) == lot.blocks > 0
    assert not any(call.parked for call in calls)


def backward(output: torch.Tensor, given: list[torch.Tensor]) -> list[torch.Tensor]:
    output.sum().backward()
    return [x.grad for x in given]


@pytest.mark.parametrize("name", ["two", "a rank with no tokens", "documents over borders", "a tail of padding"])
@pytest.mark.parametrize("offload", [True, False])
@pytest.mark.parametrize("waves", [1, 2])
def test_what_servers_keep_is_parked_too(name: str, offload: bool, waves: int) -> None:
    lot = parking()
    sinks = torch.linspace(-1, 2, HEADS, dtype=torch.float64)
    ranks = Ranks(cases.layouts()[name], MaskRule(DIM**-0.5), Modes(parking=lot), sinks, seed=3, waves=waves)
    with save_on_cpu() if offload else nullcontext():
        outputs = ranks.forward()
    lot.settle()
    for call in ranks.calls[0]:
        assert isinstance(call.state, Parked)
        assert call.state._parcel._here is None and call.state._served._here is None
        assert len(call.state._parcel._packed) == (2 if offload else 4)
        assert len(call.state._served._packed) == 2 * len(call.setup.schedule.waves)
    ranks.backward(outputs)
    assert max(ranks.errors(outputs).values()) < 1e-12 and len(lot.free) == lot.blocks


def kept_with_served() -> Kept:
    served = tuple(ServedOutputs(numbers(20 + i, 2, 8), numbers(20 + i, 2)) for i in range(2))
    return Kept(numbers(8, 4, 8), numbers(8, 4), served, None, 0)


def test_what_was_served_is_away_while_a_layer_runs_again() -> None:
    """From the layer's second forward to attention's backward, where the MLP needs the most memory of a step."""
    lot, given = parking(), kept_with_served()
    expected = [x.clone() for x in given.tensors()]
    early, last = (Parked(lot, kept_with_served(), (), LABEL, saved_plainly=False) for _ in range(2))
    lot.let_go(early._parcel)
    assert not last.is_away
    kept = last.take()
    last.part_with_served()
    assert last._served.is_away and torch.equal(kept.o_THV, expected[0])
    assert not early._served.is_away, "it never left, and nobody made it leave"
    early.part_with_served()
    last.fetch()
    assert not early._parcel.is_away and early._served.is_away, "the layer before is next, but for what it served"
    assert not last._served.is_away and len(kept.served) == 2
    assert all(torch.equal(x, y) for x, y in zip(kept.tensors(), expected, strict=True))
    early.take()
    early.part_with_served()
    assert early._served.is_away


class Raced(list[torch.Tensor]):
    """Free blocks, to which another thread gives one more whenever blocks are taken out."""

    def __init__(self, free: list[torch.Tensor], give: Callable[[], None]) -> None:
        super().__init__(free)
        self.give: Callable[[], None] | None = give

    def _race(self) -> None:
        give, self.give = self.give, None
        if give is not None:
            give()

    def pop(self, *where: Any) -> torch.Tensor:
        self._race()
        return super().pop(*where)

    def __delitem__(self, where: Any) -> None:
        self._race()
        super().__delitem__(where)


def test_no_block_is_given_to_two_parcels() -> None:
    """Garbage is collected while blocks are taken: of a parcel that nobody took, by this thread or another one."""
    lot = parking()
    kept = [lot.park([numbers(BLOCK // 4)], LABEL) for _ in range(3)]
    lot.settle()
    for parcel in kept[:2]:
        parcel.take()
    lot.free = Raced(lot.free, kept.clear)
    first, second = (lot.park([numbers(BLOCK // 4)], LABEL) for _ in range(2))
    held = [*first._blocks, *second._blocks, *lot.free]
    assert len({id(block) for block in held}) == len(held) == lot.blocks == 3


@pytest.mark.parametrize("way", ["leaving", "arriving", "arriving where an error fell"])
def test_memory_of_copies_when_nobody_wants_a_parcel(
    clocks: tuple[Parking, Stream, Stream], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's allocator is told of the stream that copies: whoever lets go of it may be any thread, on any stream."""
    lot, training, side = clocks
    asked: dict[int, list[Any]] = {}
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda x, stream: asked.setdefault(x.data_ptr(), []).append(stream)
    )
    gc.collect()  # what other tests left
    asked.clear()
    parcels = [lot.park([numbers(8), numbers(4, 3, 8)[:, 1]], LABEL)]
    lot.stay(parcels[0])
    if way != "leaving":
        parcels[0].leave()
        with monkeypatch.context() as patch:
            if "error" in way:
                copy = lot.copy
                patch.setattr(lot, "copy", lambda pairs: (copy(pairs), 1 / 0))
                with pytest.raises(ZeroDivisionError):
                    parcels[0].fetch()
            else:
                parcels[0].fetch()
    copied = {x.data_ptr() for x in (parcels[0]._here or []) + parcels[0]._copying}
    assert not asked and len(copied) == (3 if way == "leaving" else 2), "what has gaps is copied first"
    collector = threading.Thread(target=parcels.clear)
    with parking_room.torch.cuda.stream(Stream()):
        collector.start()
        collector.join()
    assert set(asked) == copied and {id(one) for streams in asked.values() for one in streams} == {id(side)}
    assert not training.is_after(side), "nothing waits"
    assert len(lot.free) == lot.blocks
