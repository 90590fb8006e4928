"""Replicas of tokens and shares of heads: who exchanges attention with whom where ranks divide heads among them.

Under tensor parallelism, and inside the attention of Ulysses, some ranks hold all tokens of a micro-batch together and
each of them a share of its heads: a replica. Ranks with the same share, one of each replica, are a CAD group, which
exchanges attention. Ranks are those of torch's world.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepspeed_cad.errors import CADConfigError, CADUnsupportedError
from deepspeed_cad.layout import Ints

TENSOR = ("tp", "tensor", "tensor_parallel")
"""Names of a mesh's axes whose ranks divide heads among them."""
PIECES = ("sp", "sequence", "sequence_parallel")
"""Names of those whose ranks also divide the tokens outside attention, which DeepSpeed's Ulysses gathers."""
DATA = ("dp", "fsdp", "ddp", "dp_replicate", "dp_shard", "replicate", "shard", "data", "data_parallel", "batch")
"""Names of those whose ranks have micro-batches of their own."""
MOST_PIECES = 8
"""Of a document whose state layers hand on from piece to piece; where there are more, heads part (docs/models.md). Each
piece waits for the one before it; seven waits take about as long as what parting heads takes."""
TWICE = (
    "heads are divided twice, by tensor parallelism and by Ulysses (sequence parallelism), and CAD runs beside one of "
    "them: set the other's size to 1"
)


@dataclass(frozen=True)
class Replica:
    """The ranks that train one micro-batch together, in the order of their shares of heads."""

    ranks: tuple[int, ...]
    pieces: bool = False
    """Each rank is given a piece of the tokens, in this order, and has all of them inside attention only (Ulysses);
    else each is given all tokens (tensor parallelism)."""


@dataclass(frozen=True, eq=False)
class Shares:
    """All replicas, as one rank sees them."""

    replicas: Ints
    rank: int
    pieces: bool = False

    @classmethod
    def none(cls, rank: int, ranks: int) -> Shares:
        """Every rank has all heads and tokens of its own."""
        return cls(np.arange(ranks)[:, None], rank)

    @classmethod
    def of(cls, said: Sequence[Replica], rank: int) -> Shares:
        """From what every rank said. Raises CADConfigError, on all ranks alike, where it does not add up."""
        for one, own in enumerate(said):
            if one not in own.ranks:
                raise CADConfigError(f"rank {one} is not among the ranks {list(own.ranks)} that it shares heads with")
            for other in own.ranks:
                theirs = f"names {_describe(said[other])}" if other < len(said) else "is not in the job"
                if other >= len(said) or said[other] != own:
                    raise CADConfigError(f"rank {one} shares heads with {_describe(own)}, but rank {other} {theirs}")
        sizes = sorted({len(own.ranks) for own in said})
        if len(sizes) > 1 or len({own.pieces for own in said}) > 1:
            raise CADConfigError(
                f"some ranks share heads among {sizes[0]} ranks and others among {sizes[-1]}, or in another way: every "
                "replica must have as many"
            )
        return cls(np.array(sorted({own.ranks for own in said}), np.int64), rank, said[rank].pieces)

    @property
    def count(self) -> int:
        return int(self.replicas.shape[1])

    @property
    def replica(self) -> int:
        """The number of this rank's replica, which is its rank in its CAD group."""
        return int(np.argwhere(self.replicas == self.rank)[0, 0])

    @property
    def groups(self) -> list[list[int]]:
        return self.replicas.T.tolist()

    @property
    def members(self) -> list[int]:
        """The ranks of this rank's CAD group."""
        return next(group for group in self.groups if self.rank in group)


