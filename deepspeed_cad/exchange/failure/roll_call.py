"""Who is here, by the job's store: each rank says so under a key of its own, and reads those of the others, in time.

Ranks that turn CAD on meet here, because one on whose host the package is missing goes on into collectives of its own.
So does whoever makes memory or a communicator with others: torch's and NCCL's own ways to meet wait half an hour for a
dead rank, and know nothing of one that cannot do its part.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

import torch
import torch.distributed as dist

from deepspeed_cad.errors import CADError, CADPeerError
from deepspeed_cad.exchange.failure.patience import LATE_S, PatientStore, wait_until
from deepspeed_cad.exchange.failure.watchdog import Alarm
from deepspeed_cad.notice import name_ranks

logger = logging.getLogger("deepspeed_cad")

Name = TypeVar("Name")

_REASONS = (
    "deepspeed_cad is not installed there, or in another version; or DEEPSPEED_CAD_AUTOLOAD=0 is set there; or these "
    'ranks were not asked for CAD (another DeepSpeed JSON, no "cad" block), or did not run the forward at which CAD is '
    'turned on here. Run "deepspeed-cad doctor" on their hosts'
)


@contextmanager
def together() -> Iterator[None]:
    """Around a call in which all ranks meet in collectives, such as `deepspeed.initialize`, on each rank that has CAD.
    Whoever took part without signing has no CAD: CADPeerError, after LATE_S, with their names. Where torch.distributed
    is only initialised inside the call nothing is compared."""
    signs = dist.is_initialized() and dist.get_world_size() > 1
    if signs:
        _store().set(f"has/{dist.get_rank()}", "1")
    yield
    if not signs:
        return
    # Collectives of the call may still be under way on the device; once they are done, every rank has entered it.
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    store, keys = _store(), {rank: f"has/{rank}" for rank in range(dist.get_world_size())}
    if not wait_until(lambda: store.check([*keys.values()]), LATE_S) and (absent := missing(keys, store.check)):
        raise CADPeerError(f"CAD is on on rank {dist.get_rank()} and not on {name_ranks(absent)}: {_REASONS}")


def call_roll(timeout_s: float) -> None:
    """Wait until every rank of the job turns CAD on. Those that are awaited for long are named in a warning; when time
    is up, in a CADPeerError."""
    store, rank, ranks = _store(), dist.get_rank(), range(dist.get_world_size())
    # A process may close its session and open another: this is the one of that number on each rank.
    turn = store.add(f"sessions/{rank}", 1)
    # Counted, because thousands of ranks may wait here for long.
    arrived = f"arrived/{turn}"
    store.add(arrived, 1)

    def absent() -> str:
        return name_ranks([one for one in ranks if store.add(f"sessions/{one}", 0) < turn])

    def warn(waited_s: float) -> None:
        logger.warning(
            "rank %d has waited %.0f s for %s to turn CAD on. If that never happens: %s",
            rank, waited_s, absent(), _REASONS,
        )  # fmt: skip

    if not wait_until(lambda: store.add(arrived, 0) >= len(ranks), timeout_s, when_late=warn):
        raise CADPeerError(f"rank {rank} waited {timeout_s:.0f} s for {absent()} to turn CAD on: {_REASONS}")


def _store() -> dist.Store:
    # Nothing may set a time-out on it: that reaches the whole job's store.
    return dist.PrefixStore("deepspeed_cad/roll_call", dist.distributed_c10d._get_default_store())


def missing(keys: Mapping[Name, str], are_there: Callable[[list[str]], bool]) -> list[Name]:
    """Those whose keys are not there; `are_there` asks a store."""
    return [name for name, key in keys.items() if not are_there([key])]


class RollCall:
    """The roll calls of one transport, in which ranks also leave words."""

    def __init__(self, store: dist.Store, ranks: int, alarm: Alarm) -> None:
        # A store behind a link that dies answers nobody, and asking it again and again would not end.
        self.store, self.ranks, self.alarm = PatientStore(store, alarm.timeout_s), ranks, alarm
        self._calls = 0

    def call(self, what: str, word: str = "") -> list[str]:
        """The words of all ranks, in their order. Every rank calls it with the same `what`."""
        self._calls += 1
        store, alarm, board = self.store, self.alarm, self.alarm.liveness
        keys = {rank: f"{self._calls}/{rank}" for rank in range(self.ranks)}

        def are_here() -> bool:
            alarm.check()
            return store.check([*keys.values()])

        try:
            # A mark before the word: some stores cannot keep an empty one.
            store.set(keys[alarm.rank], f"={word}")
            # Asked again and again: waiting inside the store would keep this process's other threads out of it.
            if not board.patiently(are_here, what, board.started() + 1, with_servers=True, timeout_s=alarm.timeout_s):
                absent = [alarm.in_job(rank) for rank in missing(keys, store.check)]
                raise RuntimeError(f"ranks {absent} did not come within {alarm.timeout_s:g} s")
            return [word[1:] for word in store.read([*keys.values()]).values()]
        except CADError:
            raise
        except RuntimeError as error:
            raise alarm.explain(what, error) from error

    def agree(self, what: str, problem: str, kind: type[CADError] = CADError) -> None:
        """Go on only where no rank has a problem ("" for none); else the same error on every rank."""
        said = enumerate(self.call(what, problem))
        if told := [f"rank {self.alarm.in_job(rank)}: {word}" for rank, word in said if word]:
            raise kind(f"{what} failed on {len(told)} of {self.ranks} ranks. {'; '.join(told)}")
