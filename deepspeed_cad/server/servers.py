"""The reserved servers of one trainer's session. An object of these classes is chosen once, when groups are opened:
nobody is reserved, servers stay as they are, or servers may be lost and others come.

A server is lost when its socket here has closed, or it has said that it failed, or nothing at all. Exchanges end then,
here or by word of the trainer that found it, by ServerLostError, and all trainers come to the end of the pass that lost
its exchange (attention/surviving.py). Servers that came later are heard of with the lengths of a micro-batch, so all
trainers begin at the forward of that one. There trainers tell each other whom they lost; who is lost to one is dropped
by all. They open another group with the servers that are left, or have come, and begin again where one more is lost
meanwhile. From then on plans are made for these, and the pass runs again.
"""

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from deepspeed_cad.ahead.crew import Crew, Servers
from deepspeed_cad.attention.call import Calls
from deepspeed_cad.attention.microbatch import MicroBatch
from deepspeed_cad.attention.surviving import SurvivingCall
from deepspeed_cad.config import CADConfig
from deepspeed_cad.errors import CADError, CADPeerError, ServerLostError
from deepspeed_cad.exchange.failure.board import Liveness
from deepspeed_cad.exchange.failure.patience import LOOK_S, wait_until
from deepspeed_cad.exchange.group import OwnGroup
from deepspeed_cad.exchange.probe import NOT_OPENED, Opened
from deepspeed_cad.exchange.transport import Transport
from deepspeed_cad.layout import Ints
from deepspeed_cad.notice import notice
from deepspeed_cad.planner.plan import Floats
from deepspeed_cad.server.launch import Split
from deepspeed_cad.server.links import ServerLink
from deepspeed_cad.server.meeting import (
    ASKED,
    Hello,
    Members,
    Rendezvous,
    may_change,
    offer_places,
    open_again,
    open_board,
    open_group,
    transports_of,
    why_not_change,
)
from deepspeed_cad.server.orders import REGROUP, TRACE, Leader
from deepspeed_cad.server.sockets import CONNECT_S, connect_to
from deepspeed_cad.trace import WARM_UP, Tracer

logger = logging.getLogger("deepspeed_cad")

BLAME_S = 12.0
"""For the socket of a server to close after an exchange failed: a host that vanished is noticed within about 10 s."""
LEAST_SILENT_S = 5.0
"""Of silence, after which a server is lost: it speaks twice a second, and machines are busy."""
TRAINERS = "what the other trainers say of servers"


class NoServers:
    """Every rank trains and serves."""

    at_start = 0
    """Servers that the job began with."""
    reporters: tuple[Any, ...] = ()
    """What travels about servers with document lengths."""
    bytes_sent = 0
    """Through transports that were given up."""

    def __init__(self, trainers: int) -> None:
        self.members = Members(0, trainers, ())

    def crew(self, opened: Opened | None, speeds: Floats | None) -> Crew:
        """The ranks that there are now, as plans see them.

        `opened`: through what they exchange; None: there is one rank. `speeds`: in attention, of the ranks that the job
        began with; None: all are equal."""
        if opened is None:
            return Crew(self.members.trainers, speeds=speeds)
        return Crew(self.members.trainers, opened.transport, np.array(opened.hosts, np.int64), speeds)

    def begin(self, transport: Transport | None, install: Callable[[Opened | None], None]) -> None:
        """From now on servers may change, if they may at all.

        `install` takes what exchanges go through from then on; None: nothing, one rank is left."""

    def trace_next(self, tracer: Tracer) -> None:
        """A micro-batch is about to be trained: servers record it where trainers do."""

    def busy(self) -> tuple[float, float]:
        """Seconds that servers attended and that they are up, summed over servers, as they last told the leader."""
        return 0.0, 0.0

    def close(self) -> None:
        """Servers change no more."""

    def leave(self, reason: str) -> None:
        """This trainer needs no server any more; `reason` is empty where it ended well."""


