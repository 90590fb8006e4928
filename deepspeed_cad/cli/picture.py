"""Pictures of `deepspeed-cad plan`, drawn with matplotlib, which is imported only here.

In: throughput of modes, or a `Comparison` of them; where to write. Out: PNG, SVG or PDF files.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from deepspeed_cad.errors import CADError
from deepspeed_cad.forecast.compare import MODES, Comparison, label

PARTS = ("non_attention", "attention", "optimizer", "exchange", "collectives", "waiting")


def draw_curves(over: str, curves: Mapping[str, Sequence[tuple[int, float]]], path: str) -> None:
    """Tokens per second and GPU of every mode, over a quantity. Raises CADError without matplotlib, as both do."""
    curves = {mode: points for mode, points in curves.items() if points}
    kinds = [mode.removesuffix(" kept") for mode in curves]
    figure, axis = _subplots(figsize=(7, 4))
    for (mode, points), kind in zip(curves.items(), kinds):
        style = "-" if kind == mode else "--"
        axis.plot(*zip(*points), marker="o", label=MODES[mode], color=f"C{kinds.index(kind)}", ls=style)
    axis.set(xlabel=over, ylabel="tokens/s/GPU")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    values = sorted({value for points in curves.values() for value, _ in points})
    if len(values) > 1 and values[0] > 0 and values[-1] >= 4 * values[0]:
        axis.set_xscale("log", base=2)
        axis.set_xticks(values, [f"{one:,}" for one in values])
    if curves:
        axis.legend(frameon=False)
    _save(figure, path)


def draw_step(comparison: Comparison, path: str) -> None:
    """Where the seconds of one step go on the mean rank, one bar for each mode."""
    found = comparison.found
    figure, axis = _subplots(figsize=(9, 0.6 * len(found) + 1.4))
    for row, one in enumerate(found):
        left = 0.0
        for number, part in enumerate(PARTS):
            seconds = getattr(one.seconds, part)
            axis.barh(row, seconds, left=left, color=f"C{number}", label=part if row == 0 else None, edgecolor="white")
            left += seconds
        axis.text(left, row, f"  {one.tokens_per_second:,.0f} tokens/s/GPU", va="center", fontsize=9)
    axis.set_yticks(range(len(found)), [label(one) for one in found])
    axis.invert_yaxis()
    axis.set_xlim(0, 1.25 * max(one.seconds.total for one in found))
    axis.set(xlabel="seconds of a step, mean rank")
    axis.legend(frameon=False, ncols=len(PARTS), loc="upper center", bbox_to_anchor=(0.5, 1.16), fontsize=9)
    _save(figure, path)


def _subplots(figsize: tuple[float, float]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize, layout="constrained")
    return figure, figure.subplots()


def _save(figure: Any, path: str) -> None:
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise CADError(f"the picture {path} cannot be written: {error}") from error
