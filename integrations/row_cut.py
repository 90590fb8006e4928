"""A decoder's arguments cut for two nano-batches, and what it returned for both joined.

In: arguments, a cut. Out: those of each nano-batch; later one output of two (tensors, tuples, dicts and the output
classes of transformers), or `CannotJoin` that names what is in them and has no rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


class CannotJoin(Exception):
    """What of an output has no rows, in words."""


@dataclass(frozen=True)
class RowCut:
    """Between the tokens of one row, or between batch rows.

    A nano-batch without rows runs on a stand-in, since models cannot run on none, and `join` drops it.
    """

    batch: int
    width: int
    at: int
    """Rows of the flattened [batch · width] buffer in the first nano-batch; a multiple of `width` if batch > 1."""

    def split(self, value: Any) -> tuple[Any, Any]:
        """An argument for both nano-batches; what has no rows to cut goes to both unchanged."""
        if isinstance(value, torch.Tensor):
            dim = self._dim(value)
            return (value, value) if dim is None else self._halves(value, dim)
        if type(value) in (tuple, list):
            pairs = [self.split(item) for item in value]
            return type(value)(a for a, _ in pairs), type(value)(b for _, b in pairs)
        if type(value) is dict:
            pairs_of = {key: self.split(item) for key, item in value.items()}
            return {k: a for k, (a, _) in pairs_of.items()}, {k: b for k, (_, b) in pairs_of.items()}
        return value, value

    def _dim(self, value: torch.Tensor) -> int | None:
        """The dimension of an argument that has rows."""
        shape, rows = tuple(value.shape), (self.batch, self.width)
        # Of [X, batch, width, ...] X are axes of positions, and not batch rows.
        axes = self.batch == 1 or shape[:1] != (self.batch,) or not value.is_floating_point()
        if self.batch == 1:
            if shape[:2] == rows:
                return 1
            if shape == (self.width,):
                return 0
            if len(shape) == 4 and shape[0] == 1 and shape[2] == self.width:
                return 2  # heads before tokens
        if axes and shape[1:3] == rows:
            return 2 if self.batch == 1 else 1
        return 0 if self.batch > 1 and len(shape) >= 2 and shape[0] == self.batch else None

    def _halves(self, value: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        at, rows = self._at, value.shape[dim]
        # One split, not two slices: its backward is one concatenation instead of two zero-filled tensors and a sum.
        first, second = torch.split(value, [at, rows - at], dim=dim)
        return first if at else value.narrow(dim, 0, 1), second if at < rows else value.narrow(dim, 0, 1)

    @property
    def _at(self) -> int:
        return self.at if self.batch == 1 else self.at // self.width

    def join(self, first: Any, second: Any, name: str = "its output") -> Any:
        """What the decoder would have returned; `name` says in errors where in the output it is."""
        if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
            return self._join_rows(first, second, name)
        if first is second:
            return first
        if type(first) is not type(second):
            raise CannotJoin(f"{name}, a {type(first).__name__} and a {type(second).__name__}")
        if isinstance(first, dict) and first.keys() == second.keys():
            joined = type(first)()
            for key in first:  # one by one: recorded outputs have keys that an output class does not declare
                joined[key] = self.join(first[key], second[key], f'"{key}"')
            return joined
        if type(first) in (tuple, list) and len(first) == len(second):
            return type(first)(self.join(x, y, f"{name}[{i}]") for i, (x, y) in enumerate(zip(first, second)))
        if isinstance(first, (bool, int, str)) and first == second:
            return first
        raise CannotJoin(f"{name}, a {type(first).__name__}")

    def _join_rows(self, first: torch.Tensor, second: torch.Tensor, name: str) -> torch.Tensor:
        at, rows = self._at, self.width if self.batch == 1 else self.batch
        counts = max(at, 1), max(rows - at, 1)
        shapes = [list(x.shape) for x in (first, second)]
        dim = int(self.batch == 1 and all(len(one) >= 2 and one[0] == 1 for one in shapes))
        # Routers flatten batch rows.
        each = self.width if self.batch > 1 and shapes[0][:1] == [counts[0] * self.width] else 1
        if first.ndim <= dim or shapes != [[*shapes[0][:dim], n * each, *shapes[0][dim + 1 :]] for n in counts]:
            raise CannotJoin(f"{name} of shapes {shapes[0]} and {shapes[1]}")
        # A stand-in stays in the graph, so that the backward of both nano-batches runs on every rank.
        joined = torch.cat([first, second], dim)
        return joined if 0 < at < rows else joined.narrow(dim, each if at == 0 else 0, rows * each)