class ReservedServers(NoServers):
    """Servers that are there until the job ends: what ends one ends all."""

    def __init__(self, role: Split, liveness: Liveness, link: ServerLink) -> None:
        self.role, self.liveness, self.link = role, liveness, link
        self.members = Members(0, role.trainers, tuple(range(role.trainers, role.ranks)))
        self.at_start = role.servers

    def crew(self, opened: Opened | None, speeds: Floats | None) -> Crew:
        """See NoServers; on the leader the crew also tells the servers."""
        count, generation = len(self.members.servers), self.members.generation
        speeds = None if speeds is None else speeds_of(self.members, speeds)
        leads = Leader(partial(self.link.tell, generation=generation)).open if self.role.rank == 0 and count else None
        servers = Servers(count, self.at_start, leads)
        return replace(super().crew(opened, speeds), servers=servers, generation=generation)

    def busy(self) -> tuple[float, float]:
        return self.link.busy()

    def leave(self, reason: str) -> None:
        self.link.leave(reason)

    def trace_next(self, tracer: Tracer) -> None:
        """See NoServers; only the leader says so."""
        if tracer.rank == 0 and tracer.micro_batches <= WARM_UP + tracer.steps:
            head = {"do": TRACE, "path": str(tracer.path), "steps": tracer.steps, "ranks": tracer.ranks}
            self.link.tell(head, generation=self.members.generation)


class SurvivingServers(ReservedServers):
    """See NoServers; to this trainer's exchanges, what says that a server is lost (Losses)."""

    columns = 1
    """Of a Reporter, which it is."""

    def __init__(
        self, meeting: Rendezvous, config: CADConfig, liveness: Liveness, link: ServerLink, device: torch.device
    ) -> None:
        """Those that the job began with. Collective over trainers."""
        super().__init__(meeting.split, liveness, link)
        self.device, self.reporters = device, (self,)
        self.transports = config.transport, transports_of(config, device)
        self.came = 0
        """Servers that came later, as all trainers have heard."""
        self.repeated = 0
        """Passes that ran again."""
        self._meeting, self._admitted = meeting, 0
        limit = timedelta(seconds=config.timeout_s)
        self._trainers = dist.new_group(timeout=limit, backend="gloo") if self.role.trainers > 1 else None
        self._transport: Transport | None = None
        self._install: Callable[[Opened | None], None] = lambda opened: None
        self._given_up: list[Callable[[], None]] = []
        """Release the memory of transports that were given up."""
        self._called, self._looked = -1, 0.0

    @property
    def generation(self) -> int:
        return self.members.generation

    def begin(self, transport: Transport | None, install: Callable[[Opened | None], None]) -> None:
        self._transport, self._install = transport, install
        self.liveness.watched, self.liveness.losses = range(self.role.trainers), self

    def crew(self, opened: Opened | None, speeds: Floats | None) -> Crew:
        return replace(super().crew(opened, speeds), calls=self._calls)

    def _calls(self, plan_again: Callable[[MicroBatch], None]) -> Calls:
        # Look-ahead threads learn of a change at different moments.
        make, admit = partial(SurvivingCall, servers=self), partial(self._admit, self.came)
        return Calls(make, admit, plan_again, compares_plans=False)

    @property
    def newcomers(self) -> int:
        with suppress(CADPeerError):  # whoever waits for anything finds that the store is gone
            return len(self._meeting.who_came()) if self.role.rank == 0 else 0
        return 0

    def report(self, model: int) -> Ints:
        return np.array([self.newcomers])

    def hear(self, model: int, reports: Ints) -> None:
        """From the micro-batch on with which all trainers hear of them, they take part."""
        self.came = max(self.came, int(reports.max()))

    def close(self) -> None:
        if self._trainers is not None and dist.is_initialized():
            dist.destroy_process_group(self._trainers)

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
        return "another trainer has lost a server" if self._called == members.generation else ""

    def wait(self) -> str:
        with suppress(CADPeerError):
            return wait_until(self.why, BLAME_S * bool(self.members.servers), self._look_for_trainers)
        return ""

    def _look_for_trainers(self) -> None:
        if hopeless := self.liveness.why_hopeless():
            raise CADPeerError(f"rank {self.role.rank}: servers are lost, and so are trainers: {hopeless}")

    # Where all trainers stand at the same point

    def all_have(self, result: bool) -> bool:
        if not self._all(result):
            self._change()
            return False
        while self._given_up:
            self._given_up.pop()()
        return True

    def _admit(self, came: int) -> None:
        """A forward begins in which so many servers take part that came later."""
        if came > self._admitted:
            self._change(came)

    def _all(self, well: bool) -> bool:
        """Whether all trainers say so. One that does not calls the others out of their exchanges."""
        said = torch.tensor([int(well)])
        if self._trainers is not None:
            with Liveness.watch(self.liveness, TRAINERS):
                if not well:
                    self._meeting.root.set(f"called/{self.generation}", "1")
                work = dist.all_reduce(said, dist.ReduceOp.MIN, group=self._trainers, async_op=True)
                self.liveness.patiently(work.get_future().done, TRAINERS)
                work.wait()
        return bool(said)

    def _change(self, came: int = 0) -> None:
        before = self.members
        idle_after, self.liveness.idle_after = self.liveness.idle_after, lambda: None
        if self._transport is not None:
            self.bytes_sent += self._transport.bytes_sent
            self._given_up.append(self._transport.abandon())
        agreed, seen = False, set(before.servers)
        while not agreed:
            self._agree(came)
            seen.update(self.members.servers)
            opened, well = None, False
            try:
                if self.members.ranks > 1:
                    opened = open_again(self._meeting, self.members, self.liveness, self.device, *self.transports)
                well = True
            except ServerLostError as lost:
                logger.info("one more: %s", lost)
            except NOT_OPENED as error:
                if not (new := [one for one in self.members.servers if one not in before.servers]):
                    raise
                for number in new:
                    self.link.lose(number, f"it came, and could not be reached by a transport: {error}")
            if not (agreed := self._all(well)) and opened is not None:
                self._given_up.append(opened.transport.abandon())
        self.liveness.idle_after = idle_after
        self._transport = None if opened is None else opened.transport
        self._install(opened)
        if self.role.rank == 0:
            notice(self._describe(before, sorted(seen)))

    def _agree(self, came: int) -> None:
        gone = [number for number in self.members.servers if number in self.link.gone]
        words: list[Any] = [(gone, 0 if self._transport is None else self._transport.exchanges)]
        if self._trainers is not None:
            words *= self.role.trainers
            with Liveness.watch(self.liveness, TRAINERS):
                dist.all_gather_object(words, words[0], group=self._trainers)
        lost = {number for gone, _ in words for number in gone}
        servers = [number for number in self.members.servers if number not in lost]
        while self._admitted < came:
            servers.append(self._let_in(self._admitted))
            self._admitted += 1
        exchanges = max(exchanges for _, exchanges in words)
        self.members = Members(self.generation + 1, self.role.trainers, tuple(servers), exchanges)
        told = {"do": REGROUP, **asdict(self.members)} if self.role.rank == 0 else None
        self.link.change(self.members.servers, self.generation, told)

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

    def _describe(self, before: Members, seen: list[int]) -> str:
        now, gone = self.members.servers, self.link.gone
        changes = [
            f"server {number} ended: {gone[number]}"
            for number in seen if number not in now
        ] + [f"server {number} came" for number in now if number not in before.servers]  # fmt: skip
        rest = f"server{'s' * (len(now) > 1)} {', '.join(map(str, now))}" if now else "the trainers alone"
        return f"{'; '.join(changes)}. Training goes on with {rest}"


