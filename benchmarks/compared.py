"""Which modes and sizes predictions were compared with, and how far off they were.

    python benchmarks/compared.py        # writes deepspeed_cad/forecast/compared.json

In: the files that foreseen.py compares. Out: what `deepspeed-cad plan` says of it. For each kind of run GPU, mode,
GPUs, sharding, pipeline stages; the largest errors of ratios and of memory, but for those that foreseen.py tells the
reason of; tokens/s of reserved servers over CAD in place.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from foreseen import KNOWN, Row, foresee_all  # noqa: E402
from foreseen_runs import KINDS, RESULTS, read_run  # noqa: E402

from deepspeed_cad.forecast.step import COMPARED  # noqa: E402

MODES = {"in_place": "cad", "reserved": "cad reserved"}
"""Functions of the simulator that are named otherwise than their modes."""


def runs() -> list[list[Any]]:
    """What was compared, each once."""
    found: set[tuple[Any, ...]] = set()
    for path in (path for kind in KINDS for path in RESULTS.glob(f"*/{kind}")):
        for mode in read_run(path).modes:
            if isinstance(mode.run, str):
                continue
            function, setting = mode.run.func, mode.run.args[0]  # type: ignore[attr-defined]
            name = MODES.get(function.__name__, function.__name__)
            name += " kept" * bool(mode.run.keywords.get("kept"))  # type: ignore[attr-defined]
            size = setting.cluster.ranks, setting.sharding, setting.pipeline
            # `plan` says of Ulysses and tensor parallelism that they were not compared: two runs are few.
            if name != "without_attention" and setting.sharing == 1:
                found.add((setting.machine.name, name, *size))
    return [list(one) for one in sorted(found)]


def errors(rows: list[Row], figure: str) -> float:
    """How far predicted over measured was from 1, at most, where nothing was fitted to the run: 0.03 is 3 %."""
    # Of servers no ratio is relied on: those that are foreseen to be faster are not recommended for it.
    rows = [row for row in rows if figure != "ratio" or "reserved" not in row.mode]
    values = [
        abs(getattr(row, figure) - 1.0)
        for row in rows
        if getattr(row, figure) and (row.file, row.mode, figure) not in KNOWN and not row.fitted
    ]
    return round(max(values), 3)


def servers() -> list[float]:
    """The least and the most of tokens/s of reserved servers over CAD in place, of the pairs that foreseen.py compares:
    over the same link where both ran, else over NVLink in place."""
    found = map(read_run, RESULTS.glob("*/*reserved_*.json"))
    pairs = [(run.first, run.modes[0]) for run in found if run.first and not isinstance(run.modes[0].run, str)]
    ratios = [first.seconds / mode.seconds for first, mode in pairs]
    return [round(min(ratios), 2), round(max(ratios), 2)]


def find() -> dict[str, Any]:
    """What compared.json holds."""
    rows = foresee_all()
    return {
        "runs": runs(),
        "ratio": errors(rows, "ratio"),
        "memory": errors(rows, "memory"),
        "servers": servers(),
    }


if __name__ == "__main__":
    text = json.dumps(find()).replace("[[", "[\n [").replace("], [", "],\n [").replace("]],", "]\n],")
    COMPARED.write_text(text + "\n")
