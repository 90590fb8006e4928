"""Workloads of the training benchmark: document lengths per step, and the tokens made from them.

In: a JSON file with `tokens_per_rank`, `ranks` and `steps`; a step lists the document lengths of every rank, or, with
`"stream": true`, those of one stream that is cut into equal rank parts. Out: `Workload`, and for each step `Row`s that
are the same on every rank (tokens are drawn from a generator seeded by step and row).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from deepspeed_cad.layout import Layout, LocalSegments


@dataclass(frozen=True)
class Row:
    """Packed documents: the tokens of one rank, or a whole stream."""

    lengths: tuple[int, ...]
    tokens: torch.Tensor
    positions: torch.Tensor
    targets: torch.Tensor
    """The next token of the document; −100 at its end."""


@dataclass(frozen=True)
class Workload:
    """Document lengths of some steps."""

    name: str
    ranks: int
    tokens_per_rank: int
    stream: bool
    steps: tuple[tuple[tuple[int, ...], ...], ...]
    """[step][row][document]: one row per rank, or one row in all for a stream."""

    @staticmethod
    def load(path: Path) -> Workload:
        """Read a file; raises ValueError where lengths and tokens disagree."""
        found = json.loads(path.read_text())
        stream = bool(found.get("stream", False))
        steps = [[step] if stream else step for step in found["steps"]]
        workload = Workload(
            found.get("name", path.stem), int(found["ranks"]), int(found["tokens_per_rank"]), stream,
            tuple(tuple(tuple(int(n) for n in row) for row in step) for step in steps),
        )  # fmt: skip
        for s, step in enumerate(workload.steps):
            if len(step) != workload.rows:
                raise ValueError(f"{path}: step {s} has {len(step)} rows, expected {workload.rows}")
            for r, row in enumerate(step):
                if sum(row) != workload.row_tokens:
                    raise ValueError(f"{path}: step {s}, row {r} has {sum(row)} tokens, not {workload.row_tokens}")
        return workload

    @property
    def rows(self) -> int:
        """Rows of a step."""
        return 1 if self.stream else self.ranks

    @property
    def row_tokens(self) -> int:
        """Tokens of a row."""
        return self.tokens_per_rank * (self.ranks if self.stream else 1)

    def fit(self, ranks: int, tokens_per_rank: int | None, scale: bool, steps: int | None) -> Workload:
        """The workload for this many ranks and tokens: rows beyond are left out, lengths are scaled down or cut.

        Raises ValueError where it has fewer rows or tokens than asked for.
        """
        tokens = self.tokens_per_rank if tokens_per_rank is None else tokens_per_rank
        if ranks > self.ranks:
            raise ValueError(f"workload {self.name} is for {self.ranks} ranks, not {ranks}: start fewer processes")
        if tokens > self.tokens_per_rank:
            raise ValueError(f"workload {self.name} has {self.tokens_per_rank} tokens per rank, not {tokens}")
        fitted = replace(self, ranks=ranks, tokens_per_rank=tokens)
        factor = fitted.row_tokens / self.row_tokens if scale else 1.0
        rows = [[_cut(row, fitted.row_tokens, factor) for row in step[: fitted.rows]] for step in self.steps[:steps]]
        name = self.name if fitted == self else f"{self.name} ({ranks} ranks of {tokens} tokens)"
        return replace(fitted, name=name, steps=tuple(map(tuple, rows)))

    def fill(self, shares: list[float]) -> Workload:
        """Rows cut to these shares of their tokens, by rank. Raises ValueError for a stream, and for other numbers."""
        if self.stream or len(shares) != self.ranks or not all(0 < share <= 1 for share in shares):
            raise ValueError(f"{self.name}: rows of {self.ranks} ranks cannot be {shares} full")
        ends = [round(self.tokens_per_rank * share) for share in shares]
        steps = tuple(tuple(_cut(row, end, 1.0) for row, end in zip(step, ends)) for step in self.steps)
        return replace(self, name=f"{self.name} (rows {', '.join(f'{share:.0%}' for share in shares)})", steps=steps)

    @property
    def tokens(self) -> int:
        """Of all steps and ranks."""
        return sum(sum(row) for step in self.steps for row in step)

    @property
    def evenness(self) -> float:
        """Tokens of the mean row over those of the fullest one of each step."""
        fullest = sum(max(sum(row) for row in step) for step in self.steps)
        return self.tokens / fullest / self.rows

    def make_rows(self, step: int, vocab: int) -> list[Row]:
        """The rows of a step."""
        made = []
        for r, lengths in enumerate(self.steps[step]):
            generator = torch.Generator().manual_seed(1000 * step + r)
            tokens = torch.randint(0, vocab, (sum(lengths),), generator=generator)
            positions = torch.cat([torch.arange(n) for n in lengths])
            targets = torch.cat([tokens[1:], tokens.new_full((1,), -100)])
            targets[:-1][positions[1:] == 0] = -100
            made.append(Row(lengths, tokens, positions, targets))
        return made

    def layout(self, step: int) -> Layout:
        """Where the documents live."""
        if self.stream:
            return Layout.from_stream(list(self.steps[step][0]), self.ranks, self.tokens_per_rank)
        return Layout.from_rank_lengths([list(row) for row in self.steps[step]])

    def local(self, step: int, rank: int) -> LocalSegments:
        """The segments of one rank."""
        own = self.layout(step).segments
        here = own.select(own.rank == rank)
        return LocalSegments(here.begin, here.end, here.offset, self.tokens_per_rank)

    def targets(self, step: int) -> int:
        """Tokens of a step that have a target, over all ranks."""
        return sum(n - 1 for row in self.steps[step] for n in row)

    def pairs(self, step: int, window: int | None = None) -> float:
        """Query-key pairs of one head, over all ranks; `window`: a row reads at most so many keys."""
        return float(sum(_pairs(n, window) for row in self.steps[step] for n in row))


def _pairs(tokens: int, window: int | None) -> float:
    if window is None or tokens <= window:
        return tokens * (tokens + 1) / 2
    return window * (window + 1) / 2 + (tokens - window) * window


def _cut(lengths: tuple[int, ...], tokens: int, factor: float) -> tuple[int, ...]:
    ends = np.minimum(np.round(np.cumsum(lengths) * factor).astype(np.int64), tokens)
    cut = np.diff(ends, prepend=0)
    return tuple(int(n) for n in cut if n > 0)
