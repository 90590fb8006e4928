"""Documents that span ranks, in layers that carry state: rows brought together, and taken apart again.

In: the layout of a micro-batch and its transport. Out: for the kernel of such a layer the state behind the piece before
each piece, or all rows of a document, of some heads on each of its ranks; for its short convolution the rows before
each piece. Heads are a dispatch to the ranks that run them and a return, as in attention; states and rows before pieces
a dispatch alone, whose backward is one the other way round; between GPUs messages from rank to rank. Every rank takes
part in each exchange of the transport, also with nothing to send.

A document's heads are divided among its ranks in proportion to the rows that each holds: so every rank runs as much as
it would of its own rows, and fewer rows move than with equal shares. Where what lands would be more than there is
memory for, it comes in waves, a part of each rank's heads after the other. `n` rows of such documents on this rank,
ordered by document and position; `G` head groups; `L` tokens of a document; `S` rows that a rank runs; `w` any width.
"""

import itertools
import warnings
from collections.abc import Hashable, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from deepspeed_cad.attention.memory import NO_LIMIT, ExchangeMemory
from deepspeed_cad.attention.nano_batches import in_backward, unseen_by_checkpointing
from deepspeed_cad.errors import CADError
from deepspeed_cad.exchange.failure.identity import Moment
from deepspeed_cad.exchange.group import processes_of
from deepspeed_cad.exchange.transport import Outgoing, Returning, Transport
from deepspeed_cad.layout import Ints, Layout
from deepspeed_cad.schedule import (
    GROUP,
    HOME,
    HOME_ROW,
    KIND,
    QUERY,
    ROWS,
    SERVER,
    SERVER_ROW,
    STAGE_ROW,
    Schedule,
    expand,
)
from deepspeed_cad.shares import divide

# In it torch says that messages go one after the other, which `carry` counts on.
warnings.filterwarnings("ignore", ".*unbatched P2P op")
NARROW = 64
"""Bytes of a row of one head group: copy engines read narrower ones slowly unless rows lie one behind the other."""


class Share(NamedTuple):
    """Head groups of one document that this rank runs."""

    tokens: int
    begin: int
    end: int


class Wave(NamedTuple):
    """Some head groups of every document. Rows land share by share, [groups, L] each."""

    schedule: Schedule
    shares: list[Share]


OneWay = tuple[Schedule, Schedule]
"""An exchange that nothing returns from, and that of its gradients."""


class Before(NamedTuple):
    """Rows before pieces, for a convolution."""

    exchange: OneWay
    sent: Tensor
    """Rows of this rank, [0, n), that others or itself read: once for each piece that does."""
    gots: list[int]
    """Of each piece of this rank, how many of the rows before it came."""


class Piece(NamedTuple):
    """Of a document: its rows on this rank, how many pieces are before these, and whether none is behind them."""

    size: int
    place: int
    is_last: bool


