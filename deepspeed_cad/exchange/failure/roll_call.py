"""Who is here: ranks that turn CAD on learn early which others do not.

A rank on whose host the package is missing, or turned off, says nothing: it goes on into collectives of its own, and
the others would wait for it in the opening of CAD's groups and fail without naming it. So each rank that has CAD signs
the job's store, and looks who else did. In: the default process group. Out: nothing, a warning that names the ranks
that are awaited, or one CADPeerError that does.

Where ranks meet on the host, on the job's store: each leaves a word and reads those of all others, in time.

Whoever makes memory or a communicator together with others meets them here first. Torch's and NCCL's own ways to meet
wait for a dead rank for half an hour, and know nothing of one that cannot do its part.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from deepspeed_cad.errors import CADError, CADPeerError, ServerLostError
from deepspeed_cad.exchange.failure.patience import wait_until
from deepspeed_cad.exchange.failure.store import PatientStore
from deepspeed_cad.exchange.failure.watchdog import Alarm
from deepspeed_cad.exchange.native_calls import Table

logger = logging.getLogger("deepspeed_cad")

PATIENCE_S = 10.0
"""Seconds of waiting after which absent ranks are named."""

_REASONS = (
    "deepspeed_cad is not installed there, or in another version; or DEEPSPEED_CAD_AUTOLOAD=0 is set there; or these "
    'ranks were not asked for CAD (another DeepSpeed JSON, no "cad" block). Run "deepspeed-cad doctor" on their hosts'
)


@contextmanager
def together() -> Iterator[None]:
    """Around a call in which all ranks meet in collectives, such as `deepspeed.initialize`, on each rank that has CAD.

    Whoever took part without signing before has no CAD. Raises CADPeerError, after PATIENCE_S, with their names. Where
    torch.distributed is only initialised inside the call nothing is compared.
    """
    signs = dist.is_initialized() and dist.get_world_size() > 1
    if signs:
        _store().set(f"has/{dist.get_rank()}", "1")
    yield
    if not signs:
        return
    # Collectives of the call may still be under way on the device; once they are done, every rank has entered it.
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    store, rank, world = _store(), dist.get_rank(), range(dist.get_world_size())
    if _wait(lambda: store.check([f"has/{one}" for one in world]), PATIENCE_S):
        return
    absent = [one for one in world if not store.check([f"has/{one}"])]
    raise CADPeerError(f"CAD is on on rank {rank} and not on {_name(absent)}: {_REASONS}")


def meet(group: dist.ProcessGroup | None, timeout_s: float) -> None:
    """Wait until every rank of the group turns CAD on, `timeout_s` at most; None: all ranks.

    Ranks may come at very different times, so those that are awaited for more than PATIENCE_S are named in a warning.
    Raises CADPeerError, naming them, when the time is over.
    """
    store, rank = _store(), dist.get_rank()
    ranks = dist.get_process_group_ranks(group) if group is not None else list(range(dist.get_world_size()))
    # A process may close its session and open another: this is the one of that number on each rank.
    turn = store.add(f"sessions/{rank}", 1)
    arrived = f"arrived/{ranks[0]}-{len(ranks)}/{turn}"
    store.add(arrived, 1)

    def all_here() -> bool:
        return store.add(arrived, 0) >= len(ranks)

    def absent() -> str:
        return _name([one for one in ranks if store.add(f"sessions/{one}", 0) < turn])

    if _wait(all_here, min(PATIENCE_S, timeout_s)):
        return
    if timeout_s > PATIENCE_S:
        logger.warning(
            "rank %d has waited %.0f s for %s to turn CAD on. If that never happens: %s",
            rank, PATIENCE_S, absent(), _REASONS,
        )  # fmt: skip
        if _wait(all_here, timeout_s - PATIENCE_S):
            return
    raise CADPeerError(f"rank {rank} waited {timeout_s:.0f} s for {absent()} to turn CAD on: {_REASONS}")


def _store() -> dist.Store:
    # Nothing may set a time-out on it: that reaches the store below, which is the whole job's.
    return dist.PrefixStore("deepspeed_cad/meet", dist.distributed_c10d._get_default_store())


def _wait(is_done: Callable[[], bool], seconds: float) -> bool:
    """Whether it is done within so many seconds. The store is asked less and less often."""
    end, pause = time.monotonic() + seconds, 0.001
    while not is_done():
        if time.monotonic() >= end:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.25)
    return True


def _name(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


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
