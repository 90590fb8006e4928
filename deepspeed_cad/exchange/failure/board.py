"""The error board: what every rank says of itself on the job's store, and who is missing when an exchange fails.

A rank that meets an error writes a line; ranks that write none within a few seconds are those that died or hang. In:
what this rank does, and a wait that does not end. Out: one error that names the ranks to blame.

Two ranks may also wait for each other in two places: a forward that only one rank runs asks the others for their
documents, and they wait for that rank in an exchange which it starts after that forward. So a rank whose training
thread is blocked leaves there how far it has come, and whoever waits in an exchange looks (`_standstill`).

Why this is never said of a rank that is only slow. Rank B is blocked: it waits for collective n of its look-ahead
thread, and has started s exchanges. Rank A waits in exchange e > s, and its look-ahead thread is done with all that it
was asked for, fewer than n collectives. Ranks that run the same program run the same collectives and exchanges, in the
same order: B waits for collective n before it starts exchange s + 1, so A asked for collective n before it started
exchange s + 1, let alone e. It did not, however long anything took. (Where only a stream of A waits, A may come to
collective n yet; its order is another one all the same.) No clock is compared, and what is old on the board does no
harm: a rank is past collective n only after all ranks came to it, and then A has begun n of them.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple, Protocol

import torch.distributed as dist

from deepspeed_cad.errors import CADError, CADPeerError, ServerLostError, in_one_line
from deepspeed_cad.exchange.failure.patience import EXCHANGE_PAUSE_S, PatientStore, SilentStoreError, wait_until
from deepspeed_cad.notice import counted

REMEMBERED = 256
"""Micro-batches that a rank remembers to have trained, or dropped: far more than are ever in flight."""
WORDS_S = 5.0
"""How long survivors wait for each other's word before they call the silent ranks dead."""
LOST = "lost its peers"
"""How a rank says that it stopped because others did, before it knows which."""
MOST = 2000
"""Characters of a line."""
REMEDY = (
    "Every rank must run the same forwards and backwards, in the same order: look for a forward without gradients, a "
    "skipped batch, or an exception that the script caught, on some rank only"
)


class Losses(Protocol):
    """Knows of servers that are lost, where the other ranks go on without them."""

    def why(self) -> str:
        """Why no exchange of the present group can end, or ""."""

    def wait(self) -> str:
        """The same for an exchange that failed: waits until it is known whether a server is to blame."""


class Place(NamedTuple):
    """Where a rank is that has trained nothing for a while."""

    micro_batches: int
    """That it has begun."""
    inside: bool
    """In a forward or a backward."""
    waits: bool
    """There for other ranks, and for long."""
    text: str
    exchanges: int = 0
    """That it has started."""

    def describe(self) -> str:
        return f"{self.text}, after {counted(self.micro_batches, 'micro-batch')}"


