"""Results that are rows of figures: one JSON file, and beside it the same as a Markdown table and a picture.

    python benchmarks/rows.py benchmarks/results/kernels-h200.json

makes table and picture anew from the JSON of `kernels.py` or `exchange.py`. In: `{"machine": {…}, "rows": [{…}, …]}`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

EXCHANGE = (
    "transport",
    "tokens",
    "slices",
    "MiB",
    "host_us",
    "dispatch_ms",
    "dispatch_GBps",
    "return_ms",
    "slower_percent",
)
KERNELS = ("kernel", "heads", "rows", "shards", "forward_TFLOPs", "backward_TFLOPs")


def columns_of(rows: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    """Which of the two benchmarks made the rows."""
    return KERNELS if any("kernel" in row for row in rows) else EXCHANGE


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as a Markdown table; a transport that was refused has its reason in the second column."""
    columns = columns_of(rows)
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for row in rows:
        cells = [_cell(row.get(column, "")) for column in columns]
        if "refused" in row:
            cells[1] = f"refused: {row['refused']}"
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)


def write(results: dict[str, Any], path: Path) -> None:
    """JSON at `path`, table and picture beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
    of = ", ".join(f"{key} {value}" for key, value in results["machine"].items())
    path.with_suffix(".md").write_text(f"{of}\n\n{table(results['rows'])}")
    draw(results, path.with_suffix(".png"))


def draw(results: dict[str, Any], path: Path) -> None:
    """TFLOP/s over rows of a shard; or GB/s over MiB of an exchange, beside what it costs a matrix product."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in results["rows"] if "refused" not in row]
    if columns_of(rows) is KERNELS:
        panels = (("forward_TFLOPs", "TFLOP/s, forward"), ("backward_TFLOPs", "TFLOP/s, backward"))
        across, name = "rows", "query rows of a shard"
    else:
        panels = (
            ("dispatch_GBps", "GB/s that leave one rank"),
            ("slower_percent", "matrix product beside, % slower"),
        )
        across, name = "MiB", "MiB that leave one rank"
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.2))
    for axis, (column, label) in zip(axes, panels):
        for series in dict.fromkeys(_series(row) for row in rows):
            points = [(row[across], row[column]) for row in rows if _series(row) == series and column in row]
            if points:
                axis.plot(*zip(*sorted(points)), marker="o", markersize=3, label=series)
        axis.set_xscale("log", base=2)
        axis.set_xlabel(name)
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=7)
    on = results["machine"]
    figure.suptitle(f"{on.get('ranks', 1)} × {on['gpu']}, {on['date']}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _series(row: dict[str, Any]) -> str:
    return str(row["transport"]) if "transport" in row else f"{row['kernel']}, {row['heads']}"


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        write(json.loads(Path(argument).read_text()), Path(argument))
