"""How a layer that carries state is run so that none crosses a document's border, found out on the layer itself.

The first way of `Way` that passes the probe: of two tiny documents in a row, what the second gives must not change when
the first does, and both must give what they give alone. Packages and versions differ in what they do with borders, so
nothing is concluded from their names. The probe has random numbers of its own, runs without gradients and outside of
checkpointing's recorders, and calls the layer equally often on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum

import torch
from deepspeed_cad.integrations.borders import Borders
from torch.utils._python_dispatch import _disable_current_modes

LENGTHS = (67, 70)
"""Tokens of the probe's documents: both longer than a chunk of the kernels (64), the border inside of one."""
LOUD = 30.0
"""How many times larger than the second document the first is. At the start of a training layers hand on little state,
and it grows with the square of this."""
VISIBLE = 1e-3
"""Share of its largest output by which the second document must change without borders; else the probe could not see a
leak, as where a layer's last projection is still zero."""
_NOISE = 2.0
"""The second document may change with the first by so many times what it changes from run to run. That is nothing with
kernels that give the same for the same, as those of forwards do: then not one bit may change, however small the state
that a layer hands on at the start of training."""
_ALONE = {torch.float64: 1e-3, torch.float32: 2e-2, torch.float16: 5e-2, torch.bfloat16: 0.1}
"""How far both may be from what they give alone, as a share of the largest output. Kernels round in fp32 or TF32."""


class Way(Enum):
    """How a layer runs a packed row. The order in which they are tried is that of the names here."""

    BORDERS = "its kernels take the borders"
    GAPS = "its recurrent kernel takes the borders, and blank rows between documents part its convolution"
    DOCUMENTS = "document by document"


Run = Callable[[Way, Borders, torch.Tensor], torch.Tensor]
"""Runs the layer one way on hidden states [1, T, D]."""
Whole = Callable[[torch.Tensor], torch.Tensor]
"""Runs the layer on hidden states [B, S, D], each batch row one document."""


class Probe:
    """One layer under test."""

    def __init__(self, run: Run, whole: Whole, like: torch.Tensor) -> None:
        """`like`: hidden states [B, S, D] of the kind that the layer gets."""
        self.run, self.borders = run, Borders.of_lengths(LENGTHS)
        self.dtype = like.dtype
        first, second = LENGTHS
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randn(2 * first + second, like.shape[-1], generator=generator)
        one, other, last = drawn.to(like.device, like.dtype).split([first, first, second])
        one, other = LOUD * one, LOUD * other
        self.rows, self.changed = torch.cat([one, last])[None], torch.cat([other, last])[None]
        self.expected = [whole(document[None]) for document in (one, last)]
        self.largest = float(self.expected[1].abs().max())
        leak = self._change(whole(self.rows), whole(self.changed))
        self.is_blind = not leak > VISIBLE * self.largest

    def fails(self, way: Way) -> str:
        """Why a way is wrong; empty where it is right."""
        got, again, changed = (self.run(way, self.borders, rows) for rows in (self.rows, self.rows, self.changed))
        leak, noise = self._change(got, changed), self._change(got, again)
        if not leak <= _NOISE * noise:
            return f"a document changed by {leak / self.largest:.1e} of its largest value with the document before it"
        for document, expected in zip(got.split(LENGTHS, dim=1), self.expected):
            error = float((document - expected).abs().max() / expected.abs().max())
            if not error <= _ALONE.get(self.dtype, 0.1):
                return f"a document differs by {error:.1e} of its largest value from what it gives alone"
        return ""

    @staticmethod
    def _change(one: torch.Tensor, other: torch.Tensor) -> float:
        return float((one[:, LENGTHS[0] :] - other[:, LENGTHS[0] :]).abs().max())


@torch.compiler.disable
def find_way(run: Run, whole: Whole, like: torch.Tensor, ways: list[Way]) -> tuple[Way | None, list[str], bool]:
    """The first of `ways` that keeps documents apart, why those before it do not, and whether that is certain.

    None where no way does. Not certain: the layer shows no state now, so only DOCUMENTS, which needs no proof, is safe.
    """
    reasons: list[str] = []
    with _aside():
        probe = Probe(run, whole, like)
        if probe.is_blind:
            return Way.DOCUMENTS, ["its output does not show state yet"], False
        for way in ways:
            try:
                reason = probe.fails(way)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # what packages raise that do not know borders is of many kinds
                reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            if not reason:
                return way, reasons, True
            reasons.append(f"{way.name.lower()}: {reason}")
    return None, reasons, True


@contextmanager
def _aside() -> Iterator[None]:
    """Nothing that runs in here is recorded: not by autograd, not by selective checkpointing, not by autocast, which
    would keep weights that it cast without gradients for the forward around it."""
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with torch.no_grad(), _disable_current_modes():
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)
