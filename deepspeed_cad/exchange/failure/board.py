"""Who is missing when an exchange fails: turns a communication error into one that names the rank.

Every rank that meets an error writes a line into the job's store; the ranks that do not write one within a few
seconds are those that died or hang. Ranks that stopped with an error of their own are quoted.

Ranks may also wait for each other in two places: one for lengths or a plan, another one for it in an exchange.

A forward that only one rank runs asks the others for their documents, and they wait for that rank in an exchange which
it starts after that forward: neither ends. In: what a rank whose training thread is blocked has left on the board. Out:
whether this rank, which waits in an exchange, is the one that it waits for.

Why this is never said of a rank that is only slow. Rank B is blocked: it waits for collective n of its look-ahead
thread, and has started s exchanges. Rank A waits in exchange e > s, and its look-ahead thread is done with all that it
was asked for, fewer than n collectives. Ranks that run the same program run the same collectives and exchanges, and in
the same order: B waits for collective n before it starts exchange s + 1, so A asked for collective n before it started
exchange s + 1, let alone e. It did not, however long anything took. Where the host waits in exchanges it cannot end,
either: collective n needs A, whose training thread is kept by exchange e, which needs B, whose training thread is kept
by collective n. Where only a stream waits A may come to collective n yet; its order is another one all the same.

No clock is compared, and what was left on the board may be old: a rank is past collective n only after all ranks came
to it, and then A has begun n of them. Loaders that are slow, plans that are late, ranks that compute something else
meanwhile are on the way to what they are waited for, and A has asked for no less than B.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Protocol

import torch.distributed as dist

from deepspeed_cad.errors import CADError, CADPeerError, ServerLostError
from deepspeed_cad.exchange.failure.patience import LOOK_S
from deepspeed_cad.exchange.failure.store import PatientStore, SilentStoreError
from deepspeed_cad.notice import counted

REMEDY = (
    "Every rank must run the same forwards and backwards, in the same order: look for a forward without gradients, a "
    "skipped batch, or an exception that the script caught, on some rank only"
)


@dataclass(frozen=True)
class Blocked:
    """A training thread that waits for its look-ahead thread, which is in a collective."""

    exchanges: int
    """Exchanges that the rank has started."""
    collectives: int
    """Collectives that its look-ahead thread has begun, the one that it is in included."""
    subject: str
    """What that one is about."""

    def to_text(self) -> str:
        """One line for the board."""
        return f"{self.exchanges} {self.collectives} {self.subject}"

    @classmethod
    def from_text(cls, text: str) -> Blocked:
        """The inverse of `to_text`."""
        exchanges, collectives, subject = text.split(" ", 2)
        return cls(int(exchanges), int(collectives), subject)

    def needs(self, exchange: int, collectives: int) -> bool:
        """Whether it waits for a rank that waits in this exchange, and whose look-ahead thread has nothing to do after
        so many collectives."""
        return self.exchanges < exchange and self.collectives > collectives

    def describe(self, rank: int, waiting: int) -> str:
        """In words: `rank` is blocked, `waiting` is the rank that waits for it in an exchange."""
        return (
            f"rank {rank} waits for the other ranks' {self.subject} before it starts exchange {self.exchanges + 1}, "
            f"which rank {waiting} started without asking for that. {REMEDY}"
        )


REMEMBERED = 256
"""Micro-batches that a rank remembers to have trained, or dropped: far more than are ever in flight."""
LOST = "lost its peers"
"""How a rank says that it stopped because others did, before it knows which."""
PATIENCE_S = 5.0
"""How long survivors wait for each other's word before they call the silent ranks dead."""


class Work(Protocol):
    """What is needed of dist.Work."""

    def is_completed(self) -> bool:
        """Whether it is over; it never waits."""


class Losses(Protocol):
    """Knows of servers that are lost, where the other ranks go on without them."""

    def why(self) -> str:
        """Why no exchange of the present group can end, or ""."""

    def wait(self) -> str:
        """The same for an exchange that failed: waits until it is known whether a server is to blame."""


