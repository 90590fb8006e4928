"""Which predictions were compared with runs, and how far off those were.

In: compared.json, which benchmarks/compared.py makes of the measured runs. Out: what a star, a ± and "fits" stand on.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

PATH = Path(__file__).parent / "compared.json"


class Run(NamedTuple):
    machine: str
    mode: str
    ranks: int
    sharding: str
    pipeline: int


_FOUND = json.loads(PATH.read_text(encoding="utf-8"))
RUNS = frozenset(Run(*run) for run in _FOUND["runs"])
"""Each once."""
RATIO: float = _FOUND["ratio"]
"""How far a foreseen ratio of two modes in place was from the measured one, at most."""
MEMORY: float = _FOUND["memory"]
"""The same of a GPU's peak memory."""
SERVERS: tuple[float, float] = tuple(_FOUND["servers"])
"""Tokens/s of reserved servers over CAD in place, as measured: the least and the most."""
