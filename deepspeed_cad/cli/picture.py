"""Pictures of `deepspeed-cad plan`, drawn with matplotlib, which is imported only here.

In: a plan, outlooks of steps, or a `Comparison` of modes; where to write. Out: PNG, SVG or PDF files.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from deepspeed_cad.errors import CADError
from deepspeed_cad.forecast.compare import MODES, Comparison, label
from deepspeed_cad.planner.plan import Plan, PlanInput
from deepspeed_cad.schedule import HOME, KIND, QUERY, ROWS, SERVER, build_slices

PARTS = ("non_attention", "attention", "optimizer", "exchange", "collectives", "waiting")
BEFORE, AFTER = "#9aa0ab", "#2a6fdb"


def draw_plan(problem: PlanInput, plan: Plan, path: str) -> None:
    """Load of each rank before and after, and who sends how much to whom.

    Raises CADError without matplotlib, as all of these do."""
    figure, (load, traffic) = _subplots(1, 2, figsize=(13, 3.6))
    ranks = np.arange(len(plan.load))
    load.bar(ranks - 0.2, plan.load_before, 0.4, color=BEFORE, label=f"before: max/mean {plan.imbalance_before:.2f}")
    load.bar(ranks + 0.2, plan.load, 0.4, color=AFTER, label=f"after: max/mean {plan.imbalance:.3f}")
    load.axhline(plan.load.mean(), color="black", linewidth=0.8, linestyle="--")
    load.set(title="Attention per rank", xlabel="rank", ylabel=problem.cost.unit)
    load.legend(frameon=False)
    shape, moved = problem.shape, build_slices(problem.tick, plan.tasks, problem.window).table
    moved = moved[moved[:, HOME] != moved[:, SERVER]]
    there = np.where(moved[:, KIND] == QUERY, shape.query_bytes, shape.key_value_bytes) * moved[:, ROWS]
    back = np.where(moved[:, KIND] == QUERY, shape.output_bytes, 0) * moved[:, ROWS]
    table = np.zeros((problem.tick.ranks, problem.tick.ranks))
    np.add.at(table, (moved[:, HOME], moved[:, SERVER]), there / 2**20)
    np.add.at(table, (moved[:, SERVER], moved[:, HOME]), back / 2**20)
    traffic.set(title=f"Moved in one layer's forward: {table.sum():.0f} MiB", xlabel="to rank", ylabel="from rank")
    figure.colorbar(traffic.imshow(table, cmap="magma_r"), ax=traffic, label="MiB")
    _save(figure, path)


def draw_evenness(steps: Sequence[Mapping[str, float]], path: str) -> None:
    """Max over mean of the ranks' attention in every step, without and with CAD."""
    names = {"without CAD": "imbalance_before", "with CAD": "imbalance"}
    lines = {name: [(number, one[key]) for number, one in enumerate(steps)] for name, key in names.items()}
    _draw_lines(lines, [{"color": BEFORE}, {"color": AFTER}], path, "step", "max/mean")


def draw_curves(over: str, curves: Mapping[str, Sequence[tuple[int, float]]], path: str) -> None:
    """Tokens per second and GPU of every mode, over a quantity."""
    curves = {mode: points for mode, points in curves.items() if points}
    kinds = [mode.removesuffix(" kept") for mode in curves]
    styles = [
        {"color": f"C{kinds.index(kind)}", "ls": "-" if kind == mode else "--"} for mode, kind in zip(curves, kinds)
    ]
    _draw_lines({MODES[mode]: points for mode, points in curves.items()}, styles, path, over, "tokens/s/GPU")


def _draw_lines(
    lines: Mapping[str, Sequence[tuple[int, float]]], styles: Sequence[dict[str, str]], path: str, over: str, what: str
) -> None:
    figure, axis = _subplots(figsize=(7, 4))
    for (name, points), style in zip(lines.items(), styles):
        axis.plot(*zip(*points), marker="o", label=name, **style)
    axis.set(xlabel=over, ylabel=what)
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    values = sorted({value for points in lines.values() for value, _ in points})
    if len(values) > 1 and values[0] > 0 and values[-1] >= 4 * values[0]:
        axis.set_xscale("log", base=2)
        axis.set_xticks(values, [f"{one // 1024}K" if one >= 4096 and one % 1024 == 0 else str(one) for one in values])
    if lines:
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


def _subplots(*shape: int, **options: Any) -> Any:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise CADError('a picture needs matplotlib: pip install "deepspeed_cad[plot]"') from error
    return pyplot.subplots(*shape, layout="constrained", **options)


def _save(figure: Any, path: str) -> None:
    from matplotlib import pyplot

    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise CADError(f"the picture {path} cannot be written: {error}") from error
    pyplot.close(figure)
