"""Where ranks meet on the host, on the job's store: each leaves a word and reads those of all others, in time.

Whoever makes memory or a communicator together with others meets them here first. Torch's and NCCL's own ways to meet
wait for a dead rank for half an hour, and know nothing of one that cannot do its part.
"""

from __future__ import annotations

import torch.distributed as dist

from deepspeed_cad.errors import CADError, ServerLostError
from deepspeed_cad.exchange.alarm import Alarm
from deepspeed_cad.exchange.native_calls import Table
from deepspeed_cad.exchange.patience import wait_until
from deepspeed_cad.exchange.patient_store import PatientStore

PAUSE_S = 1e-3


class Meeting:
    """The meetings of one transport."""

    def __init__(self, store: dist.Store | None, members: Table, place: int, alarm: Alarm) -> None:
        """`store` None: a rank alone."""
        # A store behind a link that dies answers nobody, and asking it again and again would not end.
        self.store = None if store is None else PatientStore(store, alarm.timeout_s)
        self.members, self.place, self.alarm = members, place, alarm
        self._held = 0

    def hold(self, what: str, word: str = "") -> list[str]:
        """The words of all members, in their order. Every member calls it with the same `what`."""
        if self.store is None:
            return [word]
        self._held += 1
        keys = [f"{self._held}/{rank}" for rank in range(len(self.members))]
        store = self.store

        def are_here() -> bool:
            if store.check(keys):
                return True
            self.alarm.check()
            if lost := self.alarm.lost():
                raise ServerLostError(lost)
            return False

        def look_around() -> None:
            if found := self.alarm.in_vain():
                self.alarm.wait_no_more(what, found)

        try:
            # A mark before the word: some stores cannot keep an empty one.
            store.set(keys[self.place], f"={word}")
            # Asked again and again: waiting inside the store would keep this process's other threads out of it.
            if not wait_until(are_here, self.alarm.timeout_s, PAUSE_S, look_around):
                missing = [int(rank) for rank, key in zip(self.members, keys) if not store.check([key])]
                raise RuntimeError(f"ranks {missing} did not come within {self.alarm.timeout_s:g} s")
            return [store.get(key).decode()[1:] for key in keys]
        except CADError:
            raise
        except RuntimeError as error:
            raise self.alarm.explain(what, error) from error

    def agree(self, what: str, problem: str) -> None:
        """Go on only where no member has a problem ("" for none); else the same CADError on every member."""
        words = self.hold(what, problem)
        told = [f"rank {int(rank)}: {word}" for rank, word in zip(self.members, words) if word]
        if told:
            raise CADError(f"{what} failed on {len(told)} of {len(words)} ranks. {'; '.join(told)}")
