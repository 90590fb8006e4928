"""Who is missing when an exchange fails: turns a communication error into one that names the rank.

Every rank that meets an error writes a line into the job's store; the ranks that do not write one within a few
seconds are those that died or hang. Ranks that stopped with an error of their own are quoted.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from types import TracebackType

import torch.distributed as dist

from deepspeed_cad.errors import CADError, CADPeerError

PATIENCE_S = 5.0
"""How long survivors wait for each other's word before they call the silent ranks dead."""


class Liveness:
    """The error board of one CAD group."""

    def __init__(self, store: dist.Store, rank: int, ranks: int) -> None:
        self.store, self.rank, self.ranks = store, rank, ranks

    def report(self, message: str) -> None:
        """Leave a line for the other ranks; a store that is gone is no reason to fail again."""
        try:
            self.store.set(f"error/{self.rank}", message[:2000])
        except (RuntimeError, OSError):
            return

    def stop(self, reason: str) -> None:
        """Tell every rank to stop, and why."""
        self.report(reason)
        try:
            self.store.set("stop", reason[:2000])
        except (RuntimeError, OSError):
            return

    def stopped(self) -> str:
        """Why some rank told all to stop, or ""."""
        try:
            return self.store.get("stop").decode() if self.store.check(["stop"]) else ""
        except (RuntimeError, OSError):
            return ""

    def explain(self, waited_for: str, error: BaseException) -> CADPeerError:
        """The error to raise on this rank: names the ranks that died, hang, or stopped and why."""
        self.report(f"lost its peers in {waited_for}")
        said: dict[int, str] = {}
        deadline = time.monotonic() + PATIENCE_S
        try:
            while len(said) < self.ranks and time.monotonic() < deadline:
                for rank in range(self.ranks):
                    if rank not in said and self.store.check([f"error/{rank}"]):
                        said[rank] = self.store.get(f"error/{rank}").decode()
                time.sleep(0.05)
        except (RuntimeError, OSError):
            return CADPeerError(
                f"rank {self.rank} waited for {waited_for}, and the job's store is gone too: the process that holds it "
                f"(rank 0, or the launcher) died. First error here: {_first_line(error)}"
            )
        silent = [rank for rank in range(self.ranks) if rank not in said]
        stopped = [f"rank {rank} stopped: {text}" for rank, text in said.items() if not text.startswith("lost its")]
        if silent:
            who = f"rank {', '.join(map(str, silent))} died or hangs"
        else:
            who = "; ".join(stopped) or "every rank lost the connection"
        return CADPeerError(f"rank {self.rank} waited for {waited_for}: {who}. First error here: {_first_line(error)}")

    class Watch(AbstractContextManager[None]):
        """Turns communication errors raised inside into a CADPeerError."""

        def __init__(self, liveness: Liveness | None, waited_for: str) -> None:
            self.liveness, self.waited_for = liveness, waited_for

        def __exit__(
            self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
        ) -> None:
            if isinstance(error, RuntimeError) and not isinstance(error, CADError):
                if self.liveness is None:
                    raise CADPeerError(f"{self.waited_for} failed: {_first_line(error)}") from error
                raise self.liveness.explain(self.waited_for, error) from error

    @staticmethod
    def watch(liveness: Liveness | None, waited_for: str) -> Liveness.Watch:
        """A context in which communication errors are explained."""
        return Liveness.Watch(liveness, waited_for)


def open_board(group: dist.ProcessGroup, rank: int, ranks: int) -> Liveness:
    """The board of a group, on the store of the job's default process group.

    Nothing here waits inside the store: only what is there is read. Its time-out is the job's, for whom communicators
    are opened later, and a PrefixStore hands the time-out that it is given down to the store of the whole job.
    """
    store = dist.distributed_c10d._get_default_store()
    return Liveness(dist.PrefixStore(f"deepspeed_cad/{group.group_name}", store), rank, ranks)


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0][:300] if text else type(error).__name__
