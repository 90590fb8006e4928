"""Checks of a question to the planner.

In: a `PlanInput`. Out: nothing, or an error that names the field, the value and what is allowed.
"""

from __future__ import annotations

import math

import numpy as np

from deepspeed_cad.errors import CADConfigError
from deepspeed_cad.layout import Segments
from deepspeed_cad.planner.plan import PlanInput


def check_input(problem: PlanInput) -> None:
    """Raise CADConfigError for a field that no plan could be made with."""
    tick, shape = problem.tick, problem.shape
    ranks = tick.ranks
    if ranks < 1:
        raise CADConfigError(f"a plan needs at least one rank, found {ranks}")
    if shape.groups < 1 or shape.query_heads < 1 or shape.query_heads % shape.groups:
        raise CADConfigError(
            f"{shape.query_heads} query heads cannot be shared by {shape.groups} KV heads: "
            "the second must divide the first"
        )
    if min(shape.head_dim, shape.value_dim, shape.bytes_per_element) < 1:
        raise CADConfigError(
            f"head_dim {shape.head_dim}, value_dim {shape.value_dim} and bytes_per_element {shape.bytes_per_element} "
            "must all be at least 1"
        )
    if not (math.isfinite(problem.tolerance) and 0 <= problem.tolerance < 1):
        raise CADConfigError(f"tolerance is {problem.tolerance}; it is a share of the mean, from 0 up to 1")
    if problem.granularity < 1:
        raise CADConfigError(f"granularity is {problem.granularity}; it is a number of query rows, at least 1")
    if problem.window is not None and problem.window < 1:
        raise CADConfigError(f"window is {problem.window}; it is a number of tokens, at least 1, or None")
    if problem.hosts is not None:
        hosts = np.asarray(problem.hosts)
        if hosts.shape != (ranks,) or hosts.dtype.kind not in "iu":
            raise CADConfigError(
                f"hosts has shape {hosts.shape} and dtype {hosts.dtype}; it needs a whole number, that of its host, "
                f"for each of the {ranks} ranks"
            )
    for name in ("base_load", "speed"):
        values = getattr(problem, name)
        if values is None:
            continue
        array = np.asarray(values, np.float64)
        if array.shape != (ranks,):
            raise CADConfigError(f"{name} has shape {array.shape}; it needs one number for each of the {ranks} ranks")
        wrong = ~np.isfinite(array) | (array < 0)
        if wrong.any():
            rank = int(np.flatnonzero(wrong)[0])
            raise CADConfigError(f"{name} of rank {rank} is {array[rank]}; it must be a number of at least 0")
    if problem.alternation is not None:
        servers, later = problem.alternation
        if np.shape(servers) != (ranks,):
            raise CADConfigError(
                f"alternation.servers has shape {np.shape(servers)}; it needs one value for each of the {ranks} ranks"
            )
        if not (math.isfinite(later) and later >= 0.0):
            raise CADConfigError(f"alternation.later is {later}; it must be a finite number of at least 0")
    if problem.speed is not None and len(tick.query) and not (np.asarray(problem.speed) > 0).any():
        raise CADConfigError("speed is 0 on every rank: at least one rank must be able to run tasks")
    for name in ("pair", "row", "key", "task", "byte_inside", "byte_between"):
        value = getattr(problem.cost, name)
        if not math.isfinite(value) or value < 0:
            raise CADConfigError(f"cost.{name} is {value}; it must be a finite number of at least 0")
    _check_segments("query", tick.query, ranks)
    _check_segments("key", tick.key, ranks)


def _check_segments(name: str, segments: Segments, ranks: int) -> None:
    document, rank, begin, end = segments.document, segments.rank, segments.begin, segments.end
    foreign = rank[(rank < 0) | (rank >= ranks)]
    if len(foreign):
        raise CADConfigError(f"a {name} segment lies on rank {int(foreign[0])} of a tick with {ranks} ranks")
    if (begin < 0).any() or (end < begin).any():
        at = int(np.flatnonzero((begin < 0) | (end < begin))[0])
        raise CADConfigError(f"{name} segment {at} is [{int(begin[at])}, {int(end[at])}): not an interval of positions")
    order = np.lexsort((end, begin, document))
    same = document[order][1:] == document[order][:-1]
    overlap = same & (begin[order][1:] < end[order][:-1])
    if overlap.any():
        at = int(np.flatnonzero(overlap)[0])
        first, second = order[at], order[at + 1]
        raise CADConfigError(
            f"two {name} segments hold the same rows of document {int(document[first])}: [{int(begin[first])}, "
            f"{int(end[first])}) on rank {int(rank[first])} and [{int(begin[second])}, {int(end[second])}) on rank "
            f"{int(rank[second])}; each row has one home"
        )
    if len(rank) and int(end.max()) >= 1 << 31:
        raise CADConfigError(f"a document of {int(end.max())} tokens is longer than the planner counts (2^31)")
