"""The store through which ranks map each other's memory, as torch's symmetric memory has to see it.

In: the store of a group. Out: the same, with keys that are alike on all members, and waits that end where one is lost.
"""

from __future__ import annotations

import re
from datetime import timedelta

import torch.distributed as dist

from deepspeed_cad.errors import CADPeerError
from deepspeed_cad.exchange.failure.watchdog import Alarm

_KEY = re.compile(r"(.*)/(\d+)/(\d+)")


class MemoryStore(dist.Store):
    """The store of one group through which its ranks map each other's memory, not all of them there from the start.

    Torch numbers what its symmetric memory exchanges, in keys "WHAT/NUMBER/RANK", by a counter of the process
    (`StoreExchange` in its CUDASymmetricMemoryUtils.hpp; later versions count for each group). A server that came later
    has exchanged less, so its keys would never be those that the others wait for. Here each number is replaced by its
    place among those of the group, in which all members exchange the same.

    Torch holds it by a pointer: whoever registers it has to keep it.
    """

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

    def check(self, keys: list[str]) -> bool:
        """Whether values are there."""
        return self._store.check([self._rename(key) for key in keys])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Until values are there; raises as `get`."""
        alarm = self._alarm
        # Asked again and again, so that it ends where a server is lost.
        if not alarm.liveness.patiently(
            lambda: self.check(keys), "other ranks' memory", with_servers=True, timeout_s=alarm.timeout_s
        ):
            raise CADPeerError(
                f"rank {alarm.rank} waited {alarm.timeout_s:g} s for {', '.join(keys)} while ranks map "
                "each other's memory"
            )

    def _rename(self, key: str) -> str:
        found = _KEY.fullmatch(key)
        if found is None:
            return key
        what, number, rank = found.groups()
        place = self._places.setdefault((what, number), len(self._places))
        return f"{what}/place {place}/{rank}"
