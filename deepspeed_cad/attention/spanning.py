"""Documents that span ranks, in layers that carry state: rows brought together, and taken apart again.

In: the layout of a micro-batch and its transport. Out: for the kernel of such a layer all rows of a document, of some
heads on each of its ranks; for its short convolution the rows before each piece. Both are exchanges in which every row
that leaves a rank lands at one place, so the backward is the same exchange the other way round. Every rank takes part
in each, also with nothing to send.

A document's heads are divided among its ranks in proportion to the rows that each holds: so every rank runs as much as
it would of its own rows, and fewer rows move than with equal shares. Where what lands would be more than there is
memory for, it comes in waves, a part of each rank's heads after the other. `n` rows of such documents on this rank,
ordered by document and position; `G` head groups; `L` tokens of a document.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from deepspeed_cad.attention.memory import NO_LIMIT, ExchangeMemory
from deepspeed_cad.attention.nano_batches import in_backward, unseen_by_checkpointing
from deepspeed_cad.errors import CADError
from deepspeed_cad.exchange.failure.identity import Moment
from deepspeed_cad.exchange.transport import Outgoing, Transport
from deepspeed_cad.layout import Ints, Layout
from deepspeed_cad.schedule import HOME, HOME_ROW, KIND, QUERY, ROWS, SERVER, SERVER_ROW, STAGE_ROW, Schedule, expand
from deepspeed_cad.shares import divide


@dataclass(frozen=True, eq=False)
class Way:
    out: Schedule
    back: Schedule

    def reverse(self) -> Way:
        return Way(self.back, self.out)


class Share(NamedTuple):
    """Head groups of one document that this rank runs."""

    tokens: int
    begin: int
    end: int


class Wave(NamedTuple):
    """Some head groups of every document. Rows land share by share, [groups, L] each."""

    way: Way
    shares: list[Share]


@dataclass(frozen=True, eq=False)
class Heads:
    """How head groups are divided."""

    waves: list[Wave]
    index: tuple[torch.Tensor, torch.Tensor]
    """[G · n] each: head group and row of what leaves home, one wave behind the other."""

    def leave(self, rows_GnX: torch.Tensor) -> list[torch.Tensor]:
        """Rows of each wave, as they leave home. Differentiable."""
        ordered: torch.Tensor = _Order.apply(rows_GnX, self.index, None)
        return list(ordered.split([wave.way.out.query_tokens for wave in self.waves]))

    def come_home(self, waves: list[torch.Tensor], groups: int) -> torch.Tensor:
        """The reverse: [G, n, …]."""
        found: torch.Tensor = _Order.apply(torch.cat(waves), self.index, groups)
        return found


AREAS = 2
"""Times what lands in a wave that there is memory for it: landing areas that take turns, or what is packed beside what
comes."""


class Before(NamedTuple):
    """Rows before pieces, for a convolution."""

    way: Way
    sent: torch.Tensor
    """Rows of this rank, [0, n), that others or itself read: once for each piece that does."""
    joined: torch.Tensor
    """What the convolution runs on, chosen from a blank row, the rows of this rank and those that came, in that order:
    each piece behind the rows before it, blank ones at the begin of a document."""
    own: torch.Tensor
    """Where the rows of this rank lie in that."""


class Spanning:
    """All documents in several pieces of one micro-batch, seen from one rank."""

    def __init__(
        self,
        layout: Layout,
        rank: int,
        transport: Transport,
        turn: int,
        device: torch.device,
        memory: ExchangeMemory = NO_LIMIT,
    ) -> None:
        """`turn`: of the micro-batch, as in `Moment`; `memory`: what may land at once."""
        segments = layout.segments
        several = np.bincount(segments.document)[segments.document] > 1
        order = np.lexsort((segments.begin, segments.document))
        pieces = self._pieces = segments.select(order[several[order]])
        self._rank, self._ranks, self._transport, self._turn = rank, layout.ranks, transport, turn
        self._device, self._memory = device, memory
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
        self._heads: dict[tuple[int, int], Heads] = {}
        self._before: dict[int, Before] = {}
        self._layers: dict[Hashable, int] = {}
        """In the order in which they first ran."""
        self._came: dict[Hashable, torch.Tensor] = {}

    def heads(self, groups: int, size: int = 0, label: str = "") -> Heads:
        """How `groups` head groups are divided. `size`: bytes of a row of one of them; `label` names the layer.

        Raises CADError, the same on all ranks, where one group at a time is more than there is memory for.
        """
        if (groups, size) not in self._heads:
            widths = np.array([divide(groups, held) for held in self._held], np.int64).reshape(self._held.shape)
            self._heads[groups, size] = self._divide(self._cut(widths, size, label))
        return self._heads[groups, size]

    def before(self, count: int) -> Before:
        if count not in self._before:
            self._before[count] = self._look_back(count)
        return self._before[count]

    def move(self, way: Way, layer: Hashable, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Rows where they are needed: tensors [rows of the way's home, …] to [rows that land, …]. Differentiable.
        `layer` tells it from the other layers of the micro-batch."""
        return list(_Move.apply(self, way, self._number(layer), None, *tensors))

    @unseen_by_checkpointing
    def bring(self, before: Before, layer: Hashable, rows: torch.Tensor) -> torch.Tensor:
        """The rows before pieces, out of those of this rank. Differentiable. They are few and kept: where activation
        checkpointing runs the layer again, nothing moves."""
        came, recomputes = self._came.get(layer), in_backward()
        if came is not None and not recomputes:
            raise CADError(f"{type(layer).__name__} with documents that span ranks was called twice in one forward")
        sent = rows.index_select(0, before.sent)
        (found,) = _Move.apply(self, before.way, self._number(layer), came, sent)
        self._came[layer] = found.detach()
        return found

    def _number(self, layer: Hashable) -> int:
        return self._layers.setdefault(layer, len(self._layers))

    def exchange(
        self, way: Way, layer: int, tensors: tuple[torch.Tensor, ...], backward: bool
    ) -> tuple[torch.Tensor, ...]:
        """The same without gradients. One field of bytes: rows of several types travel as one message."""
        rows = torch.cat([x.flatten(1).contiguous().view(torch.uint8) for x in tensors], dim=1)
        moment = Moment(self._turn, layer, backward)
        landed = self._transport.dispatch(way.out, [Outgoing(QUERY, rows[:, None])], 0, moment).wait()[0]
        parts = landed.split([x[0:0].flatten(1).shape[1] * x.element_size() for x in tensors], dim=1)
        # Copies: landing memory is used again.
        copies = [part.clone(memory_format=torch.contiguous_format) for part in parts]
        return tuple(part.view(x.dtype).view(len(part), *x.shape[1:]) for part, x in zip(copies, tensors, strict=True))

    def _cut(self, widths: Ints, size: int, label: str) -> list[Ints]:
        """[documents, ranks] first head group of each rank in each of as few waves as fit, and the last one's end.

        `widths`: [documents, ranks] groups that each runs.
        """
        first, memory = np.cumsum(widths, axis=1) - widths, self._memory
        needed = np.zeros(1)
        for waves in range(1, int(widths.max(initial=1)) + 1):
            cuts = [first + widths * wave // waves for wave in range(waves + 1)]
            parts = np.diff(cuts, axis=0)
            served = (parts * self._held.sum(1)[:, None]).sum(1)
            home = (parts.sum(2)[..., None] * self._held).sum(1)
            needed = AREAS * size * np.maximum(served, home).max(0)
            if needed.max() <= memory.limit:
                break
        if needed.max() > max(memory.limit, memory.most):
            raise CADError(
                f"{label}: rows of documents that span ranks do not fit. One head group at a time, rank "
                f"{int(needed.argmax())} needs {needed.max() / 2**20:.3g} MiB for what lands, and {memory.source} "
                f'allows {memory.limit / 2**20:.3g}. Set "memory" to at least {needed.max() / 2**30:.3g} (GiB), use '
                "shorter documents or more ranks, or free GPU memory by more checkpointing"
            )
        memory.needed(float(needed.max()))
        return cuts

    def _divide(self, cuts: list[Ints]) -> Heads:
        parts = [self._one_wave(begins, ends) for begins, ends in itertools.pairwise(cuts)]
        group, row = (self._to_device(np.concatenate(own)) for own in zip(*(own for _, own in parts)))
        return Heads([wave for wave, _ in parts], (group, row))

    def _one_wave(self, begins: Ints, ends: Ints) -> tuple[Wave, tuple[Ints, Ints]]:
        """`begins` and `ends`: [documents, ranks] of the head groups. Also groups and rows that leave here."""
        pieces, tokens = self._pieces, self._held.sum(1)
        # A unit is a head group of a document, with the server that runs it; each piece of the document goes there.
        counts = (ends - begins).reshape(-1)
        document, server = np.divmod(np.repeat(np.arange(len(counts)), counts), self._ranks)
        group = expand(begins.reshape(-1), counts)
        begin, landed = self._in_turn(server, tokens[document])
        unit = np.repeat(np.arange(len(group)), self._count[document])
        piece = expand(self._first[document], self._count[document])
        home, size = pieces.rank[piece], self._sizes[piece]
        home_row, left = self._in_turn(home, size)
        table = np.stack([home, home_row, server[unit], begin[unit] + pieces.begin[piece], size], axis=1)
        mine, held = home == self._rank, begins[:, self._rank] < ends[:, self._rank]
        shares = [Share(*map(int, one)) for one in zip(tokens[held], *(x[held, self._rank] for x in (begins, ends)))]
        own = np.repeat(group[unit[mine]], size[mine]), expand(self._base[piece[mine]], size[mine])
        return Wave(self._way(table, left, landed), shares), own

    def _look_back(self, count: int) -> Before:
        pieces, me, n = self._pieces, self._rank, len(self.rows)
        wanted = pieces.begin - count
        near = (pieces.document[:, None] == pieces.document) & (pieces.end > wanted[:, None])
        at, other = np.nonzero(np.tril(near, -1))
        low = np.maximum(pieces.begin[other], wanted[at])
        size, home, server = pieces.end[other] - low, pieces.rank[other], pieces.rank[at]
        (home_row, sent), (server_row, landed) = self._in_turn(home, size), self._in_turn(server, size)
        leaves, comes, mine = home == me, server == me, pieces.rank == me
        first = self._base[other] + low - pieces.begin[other]
        # Each piece of this rank has `count` rows in front of it.
        lengths = (count + self._sizes) * mine
        begin = np.cumsum(lengths) - lengths + count
        joined = np.zeros(int(lengths.sum()), np.int64)
        joined[expand(begin[mine], self._sizes[mine])] = 1 + np.arange(n)
        into = expand((begin[at] + low - pieces.begin[at])[comes], size[comes])
        joined[into] = 1 + n + expand(server_row[comes], size[comes])
        # A rank without any has a stand-in of one row.
        joined = joined if n else np.ones(1, np.int64)
        own = np.flatnonzero((joined > 0) & (joined <= max(n, 1)))
        tensors = (self._to_device(one) for one in (expand(first[leaves], size[leaves]), joined, own))
        table = np.stack([home, home_row, server, server_row, size], axis=1)
        return Before(self._way(table, sent, landed), *tensors)

    def _in_turn(self, rank: Ints, size: Ints) -> tuple[Ints, Ints]:
        """Where parts begin that lie one behind the other on each rank, and [ranks] rows of all of them."""
        begin = np.zeros(len(size), np.int64)
        for one in range(self._ranks):
            here = rank == one
            begin[here] = np.cumsum(size[here]) - size[here]
        return begin, np.bincount(rank, weights=size, minlength=self._ranks).astype(np.int64)

    def _to_device(self, index: Ints) -> torch.Tensor:
        return torch.from_numpy(index).to(self._device)

    def _way(self, table: Ints, at_home: Ints, landed: Ints) -> Way:
        """`table`: home, its row, server, its row, rows of each slice."""
        slices = np.zeros((len(table), 8), np.int64)
        slices[:, KIND] = QUERY
        slices[:, [HOME, HOME_ROW, SERVER, SERVER_ROW, ROWS]] = table
        back = slices.copy()
        back[:, [HOME, HOME_ROW, SERVER, SERVER_ROW]] = slices[:, [SERVER, SERVER_ROW, HOME, HOME_ROW]]
        return Way(self._schedule(slices, at_home, landed), self._schedule(back, landed, at_home))

    def _schedule(self, slices: Ints, at_home: Ints, landed: Ints) -> Schedule:
        table = slices[np.lexsort((slices[:, SERVER_ROW], slices[:, SERVER], slices[:, HOME]))]
        leaves = table[:, HOME] != table[:, SERVER]
        # Nothing comes back, but carriers make the tables of both directions at once.
        sizes = table[:, ROWS] * leaves
        returned = np.bincount(table[:, HOME], weights=sizes, minlength=self._ranks).astype(np.int64)
        before = np.cumsum(returned) - returned
        table[:, STAGE_ROW] = np.cumsum(sizes) - sizes - before[table[:, HOME]]
        home, server = table[:, HOME] == self._rank, table[:, SERVER] == self._rank
        rows, nothing = int(at_home[self._rank]), np.zeros(self._ranks, np.int64)
        return Schedule(
            self._rank, self._ranks, 1, None, rows, 0, table[home & leaves], table[server & leaves],
            table[home & ~leaves], np.stack([landed, nothing], axis=1), np.stack([returned, nothing], axis=1), (), (),
        )  # fmt: skip


class _Move(torch.autograd.Function):
    """An exchange whose backward is the same the other way round."""

    @staticmethod
    def forward(
        ctx: Any, spanning: Spanning, way: Way, layer: int, kept: torch.Tensor | None, *tensors: torch.Tensor
    ) -> Any:
        """`kept`: what the same exchange brought before."""
        ctx.given = spanning, way.reverse(), layer
        return spanning.exchange(way, layer, tensors, backward=False) if kept is None else (kept.detach(),)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        spanning, way, layer = ctx.given
        return None, None, None, None, *spanning.exchange(way, layer, gradients, backward=True)


class _Order(torch.autograd.Function):
    """Rows [G, n, …] in another order, [G · n, …], or, with `groups`, back: each once, so a backward writes and adds
    nothing."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, index: tuple[torch.Tensor, torch.Tensor], groups: int | None
    ) -> torch.Tensor:
        ctx.given = index, rows.shape[0] if groups is None else None
        return _ordered(rows, index, groups)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _ordered(gradient, *ctx.given), None, None


def _ordered(rows: torch.Tensor, index: tuple[torch.Tensor, torch.Tensor], groups: int | None) -> torch.Tensor:
    if groups is None:
        return rows[index]
    found = rows.new_empty(groups, len(rows) // groups, *rows.shape[1:])
    found[index] = rows
    return found
