"""Checks of a question to the planner and of its answer.

In: a `PlanInput`, or tasks. Out: nothing, or an error that names the field, the value and what is allowed.
"""

from __future__ import annotations

import math

import numpy as np

from deepspeed_cad.errors import CADConfigError, CADError
from deepspeed_cad.layout import Ints, Tick
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
    for name in ("query", "key"):
        _check_segments(name, getattr(tick, name), ranks)


def _check_segments(name: str, segments: object, ranks: int) -> None:
    rank, begin, end = segments.rank, segments.begin, segments.end  # type: ignore[attr-defined]
    foreign = rank[(rank < 0) | (rank >= ranks)]
    if len(foreign):
        raise CADConfigError(f"a {name} segment lies on rank {int(foreign[0])} of a tick with {ranks} ranks")
    if (begin < 0).any() or (end < begin).any():
        at = int(np.flatnonzero((begin < 0) | (end < begin))[0])
        raise CADConfigError(f"{name} segment {at} is [{int(begin[at])}, {int(end[at])}): not an interval of positions")
    document = segments.document  # type: ignore[attr-defined]
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


def check_coverage(tasks: Ints, tick: Tick, groups: int) -> None:
    """Raise CADError unless the tasks cover every (query row, head group) of the tick exactly once."""
    for row in tasks:
        if not (row[1] < row[2] and 0 <= row[3] < row[4] <= groups and 0 <= row[5] < tick.ranks):
            raise CADError(f"task {row.tolist()} is empty, or names head groups or a server that do not exist")
    for document in np.union1d(tick.query.document, tasks[:, 0] if len(tasks) else []):
        own = tick.query.document == document
        wanted = _intervals(tick.query.begin[own], tick.query.end[own])
        mine = tasks[tasks[:, 0] == document]
        for group in range(groups):
            here = mine[(mine[:, 3] <= group) & (group < mine[:, 4])]
            order = np.argsort(here[:, 1], kind="stable")
            begin, end = here[order, 1], here[order, 2]
            if (begin[1:] < end[:-1]).any():
                at = int(np.flatnonzero(begin[1:] < end[:-1])[0])
                raise CADError(
                    f"document {int(document)}, head group {group}: rows [{int(begin[at + 1])}, {int(end[at])}) are "
                    "computed by two tasks"
                )
            covered = _intervals(begin, end)
            if covered != wanted:
                raise CADError(
                    f"document {int(document)}, head group {group}: tasks cover rows {covered}, the tick has {wanted}"
                )


def check_cuts(tasks: Ints, tick: Tick, granularity: int) -> int:
    """How many row boundaries are neither on the granularity from a document's or segment's begin nor an end."""
    wrong = 0
    by_document: dict[int, list[tuple[int, int]]] = {}
    for document, begin, end in zip(tick.query.document, tick.query.begin, tick.query.end, strict=True):
        by_document.setdefault(int(document), []).append((int(begin), int(end)))
    for row in tasks:
        segments = by_document.get(int(row[0]), [])
        for at in (int(row[1]), int(row[2])):
            fine = at % granularity == 0 or any(
                at == end or (begin <= at and (at - begin) % granularity == 0) for begin, end in segments
            )
            wrong += not fine
    return wrong


def _intervals(begin: Ints, end: Ints) -> list[tuple[int, int]]:
    """The union of intervals as a list of disjoint ones, in order; empty ones are dropped."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted(zip(begin.tolist(), end.tolist(), strict=True)):
        if low == high:
            continue
        if joined and low <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], high))
        else:
            joined.append((low, high))
    return joined
