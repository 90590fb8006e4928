"""Clock and power of every GPU in every mode of a training benchmark.

    nvidia-smi --query-gpu=timestamp,index,clocks.sm,power.draw --format=csv,noheader -lms 100 > clocks.csv &
    torchrun … benchmarks/train_step.py … 2> train.log
    python benchmarks/power.py clocks.csv train.log

In: the samples, and the log of train_step.py, whose lines begin with the time at which a step ended. Out: a table of
means over the samples that lie inside the steps of a mode.
"""

from __future__ import annotations

import csv
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from datetime import datetime, timedelta
from pathlib import Path
from statistics import fmean

STEP = re.compile(r"(\d\d:\d\d:\d\d\.\d+) pass \d+, step \d+, (.*): ([\d.]+) s")


def read_samples(lines: Iterable[str]) -> list[tuple[datetime, int, float, float]]:
    """Moment (of any one day), GPU, MHz and watts."""
    found = []
    for row in csv.reader(lines, skipinitialspace=True):
        if len(row) >= 4:
            moment = datetime.strptime(row[0].split()[1], "%H:%M:%S.%f")
            found.append((moment, int(row[1]), float(row[2].split()[0]), float(row[3].split()[0])))
    return found


def by_mode(samples: list[tuple[datetime, int, float, float]], log: str) -> dict[str, dict[int, tuple[float, float]]]:
    """Mean MHz and watts of every GPU in every mode."""
    inside: dict[str, dict[int, list[tuple[float, float]]]] = defaultdict(lambda: defaultdict(list))
    for ended, mode, seconds in STEP.findall(log):
        end = datetime.strptime(ended, "%H:%M:%S.%f")
        begin = end - timedelta(seconds=float(seconds))
        for moment, gpu, clock, power in samples:
            if begin < moment < end:
                inside[mode][gpu].append((clock, power))
    return {
        mode: {gpu: (fmean(c for c, _ in own), fmean(p for _, p in own)) for gpu, own in sorted(gpus.items())}
        for mode, gpus in inside.items()
    }


def main() -> None:
    """Print the table."""
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    found = by_mode(read_samples(Path(sys.argv[1]).read_text().splitlines()), Path(sys.argv[2]).read_text())
    if not found:
        raise SystemExit(
            f"no sample of {sys.argv[1]} lies inside a step of {sys.argv[2]}: were both made on one machine?"
        )
    sys.stdout.write("| mode | MHz | W |\n|---|---|---|\n")
    for mode, gpus in found.items():
        clocks, powers = (", ".join(f"{pair[i]:.0f}" for pair in gpus.values()) for i in range(2))
        sys.stdout.write(f"| {mode} | {clocks} | {powers} |\n")


if __name__ == "__main__":
    main()
