"""One figure over another: throughput over ranks, over context, over reserved servers.

In: values, and how to compare all modes at each. Out: a `Curve`: tokens per second and GPU of each mode, None where it
cannot run or does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deepspeed_cad.errors import CADError
from deepspeed_cad.forecast.compare import Comparison


@dataclass(frozen=True)
class Curve:
    """Throughput of all modes over one quantity."""

    over: str
    values: tuple[int, ...]
    by_mode: dict[str, tuple[float | None, ...]]


def sweep(
    over: str,
    values: Sequence[int],
    at: Callable[[int], Comparison],
    wanted: Sequence[str],
    tell: Callable[[str], None],
) -> Curve:
    """Compare the modes at each value; `tell` hears which one is next."""
    by_mode: dict[str, list[float | None]] = {mode: [] for mode in wanted}
    for value in values:
        tell(f"{over}: {value}")
        try:
            comparison = at(value)
        except CADError:
            # Such as 12 ranks in groups of 8: a gap in the curve says it.
            comparison = Comparison((), {})
        for mode in wanted:
            found = comparison.of(mode)
            by_mode[mode].append(found.tokens_per_second if found is not None and found.fits else None)
    return Curve(over, tuple(values), {mode: tuple(row) for mode, row in by_mode.items()})


def around(value: int, least: int, times: Sequence[float]) -> list[int]:
    """Whole multiples and parts of a value, at least `least`, ascending."""
    return sorted({int(value * one) for one in times if value * one >= least and value * one == int(value * one)})
