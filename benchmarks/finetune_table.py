"""Losses and seconds of examples/finetune_deepspeed.py with CAD off and on, side by side.

    python benchmarks/finetune_table.py FOLDER

In: finetune_off.jsonl and finetune_on.jsonl in FOLDER, which the script's `--report` writes, a line for each step, and
finetune_resumed.jsonl of a run with CAD that went on from a checkpoint. Out: a Markdown table of some steps on stdout,
finetune.json, and the losses as a picture, finetune.svg. Medians leave out the first two steps, in which kernels are
compiled.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

WARMUP = 2
LINES = 20
"""Steps that the table shows."""


def read(path: Path) -> list[dict[str, Any]]:
    """The steps of a run."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def compare(off: list[dict[str, Any]], on: list[dict[str, Any]], resumed: list[dict[str, Any]]) -> dict[str, Any]:
    """All runs; raises ValueError where the first two did not take the same steps."""
    if len(off) != len(on) or not on:
        raise ValueError(f"{len(off)} steps without CAD and {len(on)} with it: one of them did not end")
    seconds = {name: [one["seconds"] for one in run] for name, run in (("off", off), ("on", on))}
    losses = {name: [one["loss"] for one in run] for name, run in (("off", off), ("on", on))}
    middle = {name: median(times[WARMUP:] or times) for name, times in seconds.items()}
    return {
        "seconds": seconds, "losses": losses, "median_s": middle, "off_over_on": middle["off"] / middle["on"],
        "largest_difference_of_losses": max(abs(a - b) for a, b in zip(losses["off"], losses["on"])),
        "resumed": {str(one["step"]): one["loss"] for one in resumed},
        "resumed_differs_by": max((abs(one["loss"] - losses["on"][one["step"] - 1]) for one in resumed), default=None),
        "peak_GiB": {name: max(one.get("peak_GiB", 0.0) for one in run) for name, run in (("off", off), ("on", on))},
        "attention_max_over_mean": [one["cad/attention_max_over_mean"] for one in on],
        "attention_max_over_mean_before": [one["cad/attention_max_over_mean_before"] for one in on],
    }  # fmt: skip


def table(found: dict[str, Any]) -> str:
    """Markdown, a line for some of the steps."""
    lines = ["| step | loss off | loss on | s off | s on | attention max/mean off | on |", "|" + "---|" * 7]
    columns = (
        *found["losses"].values(), *found["seconds"].values(), found["attention_max_over_mean_before"],
        found["attention_max_over_mean"],
    )  # fmt: skip
    steps = len(found["losses"]["on"])
    for step, values in enumerate(zip(*columns), 1):
        if step > 1 and step % max(1, steps // LINES):
            continue
        off, on, off_s, on_s, before, after = values
        lines.append(f"| {step} | {off:.6f} | {on:.6f} | {off_s:.3f} | {on_s:.3f} | {before:.2f} | {after:.2f} |")
    middle, peak, apart = found["median_s"], found["peak_GiB"], found["resumed_differs_by"]
    again = "" if apart is None else f"; gone on from step {min(map(int, found['resumed'])) - 1}: by {apart:.1e}"
    return "\n".join(lines) + (
        f"\n\nmedian {middle['off']:.3f} s off, {middle['on']:.3f} s on: {found['off_over_on']:.3f} times as fast; "
        f"losses differ by at most {found['largest_difference_of_losses']:.1e}{again}; "
        f"peak {peak['off']:.1f} GiB off, {peak['on']:.1f} on\n"
    )


def draw(found: dict[str, Any], path: Path) -> None:
    """The losses of all runs in one picture."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.5), layout="constrained")
    for (name, losses), style in zip(found["losses"].items(), ("-", "--")):
        axes.plot(range(1, len(losses) + 1), losses, style, label=f"CAD {name}", linewidth=1.2)
    if found["resumed"]:
        axes.plot(
            [*map(int, found["resumed"])], [*found["resumed"].values()], ":", label="CAD on, resumed", linewidth=2
        )
    axes.set(xlabel="step", ylabel="loss")
    axes.legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--commit", default="", help="where this is not a git checkout: what results name as the commit"
    )
    options = parser.parse_args()
    off, on, resumed = (options.folder / f"finetune_{name}.jsonl" for name in ("off", "on", "resumed"))
    found = compare(read(off), read(on), read(resumed) if resumed.exists() else [])
    found |= {"commit": options.commit, "date": time.strftime("%Y-%m-%d", time.gmtime())}
    (options.folder / "finetune.json").write_text(json.dumps(found, indent=1) + "\n")
    draw(found, options.folder / "finetune.svg")
    sys.stdout.write(table(found))


if __name__ == "__main__":
    main()
