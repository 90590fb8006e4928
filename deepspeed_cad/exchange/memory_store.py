"""The store through which torch's symmetric memory lets ranks meet that have not all been there from the start.

Torch numbers what its symmetric memory exchanges, in keys "WHAT/NUMBER/RANK", by a counter of the process
(`StoreExchange` in its CUDASymmetricMemoryUtils.hpp; later versions count for each group). A server that came later has
exchanged less, so its keys would never be those that the others wait for, and all would wait without an end. Here each
number is replaced by its place among those of one group, in which all members exchange the same. Waiting asks again and
again, so it ends where a server is lost, too.

In: what torch asks of a store. Out: the same of the group's store, under names that are alike on all ranks.
"""

from __future__ import annotations

import re
from datetime import timedelta

import torch.distributed as dist

from deepspeed_cad.errors import CADPeerError, ServerLostError
from deepspeed_cad.exchange.alarm import Alarm
from deepspeed_cad.exchange.patience import wait_until

PAUSE_S = 1e-3
_KEY = re.compile(r"(.*)/(\d+)/(\d+)")


class MemoryStore(dist.Store):
    """Of one group, on one rank. Torch holds it by a pointer: whoever registers it has to keep it."""

    def __init__(self, store: dist.Store, alarm: Alarm) -> None:
        super().__init__()
        self._store, self._alarm = store, alarm
        self._places: dict[tuple[str, str], int] = {}

    def set(self, key: str, value: str) -> None:
        """Leave a value."""
        self._store.set(self._rename(key), value)

    def get(self, key: str) -> bytes:
        """A value, when it is there. Raises ServerLostError where a server is lost, CADPeerError where time is up."""
        self.wait([key])
        return self._store.get(self._rename(key))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """Several."""
        return [self.get(key) for key in keys]

    def check(self, keys: list[str]) -> bool:
        """Whether values are there."""
        return self._store.check([self._rename(key) for key in keys])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Until values are there; raises as `get`."""

        def are_there() -> bool:
            there = self.check(keys)
            if not there and (lost := self._alarm.lost()):
                raise ServerLostError(lost)
            return there

        if not wait_until(are_there, self._alarm.timeout_s, PAUSE_S):
            raise CADPeerError(
                f"rank {self._alarm.rank} waited {self._alarm.timeout_s:g} s for {', '.join(keys)} while ranks map "
                "each other's memory"
            )

    def _rename(self, key: str) -> str:
        found = _KEY.fullmatch(key)
        if found is None:
            return key
        what, number, rank = found.groups()
        place = self._places.setdefault((what, number), len(self._places))
        return f"{what}/place {place}/{rank}"