def speeds_of(members: Members, speeds: Floats) -> Floats:
    """[members]: what was found at the start; who came later is taken for a mean server."""
    numbers, known = np.array(members.numbers), len(speeds)
    return np.where(numbers < known, speeds[np.minimum(numbers, known - 1)], speeds[members.trainers :].mean())


def join_servers(role: Split, config: CADConfig, device: torch.device) -> tuple[ReservedServers, OwnGroup]:
    """Meet the servers. Collective over trainers and servers; raises one CADError on all of them where it fails."""
    meeting, goes_on, mine = Rendezvous(role, config.timeout_s), may_change(config), Hello.of(role, config)
    meeting.claim()
    if reason := why_not_change(config, device):
        meeting.refuse(reason)
    if role.rank == 0:
        offer_places(meeting, mine)
    said = meeting.meet(mine)
    liveness = open_board(meeting, goes_on)
    try:
        doors = {server.rank: meeting.find_door(server.rank, config.timeout_s) for server in said[role.trainers :]}
        connections = {number: connect_to(role.rank, said[number].what, door) for number, door in doors.items()}
    except CADError as error:
        liveness.report(str(error))  # the others have connected, or wait for that
        raise
    link = ServerLink(role.rank, connections, liveness, max(config.timeout_s / 2, LEAST_SILENT_S))
    servers = (
        SurvivingServers(meeting, config, liveness, link, device) if goes_on
        else ReservedServers(role, liveness, link)
    )  # fmt: skip
    return servers, open_group(meeting, servers.members, liveness, device)
