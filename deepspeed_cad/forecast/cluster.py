"""A cluster: how many GPUs on how many hosts, and how long its collectives take.

In: ranks, ranks per host, a `Machine`. Out: seconds. Members of a group lie `stride` ranks apart: data-parallel
neighbours are `tensor` ranks apart where tensor parallelism takes the ranks between.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deepspeed_cad.forecast.machine import Machine
from deepspeed_cad.layout import Ints


@dataclass(frozen=True)
class Cluster:
    """GPUs, hosts and links."""

    ranks: int
    per_host: int
    """GPUs that share the fast links; of the smallest host where they differ."""
    machine: Machine
    sizes: tuple[int, ...] = ()
    """GPUs of each host, where they differ."""
    collective_between: float | None = None
    """Bytes a second of NCCL's collectives between hosts; None: what other transfers reach there."""

    @property
    def hosts(self) -> Ints:
        """[ranks]: number of each rank's host."""
        if self.sizes:
            return np.repeat(np.arange(len(self.sizes)), self.sizes)
        return np.arange(self.ranks, dtype=np.int64) // self.per_host

    def on_one_host(self, group: int, stride: int = 1) -> int:
        """Members of a group that share a host."""
        return max(1, min(group, self.per_host // stride))

    def gather(self, size: float, group: int, stride: int = 1) -> float:
        """Seconds of an all-gather after which every member has `size` bytes; a reduce-scatter of them takes as long.

        Hosts pass each part on once: what comes from other hosts is shared between the links of a host.
        """
        if group < 2:
            return 0.0
        here = self.on_one_host(group, stride)
        hosts = -(-group // here)
        inside = size * (here - 1) / here / self.machine.collective
        between = size * (hosts - 1) / hosts / (here * self._between)
        return max(inside, between) + self.machine.latency

    def all_to_all(self, size: float, group: int, stride: int = 1) -> float:
        """Seconds of an all-to-all of buffers of `size` bytes: packed, then moved; both kinds of links work at once."""
        if group < 2:
            return 0.0
        here = self.on_one_host(group, stride)
        inside = size * (here - 1) / group / self.machine.collective
        between = size * (group - here) / group / self._between
        packing = size * (group - 1) / group * self.machine.packing
        return max(inside, between) + packing + self.machine.latency

    @property
    def _between(self) -> float:
        """Bytes a second of collectives between hosts."""
        return self.collective_between or self.machine.between

    def shares(self, group: int, stride: int = 1) -> tuple[float, float]:
        """Of what a member of a group sends to all, the shares that stay on its host and that leave it."""
        here = self.on_one_host(group, stride)
        return (here - 1) / group, (group - here) / group
