"""The question as a JSON file, which `deepspeed-cad plan` reads, and its checks (`check_input`)."""

import difflib
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from deepspeed_cad.config import is_number
from deepspeed_cad.cost import PAIRS, CostModel
from deepspeed_cad.errors import CADConfigError
from deepspeed_cad.layout import Ints, Layout
from deepspeed_cad.planner.constants import TRAVELS
from deepspeed_cad.planner.plan import Floats, HeadShape, PlanInput

logger = logging.getLogger(__name__)

KEYS = {
    "documents": "lengths in stream order, cut into ranks of tokens_per_rank",
    "tokens_per_rank": "with documents: tokens of each rank",
    "ranks": "with documents: how many; else one list of document lengths for each rank",
    "heads": "query heads",
    "kv_heads": "KV heads, a divisor of heads (default: heads)",
    "head_dim": "size of a query and key head",
    "value_head_dim": "size of a value head (default: head_dim)",
    "bytes_per_element": "2 for bf16 (default)",
    "window": "sliding window in tokens, or null",
    "cost": '"pairs" (default) or the file of a profile',
    "tolerance": "how far any rank may lie from the mean (default 0.05)",
    "granularity": "query rows between cuts (default 128)",
    "hosts": "number of each rank's host; equal ones share the fast links (default: one host)",
    "ranks_per_node": "the same for hosts one behind the other: ranks of each, or a list such as [8, 8, 4]",
    "links": 'GB/s into a rank, {"inside": of its host, "between": hosts}; only with a profile as cost',
    "speeds": "relative speed of each rank; 0: runs no tasks",
    "base_load": "what each rank computes besides, in the unit of the cost model",
    "servers": '"all" (default), a list of the ranks that run tasks, or a number of further ranks that only serve',
}


def check_input(problem: PlanInput) -> None:
    """Raise CADConfigError for what neither layouts nor configurations rule out, with its value and what is allowed."""
    if not (math.isfinite(problem.tolerance) and 0 <= problem.tolerance < 1):
        raise CADConfigError(f"tolerance is {problem.tolerance}; it is a share of the mean, from 0 up to 1")
    for name, values in (("base_load", problem.floors), ("speed", problem.speeds)):
        wrong = ~np.isfinite(values) | (values < 0)
        if wrong.any():
            rank = int(np.argmax(wrong))
            raise CADConfigError(f"{name} of rank {rank} is {values[rank]}; it must be a number of at least 0")
    if len(problem.tick.query) and not (problem.speeds > 0).any():
        raise CADConfigError("speed is 0 on every rank: at least one rank must be able to run tasks")
    longest = problem.tick.key.end.max(initial=0)
    if longest >= 1 << 31:
        raise CADConfigError(f"a document of {longest} tokens is longer than the planner counts (2^31)")


class Question(NamedTuple):
    problem: PlanInput
    number: list[int]
    """For each document of the tick: its place in the input."""


def read_question(fields: Any) -> Question:
    """Make a question of what a JSON file holds. Raises CADConfigError, naming the key."""
    known = ", ".join(KEYS)
    if not isinstance(fields, dict):
        raise CADConfigError(f"the input holds a {type(fields).__name__}; expected an object with the keys {known}")
    for key in fields.keys() - KEYS:
        if close := difflib.get_close_matches(key, KEYS, 1, 0.75):
            raise CADConfigError(f"unknown key {key!r}: did you mean {close[0]!r}? Known keys: {known}")
        logger.warning("key %r is not known and ignored; known keys: %s", key, known)
    layout, number = _layout(fields)
    trainers = layout.ranks
    heads, head_dim = _integer(fields, "heads"), _integer(fields, "head_dim")
    kv_heads = _integer(fields, "kv_heads", heads)
    if heads % kv_heads:
        raise CADConfigError(f"kv_heads is {kv_heads} and heads is {heads}: kv_heads must divide heads")
    value_dim = _integer(fields, "value_head_dim", head_dim)
    shape = HeadShape(heads, kv_heads, head_dim, value_dim, _integer(fields, "bytes_per_element", 2))
    servers = fields.get("servers", "all")
    if type(servers) is int and servers >= 0:
        layout = Layout(trainers + servers, layout.segments, np.pad(layout.tokens, (0, servers)))
    speed = _numbers(fields, "speeds", layout.ranks, trainers, 1.0)
    if isinstance(servers, list) and servers and all(type(one) is int and 0 <= one < trainers for one in servers):
        speed = np.where(np.isin(np.arange(trainers), servers), 1.0 if speed is None else speed, 0.0)
    elif servers != "all" and not (type(servers) is int and servers >= 0):
        raise CADConfigError(
            f'servers is {servers!r}; expected "all", a list of ranks from 0 to {trainers - 1} that run tasks, or a '
            "number of further ranks that only serve"
        )
    tolerance = fields.get("tolerance", PlanInput.tolerance)
    if not is_number(tolerance):
        raise CADConfigError(f"tolerance is {tolerance!r}; expected {KEYS['tolerance']}")
    problem = PlanInput(
        tick=layout.tick(),
        shape=shape,
        cost=with_links(read_cost(fields.get("cost", "pairs"), shape), **_links(fields)),
        window=None if fields.get("window") is None else _integer(fields, "window"),
        tolerance=float(tolerance),
        granularity=_integer(fields, "granularity", PlanInput.granularity),
        base_load=_numbers(fields, "base_load", layout.ranks, trainers, 0.0),
        speed=speed,
        hosts=_hosts(fields, layout.ranks),
    )
    check_input(problem)
    return Question(problem, number)


