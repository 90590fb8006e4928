"""Pictures of what is foreseen, drawn with matplotlib: curves of throughput over ranks, context or reserved servers;
one step of all modes as a timeline.

In: values and how to compare all modes at each, or a `Comparison`; where to write. Out: PNG, SVG or PDF files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from deepspeed_cad.errors import CADError
from deepspeed_cad.forecast.compare import MODES, Comparison, label

COLOURS = {
    "plain": "#6b7482",
    "plain kept": "#a3aab5",
    "ulysses": "#e09b22",
    "ulysses kept": "#f0c987",
    "gathered": "#9b5bd6",
    "gathered kept": "#cbb0ea",
    "packed": "#0f9d8a",
    "cad": "#2f6fde",
    "cad reserved": "#7fb2ff",
}
PARTS = {
    "non_attention": "#cfd5de",
    "attention": "#2f6fde",
    "optimizer": "#9aa0ab",
    "exchange": "#e09b22",
    "collectives": "#9b5bd6",
    "waiting": "#f3d6d6",
}


@dataclass(frozen=True)
class Curve:
    """Tokens per second and GPU of all modes over one quantity; None where a mode cannot run or does not fit."""

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


def draw_curve(curve: Curve, path: str) -> None:
    """Tokens per second and GPU of every mode."""
    pyplot = _pyplot()
    figure, axis = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for mode, row in curve.by_mode.items():
        points = [(value, one) for value, one in zip(curve.values, row, strict=True) if one is not None]
        if points:
            axis.plot(*zip(*points, strict=True), "o-", color=COLOURS[mode], label=MODES[mode])
    axis.set(xlabel=curve.over, ylabel="tokens/s/GPU")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    if len(curve.values) > 1 and curve.values[0] > 0 and curve.values[-1] >= 4 * curve.values[0]:
        axis.set_xscale("log", base=2)
        axis.set_xticks(curve.values, [_short(value) for value in curve.values])
    if axis.lines:
        axis.legend(frameon=False)
    _save(figure, pyplot, path)


def draw_step(comparison: Comparison, path: str) -> None:
    """Where the seconds of one step go on the mean rank, one bar for each mode."""
    pyplot = _pyplot()
    found = comparison.found
    figure, axis = pyplot.subplots(figsize=(9, 0.6 * len(found) + 1.4), layout="constrained")
    for row, one in enumerate(found):
        left = 0.0
        for part, colour in PARTS.items():
            seconds = getattr(one.seconds, part)
            axis.barh(row, seconds, left=left, color=colour, label=part if row == 0 else None, edgecolor="white")
            left += seconds
        axis.text(left, row, f"  {one.tokens_per_second:,.0f} tokens/s/GPU", va="center", fontsize=9)
    axis.set_yticks(range(len(found)), [label(one) for one in found])
    axis.invert_yaxis()
    axis.set_xlim(0, 1.25 * max(one.seconds.total for one in found))
    axis.set(xlabel="seconds of a step, mean rank")
    axis.legend(frameon=False, ncols=len(PARTS), loc="upper center", bbox_to_anchor=(0.5, 1.16), fontsize=9)
    _save(figure, pyplot, path)


def _short(value: int) -> str:
    return f"{value // 1024}K" if value >= 4096 and value % 1024 == 0 else str(value)


def _pyplot() -> Any:
    try:
        import matplotlib

        matplotlib.use("Agg")
        matplotlib.rcParams["svg.hashsalt"] = "cad"
        from matplotlib import pyplot
    except ImportError as error:
        raise CADError("a picture needs matplotlib: pip install matplotlib") from error
    return pyplot


def _save(figure: Any, pyplot: Any, path: str) -> None:
    try:
        options = {"metadata": {"Date": None}} if path.endswith(".svg") else {}
        figure.savefig(path, dpi=110, **options)
    except (OSError, ValueError) as error:
        raise CADError(f"the picture {path} cannot be written: {error}") from error
    pyplot.close(figure)
