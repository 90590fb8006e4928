"""What the planner is asked (`PlanInput`) and what it answers (`Plan`): plain data, comparable, saved as JSON."""

import hashlib
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from deepspeed_cad.cost import CostModel
from deepspeed_cad.layout import Ints, Tick

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

QKV_SENT, QKV_RECEIVED, O_SENT, O_RECEIVED = range(4)
"""Rows of `Flows.bytes`: dispatched by a home, received by a server; returned by a server, received by a home."""
INSIDE, BETWEEN = range(2)


@dataclass(frozen=True)
class HeadShape:
    """Heads of one attention layer: `query_heads` = `groups` × heads per group; sizes in elements and bytes."""

    query_heads: int
    groups: int
    """Head groups: KV heads, each with the query heads that share it."""
    head_dim: int
    """Size of a query or key head."""
    value_dim: int
    """Size of a value head (differs from head_dim in MLA)."""
    bytes_per_element: int

    @property
    def heads_per_group(self) -> int:
        return self.query_heads // self.groups

    @property
    def query_bytes(self) -> int:
        """Of one row of one head group's Q."""
        return self.heads_per_group * self.head_dim * self.bytes_per_element

    @property
    def output_bytes(self) -> int:
        """Bytes of one row of one head group's O."""
        return self.heads_per_group * self.value_dim * self.bytes_per_element

    @property
    def key_value_bytes(self) -> int:
        """Bytes of one row of one head group's K and V."""
        return (self.head_dim + self.value_dim) * self.bytes_per_element


class Alternation(NamedTuple):
    """What is known of a tick that takes turns with another one beside reserved servers (finish.py)."""

    servers: Bools
    """[ranks]: those that only serve, and run what reaches them in the order in which it does."""
    later: float
    """How long after this tick's end what they found is in time, in the unit of the cost model."""


@dataclass(frozen=True, eq=False)
class PlanInput:
    """Everything a plan depends on. Equal on every rank, so that every rank makes the same plan."""

    tick: Tick
    shape: HeadShape
    cost: CostModel
    window: int | None = None
    """Sliding window in tokens (a row reads itself and the window − 1 before it); None: the whole prefix."""
    tolerance: float = 0.05
    """How far any server's finish time may lie from the mean, above and below, as a share of the mean."""
    granularity: int = 128
    """Query rows: cuts are multiples of it from the start of a document or segment, or an end."""
    base_load: Floats | None = None
    """Seconds that each rank computes besides attention in this tick ([ranks], default 0)."""
    speed: Floats | None = None
    """Relative speed of each rank ([ranks], default 1); 0: the rank runs no tasks."""
    hosts: Ints | None = None
    """Number of each rank's host ([ranks], any numbers in any order); ranks of one share fast links. None: one host."""
    waves: tuple[int, ...] = (1,)
    """In how many waves that what moves may go: the plan takes the number with which it ends first."""
    alternation: Alternation | None = None
    """Where this tick takes turns with another one beside reserved servers; None: it is alone."""
    backward: bool = True
    """Whether a backward follows; without one, `cost` is that of the forward alone."""

    @cached_property
    def floors(self) -> Floats:
        return np.ascontiguousarray(np.zeros(self.tick.ranks) if self.base_load is None else self.base_load, np.float64)

    @cached_property
    def speeds(self) -> Floats:
        return np.ascontiguousarray(np.ones(self.tick.ranks) if self.speed is None else self.speed, np.float64)

    @cached_property
    def divisors(self) -> Floats:
        """[ranks]: what work is divided by to become time; a rank of speed 0 has none."""
        return np.where(self.speeds > 0, self.speeds, 1.0)

    def ends(self, work: Floats) -> Floats:
        """[ranks]: when each is done with so much work, if transfers took no time."""
        return self.floors + work / self.divisors


@dataclass(frozen=True, eq=False)
class Flows:
    """What a plan moves between ranks in one layer's forward, as the model of transfers needs it (finish.py). Per head
    group: Q of every row that is not at home on its server goes there, and O comes back. Of K and V a server receives
    each row that it reads of a (document, head group) and does not hold itself, once, from the row's home."""

    bytes: Ints
    """[4, 2, ranks]: of what (see above), inside a host or between hosts, for each rank."""
    waiting: Floats
    """[ranks]: work of tasks that read anything from another rank, in the unit of the cost model times speed."""
    pairs: Ints
    """[n, 3]: home, server, and whether Q and O travel beside K and V; ordered."""
    parts: Floats
    """[ranks]: head groups of documents with such work, which waves do not cut."""
    served: Ints
    """[2, ranks]: query and KV rows times head groups that lie side by side at each server to be run, its own among
    them, but for those that run where they are: where all that they read is at home in one piece, or IN_PLACE."""

    @cached_property
    def sent(self) -> Ints:
        return self.bytes[[QKV_SENT, O_SENT]].sum((0, 1))

    @cached_property
    def received(self) -> Ints:
        return self.bytes[[QKV_RECEIVED, O_RECEIVED]].sum((0, 1))

    @cached_property
    def between(self) -> int:
        return int(self.bytes[[QKV_SENT, O_SENT], BETWEEN].sum())


@dataclass(frozen=True, eq=False)
class Plan:
    """CA tasks that cover every (row, head group) of a tick exactly once."""

    tasks: Ints
    """[n, 6]: document, q_begin, q_end, group_begin, group_end, server; ordered by these columns."""
    load: Floats
    """[ranks]: predicted finish time, work ÷ speed + base load, in the unit of the cost model (seconds, or pairs)."""
    load_before: Floats
    """[ranks]: the same if every rank ran its own tokens."""
    sent_bytes: Ints
    """[ranks]: bytes of Q, K, V and O that leave each rank in one layer's forward."""
    received_bytes: Ints
    """[ranks]: bytes that reach each rank in one layer's forward."""
    finish: Floats = field(default_factory=lambda: np.zeros(0))
    """[ranks]: as `load`, and what of its transfers each rank waits for; equal to it where links have no cost."""
    between_bytes: int = 0
    """Of the sent bytes, those between hosts."""
    waves: int = 1
    """Parts in which what moves goes out, is served and comes back, one behind the other."""
    planning_ms: float = 0.0
    notes: tuple[str, ...] = field(default=())
    """Why a bound was not reached, if one was not."""
    flows: Flows | None = None
    """What moves between which ranks, as the core counted it; None where nothing was planned."""

    @property
    def imbalance(self) -> float:
        """Max over mean of the predicted load."""
        return _max_over_mean(self.load)

    @property
    def imbalance_before(self) -> float:
        return _max_over_mean(self.load_before)

    def fingerprint(self) -> int:
        """63-bit digest of the tasks: equal on every rank, or something is wrong."""
        return digest(self.tasks) >> 1

    def to_json(self) -> dict[str, Any]:
        found = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "flows"}
        return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in found.items()}


def digest(numbers: Ints) -> int:
    """64 bits over an array."""
    return int.from_bytes(hashlib.blake2b(np.ascontiguousarray(numbers).tobytes(), digest_size=8).digest(), "little")


def _max_over_mean(load: Floats) -> float:
    mean = float(load.mean()) if len(load) else 0.0
    return float(load.max()) / mean if mean > 0 else 1.0
