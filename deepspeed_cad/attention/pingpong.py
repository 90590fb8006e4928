"""Two nano-batches of one micro-batch alternate: greenlets run the unmodified code of a model on two parts.

Ping-pong alternates inside a decoder layer. The layer is called once for the whole micro-batch, so sharded parameters
are gathered once, and the nano-batches hand over to each other around core attention:

    pre A │ pre B ‖ dispatch A │ attention A ‖ dispatch B │ attention B ‖ return A │ post A ‖ return B │ post B

Interleaving alternates over the whole decoder: each layer is called once for each nano-batch, which hands over once,
right after its dispatch. `linear A(l)` is what lies between two attentions: post A of layer l, pre A of layer l + 1.
While one nano-batch is there, servers attend the other one, and neither has to wait where both take as long:

    … collect A │ linear A(l) │ dispatch A │ collect B │ linear B(l) │ dispatch B │ collect A │ linear A(l+1) │ …
    servers:      B of layer l               A of layer l+1            B of layer l+1

Autograd runs its nodes in the reverse order of their creation, so the backward mirrors both without further help.
Greenlets stay on one thread. Inside a layer, grad mode, autocast and saved-tensor hooks hold for both nano-batches;
over the decoder each has its own (thread_state.py).
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from greenlet import GreenletExit, getcurrent, greenlet

from deepspeed_cad.errors import CADError

if TYPE_CHECKING:  # it needs private names, which another torch may lack
    from deepspeed_cad.attention.thread_state import ThreadState


def hand_over() -> None:
    """Let the other nano-batch run until it hands over in turn."""
    parent = getcurrent().parent
    if parent is None:
        raise CADError("a nano-batch handed over outside of run_alternating")
    parent.switch()


def run_alternating(
    first: Callable[[], Any], second: Callable[[], Any], states: tuple[ThreadState, ThreadState] | None = None
) -> tuple[Any, Any]:
    """Run two functions on this thread, switching whenever one calls `hand_over`; the first goes first.

    An error in either ends both and is raised. `states`: each function has a state of torch of its own; None: what one
    changes the other sees, so neither may hand over inside a context that it entered.
    """
    results: list[Any] = [None, None]

    def body(index: int, function: Callable[[], Any]) -> None:
        results[index] = function()

    pair = [greenlet(body), greenlet(body)]
    for one in pair:
        one.gr_context = contextvars.copy_context()
    arguments: list[tuple[Any, ...]] = [(0, first), (1, second)]
    held: Any = states or (nullcontext(), nullcontext())
    try:
        while not all(one.dead for one in pair):
            for index, one in enumerate(pair):
                if not one.dead:
                    with held[index]:
                        one.switch(*arguments[index])
                    arguments[index] = ()
    finally:
        for index, one in enumerate(pair):
            if one and not one.dead:
                # What it entered it leaves now, with what it pushed in place.
                with held[index]:
                    one.throw(GreenletExit)
    return results[0], results[1]


@dataclass(frozen=True)
class RowCut:
    """How the arguments of a layer are cut: along the tokens of one row, or between batch rows."""

    batch: int
    width: int
    at: int
    """Rows of the flattened [batch · width] buffer in the first nano-batch; a multiple of `width` if batch > 1."""

    @property
    def dim(self) -> int:
        """Dimension of hidden states that is cut: tokens (1) of a single row, else batch rows (0)."""
        return 1 if self.batch == 1 else 0

    def split(self, value: Any) -> tuple[Any, Any]:
        """An argument for both nano-batches; what has no rows to cut goes to both unchanged."""
        if isinstance(value, torch.Tensor):
            if self.dim == 1:
                if value.ndim >= 2 and value.shape[:2] == (1, self.width):
                    return self._halves(value, 1)
                if value.ndim == 1 and value.shape[0] == self.width:
                    return self._halves(value, 0)
                if value.ndim == 4 and value.shape[0] == 1 and value.shape[2] == self.width:
                    return self._halves(value, 2)  # heads before tokens
                if value.ndim >= 3 and value.shape[1:3] == (1, self.width):
                    return self._halves(value, 2)  # axes of positions before rows
            elif value.ndim >= 3 and value.shape[1:3] == (self.batch, self.width) and self._has_axes(value):
                return self._halves(value, 1)
            elif value.ndim >= 2 and value.shape[0] == self.batch:
                return self._halves(value, 0)
            return value, value
        if type(value) in (tuple, list):
            pairs = [self.split(item) for item in value]
            return type(value)(a for a, _ in pairs), type(value)(b for _, b in pairs)
        if type(value) is dict:
            pairs_of = {key: self.split(item) for key, item in value.items()}
            return {k: a for k, (a, _) in pairs_of.items()}, {k: b for k, (_, b) in pairs_of.items()}
        return value, value

    def _has_axes(self, value: torch.Tensor) -> bool:
        """Of [X, batch, width, ...]: whether X are axes of positions, and not batch rows."""
        return value.shape[0] != self.batch or not value.is_floating_point()

    def _halves(self, value: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Both of them; an empty one gets a row to run on, since models cannot run on none, and `join` drops it."""
        size = value.shape[dim]
        at = self.at if self.batch == 1 else self.at // self.width
        # One split, not two slices: its backward is one concatenation instead of two zero-filled tensors and a sum.
        first, second = torch.split(value, [at, size - at], dim=dim)
        return first if at else value.narrow(dim, 0, 1), second if at < size else value.narrow(dim, 0, 1)

    def join(self, first: Any, second: Any) -> Any:
        """What the layer would have returned for all rows."""
        if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
            if first.ndim < 2:
                return first
            # A stand-in row stays in the graph, so that the backward of both nano-batches runs on every rank.
            rows = torch.cat([first, second], dim=self.dim)
            return rows.narrow(self.dim, 1 if self.at == 0 else 0, self.width if self.batch == 1 else self.batch)
        if type(first) is tuple:
            return tuple(self.join(a, b) for a, b in zip(first, second, strict=True))
        return first