def _layout(fields: dict[str, Any]) -> tuple[Layout, list[int]]:
    lists = fields.get("ranks")
    if "documents" in fields:
        lengths = _lengths(fields["documents"], "documents")
        tokens = _integer(fields, "tokens_per_rank")
        if isinstance(lists, list):
            raise CADConfigError("documents and lists in ranks are both given: give one of them")
        layout = Layout.from_stream(lengths, _integer(fields, "ranks", max(1, -(-sum(lengths) // tokens))), tokens)
    elif isinstance(lists, list) and lists:
        per_rank = [_lengths(own, f"ranks[{rank}]") for rank, own in enumerate(lists)]
        layout, lengths = Layout.from_rank_lengths(per_rank), [length for own in per_rank for length in own]
    else:
        raise CADConfigError(
            "neither documents (with tokens_per_rank and ranks) nor ranks as one list of lengths for each rank is given"
        )
    return layout, [at for at, length in enumerate(lengths) if length]


def read_cost(cost: Any, shape: HeadShape) -> CostModel:
    """The cost model that a key or an option names, for one head shape. Raises CADConfigError where it names none."""
    if cost == "pairs":
        return PAIRS
    if isinstance(cost, str) and Path(cost).is_file():
        from deepspeed_cad.profiles import Profile  # brings torch, which plans do not need

        return Profile.load(cost).cost_for(shape)
    raise CADConfigError(
        f'cost is {cost!r}; expected "pairs" or the path of a profile that `deepspeed-cad profile` wrote'
    )


def hosts_of_nodes(per_node: int | list[int], ranks: int) -> Ints:
    """Number of each rank's host where hosts have their ranks one behind the other ([ranks]). `per_node`: ranks of
    every host, the last one has the rest; or the ranks of each. Raises CADConfigError where that is not all ranks."""
    if isinstance(per_node, int):
        return np.arange(ranks) // per_node
    if sum(per_node) != ranks:
        raise CADConfigError(f"hosts of {', '.join(map(str, per_node))} ranks have {sum(per_node)}; there are {ranks}")
    return np.repeat(np.arange(len(per_node)), per_node)


def _hosts(fields: dict[str, Any], ranks: int) -> Ints | None:
    hosts, per_node = fields.get("hosts"), fields.get("ranks_per_node")
    if hosts is not None and per_node is not None:
        raise CADConfigError("hosts and ranks_per_node are both given: give one of them")
    if hosts is not None:
        return np.array(_list(hosts, "hosts", lambda one: type(one) is int, "a whole number", (ranks,)), np.int64)
    if per_node is None:
        return None
    many = per_node if isinstance(per_node, list) else [per_node]
    _list(many, "ranks_per_node", lambda one: type(one) is int and one >= 1, f"above 0 ({KEYS['ranks_per_node']})")
    return hosts_of_nodes(per_node, ranks)


def _links(fields: dict[str, Any]) -> dict[str, Any]:
    if (links := fields.get("links")) is None:
        return {}
    if not isinstance(links, dict) or not links or links.keys() - {"inside", "between"}:
        raise CADConfigError(f'links is {links!r}; expected {{"inside": GB/s, "between": GB/s}}, or one of the two')
    for key, value in links.items():
        if not is_number(value) or value <= 0:
            raise CADConfigError(f"links.{key} is {value!r}; expected GB/s above 0")
    return links


def with_links(cost: CostModel, inside: float | None = None, between: float | None = None) -> CostModel:
    """A cost model with links of so many GB/s into each rank; None: as the model has them. Raises CADConfigError where
    the costs of attention are not seconds, with which those of links could be compared."""
    speeds = {"byte_inside": inside, "byte_between": between}
    given: dict[str, Any] = {name: TRAVELS / (speed * 1e9) for name, speed in speeds.items() if speed is not None}
    if given and cost.unit != "seconds":
        raise CADConfigError(
            f"links have speeds, but the cost of attention is in {cost.unit}: give a profile as cost, which "
            "`deepspeed-cad profile` writes"
        )
    return replace(cost, **given)


def _integer(fields: dict[str, Any], key: str, default: int | None = None) -> int:
    if (value := fields.get(key, default)) is None:
        raise CADConfigError(f"{key} is missing: {KEYS[key]}")
    if type(value) is not int or value < 1:
        raise CADConfigError(f"{key} is {value!r}; expected a whole number of at least 1 ({KEYS[key]})")
    return value


def _list(values: Any, where: str, right: Callable[[Any], bool], each: str, counts: Sequence[int] = ()) -> list[Any]:
    """A list of values that are right, and of one of these counts."""
    if not isinstance(values, list) or (counts and len(values) not in counts):
        many = f"{counts[0]} values" if counts else "values"
        raise CADConfigError(f"{where} is {values!r}; expected a list of {many}, each {each}")
    for at, value in enumerate(values):
        if not right(value):
            raise CADConfigError(f"{where}[{at}] is {value!r}; expected {each}")
    return values


def _lengths(values: Any, where: str) -> list[int]:
    return _list(
        values, where, lambda one: type(one) is int and 0 <= one < 1 << 31, "a whole number from 0 to 2^31 - 1"
    )


def _numbers(fields: dict[str, Any], key: str, ranks: int, trainers: int, fill: float) -> Floats | None:
    """One number per rank; ranks that `servers` added may be left out."""
    if fields.get(key) is None:
        return None
    values = _list(fields[key], key, is_number, f"a number ({KEYS[key]})", (ranks, trainers))
    return np.array([*map(float, values), *[fill] * (ranks - len(values))])
