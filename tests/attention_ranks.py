"""All ranks of an attention call in one process: a network of transports, the data of documents, and what is right."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import cases
import numpy as np
import torch

from deepspeed_cad.attention.call import AttentionCall
from deepspeed_cad.attention.device_schedule import upload_schedule
from deepspeed_cad.attention.setup import CallCounts, CallSetup, Modes
from deepspeed_cad.exchange.failure.identity import Moment
from deepspeed_cad.exchange.transport import Outgoing, Returning
from deepspeed_cad.kernels.interface import Kernel, MaskRule, Sequences
from deepspeed_cad.kernels.torch_math import TorchMath
from deepspeed_cad.layout import Layout, Tick
from deepspeed_cad.schedule import HOME, SERVER, Schedule
from deepspeed_cad.schedule.waves import OUT, Cut, schedule_waves

CPU = torch.device("cpu")
HEADS, GROUPS, DIM, VALUE = 6, 3, 8, 5
SHAPES = {"q": (HEADS, DIM), "k": (GROUPS, DIM), "v": (GROUPS, VALUE), "do": (HEADS, VALUE)}


class LseTransposed(TorchMath):
    """Gives and takes LSE as the FlashAttention libraries do: a transposed view of [H, Q]."""

    def forward(self, q: Any, k: Any, v: Any, sequences: Sequences, rule: MaskRule, out: Any = None) -> Any:
        o, lse = super().forward(q, k, v, sequences, rule, out)
        return o, lse.t().contiguous().t()


class Network:
    """Exchanges among ranks that one thread runs step by step: first all of them send, then all of them wait. With
    more waves than are under way at once each rank has a thread, because steps of ranks wait for each other."""

    def __init__(self, ranks: int, log: list[str]) -> None:
        self.log = log
        self.transports = [NetworkTransport(self, rank) for rank in range(ranks)]
        self.sent: dict[tuple[int, int], tuple[Schedule, list[Any]]] = {}
        """By exchange and rank."""
        self.news = threading.Condition()

    def take(self, exchange: int, peer: int) -> tuple[Schedule, list[Any]]:
        with self.news:
            assert self.news.wait_for(lambda: (exchange, peer) in self.sent, 10), f"rank {peer} starts no {exchange}"
            return self.sent[exchange, peer]


@dataclass
class NetworkTransport:
    """One rank's transport. What arrives is NaN where nobody sent it."""

    network: Network
    rank: int
    name: str = "network"
    most_waves: int = 8
    two_ways: bool = False
    exchanges: int = 0
    bytes_sent: int = 0
    landing_bytes: int = 0
    shipped: list[list[int]] = field(default_factory=list)
    """The width of every field, by exchange."""
    nano_batches: list[int] = field(default_factory=list)
    """The nano-batch of every exchange."""
    landed: dict[tuple[int, int], list[torch.Tensor]] = field(default_factory=dict)
    """What arrived, by nano-batch and lane: valid until its return, as in landing areas that are used again."""
    moments: list[Moment] = field(default_factory=list)
    """Of every exchange."""

    def dispatch(self, schedule: Schedule, fields: list[Outgoing], nano_batch: int, moment: Moment) -> _Dispatched:
        lane = nano_batch, moment.wave % OUT
        for area in self.landed.pop(lane, []):
            area.fill_(float("nan"))
        self.moments.append(moment)
        return _Dispatched(self, schedule, fields, self._start("dispatch", schedule, fields, nano_batch), lane)

    def give_back(self, schedule: Schedule, fields: list[Returning], nano_batch: int, moment: Moment) -> _Returned:
        self.moments.append(moment)
        back = _Returned(self, schedule, fields, self._start("give_back", schedule, fields, nano_batch))
        # Not there where nothing landed, and nobody has waited for it.
        for area in self.landed.pop((nano_batch, moment.wave % OUT), []):
            area.fill_(float("nan"))
        return back

    def make_room(self, schedules: Any, room: Any, nano_batch: int) -> None: ...

    def close(self) -> None: ...

    def _start(self, what: str, schedule: Schedule, fields: list[Any], nano_batch: int) -> int:
        self.nano_batches.append(nano_batch)
        # Layouts that transports of GPUs refuse; c10d by itself takes any.
        for one in fields:
            assert one.home.shape[1] == schedule.groups and one.home.stride(2) == 1
            if isinstance(one, Returning):
                assert one.served.shape[0] == schedule.served_rows[schedule.rank, one.kind]
                assert one.served.is_contiguous(), f"strides {one.served.stride()} cannot be returned"
                assert one.served.dtype == one.home.dtype or (one.add and one.home.dtype == torch.float32)
        self.network.log.append(what)
        self.exchanges += 1
        self.shipped.append([f.home.shape[2] for f in fields])
        data = [f.served.clone() if isinstance(f, Returning) else f.home.detach().clone() for f in fields]
        with self.network.news:
            self.network.sent[self.exchanges, self.rank] = (schedule, data)
            self.network.news.notify_all()
        self.bytes_sent += sum(
            int(schedule.rows_by_peer(schedule.sends, SERVER, f.kind).sum()) * f.home.shape[2] * f.home.element_size()
            for f in fields
            if isinstance(f, Outgoing)
        )
        return self.exchanges