class Spanning:
    """All documents in several pieces of one micro-batch, seen from one rank."""

    def __init__(
        self, layout: Layout, rank: int, transport: Transport, turn: int, device: torch.device,
        memory: ExchangeMemory = NO_LIMIT,
    ) -> None:  # fmt: skip
        """`turn`: of the micro-batch, as in `Moment`; `memory`: what may land at once."""
        segments = layout.segments
        several = np.bincount(segments.document)[segments.document] > 1
        order = np.lexsort((segments.begin, segments.document))
        pieces = self._pieces = segments.select(order[several[order]])
        self._rank, self._ranks, self._transport, self._turn = rank, layout.ranks, transport, turn
        self.device, self._memory = device, memory
        self._ahead = device.type == "cuda"
        """Whether states and rows before pieces go as messages: see `carry`."""
        self._leaving: list[tuple[Any, Tensor]] = []
        """Messages under way to others, and their rows."""
        self._sizes = pieces.end - pieces.begin
        self._base, _ = self._in_turn(pieces.rank, self._sizes)
        mine = pieces.rank == rank
        self.rows: Ints = expand(pieces.offset[mine], self._sizes[mine])
        """[n] rows of this rank's token buffer."""
        self.widest = int(pieces.count_ranks()[1].max(initial=1))
        """Ranks of the document that lies on most."""
        names, self._first, of, self._count = np.unique(
            pieces.document, return_index=True, return_inverse=True, return_counts=True
        )
        self._held = np.zeros((len(names), layout.ranks), np.int64)
        """[documents, ranks] rows."""
        np.add.at(self._held, (of, pieces.rank), self._sizes)
        self.longest = int(self._count.max(initial=1))
        """Pieces of the document that has most."""
        self._place = np.arange(len(of)) - self._first[of]
        table = zip(self._sizes[mine], self._place[mine], (self._place + 1 == self._count[of])[mine])
        # In the order of `rows`; one where there are none, for the row that stands in.
        self.pieces = [Piece(int(size), int(place), bool(end)) for size, place, end in table] or [Piece(1, 0, True)]
        self._heads: dict[tuple[int, int], list[Wave]] = {}
        self._before: dict[int, Before] = {}
        self._layers: dict[Hashable, int] = {}
        """In the order in which they first ran."""
        self._came: dict[tuple[Hashable, Hashable], Tensor] = {}

    def heads(self, groups: int, size: int, label: str = "") -> list[Wave]:
        """How `groups` head groups are divided. `size`: bytes of a row of one of them; `label` names the layer.

        Raises CADError, the same on all ranks, where one group at a time is more than there is memory for."""
        if (groups, size) not in self._heads:
            widths = np.array([divide(groups, held) for held in self._held], np.int64).reshape(self._held.shape)
            cuts = itertools.pairwise(self._cut(widths, size, label))
            self._heads[groups, size] = [self._one_wave(groups, *wave) for wave in cuts]
        return self._heads[groups, size]

    @cached_property
    def hops(self) -> list[OneWay]:
        """By place: from each document's piece there to the one behind it, a row for each."""
        rank, behind = self._pieces.rank, [np.flatnonzero(self._place == place) for place in range(1, self.longest)]
        return [self._one_way(rank[at - 1], rank[at], np.ones(len(at), np.int64)) for at in behind]

    def before(self, count: int) -> Before:
        if count not in self._before:
            self._before[count] = self._look_back(count)
        return self._before[count]

    def gather(self, schedule: Schedule, layer: Hashable, home_nGw: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """[S, w] of each tensor, where its heads run; they are valid until the next exchange. And the tensors again,
        for the next wave. Differentiable. `layer` tells it from the other layers of the micro-batch."""
        found = _Gather.apply(self, schedule, self._number(layer), *home_nGw)
        return list(found[: len(home_nGw)]), list(found[len(home_nGw) :])

    def scatter(self, schedule: Schedule, layer: Hashable, home_nGw: Tensor, served_Sw: Tensor) -> Tensor:
        """`home_nGw` with the rows that came back written into it. Differentiable."""
        found: Tensor = _Scatter.apply(self, schedule, self._number(layer), home_nGw, served_Sw)
        return found

    @unseen_by_checkpointing
    def bring(self, exchange: OneWay, layer: Hashable, what: Hashable, sent: Tensor, *behind: Tensor) -> Tensor:
        """What others send to this rank, [m, w] of `sent` [n, w]. Differentiable. It is little and kept: where
        activation checkpointing runs the layer again, nothing moves. `what` tells it from the layer's other ones. Its
        backward runs before that of `behind`, and on every rank where any of these needs a gradient."""
        came, recomputes = self._came.get((layer, what)), in_backward()
        if came is not None and not recomputes:
            raise CADError(f"{type(layer).__name__} with documents that span ranks was called twice in one forward")
        found: Tensor = _Bring.apply(self, exchange, self._number(layer), came, sent, *behind)
        self._came[layer, what] = found.detach()
        return found

    def _number(self, layer: Hashable) -> int:
        return self._layers.setdefault(layer, len(self._layers))

    def dispatch(
        self, schedule: Schedule, layer: int, home_nGw: Sequence[Tensor], backward: bool, lane: int = 0
    ) -> tuple[Tensor, ...]:
        """[S, w] of each tensor, without gradients. `lane`: rows that nothing returns have memory of their own."""
        fields = [Outgoing(QUERY, _readable(x)) for x in home_nGw]
        return tuple(self._transport.dispatch(schedule, fields, lane, Moment(self._turn, layer, backward)).wait())

    def carry(self, schedule: Schedule, layer: int, rows: Tensor, backward: bool) -> Tensor:
        """[m, w] of the ranks' rows [n, w], without gradients. On GPUs who gets nothing waits for nobody: ranks may be
        some layers ahead of those behind them."""
        if not self._ahead:
            return self.dispatch(schedule, layer, [rows[:, None]], backward, lane=1)[0].clone()
        processes, arriving = processes_of(self._transport.group), []
        came = rows.new_empty(int(schedule.served_rows[self._rank, 0]), rows.shape[1])
        # In one order on all ranks: each message may have to wait for the one before it.
        table = np.concatenate([schedule.sends, schedule.receives, schedule.own])
        table = table[np.lexsort((table[:, SERVER], table[:, HOME]))][:, [HOME, HOME_ROW, SERVER, SERVER_ROW, ROWS]]
        way = "backward" if backward else "forward"
        label = f"state and rows before pieces in the {way} of micro-batch {self._turn}, layer {layer}"
        with self._transport.watched(label) if rows.is_cuda else nullcontext():
            for home, at, server, begin, count in table.tolist():
                source, into = rows[at : at + count], came[begin : begin + count]
                if home == server:
                    into.copy_(source)
                elif home == self._rank:
                    self._leaving.append((processes.send([source], server, 0), rows))
                else:
                    arriving.append(processes.recv([into], home, 0))
            for work in arriving:
                work.wait()
        self._leaving = [one for one in self._leaving if not one[0].is_completed()]
        return came

    def give_back(self, schedule: Schedule, layer: int, pairs: list[tuple[Tensor, Tensor]], backward: bool) -> None:
        """Write rows [S, w] into tensors at home [n, G, w]: (served, home) of each."""
        fields = [Returning(QUERY, served.contiguous(), home) for served, home in pairs]
        self._transport.give_back(schedule, fields, 0, Moment(self._turn, layer, backward)).wait()

    def _cut(self, widths: Ints, size: int, label: str) -> list[Ints]:
        """[documents, ranks] first head group of each rank in each of as few waves as fit, and the last one's end.

        `widths`: [documents, ranks] groups that each runs."""
        first, memory = np.cumsum(widths, axis=1) - widths, self._memory
        needed = np.zeros(1)
        for waves in range(1, int(widths.max(initial=1)) + 1):
            cuts = [first + widths * wave // waves for wave in range(waves + 1)]
            parts = np.diff(cuts, axis=0)
            served = (parts * self._held.sum(1)[:, None]).sum(1)
            needed = size * (served + (parts.sum(2)[..., None] * self._held).sum(1)).max(0)
            if needed.max() <= memory.limit:
                break
        if needed.max() > max(memory.limit, memory.most):
            raise CADError(
                f"{label}: rows of documents that span ranks do not fit. One head group at a time, rank "
                f"{int(needed.argmax())} needs {needed.max() / 2**20:.3g} MiB for what lands, and {memory.source} "
                f'allows {memory.limit / 2**20:.3g}. Set "memory" to at least {1.006 * needed.max() / 2**30:.3g} '
                "(GiB), use shorter documents or more ranks, or free GPU memory by more checkpointing"
            )
        memory.needed(float(needed.max()))
        return cuts

    def _one_wave(self, groups: int, begins: Ints, ends: Ints) -> Wave:
        """`begins` and `ends`: [documents, ranks] of the head groups."""
        pieces, tokens = self._pieces, self._held.sum(1)
        # A unit is a head group of a document, with the server that runs it; each piece of the document goes there.
        counts = (ends - begins).reshape(-1)
        document, server = np.divmod(np.repeat(np.arange(len(counts)), counts), self._ranks)
        group = expand(begins.reshape(-1), counts)
        begin, landed = self._in_turn(server, tokens[document])
        unit = np.repeat(np.arange(len(group)), self._count[document])
        piece = expand(self._first[document], self._count[document])
        held = begins[:, self._rank] < ends[:, self._rank]
        shares = [Share(*map(int, one)) for one in zip(tokens[held], *(x[held, self._rank] for x in (begins, ends)))]
        schedule = self._schedule(
            pieces.rank[piece], self._base[piece], server[unit], begin[unit] + pieces.begin[piece], self._sizes[piece],
            landed, group[unit], groups,
        )  # fmt: skip
        return Wave(schedule, shares)

    def _look_back(self, count: int) -> Before:
        pieces, me = self._pieces, self._rank
        wanted = pieces.begin - count
        near = (pieces.document[:, None] == pieces.document) & (pieces.end > wanted[:, None])
        at, other = np.nonzero(np.tril(near, -1))
        low = np.maximum(pieces.begin[other], wanted[at])
        size, home, server = pieces.end[other] - low, pieces.rank[other], pieces.rank[at]
        leaves, mine = home == me, pieces.rank == me
        first = self._base[other] + low - pieces.begin[other]
        got = np.bincount(at, weights=size, minlength=len(pieces.rank)).astype(np.int64)
        rows = torch.from_numpy(expand(first[leaves], size[leaves])).to(self.device)
        return Before(self._one_way(home, server, size), rows, got[mine].tolist() or [0])

    def _one_way(self, home: Ints, server: Ints, size: Ints) -> OneWay:
        """Rows in turn on either side."""
        (home_row, sent), (server_row, landed) = self._in_turn(home, size), self._in_turn(server, size)
        out = self._schedule(home, home_row, server, server_row, size, landed)
        return out, self._schedule(server, server_row, home, home_row, size, sent)

    def _in_turn(self, rank: Ints, size: Ints) -> tuple[Ints, Ints]:
        """Where parts begin that lie one behind the other on each rank, and [ranks] rows of all of them."""
        begin = np.zeros(len(size), np.int64)
        for one in range(self._ranks):
            here = rank == one
            begin[here] = np.cumsum(size[here]) - size[here]
        return begin, np.bincount(rank, weights=size, minlength=self._ranks).astype(np.int64)

    def _schedule(
        self, home: Ints, home_row: Ints, server: Ints, server_row: Ints, size: Ints, landed: Ints,
        group: Ints | int = 0, groups: int = 1,
    ) -> Schedule:  # fmt: skip
        """Of slices, in any order; `landed`: [ranks] rows of all that a rank serves."""
        table = np.zeros((len(home), 8), np.int64)
        table[:, KIND], table[:, GROUP] = QUERY, group
        table[:, [HOME, HOME_ROW, SERVER, SERVER_ROW, ROWS]] = np.stack([home, home_row, server, server_row, size], 1)
        table = table[np.lexsort((table[:, SERVER_ROW], table[:, SERVER], table[:, HOME]))]
        leaves, here = table[:, HOME] != table[:, SERVER], table[:, HOME] == self._rank
        # Also where nothing comes back: carriers make the tables of both directions at once.
        sizes = table[:, ROWS] * leaves
        returned = np.bincount(table[:, HOME], weights=sizes, minlength=self._ranks).astype(np.int64)
        table[:, STAGE_ROW] = np.cumsum(sizes) - sizes - (np.cumsum(returned) - returned)[table[:, HOME]]
        serves = table[:, SERVER] == self._rank
        rows = int((table[here, HOME_ROW] + table[here, ROWS]).max(initial=0))
        return Schedule(
            self._rank, self._ranks, groups, None, rows, 0, table[here & leaves], table[serves & leaves],
            table[here & serves], np.stack([landed, 0 * landed], axis=1), np.stack([returned, 0 * returned], axis=1),
            (), (),
        )  # fmt: skip


def _readable(x_nGw: Tensor) -> Tensor:
    """As copies read it: rows of a head group that are contiguous, and one behind the other where they are narrow."""
    if x_nGw.shape[2] * x_nGw.element_size() < NARROW:
        return x_nGw.transpose(0, 1).contiguous().transpose(0, 1)
    return x_nGw if x_nGw.stride(2) == 1 else x_nGw.contiguous()


class _Gather(torch.autograd.Function):
    """Out to where heads run. Wave by wave the tensors at home are handed on, so gradients of all waves are written
    into the same ones, from the last wave to the first."""

    @staticmethod
    def forward(ctx: Any, spanning: Spanning, schedule: Schedule, layer: int, *home_nGw: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        landed = spanning.dispatch(schedule, layer, home_nGw, backward=False)
        ctx.given, ctx.like = (spanning, schedule, layer), [(x.shape, x.new_empty(0)) for x in home_nGw]
        ctx.rows = len(landed[0])
        return *landed, *(x.view_as(x) for x in home_nGw)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        (spanning, schedule, layer), count, pairs = ctx.given, len(ctx.like), []
        for (shape, like), served, home in zip(ctx.like, gradients[:count], gradients[count:]):
            served = like.new_zeros(ctx.rows, shape[2]) if served is None else served
            pairs.append((served, like.new_empty(shape) if home is None else home))
        spanning.give_back(schedule, layer, pairs, backward=True)
        return None, None, None, *(home for _, home in pairs)


class _Scatter(torch.autograd.Function):
    """Back home, into a tensor of all waves."""

    @staticmethod
    def forward(
        ctx: Any, spanning: Spanning, schedule: Schedule, layer: int, home_nGw: Tensor, served_Sw: Tensor
    ) -> Tensor:
        ctx.given = spanning, schedule, layer
        spanning.give_back(schedule, layer, [(served_Sw, home_nGw)], backward=False)
        ctx.mark_dirty(home_nGw)
        return home_nGw

    @staticmethod
    def backward(ctx: Any, gradient_nGw: Tensor) -> Any:
        spanning, schedule, layer = ctx.given
        (served,) = spanning.dispatch(schedule, layer, [gradient_nGw], backward=True)
        return None, None, None, gradient_nGw, served.clone()


class _Bring(torch.autograd.Function):
    """`kept`: what the same exchange brought before."""

    @staticmethod
    def forward(
        ctx: Any, spanning: Spanning, exchange: OneWay, layer: int, kept: Tensor | None, sent: Tensor, *behind: Tensor
    ) -> Tensor:
        ctx.given, ctx.behind = (spanning, exchange[1], layer), len(behind)
        if kept is not None:
            return kept.detach()
        return spanning.carry(exchange[0], layer, sent, backward=False)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        spanning, back, layer = ctx.given
        sent = spanning.carry(back, layer, gradient.contiguous(), backward=True)
        return None, None, None, None, sent, *[None] * ctx.behind