class Liveness:
    """The error board of one CAD group."""

    def __init__(self, store: dist.Store, rank: int, ranks: int, limit_s: float = 150.0) -> None:
        """A store that takes `limit_s` for an answer counts as lost."""
        self.store, self.rank, self.ranks = PatientStore(store, limit_s), rank, ranks
        self._stopped = self._closed = self._left = False
        self._said = ""
        self._dropped: deque[int] = deque(maxlen=REMEMBERED)
        self._taken: deque[int] = deque(maxlen=REMEMBERED)
        self.watched: Sequence[int] = range(ranks)
        """Ranks of this one's CAD group, whose exchanges have the same numbers."""
        self.beside: Sequence[int] = ()
        """Ranks with other shares of heads, of which in exchanges only counts that they stopped."""
        self.losses: Losses | None = None
        """Where the others go on without a server that is lost; from when training has opened its transport."""
        self.may_change = False
        """The same, known from the beginning."""
        self.started: Callable[[], int] = lambda: 0
        """Says how many exchanges this rank has started."""
        self.begun: Callable[[], int] = lambda: 0
        """Says how many collectives its look-ahead thread has begun."""
        self.idle_after: Callable[[], int | None] = lambda: None
        """The same; None while it still has jobs."""

    @property
    def others(self) -> list[int]:
        return [rank for rank in self.watched if rank != self.rank]

    def report(self, message: str) -> None:
        """This rank has stopped: leave a line for the others, the first one that there is reason for."""
        if not self._stopped:
            self._stopped = True
            self.write(f"error/{self.rank}", message)

    def announce(self, reason: str) -> None:
        """This rank will stop when it has trained what it announced before: leave the reason."""
        self._said = reason
        self.write(f"reason/{self.rank}", reason)

    def close(self) -> None:
        """This rank waits for nobody any more, and nobody need wait for it."""
        self._closed = True
        self.leave(self._said or "its session was closed", failed=bool(self._said))

    def leave(self, reason: str, failed: bool) -> None:
        """This rank begins nothing more. Where it `failed`, what it has begun may not end either."""
        if not self._left:
            self._left = True
            at = "0 0" if failed else f"{self.started()} {self.begun()}"
            self.write(f"closed/{self.rank}", f"{at} {reason}")

    def move(self, place: Place | None) -> None:
        """Tell where this rank is that trains nothing; None: it trains again."""
        self.write(f"place/{self.rank}", "" if place is None else json.dumps(place))

    def drop(self, micro_batches: Iterable[int]) -> None:
        """This rank will never train these micro-batches, given by their turn, although they were announced."""
        self._dropped.extend(micro_batches)
        self.write(f"dropped/{self.rank}", " ".join(map(str, self._dropped)))

    def take(self, micro_batch: int) -> None:
        self._taken.append(micro_batch)

    def block(self, collectives: int, subject: str) -> None:
        """This rank's training thread waits for a collective of its look-ahead thread: the n-th, about `subject`."""
        self.write(f"blocked/{self.rank}", f"{self.started()} {collectives} {subject}")

    def stop(self, reason: str) -> None:
        """Tell every rank to stop, and why."""
        self.report(reason)
        self.write("stop", reason)

    def reason(self, rank: int) -> str | None:
        """What a rank said when it stopped, or why it will."""
        return self._read("error", [rank]).get(rank) or self._read("reason", [rank]).get(rank)

    def left(self, ranks: Iterable[int], exchange: int = 0, collective: int = 0) -> dict[int, str]:
        """Of those that have left, and take no part in the exchange, or collective, of that number: why. 0: in any."""
        return {
            rank: why
            for rank, (exchanges, collectives, why) in self._read_reached("closed", ranks)
            if not (0 < exchange <= exchanges or 0 < collective <= collectives)
        }

    def places(self, ranks: Iterable[int]) -> dict[int, Place]:
        """Where ranks are, as far as they have told; one that trains is not among them."""
        return {rank: Place(*json.loads(line)) for rank, line in self._read("place", ranks).items() if line}

    def stopped(self) -> str:
        """Why some rank told all to stop, or ""."""
        return self.look_up("stop")

    def look_up(self, key: str) -> str:
        """What is under a key; "" where nothing is, or the store is gone."""
        with suppress(RuntimeError, OSError):
            return self.store.read([key]).get(key, "")
        return ""

    def patiently(
        self, is_over: Callable[[], bool], waited_for: str, exchange: int = 0, with_servers: bool = False,
        longest_pause_s: float = EXCHANGE_PAUSE_S, collective: int = 0, timeout_s: float = math.inf,
    ) -> bool:  # fmt: skip
        """Wait on the host for other ranks; raises CADPeerError as soon as it is certain that they will not come. Gives
        whether `is_over` said so, which never waits; False after `timeout_s`. `exchange`, `collective`: its number; 0:
        of none. `with_servers`: servers take part; where one is lost, ServerLostError says so."""
        before = ""

        def ask() -> bool:
            if is_over():
                return True
            if with_servers and (lost := self.lost()):
                raise ServerLostError(lost)
            return False

        def look_around() -> None:
            nonlocal before
            hopeless = "the session was closed" if self._closed else self.why_hopeless(exchange, collective)
            # Seen twice: what a rank sent before it stopped may still be on its way.
            before, hopeless = hopeless, hopeless and before
            if hopeless and self.only_lost():
                # Those that stopped were left alone themselves: find out by whom, as they do.
                raise self.explain(waited_for, RuntimeError(hopeless), with_servers)
            if hopeless:
                self.report(f"waited for {waited_for} in vain: {hopeless}")
                raise CADPeerError(f"rank {self.rank} waited for {waited_for}: {hopeless}")

        return wait_until(ask, timeout_s, look_around, longest_pause_s)

    def lost(self) -> str:
        """Why no exchange of the present group can end, where the others go on without a server; else ""."""
        return "" if self.losses is None else self.losses.why()

    def why_hopeless(self, exchange: int = 0, collective: int = 0) -> str:
        """Why waiting for the others, in an exchange or a collective of that number (0: in none), cannot end; or ""."""
        try:
            return "; ".join(self._hopeless(exchange, collective) or self._standstill(exchange))
        except (RuntimeError, OSError) as error:
            return _why_silent(error)

    def _hopeless(self, exchange: int, collective: int) -> list[str]:
        # Those with other shares take part in collectives.
        among = [*self.others, *self.beside] if collective else self.others
        words, taken = self._last_words(among, exchange, collective), set(map(str, self._taken))
        stopped = [f"rank {rank} stopped: {text}" for rank, text in words.items()]
        for rank, dropped in self._read("dropped", self.others).items():
            if missed := taken.intersection(dropped.split()):
                stopped.append(
                    f"rank {rank} left its loop before micro-batch {min(map(int, missed))} (counted from 0), which "
                    f"rank {self.rank} trains. Look for a break, or early stopping, on some rank only"
                )
        return stopped

    def _standstill(self, exchange: int) -> list[str]:
        """Of each rank that waits for lengths or a plan, and for this one in `exchange`: what it waits for."""
        if not exchange or (idle_after := self.idle_after()) is None:
            return []
        return [
            f"rank {rank} waits for the other ranks' {subject} before it starts exchange {exchanges + 1}, "
            f"which rank {self.rank} started without asking for that. {REMEDY}"
            for rank, (exchanges, collectives, subject) in self._read_reached("blocked", self.others)
            if exchanges < exchange and collectives > idle_after
        ]

    def only_lost(self) -> bool:
        """Whether all ranks that stopped did so because they lost others."""
        with suppress(RuntimeError, OSError):
            words = self._last_words(self.others).values()
            return bool(words) and all(text.startswith(LOST) for text in words)
        return False

    def explain(
        self, waited_for: str, error: BaseException, with_servers: bool = False, patience_s: float | None = None
    ) -> CADPeerError:
        """The error to raise on this rank: names those that died, hang, or stopped and why."""
        if with_servers and self.losses is not None and (lost := self.losses.wait()):
            return ServerLostError(lost)
        if not self.watched:
            return CADPeerError(f"rank {self.rank} waited for {waited_for}: {error}")
        self.report(f"{LOST} in {waited_for}")
        said: dict[int, str] = {}
        silent = sorted({*self.watched, self.rank})

        def all_said() -> bool:
            said.update(self._last_words(silent))
            silent[:] = [rank for rank in silent if rank not in said]
            return not silent

        try:
            wait_until(all_said, WORDS_S if patience_s is None else patience_s)
            who = self._describe(silent)
        except (RuntimeError, OSError) as gone:
            who = _why_silent(gone)
        stopped = [f"rank {rank} stopped: {text}" for rank, text in said.items() if not text.startswith(LOST)]
        who = who or "; ".join(stopped) or "every rank lost the connection"
        return CADPeerError(f"rank {self.rank} waited for {waited_for}: {who}. First error here: {in_one_line(error)}")

    def _describe(self, silent: Sequence[int]) -> str:
        places = self.places(silent)
        unknown = ", ".join(str(rank) for rank in silent if rank not in places)
        known = [f"rank {rank} did not come: it was last seen {one.describe()}" for rank, one in places.items()]
        return "; ".join([f"rank {unknown} died or hangs"] * bool(unknown) + known)

    def _last_words(self, ranks: Sequence[int], exchange: int = 0, collective: int = 0) -> dict[int, str]:
        """Why those ranks stopped, or left what is waited for; and those with other shares that have stopped."""
        errors = self._read("error", {*ranks, *self.beside})
        return dict(sorted({**self.left(ranks, exchange, collective), **errors}.items()))

    def _read(self, kind: str, ranks: Iterable[int]) -> dict[int, str]:
        keys = {f"{kind}/{rank}": rank for rank in ranks}
        return {keys[key]: line for key, line in self.store.read([*keys]).items()}

    def _read_reached(self, kind: str, ranks: Iterable[int]) -> Iterator[tuple[int, tuple[int, int, str]]]:
        """Of ranks that are blocked, or have left: exchanges, collectives, and what they wait for, or why they left."""
        for rank, line in self._read(kind, ranks).items():
            exchanges, collectives, text = line.split(" ", 2)
            yield rank, (int(exchanges), int(collectives), text)

    def write(self, key: str, text: str) -> None:
        """Leave something under a key of the board. A store that is gone is no reason to fail again."""
        with suppress(RuntimeError, OSError):
            self.store.set(key, text[:MOST])

    @staticmethod
    @contextmanager
    def watch(liveness: Liveness | None, waited_for: str, with_servers: bool = False) -> Iterator[None]:
        """Turns communication errors raised inside into a CADPeerError; `with_servers`: see `patiently`."""
        try:
            yield
        except CADError:
            raise
        except RuntimeError as error:
            if liveness is None:
                raise CADPeerError(f"{waited_for} failed: {in_one_line(error)}") from error
            raise liveness.explain(waited_for, error, with_servers) from error


def open_board(group: dist.ProcessGroup, rank: int, ranks: int, timeout_s: float = 300.0) -> Liveness:
    """The board of a group, on the store of the job's default process group. Nothing may set a time-out on that: a
    PrefixStore hands it down to the store of the whole job."""
    store = dist.PrefixStore(f"deepspeed_cad/{group.group_name}", dist.distributed_c10d._get_default_store())
    # torch numbers groups anew where a script initialises it again, on a store that may live on.
    turn = store.add(f"opened by {rank}", 1)
    return Liveness(dist.PrefixStore(str(turn), store), rank, ranks, timeout_s / 2)


def _why_silent(error: BaseException) -> str:
    if isinstance(error, SilentStoreError):
        return f"{error}: the host that holds it (that of rank 0, or of the launcher) cannot be reached"
    return "the job's store is gone: the process that holds it (rank 0, or the launcher) died"