@dataclass
class _Dispatched:
    own: NetworkTransport
    schedule: Schedule
    fields: list[Outgoing]
    exchange: int
    lane: tuple[int, int]

    def wait(self) -> list[torch.Tensor]:
        self.own.network.log.append("wait out")
        me, mine = self.own.rank, self.schedule
        arrived = []
        for i, f in enumerate(self.fields):
            landed = f.home.new_full((int(mine.served_rows[me, f.kind]), f.home.shape[2]), float("nan"))
            for peer in range(mine.ranks):
                theirs, data = self.own.network.take(self.exchange, peer)
                sends = mine.own if peer == me else theirs.sends[theirs.sends[:, SERVER] == me]
                takes = mine.own if peer == me else mine.receives[mine.receives[:, HOME] == peer]
                at = torch.from_numpy(theirs.home_index(sends, f.kind))
                rows = data[i].flatten(0, 1)[at] if peer != me else f.home.reshape(-1, f.home.shape[2])[at]
                landed[torch.from_numpy(mine.server_index(takes, f.kind))] = rows
            arrived.append(landed)
        self.own.landed[self.lane] = arrived
        return list(arrived)


@dataclass
class _Returned:
    own: NetworkTransport
    schedule: Schedule
    fields: list[Returning]
    exchange: int

    def wait(self) -> None:
        self.own.network.log.append("wait back")
        me, mine = self.own.rank, self.schedule
        for i, f in enumerate(self.fields):
            wide = torch.promote_types(f.home.dtype, torch.float32)
            groups = f.home.shape[1]
            found = torch.zeros(f.home.shape[0] * groups, f.home.shape[2], dtype=wide)
            seen = torch.zeros(len(found), dtype=torch.bool)
            for peer in range(mine.ranks):
                theirs, data = self.own.network.take(self.exchange, peer)
                sends = mine.own if peer == me else mine.sends[mine.sends[:, SERVER] == peer]
                takes = mine.own if peer == me else theirs.receives[theirs.receives[:, HOME] == me]
                at = torch.from_numpy(mine.home_index(sends, f.kind))
                found.index_add_(0, at, data[i][torch.from_numpy(theirs.server_index(takes, f.kind))].to(wide))
                seen[at] = True
            where = seen.nonzero().squeeze(1)
            row, group = where // groups, where % groups
            before = f.home[row, group].to(wide) if f.add else 0
            f.home[row, group] = (before + found[where]).to(f.home.dtype)


