"""What a decoder would have returned for a whole micro-batch, from what it returned for both of its nano-batches.

In: two outputs of one kind (tensors, tuples, dicts and the output classes of transformers). Out: one, or `CannotJoin`
that names what is in them and has no rows. `a` and `b` count the rows of a dimension in the first and the second.
"""

from __future__ import annotations

from typing import Any

import torch

from deepspeed_cad.attention.pingpong import RowCut


class CannotJoin(Exception):
    """What of an output has no rows, in words."""


class Join:
    """Joins outputs of nano-batches that were cut in one way."""

    def __init__(self, cut: RowCut) -> None:
        rows = cut.width if cut.batch == 1 else cut.batch
        at = cut.at if cut.batch == 1 else cut.at // cut.width
        # A nano-batch without rows ran on a stand-in, which is taken out again.
        self._stand_in = (int(at == 0), int(at == rows))
        a, b = max(at, 1), max(rows - at, 1)
        each = 1 if cut.batch == 1 else cut.width
        self._batch = cut.batch
        self._rows, self._tokens = (a, b), (a * each, b * each)
        self._each = each

    def join(self, first: Any, second: Any, name: str = "its output") -> Any:
        """What the decoder would have returned; `name` says in errors where in the output it is."""
        if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
            return self._tensors(first, second, name)
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

    def _tensors(self, first: torch.Tensor, second: torch.Tensor, name: str) -> torch.Tensor:
        one, other = tuple(first.shape), tuple(second.shape)
        if self._batch == 1 and len(one) >= 2 and one[0] == other[0] == 1:
            return self._along(1, self._rows, first, second, name)
        # Routers flatten batch rows.
        counts = self._tokens if one[:1] == self._tokens[:1] and one[:1] != self._rows[:1] else self._rows
        return self._along(0, counts, first, second, name)

    def _along(
        self, dim: int, counts: tuple[int, int], first: torch.Tensor, second: torch.Tensor, name: str
    ) -> torch.Tensor:
        shapes = [list(x.shape) for x in (first, second)]
        wanted = [[*shapes[0][:dim], count, *shapes[0][dim + 1 :]] for count in counts]
        if first.ndim <= dim or shapes != wanted:
            raise CannotJoin(f"{name} of shapes {shapes[0]} and {shapes[1]}")
        # A stand-in stays in the graph, so that the backward of both nano-batches runs on every rank.
        joined = torch.cat([first, second], dim)
        size = self._each if counts == self._tokens else 1
        begin, end = (here * size for here in self._stand_in)
        return joined.narrow(dim, begin, joined.shape[dim] - begin - end) if begin or end else joined