@dataclass(frozen=True)
class Place:
    """Where a rank is that has trained nothing for a while."""

    micro_batches: int
    """That it has begun."""
    inside: bool
    """In a forward or a backward."""
    waits: bool
    """There for other ranks, and for long."""
    text: str

    def describe(self) -> str:
        """In words, behind "is" or "was"."""
        return f"{self.text}, after {counted(self.micro_batches, 'micro-batch')}"

    @classmethod
    def from_text(cls, text: str) -> Place | None:
        """From a line of the board; None where the rank trains again."""
        return cls(**json.loads(text)) if text else None


class Liveness:
    """The error board of one CAD group."""

    def __init__(self, store: dist.Store | PatientStore, rank: int, ranks: int) -> None:
        self.store, self.rank, self.ranks = store, rank, ranks
        self._stopped = self._closed = self._left = False
        self._said = ""
        self._dropped: deque[int] = deque(maxlen=REMEMBERED)
        self._taken: deque[int] = deque(maxlen=REMEMBERED)
        self.idle_after: Callable[[], int | None] = lambda: None
        """Says how many collectives this rank's look-ahead thread has begun; None while it still has jobs."""
        self.watched: Sequence[int] = range(ranks)
        """Ranks without which the others cannot go on."""
        self.losses: Losses | None = None
        """Where the others go on without a server that is lost; from when training has opened its transport."""
        self.may_change = False
        """Whether they are to: known from the beginning."""
        self.started: Callable[[], int] = lambda: 0
        """Says how many exchanges this rank has started."""
        self.begun: Callable[[], int] = lambda: 0
        """Says how many collectives its look-ahead thread has begun."""

    def report(self, message: str) -> None:
        """This rank has stopped: leave a line for the others, the first one that there is reason for."""
        if not self._stopped:
            self._stopped = True
            self._write("error", message)

    def announce(self, reason: str) -> None:
        """This rank will stop when it has trained what it announced before: leave the reason."""
        self._said = reason
        self._write("reason", reason)

    def reason(self, rank: int) -> str | None:
        """What a rank said when it stopped, or why it will."""
        return self._read("error", rank) or self._read("reason", rank)

    def close(self) -> None:
        """This rank waits for nobody any more, and nobody need wait for it."""
        self._closed = True
        self.leave(self._said or "its session was closed", failed=bool(self._said))

    def leave(self, reason: str, failed: bool) -> None:
        """This rank begins nothing more; only the first word counts. Where it `failed`, what it has begun may not end
        either."""
        if not self._left:
            self._left = True
            begun = (0, 0) if failed else (self.started(), self.begun())
            self._write("closed", f"{begun[0]} {begun[1]} {reason}")

    def left(self, rank: int, exchange: int = 0, collective: int = 0) -> str | None:
        """Why a rank has left, where it takes no part in the exchange, or collective, of that number; 0: in any."""
        line = self._read("closed", rank)
        if line is None:
            return None
        exchanges, collectives, reason = line.split(" ", 2)
        takes_part = 0 < exchange <= int(exchanges) or 0 < collective <= int(collectives)
        return None if takes_part else reason

    def move(self, place: Place | None) -> None:
        """Tell where this rank is that trains nothing; None: it trains again."""
        self._write("place", "" if place is None else json.dumps(asdict(place)))

    def place(self, rank: int) -> Place | None:
        """Where a rank is, if it has told."""
        return Place.from_text(self._read("place", rank) or "")

    def drop(self, micro_batches: Iterable[int]) -> None:
        """This rank will never train these micro-batches, given by their turn, although they were announced."""
        self._dropped.extend(micro_batches)
        self._write("dropped", " ".join(map(str, self._dropped)))

    def take(self, micro_batch: int) -> None:
        """This rank trains the micro-batch of this turn."""
        self._taken.append(micro_batch)

    def block(self, collectives: int, subject: str) -> None:
        """This rank's training thread waits for a collective of its look-ahead thread: the n-th, about `subject`."""
        self._write("blocked", Blocked(self.started(), collectives, subject).to_text())

    def patiently(
        self, work: Work, waited_for: str, exchange: int = 0, with_servers: bool = False,
        longest_pause_s: float = 1e-3, collective: int = 0,
    ) -> None:  # fmt: skip
        """Wait on the host for communication; raises CADPeerError as soon as it is certain that it will not end.

        `exchange`, `collective`: the number of that which it belongs to; 0: to none. `with_servers`: reserved servers
        take part; where they may be lost, ServerLostError says that one is. `longest_pause_s`: between two looks.
        """
        pause, looked, before = 20e-6, time.monotonic(), ""
        while not work.is_completed():
            if with_servers and self.losses is not None and (lost := self.losses.why()):
                raise ServerLostError(lost)
            time.sleep(pause)
            pause = min(2 * pause, longest_pause_s)
            if time.monotonic() - looked > LOOK_S:
                looked = time.monotonic()
                hopeless = "the session was closed" if self._closed else self.why_hopeless(exchange, collective)
                # Seen twice: what a rank sent before it stopped may still be on its way.
                before, hopeless = hopeless, hopeless and before
                if hopeless and self.only_lost():
                    # Those that stopped were left alone themselves: find out by whom, as they do.
                    raise self.explain(waited_for, RuntimeError(hopeless), with_servers)
                if hopeless:
                    self.report(f"waited for {waited_for} in vain: {hopeless}")
                    raise CADPeerError(f"rank {self.rank} waited for {waited_for}: {hopeless}")

    def why_hopeless(self, exchange: int = 0, collective: int = 0) -> str:
        """Why waiting for the other ranks cannot end: one has stopped, or left its loop; empty while it may.

        `exchange`: the number of the exchange in which, or before which, this rank waits; 0: in none. One that waits in
        an exchange also asks whether the others wait for it elsewhere (`Blocked`). `collective`: likewise, of its
        look-ahead thread.
        """
        try:
            return "; ".join(self._hopeless(exchange, collective) or self._standstill(exchange))
        except SilentStoreError as error:
            return f"{error}: the host that holds it (that of rank 0, or of the launcher) cannot be reached"
        except (RuntimeError, OSError):
            return "the job's store is gone: the process that holds it (rank 0, or the launcher) died"

    def _hopeless(self, exchange: int, collective: int) -> list[str]:
        others = [rank for rank in self.watched if rank != self.rank]
        stopped = [
            f"rank {rank} stopped: {text}"
            for rank in others
            if (text := self._read("error", rank) or self.left(rank, exchange, collective))
        ]
        for rank in others:
            missed = set((self._read("dropped", rank) or "").split()) & set(map(str, self._taken))
            if missed:
                stopped.append(
                    f"rank {rank} left its loop before micro-batch {min(map(int, missed))} (counted from 0), which "
                    f"rank {self.rank} trains. Look for a break, or early stopping, on some rank only"
                )
        return stopped

    def only_lost(self) -> bool:
        """Whether all ranks that stopped did so because they lost others."""
        others = [rank for rank in self.watched if rank != self.rank]
        try:
            said = [text for rank in others if (text := self._read("error", rank) or self.left(rank))]
        except (RuntimeError, OSError):
            return False
        return bool(said) and all(text.startswith(LOST) for text in said)

    def _standstill(self, exchange: int) -> list[str]:
        """Of each rank that waits for lengths or a plan, and for this one: what it waits for."""
        collectives = self.idle_after() if exchange else None
        if collectives is None:
            return []
        said = {rank: self._read("blocked", rank) for rank in self.watched if rank != self.rank}
        blocked = {rank: Blocked.from_text(text) for rank, text in said.items() if text is not None}
        return [one.describe(rank, self.rank) for rank, one in blocked.items() if one.needs(exchange, collectives)]

    def _read(self, kind: str, rank: int) -> str | None:
        key = f"{kind}/{rank}"
        return self.store.get(key).decode() if self.store.check([key]) else None

    def _write(self, kind: str, text: str) -> None:
        # A store that is gone is no reason to fail again.
        try:
            self.store.set(f"{kind}/{self.rank}", text[:2000])
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

    def explain(
        self, waited_for: str, error: BaseException, with_servers: bool = False, patience_s: float | None = None
    ) -> CADPeerError:
        """The error to raise on this rank: names the ranks that died, hang, or stopped and why.

        `patience_s`: for the others' words, by default PATIENCE_S.
        """
        if with_servers and self.losses is not None and (lost := self.losses.wait()):
            return ServerLostError(lost)
        self.report(f"{LOST} in {waited_for}")
        said: dict[int, str] = {}
        watched = sorted({*self.watched, self.rank})
        deadline = time.monotonic() + (PATIENCE_S if patience_s is None else patience_s)
        try:
            while True:
                for rank in watched:
                    if rank not in said and (text := self._read("error", rank) or self.left(rank)):
                        said[rank] = text
                if len(said) == len(watched) or time.monotonic() >= deadline:
                    break
                time.sleep(0.05)
            absent = self._describe([rank for rank in watched if rank not in said])
        except SilentStoreError as unanswered:
            return CADPeerError(
                f"rank {self.rank} waited for {waited_for}, and {unanswered}: the host that holds it (that of rank "
                f"0, or of the launcher) cannot be reached. First error here: {_first_line(error)}"
            )
        except (RuntimeError, OSError):
            return CADPeerError(
                f"rank {self.rank} waited for {waited_for}, and the job's store is gone too: the process that holds it "
                f"(rank 0, or the launcher) died. First error here: {_first_line(error)}"
            )
        stopped = [f"rank {rank} stopped: {text}" for rank, text in said.items() if not text.startswith(LOST)]
        who = absent or "; ".join(stopped) or "every rank lost the connection"
        return CADPeerError(f"rank {self.rank} waited for {waited_for}: {who}. First error here: {_first_line(error)}")

    def _describe(self, silent: Sequence[int]) -> str:
        """Ranks that did not say that they stopped: where they are, or that nothing is known of them."""
        places = {rank: place for rank in silent if (place := self.place(rank)) is not None}
        unknown = ", ".join(str(rank) for rank in silent if rank not in places)
        known = [f"rank {rank} did not come: it was last seen {one.describe()}" for rank, one in places.items()]
        return "; ".join([f"rank {unknown} died or hangs"] * bool(unknown) + known)

    class Watch(AbstractContextManager[None]):
        """Turns communication errors raised inside into a CADPeerError."""

        def __init__(self, liveness: Liveness | None, waited_for: str, with_servers: bool) -> None:
            self.liveness, self.waited_for, self.with_servers = liveness, waited_for, with_servers

        def __exit__(
            self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
        ) -> None:
            if isinstance(error, RuntimeError) and not isinstance(error, CADError):
                if self.liveness is None:
                    raise CADPeerError(f"{self.waited_for} failed: {_first_line(error)}") from error
                raise self.liveness.explain(self.waited_for, error, self.with_servers) from error

    @staticmethod
    def watch(liveness: Liveness | None, waited_for: str, with_servers: bool = False) -> Liveness.Watch:
        """A context in which communication errors are explained; `with_servers`: see `patiently`."""
        return Liveness.Watch(liveness, waited_for, with_servers)


def open_board(group: dist.ProcessGroup, rank: int, ranks: int, timeout_s: float = 300.0) -> Liveness:
    """The board of a group, on the store of the job's default process group.

    A store that takes half of `timeout_s` for an answer counts as lost.

    Nothing here waits inside the store: only what is there is read. Its time-out is the job's, for whom communicators
    are opened later, and a PrefixStore hands the time-out that it is given down to the store of the whole job.
    """
    store = dist.distributed_c10d._get_default_store()
    board = dist.PrefixStore(f"deepspeed_cad/{group.group_name}", store)
    return Liveness(PatientStore(board, timeout_s / 2), rank, ranks)


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0][:300] if text else type(error).__name__
