"""One short table of training steps: CAD and its rivals, as most run them and with attention kept.

    python benchmarks/rivals_table.py results/headline

In: a folder with JSON files of train_step.py; `clocks.csv` and the logs of the runs too, as power.py reads them, where
benchmarks/gpus found an nvidia-smi. Out: a Markdown table for each file on stdout. `÷` are tokens/s over those of
another mode; `kept` is the one whose checkpointing does not run attention again. What CAD gains over the kept one it
gains by balance, what the kept one gains over the other comes from attention that is not repeated.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from power import by_mode, read_samples
from train_report import COLUMNS, compared_with, ratios

SHOWN = ("mode", "max/mean", "exposed exchange", "peak GiB")
"""Columns of the run's own table that are in this one."""


def table(results: dict[str, Any], clocks: dict[str, dict[int, tuple[float, float]]]) -> str:
    """One run; `clocks`: mean MHz and watts of every GPU in every mode."""
    modes, others = results["modes"], compared_with(results)
    kept = modes.get("ulysses:kept", {}).get("peak_GiB")
    heads = ["mode", "s", *(f"÷ {other}" for other in others), *SHOWN[1:], "GiB ÷ Ulysses kept", "MHz", "W"]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for name, mode in modes.items():
        first, *shown = (cell(name, mode) for head, cell in COLUMNS if head in SHOWN)
        memory = f"{mode['peak_GiB'] / kept:.3f}" if kept else ""
        means = (", ".join(f"{pair[i]:.0f}" for pair in clocks.get(name, {}).values()) for i in range(2))
        cells = [first, f"{mode['seconds']:.3f}", *ratios(mode, others), *shown, memory, *means]
        lines.append("| " + " | ".join(cells) + " |")
    on = results["machine"]
    return f"{results['workload']}, {results['kernel']}, {on['ranks']} × {on['device']}\n\n" + "\n".join(lines) + "\n"


def kept_seconds(mode: dict[str, Any]) -> float:
    """Seconds of the steps of a mode that attends twice, if attention were kept: each step without the forward of
    attention that its slowest rank repeats. Arithmetic, where no run keeps it."""
    repeated = 1.0 - mode["attention_s_mean_without_recompute"] / mode["attention_s_mean"]
    slowest = [max(ranks) for ranks in mode["attention_s_by_step_and_rank"]]
    return sum(mode["step_seconds"]) - repeated * sum(slowest)


def main(folder: Path) -> None:
    """Print the tables."""
    samples = folder / "clocks.csv"
    found = read_samples(samples.read_text().splitlines()) if samples.exists() else []
    for path in sorted(folder.glob("train_*.json")):
        results = json.loads(path.read_text())
        workload = results["workload"].split()[0].removesuffix(f"_{results['settings'].get('model')}")
        log = folder / f"{workload}.log"
        sys.stdout.write("\n" + table(results, by_mode(found, log.read_text()) if log.exists() else {}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
