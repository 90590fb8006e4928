"""From measured seconds to the four coefficients of the cost model.

In: how many pairs, query rows, KV rows and tasks each measured call had, all head groups together, and its seconds.
Out: the coefficients, none below zero, that keep the relative errors least.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np

from deepspeed_cad.errors import CADError
from deepspeed_cad.planner.plan import Floats


@dataclass(frozen=True, eq=False)
class Fit:
    pair: float
    row: float
    key: float
    task: float
    predicted: Floats
    """Seconds for each call."""
    errors: Floats
    """Predicted over measured, minus 1."""


def fit_cost(counts: Floats, seconds: Floats, weights: Floats | None = None) -> Fit:
    """Least squares on relative errors, no coefficient below zero.

    `counts` [calls, 4]: pairs, rows, KV rows, tasks. Every subset of the four is tried, always with the pairs: exact
    for so few. Raises CADError where there is nothing to fit.
    """
    counts, seconds = np.asarray(counts, np.float64), np.asarray(seconds, np.float64)
    if len(counts) < 4 or not (seconds > 0).all() or not np.isfinite(seconds).all():
        raise CADError(
            f"{len(seconds)} measured calls with {seconds.min(initial=np.inf):.3g} s at least cannot be fitted; "
            "expected 4 or more that take time"
        )
    root = np.sqrt(np.ones(len(seconds)) if weights is None else np.asarray(weights, np.float64))
    relative = counts / seconds[:, None]
    best, least = np.zeros(4), np.inf
    for size in range(4):
        for others in combinations((1, 2, 3), size):
            columns = [0, *others]
            scale = relative[:, columns].max(axis=0)
            if not (scale > 0).all():
                continue
            solved = np.linalg.lstsq(relative[:, columns] / scale * root[:, None], root, rcond=None)[0] / scale
            squares = float((((relative[:, columns] @ solved - 1.0) * root) ** 2).sum())
            # More terms have to be worth it: otherwise rounding decides.
            if (solved[1:] >= 0).all() and solved[0] > 0 and squares < least * (1.0 - 1e-9):
                best, least = np.zeros(4), squares
                best[columns] = solved
    if not np.isfinite(least):
        raise CADError(
            "no cost per pair above zero fits the measured times: they hardly depend on the lengths. Measure longer "
            "documents, on a machine that does nothing else"
        )
    pair, row, key, task = best.tolist()
    return Fit(pair, row, key, task, counts @ best, relative @ best - 1.0)
