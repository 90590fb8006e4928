"""A trainer's side of servers that die, or come later: how all trainers agree on who is there, and go on.

A thread of its own does it, whatever the training thread is doing (attention/surviving says why). It begins when

- a server is lost: its socket here has closed, it has said that it failed, or nothing at all, or another trainer has
  found that; or
- the training thread comes to a micro-batch from which on servers take part that came later. All trainers have heard of
  these with the lengths of that micro-batch, so all of them begin at the same point.

Then, in each trainer:

1. The training thread is halted. If it is in an exchange, that ends by ServerLostError.
2. Trainers tell each other, through the job's store, whom they lost, which passes of attention they entered, and which
   of those did not run to their end. Who is lost to one is dropped by all.
3. Trainers and the servers that are left, or have come, open another group. Trainer 0 tells servers to. One that is
   dropped and lives reads that on the board. Where one more server is lost from here on, this begins again at 2.
4. Passes that all trainers entered and some did not finish run again, with new plans. What only some trainers entered
   has exchanged nothing: it begins anew when the training thread goes on.

In: what sockets and the store say. Out: a new crew and transport for plans. Nothing is lost and nothing counts twice.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from deepspeed_cad.ahead.crew import Crew
from deepspeed_cad.attention.call import Calls
from deepspeed_cad.attention.microbatch import MicroBatch
from deepspeed_cad.attention.surviving.call import SurvivingCall
from deepspeed_cad.attention.surviving.origin import stream_beside
from deepspeed_cad.attention.surviving.passes import Passes
from deepspeed_cad.config import CADConfig
from deepspeed_cad.errors import CADError, CADPeerError, ServerLostError
from deepspeed_cad.exchange.failure.board import Liveness
from deepspeed_cad.exchange.failure.patience import LOOK_S, PAUSE_S, wait_until
from deepspeed_cad.exchange.failure.roll_call import missing
from deepspeed_cad.exchange.probe import Opened
from deepspeed_cad.exchange.transport import Transport
from deepspeed_cad.layout import Ints
from deepspeed_cad.notice import notice
from deepspeed_cad.planner.plan import Floats
from deepspeed_cad.server.handshake import CONNECT_S, connect_to
from deepspeed_cad.server.orders import REGROUP
from deepspeed_cad.server.rendezvous import Rendezvous
from deepspeed_cad.server.servers import ReservedServers
from deepspeed_cad.server.split import Split
from deepspeed_cad.server.surviving.board import ASKED
from deepspeed_cad.server.surviving.link import SurvivingLink
from deepspeed_cad.server.surviving.members import Members
from deepspeed_cad.server.surviving.regroup import regroup
from deepspeed_cad.threads import start_daemon

logger = logging.getLogger("deepspeed_cad")

BLAME_S = 12.0
"""For the socket of a server to close after an exchange failed: a host that vanished is noticed within about 10 s."""


class Word(NamedTuple):
    """What a trainer says in a change: JSON in the store."""

    gone: list[int]
    """Servers that it lost."""
    came: int
    """Servers that came later and should take part."""
    entered: int
    """Passes of attention that it entered."""
    without_result: list[int]
    """Those of them that did not run to their end."""
    exchanges: int
    """That it started."""


class SurvivingServers(ReservedServers):
    """See NoServers; to this trainer's exchanges, what says that a server is lost (Losses)."""

    link: SurvivingLink
    columns = 1
    """Of a Reporter, which it is."""

    def __init__(
        self, role: Split, config: CADConfig, liveness: Liveness, link: SurvivingLink, device: torch.device
    ) -> None:
        """Those that the job began with."""
        super().__init__(role, config, liveness, link)
        self.device, self.passes, self.reporters = device, Passes(), (self,)
        self.newcomers = 0
        """Servers that came later, as far as trainer 0 knows."""
        self.came = 0
        """The same, as all trainers have heard."""
        self.repeated = 0
        """Passes that ran again."""
        self._meeting = Rendezvous(role, config.timeout_s)
        self._transport: Transport | None = None
        self._given_up: list[Callable[[], None]] = []
        """Release the memory of transports that were given up."""
        self._wanted = self._admitted = 0
        self._called = -1
        self._looked = 0.0
        self._wake = threading.Event()
        self._closed = False

    def begin(self, transport: Transport | None, install: Callable[[Opened | None], None]) -> None:
        self._transport = transport
        self.liveness.watched, self.liveness.losses = range(self.role.trainers), self
        self.link.heard = self._wake.set
        start_daemon("changes servers", lambda: self._run(install), self.device)

    def crew(self, opened: Opened | None, speeds: Floats | None) -> Crew:
        return replace(super().crew(opened, speeds), calls=self._calls)

    def _calls(self, plan_again: Callable[[MicroBatch], None]) -> Calls:
        # Trainers plan again at different moments.
        make, admit = partial(SurvivingCall, passes=self.passes), partial(self.admit, self.came)
        return Calls(make, admit, plan_again, compares_plans=False)

    def close(self) -> None:
        self._closed = True
        self._wake.set()
        self.passes.close()

    def report(self, model: int) -> Ints:
        """Servers that came later."""
        return np.array([self.newcomers])

    def hear(self, model: int, reports: Ints) -> None:
        """From the micro-batch on with which all trainers hear of them, they take part."""
        self.came = max(self.came, int(reports.max()))

    # What exchanges ask

    def why(self) -> str:
        members, gone = self.members, self.link.gone
        if lost := [number for number in members.servers if number in gone]:
            return "; ".join(f"server {number} ended: {gone[number]}" for number in lost)
        now = time.monotonic()
        if now - self._looked > LOOK_S:
            self._looked = now
            with suppress(CADPeerError):  # whoever waits for anything finds that the store is gone
                if self._meeting.has([f"called/{members.generation}"]):
                    self._called = members.generation
                    self._wake.set()
        return "another trainer has lost a server" if self._called == members.generation else ""

    def wait(self) -> str:
        with suppress(CADPeerError):
            return wait_until(self.why, BLAME_S * bool(self.members.servers), self._look_for_trainers)
        return ""

    def admit(self, came: int) -> None:
        """The training thread comes to a micro-batch in which so many servers take part that came later."""
        while came > self._admitted:
            generation = self.members.generation
            self._wanted = came
            self._wake.set()
            self.passes.wait_for_change(generation)

    # The thread that changes servers

    def _run(self, install: Callable[[Opened | None], None]) -> None:
        while not self._closed:
            self._wake.wait(LOOK_S)
            self._wake.clear()
            if self._closed:
                return
            if self.role.rank == 0:
                with suppress(CADPeerError):  # whoever waits for anything finds that the store is gone
                    self.newcomers = len(self._meeting.who_came())
            if self.why() or self._wanted > self._admitted:
                self._change(install)

    def _change(self, install: Callable[[Opened | None], None]) -> None:
        self.passes.halt()
        idle_after, self.liveness.idle_after = self.liveness.idle_after, lambda: None
        before, again = self.members, list[int]()
        try:
            changed = False
            while not changed:
                again = self._agree()
                try:
                    self._go_on_with(again, install)
                    changed = True
                except ServerLostError as lost:
                    logger.info("one more: %s", lost)
        except BaseException as error:
            failure = error if isinstance(error, CADError) else CADPeerError(f"{type(error).__name__}: {error}")
            logger.debug("where it happened", exc_info=True)
            self.liveness.report(str(failure))
            self.passes.go_on(failure)
            self._closed = True
            return
        finally:
            self.liveness.idle_after = idle_after
        self.repeated += len(again)
        self.passes.go_on()
        if self.role.rank == 0:
            notice(self._describe(before, len(again)))
        while self._given_up:
            self._given_up.pop()()

    def _agree(self) -> list[int]:
        """Who is there from now on; gives the passes that have to run again."""
        words = self._tell_and_hear()
        gone = {number for word in words for number in word.gone}
        servers = [number for number in self.members.servers if number not in gone]
        while self._admitted < max(word.came for word in words):
            servers.append(self._let_in(self._admitted))
            self._admitted += 1
        entered, exchanges = min(word.entered for word in words), max(word.exchanges for word in words)
        self.passes.undo(entered)
        members = replace(
            self.members, generation=self.members.generation + 1, servers=tuple(servers), exchanges=exchanges
        )
        told = {"do": REGROUP, **asdict(members)} if self.role.rank == 0 else None
        self.link.change(members.servers, members.generation, told)
        self.members = members
        return sorted({index for word in words for index in word.without_result if index <= entered})

    def _tell_and_hear(self) -> list[Word]:
        generation, store = self.members.generation, self._meeting.root
        gone = [number for number in self.members.servers if number in self.link.gone]
        mine = Word(
            gone, max(self._wanted, self._admitted), self.passes.entered, self.passes.without_result,
            0 if self._transport is None else self._transport.exchanges,
        )  # fmt: skip
        store.set(f"word/{generation}/{self.role.rank}", json.dumps(mine))
        if gone:
            store.set(f"called/{generation}", "1")
        keys, limit = {rank: f"word/{generation}/{rank}" for rank in range(self.role.trainers)}, self.config.timeout_s
        if not self.liveness.patiently(
            lambda: self._meeting.has([*keys.values()]), "what the other trainers say of servers",
            longest_pause_s=PAUSE_S, timeout_s=limit,
        ):  # fmt: skip
            absent = missing(keys, self._meeting.has)
            raise CADPeerError(
                f"rank {self.role.rank} waited {limit:g} s for trainers {absent} to say which "
                "servers they have: they hang, or their hosts are lost"
            )
        return [Word(*json.loads(store.get(key))) for key in keys.values()]

    def _look_for_trainers(self) -> None:
        if hopeless := self.liveness.why_hopeless():
            raise CADPeerError(f"rank {self.role.rank}: servers are lost, and so are trainers: {hopeless}")

    def _let_in(self, index: int) -> int:
        """Connect to a server that came later; gives its number. One that is not there any more is lost at once."""
        number = self._meeting.who_came()[index]
        self.liveness.store.set(f"{ASKED}/{number}", "now")
        try:
            door = self._meeting.find_door(number, CONNECT_S)
            self.link.add(number, connect_to(self.role.rank, self._meeting.hear(number).what, door))
        except CADPeerError as error:
            self.link.lose(number, str(error))
        return number

    def _go_on_with(self, again: list[int], install: Callable[[Opened | None], None]) -> None:
        """Open the group of the present members and run passes again; raises ServerLostError where one is lost."""
        if self._transport is not None:
            self.bytes_sent += self._transport.bytes_sent
            self._given_up.append(self._transport.abandon())
            self._transport = None
        with stream_beside(self.device):
            opened = None
            if self.members.ranks > 1:
                opened = regroup(self._meeting, self.members, self.config, self.device, self.liveness)
                self._transport = opened.transport
            install(opened)
            self.passes.change(self.members.generation)
            self.passes.run_again(again)

    def _describe(self, before: Members, repeated: int) -> str:
        """What has changed, in words."""
        now, gone = self.members.servers, self.link.gone
        changes = [
            f"server {number} ended: {gone[number]}"
            for number in before.servers if number not in now
        ] + [f"server {number} came" for number in now if number not in before.servers]  # fmt: skip
        rest = f"server{'s' * (len(now) > 1)} {', '.join(map(str, now))}" if now else "the trainers alone"
        again = f"; {repeated} passes of attention ran again" if repeated else ""
        return f"{'; '.join(changes)}. Training goes on with {rest}{again}"
