"""Statistics: what CAD did on this rank, summed since the session opened; readers take differences."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

import numpy as np

from deepspeed_cad.notice import counted

if TYPE_CHECKING:
    from deepspeed_cad.attention.microbatch import MicroBatch, PlanKey, PlannedTick
    from deepspeed_cad.planner.plan import Floats


@dataclass(eq=False)
class Statistics:
    """Sums over micro-batches and kinds of layers. Attention is that of plans, in the unit of their cost model."""

    micro_batches: int = 0
    planning_s: float = 0.0
    waited_s: float = 0.0
    """Seconds in which this rank's training thread, or its GPU, did nothing but wait for an exchange."""
    served_s: float = 0.0
    """Seconds in which servers attended, summed over them, as they told trainer 0; 0 on other ranks."""
    servers_s: float = 0.0
    landing_bytes: int = 0
    """Not a sum: what landing areas hold; with transports that keep none, the most that arrives at once in a tick."""
    bytes_sent: int = 0
    waves: int = 0
    """Of the ticks that were planned, summed; as many as ticks where each is one wave."""
    slowest_before: float = 0.0
    """Attention of the slowest rank if every rank ran its own tokens."""
    slowest: float = 0.0
    """Attention of the slowest rank as planned, summed over ticks."""
    mean: float = 0.0
    most_tokens_before: float = 0.0
    """Tokens of the fullest rank, padding included, as loaders gave them, summed over micro-batches."""
    mean_tokens_before: float = 0.0
    most_tokens: float = 0.0
    mean_tokens: float = 0.0
    looks: int = 0
    """Forwards without backward that all ranks ran together; none of them is in the sums above."""
    looks_slowest_before: float = 0.0
    looks_slowest: float = 0.0
    looks_mean: float = 0.0
    """The same three, of forwards without backward."""
    load_before: Floats = field(default_factory=lambda: np.zeros(1))
    """Attention of each rank if every rank ran its own tokens; one zero before the first micro-batch."""
    load: Floats = field(default_factory=lambda: np.zeros(1))
    _pending: list[dict[tuple[PlanKey, int], PlannedTick]] = field(default_factory=list)
    """Plans not counted yet, some of which are made while the forward runs. Not micro-batches: those hold tensors."""

    def add(self, micro_batch: MicroBatch) -> None:
        """Count a micro-batch; its plans are read when all of them are made."""
        self.micro_batches += 1
        loaded = micro_batch.layout.tokens if micro_batch.loaded is None else micro_batch.loaded
        trained = micro_batch.layout.tokens[: len(loaded)]
        self.most_tokens_before += float(loaded.max())
        self.mean_tokens_before += float(loaded.mean())
        self.most_tokens += float(trained.max())
        self.mean_tokens += float(trained.mean())
        if len(self._pending) > 16:
            self.collect()
        self._pending.append(micro_batch.planned)

    def collect(self) -> None:
        """Add the plans of the micro-batches that were counted."""
        for plans in self._pending:
            for key in dict.fromkeys(key for key, _ in plans):
                planned = [one for (kind, _), one in plans.items() if kind == key]
                self.planning_s += sum(one.seconds for one in planned)
                self.waves += sum(len(one.schedules) for one in planned)
                self.slowest_before += float(np.max(sum(one.plan.load_before for one in planned), initial=0.0))
                self.slowest += sum(float(np.max(one.plan.load, initial=0.0)) for one in planned)
                self.load_before = _sum(self.load_before, *(one.plan.load_before for one in planned))
                self.load = _sum(self.load, *(one.plan.load for one in planned))
                self.mean += sum(float(one.plan.load.mean()) for one in planned)
        self._pending.clear()

    def copy(self) -> Statistics:
        now = replace(self, _pending=list(self._pending))
        # Only in the copy: plans of a forward that runs are not complete, whoever reads must not end their counting.
        now.collect()
        return now

    def since(self, earlier: Statistics) -> Statistics:
        now = self.copy()
        for name in {one.name for one in fields(self)} - {"landing_bytes", "_pending", "load", "load_before"}:
            setattr(now, name, getattr(self, name) - getattr(earlier, name))
        now.load, now.load_before = _sum(self.load, -earlier.load), _sum(self.load_before, -earlier.load_before)
        return now

    @property
    def imbalance_before(self) -> float:
        """Max over mean of the ranks' attention without CAD; 1.0 where there was none."""
        return _ratio(self.slowest_before, self.mean)

    @property
    def imbalance(self) -> float:
        """The same as planned."""
        return _ratio(self.slowest, self.mean)

    @property
    def servers_idle(self) -> float:
        """Share of their time in which servers did not attend; 0 where nothing is known of any."""
        return max(0.0, 1.0 - self.served_s / self.servers_s) if self.servers_s > 0 else 0.0

    @property
    def planning_ms(self) -> float:
        return self.planning_s * 1e3 / max(self.micro_batches, 1)

    def as_events(self) -> dict[str, float]:
        """The figures that go to monitors and logs, by name."""
        looks = {
            "cad/forward_only_micro_batches": self.looks,
            "cad/forward_only_max_over_mean_before": _ratio(self.looks_slowest_before, self.looks_mean),
            "cad/forward_only_max_over_mean": _ratio(self.looks_slowest, self.looks_mean),
        }
        return {
            "cad/attention_max_over_mean_before": self.imbalance_before,
            "cad/attention_max_over_mean": self.imbalance,
            "cad/tokens_max_over_mean_before": _ratio(self.most_tokens_before, self.mean_tokens_before),
            "cad/tokens_max_over_mean": _ratio(self.most_tokens, self.mean_tokens),
            "cad/sent_MiB": self.bytes_sent / 2**20,
            "cad/landing_MiB": self.landing_bytes / 2**20,
            "cad/planning_ms": self.planning_ms,
            "cad/waited_s": self.waited_s,
            "cad/servers_idle": self.servers_idle,
        } | (looks if self.looks else {})

    def in_words(self, balance: str) -> str:
        return (
            f"{counted(self.micro_batches, 'micro-batch')}, {balance}, "
            f"{self.bytes_sent / 2**20 / max(self.micro_batches, 1):.1f} MiB sent for each, "
            f"{self.planning_ms:.1f} ms to plan each, {self.waited_s:.2f} s waited for exchanges"
            f"{f', {self.landing_bytes / 2**20:.0f} MiB kept for what arrives' if self.landing_bytes >> 20 else ''}"
            f"{f', servers idle {self.servers_idle:.0%}' if self.servers_s else ''}"
        )


def _ratio(most: float, mean: float) -> float:
    return most / mean if mean > 0 else 1.0


def _sum(*loads: Floats) -> Floats:
    """Also of different numbers of ranks: servers may come and go, behind the trainers."""
    total = np.zeros(max(one.size for one in loads))
    for one in loads:
        total[: one.size] += one
    return total
