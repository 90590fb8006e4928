"""Pictures of a plan: load per rank before and after, who sends to whom, and where the long documents went.

In: a question and its plan. Out: an image file. matplotlib is imported only here, when a picture is asked for.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from deepspeed_cad.errors import CADError
from deepspeed_cad.planner.plan import Plan, PlanInput
from deepspeed_cad.planner.traffic import traffic_matrix

LONGEST = 6
"""Documents whose rows and head groups are drawn."""


def draw_plan(problem: PlanInput, plan: Plan, path: str, numbers: list[int] | None = None) -> None:
    """Write the picture; `numbers` are the names of the tick's documents. Raises CADError without matplotlib."""
    matplotlib, pyplot = _matplotlib()
    longest = _most_moved(problem, plan)[:LONGEST]
    rows = 1 + -(-len(longest) // 2)
    figure, axes = pyplot.subplots(rows, 2, figsize=(13, 3.6 * rows), squeeze=False, layout="constrained")
    _draw_load(axes[0][0], plan, problem.cost.unit)
    _draw_traffic(axes[0][1], figure, problem, plan)
    colours = matplotlib.colormaps["turbo"]
    drawn = None
    for place, axis in enumerate(axes[1:].flat):
        if place < len(longest):
            name = longest[place] if numbers is None else numbers[longest[place]]
            drawn = _draw_document(axis, problem, plan, longest[place], name, colours)
        else:
            axis.axis("off")
    if drawn is not None:
        figure.colorbar(drawn, ax=axes[1:], label="server", shrink=0.8)
    _save(figure, pyplot, path)


def draw_outlook(before: list[float], after: list[float], gains: list[float], path: str) -> None:
    """Write the imbalance of every step without and with CAD, and how much longer the best rival takes."""
    _, pyplot = _matplotlib()
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 4), layout="constrained")
    steps = np.arange(len(before))
    left.plot(steps, before, "o-", color="#9aa0ab", label="without CAD")
    left.plot(steps, after, "o-", color="#2a6fdb", label="with CAD")
    left.set(title="Attention of the slowest rank over the mean", xlabel="step", ylabel="max/mean")
    left.set_ylim(bottom=0)
    left.legend(frameon=False)
    right.bar(steps, gains, color="#2a6fdb")
    right.axhline(1.0, color="black", linewidth=0.8)
    right.set(title="Step time of the best rival over CAD", xlabel="step", ylabel="times")
    _save(figure, pyplot, path)


def _matplotlib() -> tuple[Any, Any]:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise CADError("a picture needs matplotlib: pip install matplotlib") from error
    return matplotlib, pyplot


def _save(figure: Any, pyplot: Any, path: str) -> None:
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise CADError(f"the picture {path} cannot be written: {error}") from error
    pyplot.close(figure)


def _most_moved(problem: PlanInput, plan: Plan) -> list[int]:
    """Documents, those that were cut first, the longest of either kind first."""
    segments = problem.tick.query
    count = int(segments.document.max()) + 1 if len(segments) else 0
    lengths, moved = np.zeros(count, np.int64), np.zeros(count, np.int64)
    np.maximum.at(lengths, segments.document, segments.end)
    np.add.at(moved, plan.tasks[:, 0], 1)
    np.subtract.at(moved, segments.document, 1)
    order = np.lexsort((-lengths, moved <= 0))
    return [int(document) for document in order if lengths[document]]


def _draw_load(axis: Any, plan: Plan, unit: str) -> None:
    ranks = np.arange(len(plan.load))
    axis.bar(ranks - 0.2, plan.load_before, 0.4, color="#c0c4cc", label=f"before: max/mean {plan.imbalance_before:.2f}")
    axis.bar(ranks + 0.2, plan.load, 0.4, color="#2a6fdb", label=f"after: max/mean {plan.imbalance:.3f}")
    axis.axhline(plan.load.mean(), color="black", linewidth=0.8, linestyle="--")
    axis.set(title="Attention per rank", xlabel="rank", ylabel=unit)
    axis.legend(frameon=False)


def _draw_traffic(axis: Any, figure: Any, problem: PlanInput, plan: Plan) -> None:
    ranks = problem.tick.ranks
    table = np.zeros((ranks, ranks))
    for (source, target), amount in traffic_matrix(plan.tasks, problem.tick, problem.shape, problem.window).items():
        table[source, target] = amount / 2**20
    image = axis.imshow(table, cmap="magma_r")
    axis.set(title=f"Moved in one layer's forward: {table.sum():.0f} MiB", xlabel="to rank", ylabel="from rank")
    figure.colorbar(image, ax=axis, label="MiB")


def _draw_document(axis: Any, problem: PlanInput, plan: Plan, document: int, name: int, colours: Any) -> Any:
    """Rows along x, head groups along y, the colour is the server; dashed lines are borders between home ranks."""
    ranks, groups = problem.tick.ranks, problem.shape.groups
    mine = plan.tasks[plan.tasks[:, 0] == document]
    edges = np.unique(mine[:, 1:3])
    servers = np.full((groups, len(edges) - 1), np.nan)
    for _, begin, end, group, group_end, server in mine.tolist():
        low, high = np.searchsorted(edges, (begin, end))
        servers[group:group_end, low:high] = server
    mesh = axis.pcolormesh(
        edges, np.arange(groups + 1), np.ma.masked_invalid(servers), cmap=colours, vmin=0, vmax=max(ranks - 1, 1)
    )
    own = problem.tick.query.select(problem.tick.query.document == document)
    for begin in own.begin[1:]:
        axis.axvline(begin, color="white", linestyle="--", linewidth=1)
    homes = ", ".join(map(str, own.rank[:8])) + ("…" if len(own) > 8 else "")
    axis.set(title=f"Document {name}, at home on {homes}", xlabel="row", ylabel="head group")
    return mesh