def replica_of_mesh(mesh: Any, rank: int, ranks: int) -> Replica:
    """The replica of a rank on a DeviceMesh of all `ranks`, by the names of its axes. Raises CADConfigError for a mesh
    without names, with names that are not known, or that does not cover the job, and CADUnsupportedError for context or
    pipeline parallelism."""
    grid, names = np.array(mesh.mesh.tolist(), np.int64), tuple(mesh.mesh_dim_names or ())
    if not names:
        raise CADConfigError(
            "the mesh has no names, so CAD cannot know which of its axes divides heads: pass mesh_dim_names to "
            f"init_device_mesh, {_or(TENSOR)} for tensor parallelism and {_or(DATA)} for data"
        )
    used = [name for name, size in zip(names, grid.shape) if size > 1]
    for name in used:
        if name in ("cp", "pp"):
            raise CADUnsupportedError(
                f'the mesh has an axis "{name}" of several ranks, {"context" if name == "cp" else "pipeline"} '
                "parallelism, beside which CAD cannot run: take it out (documents may span ranks by "
                "deepspeed_cad.shard_stream; pipelines are those of DeepSpeed)"
            )
        if name not in TENSOR + PIECES + DATA:
            raise CADConfigError(
                f'the mesh has an axis "{name}" of which CAD does not know what its ranks divide: name it '
                f"{_or(TENSOR)} where they divide heads, {_or(PIECES)} for Ulysses, {_or(DATA)} where each has "
                "micro-batches of its own"
            )
    if sorted(grid.ravel().tolist()) != list(range(ranks)):
        raise CADConfigError(
            f"the mesh has {grid.size} ranks and the job {ranks}: pass the mesh of all of them, not a part of it"
        )
    pieces = not set(PIECES).isdisjoint(used)
    if pieces and not set(TENSOR).isdisjoint(used):
        raise CADUnsupportedError(TWICE)
    return replica_in(mesh, rank, PIECES if pieces else TENSOR)


def replica_in(mesh: Any, rank: int, kinds: Sequence[str] = TENSOR) -> Replica:
    """The ranks of a DeviceMesh, or of a part of one, that differ from this one along axes of these names only."""
    grid = np.array(mesh.mesh.tolist(), np.int64)
    place = np.argwhere(grid == rank)[0]
    index = tuple(slice(None) if name in kinds else int(at) for name, at in zip(mesh.mesh_dim_names, place))
    return Replica(tuple(grid[index].ravel().tolist()), kinds is PIECES)


def replica_of_groups(said: Sequence[Sequence[int] | None], rank: int) -> Replica | None:
    """The replica of a rank where every rank said which ranks have the same share of heads, and other micro-batches.
    Those at one place of all such groups are a replica, in the order of the groups' first ranks. None: nobody said it.
    Raises CADConfigError, the same on all ranks, where groups do not divide the job alike."""
    if all(own is None for own in said):
        return None
    groups = sorted({tuple(own) for own in said if own is not None})
    for one, own in enumerate(said):
        if own is None or one not in own:
            theirs = "none" if own is None else f"that of ranks {', '.join(map(str, own))}"
            raise CADConfigError(f"deepspeed_cad.open: rank {one} passed {theirs} as its group: pass each rank its own")
    if len({len(own) for own in groups}) > 1 or sum(map(len, groups)) != len(said):
        raise CADConfigError(
            f"deepspeed_cad.open: the groups {', '.join(map(str, map(list, groups)))} do not divide {len(said)} ranks "
            "alike: pass the groups of ranks that have the same share of heads, and micro-batches of their own"
        )
    place = next(own.index(rank) for own in groups if rank in own)
    return Replica(tuple(own[place] for own in groups))


def choose_groups(heads: Sequence[int], ranks: int) -> int:
    """In how many groups tensors of so many heads are divided among the ranks of a document: as many as every tensor
    has if these suffice, so that nothing moves twice; else the fewest that do, and those with fewer are repeated."""
    most, least = max(heads), min(heads)
    fits = [g for g in range(1, most + 1) if most % g == 0 and all(h % g == 0 or g % h == 0 for h in heads)]
    return next((g for g in (least, *fits) if g in fits and g >= ranks), fits[-1])


def divide(groups: int, held: Ints) -> Ints:
    """[ranks] head groups of each, in proportion to the rows that it holds, rounded by the largest remainders."""
    exact = groups * held / held.sum()
    shares = np.floor(exact).astype(np.int64)
    shares[np.argsort(shares - exact, kind="stable")[: groups - int(shares.sum())]] += 1
    return shares


def _describe(replica: Replica) -> str:
    how = ", each with a piece of the tokens" if replica.pieces else ""
    return f"ranks {', '.join(map(str, replica.ranks))}{how}"


def _or(names: Sequence[str]) -> str:
    return " or ".join(f'"{name}"' for name in names[:3])