def document(layout: Layout, number: int, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Q, K, V and dO of one document, the same on every rank; rounded to `dtype`, in fp64."""
    length = int(layout.segments.end[layout.segments.document == number].max())
    gen = torch.Generator().manual_seed(number)
    made = {name: torch.randn(length, *shape, generator=gen, dtype=torch.float64) for name, shape in SHAPES.items()}
    return {name: x.to(dtype).double() for name, x in made.items()}


def rows_of(layout: Layout, rank: int, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Q, K, V and dO of a rank; 7 where it has padding."""
    made = {name: torch.full((int(layout.tokens[rank]), *shape), 7.0, dtype=dtype) for name, shape in SHAPES.items()}
    segments = layout.segments
    for number, begin, end, _, offset in segments.select(segments.rank == rank).to_array():
        whole = document(layout, int(number), dtype)
        for name in made:
            made[name][offset : offset + end - begin] = whole[name][begin:end].to(dtype)
    return made


def expected_of(
    layout: Layout, rule: MaskRule, sinks: torch.Tensor | None, dtype: torch.dtype
) -> tuple[list[dict[str, torch.Tensor]], torch.Tensor | None]:
    """By ranks: O, dQ, dK, dV of its rows from each document alone, zero in padding; and the gradient of the sinks over
    all of them. In fp64, for inputs that are rounded to `dtype`."""
    rows = [rows_of(layout, rank) for rank in range(layout.ranks)]
    made = [{"o": torch.zeros_like(mine["do"]), **{f"d{n}": torch.zeros_like(mine[n]) for n in "qkv"}} for mine in rows]
    leaf = None if sinks is None else sinks.detach().to(dtype).double().clone().requires_grad_()
    for number in range(layout.documents):
        whole = document(layout, number, dtype)
        inputs = [whole[n].requires_grad_() for n in "qkv"]
        o = cases.document_attention(*inputs, rule.scale, rule.window, rule.softcap, leaf)
        o.backward(whole["do"])
        segments = layout.segments
        for _, begin, end, rank, offset in segments.select(segments.document == number).to_array():
            here = slice(offset, offset + end - begin)
            made[rank]["o"][here] = o.detach()[begin:end]
            for n, x in zip("qkv", inputs, strict=True):
                made[rank][f"d{n}"][here] = x.grad[begin:end]
    return made, None if leaf is None else leaf.grad


@dataclass
class Ranks:
    """One layer's attention on every rank of a layout, with a random plan."""

    layout: Layout
    rule: MaskRule
    modes: Modes = field(default_factory=Modes)
    sinks: torch.Tensor | None = None
    """[HEADS] of the model, the same on every rank; each has a leaf of its own."""
    cut: bool = False
    seed: int = 0
    kernel: Kernel = field(default_factory=LseTransposed)
    dtype: torch.dtype = torch.float64
    log: list[str] = field(default_factory=list)
    tasks: list[np.ndarray] | None = None
    """By ticks; random where not given."""
    waves: int = 1
    blocks: int = 0

    def __post_init__(self) -> None:
        ranks = range(self.layout.ranks)
        self.network = Network(len(ranks), self.log)
        self.counts = [CallCounts() for _ in ranks]
        self.leaves = []
        for rank in ranks:
            mine = rows_of(self.layout, rank, self.dtype)
            leaf = {n: mine[n].clone().requires_grad_() for n in "qkv"}
            if self.sinks is not None:
                leaf["sinks"] = self.sinks.to(self.dtype).clone().requires_grad_()
            self.leaves.append(leaf)
        at = self.layout.tokens // 2
        self.ticks: tuple[Tick, ...] = self.layout.cut(at) if self.cut else (self.layout.tick(),)
        rng = np.random.default_rng(self.seed)
        self.calls: list[list[AttentionCall]] = []
        """By ticks and ranks."""
        for nano_batch, tick in enumerate(self.ticks):
            tasks = cases.random_tasks(tick, GROUPS, rng) if self.tasks is None else self.tasks[nano_batch]
            self.calls.append([self._call(tick, tasks, rank, nano_batch) for rank in ranks])

    def _call(self, tick: Tick, tasks: np.ndarray, rank: int, nano_batch: int) -> AttentionCall:
        cut = Cut(self.waves, self.blocks, 2)
        schedule = upload_schedule(schedule_waves(tick, tasks, rank, GROUPS, self.rule.window, cut), CPU)
        rest = self.rule, self.modes, self.counts[rank], nano_batch, f"layer on rank {rank}"
        return AttentionCall(CallSetup(schedule, self.kernel, self.network.transports[rank], *rest))

    def inputs(self, nano_batch: int, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tick, leaf = self.ticks[nano_batch], self.leaves[rank]
        q0, k0 = int(tick.query_base[rank]), int(tick.key_base[rank])
        rows = slice(q0, q0 + int(tick.query_tokens[rank]))
        keys = slice(k0, k0 + int(tick.key_tokens[rank]))
        return leaf["q"][rows], leaf["k"][keys], leaf["v"][keys]

    def forward(self) -> list[torch.Tensor]:
        """O of every rank. Every step runs on all ranks before the next one does; the backward mirrors that."""
        found: list[list[torch.Tensor]] = []
        for n, calls in enumerate(self.calls):
            given = [self.inputs(n, rank) for rank in range(len(calls))]
            sinks = [leaf.get("sinks") for leaf in self.leaves]
            tokens = [call.dispatch(*one, sink) for call, one, sink in zip(calls, given, sinks)]
            tokens = self._on_all([lambda c=call, t=token: c.serve(t) for call, token in zip(calls, tokens)])
            each = zip(calls, tokens, given, sinks)
            found.append([call.collect(token, *one, sink) for call, token, one, sink in each])
        return [torch.cat(outputs) for outputs in zip(*found)]

    def backward(self, outputs: list[torch.Tensor], retain_graph: bool = False) -> None:
        gradients = [rows_of(self.layout, rank, self.dtype)["do"] for rank in range(self.layout.ranks)]
        if self.waves <= OUT:
            torch.autograd.backward(outputs, gradients, retain_graph=retain_graph)
        else:
            self._on_all([lambda o=o, do=do: o.backward(do) for o, do in zip(outputs, gradients)])

    def _on_all(self, steps: list[Callable[[], Any]]) -> list[Any]:
        if self.waves <= OUT:
            return [step() for step in steps]
        with ThreadPoolExecutor(len(steps)) as pool:
            return [one.result() for one in [pool.submit(step) for step in steps]]

    def run(self) -> dict[str, float]:
        outputs = self.forward()
        self.backward(outputs)
        return self.errors(outputs)

    def errors(self, outputs: list[torch.Tensor]) -> dict[str, float]:
        """Of O, dQ, dK, dV and the sinks' gradient, over all ranks: root mean square, as a share of what is right."""
        right, sinks = expected_of(self.layout, self.rule, self.sinks, self.dtype)
        found: dict[str, float] = {}
        for name in ("o", "dq", "dk", "dv"):
            pairs = [
                ((outputs[r].detach() if name == "o" else self.leaves[r][name[1]].grad).double(), right[r][name])
                for r in range(self.layout.ranks)
            ]
            wrong = sum(float((one - other).square().sum()) for one, other in pairs)
            # Where a row sees itself alone dQ is zero.
            found[name] = (wrong / max(sum(float(other.square().sum()) for _, other in pairs), 1.0)) ** 0.5
        if sinks is not None:
            total = torch.stack([leaf["sinks"].grad.double() for leaf in self.leaves]).sum(0)
            found["dsinks"] = float((total - sinks).norm() / sinks.norm())
        return found
