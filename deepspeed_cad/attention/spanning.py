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
from deepspeed_cad.attention.thread_state import in_backward, unseen_by_checkpointing
from deepspeed_cad.errors import CADError
from deepspeed_cad.exchange.failure.identity import Moment
from deepspeed_cad.exchange.transport import Outgoing, Transport
from deepspeed_cad.layout import Ints, Layout
from deepspeed_cad.schedule import HOME, HOME_ROW, KIND, QUERY, ROWS, SERVER, SERVER_ROW, STAGE_ROW, Schedule
from deepspeed_cad.shares import divide


@dataclass(frozen=True, eq=False)
class Way:
    """Where rows go, and back."""

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
        ordered: torch.Tensor = _Order.apply(rows_GnX, self.index)
        return list(ordered.split([wave.way.out.query_tokens for wave in self.waves]))

    def come_home(self, waves: list[torch.Tensor], groups: int) -> torch.Tensor:
        """The reverse: [G, n, …]."""
        found: torch.Tensor = _Place.apply(torch.cat(waves), self.index, groups)
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
        sizes, self._base = pieces.end - pieces.begin, np.zeros(len(pieces), np.int64)
        for one in range(layout.ranks):
            at = pieces.rank == one
            self._base[at] = np.cumsum(sizes[at]) - sizes[at]
        self._rows_of_rank = np.bincount(pieces.rank, weights=sizes, minlength=layout.ranks).astype(np.int64)
        mine = pieces.rank == rank
        self.rows: Ints = np.concatenate(
            [np.arange(first, first + size) for first, size in zip(pieces.offset[mine], sizes[mine])]
            or [np.zeros(0, np.int64)]
        )
        """[n] rows of this rank's token buffer."""
        self.widest = int(pieces.count_ranks()[1].max(initial=1))
        """Ranks of the document that lies on most."""
        self._held = np.zeros((len(np.unique(pieces.document)), layout.ranks), np.int64)
        """[documents, ranks] rows."""
        np.add.at(self._held, (np.unique(pieces.document, return_inverse=True)[1], pieces.rank), sizes)
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
            widths = np.array([divide(groups, held) for held in self._held]).reshape(self._held.shape)
            self._heads[groups, size] = self._divide(self._cut(widths, size, label))
        return self._heads[groups, size]

    def before(self, count: int) -> Before:
        """The `count` rows before each piece."""
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
        own: list[Ints] = [np.zeros((2, 0), np.int64)]
        waves = [self._one_wave(begins, ends, own) for begins, ends in itertools.pairwise(cuts)]
        group, row = (torch.from_numpy(one).to(self._device) for one in np.concatenate(own, axis=1))
        return Heads(waves, (group, row))

    def _one_wave(self, begins: Ints, ends: Ints, own: list[Ints]) -> Wave:
        """`begins` and `ends`: [documents, ranks] of the head groups; `own` gets groups and rows that leave here."""
        pieces, table, shares = self._pieces, [], []
        names = np.unique(pieces.document)
        left, landed = np.zeros(self._ranks, np.int64), np.zeros(self._ranks, np.int64)
        for document, name in enumerate(names):
            of, tokens = np.flatnonzero(pieces.document == name), int(self._held[document].sum())
            for server in range(self._ranks):
                begin, end = int(begins[document, server]), int(ends[document, server])
                for group in range(begin, end):
                    for at in of:
                        home, size = int(pieces.rank[at]), int(pieces.end[at] - pieces.begin[at])
                        table.append((home, left[home], server, landed[server] + pieces.begin[at], size))
                        left[home] += size
                        if home == self._rank:
                            rows = self._base[at] + np.arange(size)
                            own.append(np.stack([np.full(size, group), rows]))
                    landed[server] += tokens
                if server == self._rank and begin < end:
                    shares.append(Share(tokens, begin, end))
        return Wave(self._way(table, left, landed), shares)

    def _look_back(self, count: int) -> Before:
        pieces, table = self._pieces, []
        sent, landed = np.zeros(self._ranks, np.int64), np.zeros(self._ranks, np.int64)
        own_sent: list[Ints] = []
        joined: list[Ints] = []
        n = int(self._rows_of_rank[self._rank])
        for at in range(len(pieces)):
            begin, rank = int(pieces.begin[at]), int(pieces.rank[at])
            came = np.zeros(count, np.int64)
            for other in range(at - 1, -1, -1):
                if pieces.document[other] != pieces.document[at] or pieces.end[other] <= begin - count:
                    break
                low, high = max(int(pieces.begin[other]), begin - count), int(pieces.end[other])
                home, first = int(pieces.rank[other]), int(self._base[other] + low - pieces.begin[other])
                table.append((home, sent[home], rank, landed[rank], high - low))
                came[count - begin + low : count - begin + high] = 1 + n + landed[rank] + np.arange(high - low)
                if home == self._rank:
                    own_sent.append(np.arange(first, first + high - low))
                sent[home] += high - low
                landed[rank] += high - low
            if rank == self._rank:
                joined += [came, 1 + self._base[at] + np.arange(pieces.end[at] - begin)]
        # A rank without any has a stand-in of one row.
        chosen = np.concatenate(joined) if n else np.ones(1, np.int64)
        own = np.flatnonzero((chosen > 0) & (chosen <= max(n, 1)))
        gathered = np.concatenate([*own_sent, np.zeros(0, np.int64)])
        tensors = (torch.from_numpy(one).to(self._device) for one in (gathered, chosen, own))
        return Before(self._way(table, sent, landed), *tensors)

    def _way(self, table: list[Any], at_home: Ints, landed: Ints) -> Way:
        """`table`: home, its row, server, its row, rows of each slice."""
        slices = np.zeros((len(table), 8), np.int64)
        slices[:, KIND] = QUERY
        if table:
            slices[:, [HOME, HOME_ROW, SERVER, SERVER_ROW, ROWS]] = np.array(table, np.int64)
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
    """Rows [G, n, …] in another order, [G · n, …]: each once, so a backward writes and adds nothing."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, index: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        ctx.given = index, rows.shape[0]
        return rows[index]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _placed(gradient, *ctx.given), None


class _Place(torch.autograd.Function):
    """The reverse."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, index: tuple[torch.Tensor, torch.Tensor], groups: int) -> torch.Tensor:
        ctx.index = index
        return _placed(rows, index, groups)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient[ctx.index], None, None


def _placed(rows: torch.Tensor, index: tuple[torch.Tensor, torch.Tensor], groups: int) -> torch.Tensor:
    found = rows.new_empty(groups, len(rows) // groups, *rows.shape[1:])
    found[index] = rows
    return found
