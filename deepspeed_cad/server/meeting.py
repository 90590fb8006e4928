"""How trainers and servers come together, when a job begins and where servers change.

They meet at the store at which the trainers' torch.distributed meets, under a prefix of ours. Under torchrun that is
the agent's store; with other launchers it is trainer 0's own and appears when the script calls init_process_group, so a
server tries until then. Servers of another launch find their places by word of the job that trainer 0 leaves there.

In: what this rank says of itself. Out: what all ranks said, or the same CADError on every rank where they do not belong
together; the board; the group of all that are there.
"""

from __future__ import annotations

import json
import logging
import math
import socket
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_cad.config import CADConfig
from deepspeed_cad.errors import CADConfigError, CADError, CADPeerError, in_one_line
from deepspeed_cad.exchange.failure.board import Liveness
from deepspeed_cad.exchange.failure.patience import PAUSE_S, wait_until
from deepspeed_cad.exchange.failure.roll_call import missing
from deepspeed_cad.exchange.group import OwnGroup, make_group, numbers_of
from deepspeed_cad.exchange.probe import NAMES, Opened, open_transport
from deepspeed_cad.server.launch import Split
from deepspeed_cad.server.sockets import Door
from deepspeed_cad.threads import run_aside
from deepspeed_cad.version import __version__

logger = logging.getLogger("deepspeed_cad")

PREFIX = "deepspeed_cad/servers"
REFUSED = "refused"
JOB = "job"
CAME = "came"
"""Numbers of servers that came when the job ran, in one value: each adds its own by one call, or has not come."""
LEFT, ASKED, GIVEN_UP = "left", "asked", "given up"
"""On the board: the training has ended; a server that came later is asked in; trainers go on without a server."""


def may_change(config: CADConfig) -> bool:
    """Whether training goes on where a server is lost, and others may come."""
    return config.on_server_failure == "continue"


def transports_of(config: CADConfig, device: torch.device) -> tuple[str, ...]:
    """The transports that may be used: where servers may change, those that let go of one that is lost."""
    return ("nvlink", "nccl") if may_change(config) and device.type == "cuda" else NAMES


def why_not_change(config: CADConfig, device: torch.device) -> str:
    """Why servers cannot change while a job runs on this device, if it asks for that; else ""."""
    if config.transport in ("auto", *transports_of(config, device)):
        return ""
    return (
        f'"cad": key "on_server_failure" is "continue", attention runs on {device}, and key "transport" is '
        f'"{config.transport}", of which nothing can be given up there while a server is waited for. Leave "transport" '
        'out, set it to "nvlink" or "nccl", or set "on_server_failure" to "stop"'
    )


@dataclass(frozen=True)
class Members:
    """The ranks that exchange attention, from one change of the servers to the next.

    Trainers stay for as long as the job. A server has a number for life, by which it is called in messages, and a place
    among the ranks of the present group: trainers first, then servers by their numbers."""

    generation: int
    """Changes so far."""
    trainers: int
    servers: tuple[int, ...]
    """Their numbers, ascending."""
    exchanges: int = 0
    """How many had been started before it."""

    @property
    def ranks(self) -> int:
        return self.trainers + len(self.servers)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of all ranks, by their places."""
        return (*range(self.trainers), *self.servers)


@dataclass(frozen=True)
class Hello:
    """What a rank says of itself before anything is shared."""

    rank: int
    trainers: int
    servers: int
    version: str
    config: dict[str, Any]
    host: str

    @property
    def what(self) -> str:
        return f"{'trainer' if self.rank < self.trainers else 'server'} {self.rank} on {self.host}"

    @classmethod
    def of(cls, split: Split, config: CADConfig) -> Hello:
        settings = json.loads(json.dumps(config.to_dict()))
        return cls(split.rank, split.trainers, split.servers, __version__, settings, socket.gethostname())


def open_store(rendezvous: str, timeout_s: float) -> dist.Store:
    """A connection of its own to the job's store. Raises CADPeerError where nobody listens there in time."""
    host, _, port = rendezvous.rpartition(":")
    limit = timedelta(seconds=timeout_s)
    try:
        connect = partial(dist.TCPStore, host, int(port), is_master=False, wait_for_workers=False, timeout=limit)
        made = run_aside("connects to the store", connect)  # no signal reaches a thread that waits in there
        wait_until(made.done, math.inf)
        return made.result()
    except (RuntimeError, ValueError) as error:
        raise CADPeerError(
            f"no store of torch.distributed answers at {rendezvous} (MASTER_ADDR:MASTER_PORT of the trainers) within "
            f"{timeout_s:g} s: {in_one_line(error)}"
        ) from error


_claimed: set[tuple[str, int, int]] = set()
"""Rendezvous, attempts and ranks of this process."""


class Rendezvous:
    def __init__(self, split: Split, timeout_s: float) -> None:
        self.split, self.timeout_s = split, timeout_s
        self.root = dist.PrefixStore(f"{PREFIX}/{split.attempt}", open_store(split.rendezvous, timeout_s))

    def claim(self) -> None:
        """This process is the only one with its rank; raises CADConfigError on all that still meet."""
        place = self.split.rendezvous, self.split.attempt, self.split.rank
        if place in _claimed:
            self.refuse(
                f"rank {self.split.rank} opened a session with reserved servers before, and they ended with that: "
                "leave the first session open"
            )
        _claimed.add(place)
        if self.root.add(f"claimed/{self.split.rank}", 1) > 1:
            self.refuse(
                f"two processes are rank {self.split.rank} of the {self.split.ranks} ranks that meet at "
                f"{self.split.rendezvous}: two launches use the same rendezvous. Give one of them another port "
                "(--master_port, or --rdzv-endpoint)"
            )

    def meet(self, mine: Hello) -> list[Hello]:
        """What every rank says. A trainer waits `timeout_s` for servers; a server as long as trainers may come."""
        self.root.set(f"hello/{mine.rank}", json.dumps(asdict(mine)))
        keys = {rank: f"hello/{rank}" for rank in range(self.split.ranks)}
        limit = math.inf if self.split.is_server else self.timeout_s

        def warn(waited_s: float) -> None:
            if not self.split.is_server:
                absent = self._name(missing(keys, self.has))
                logger.warning("rank %d has waited %.0f s for %s", mine.rank, waited_s, absent)

        def are_here() -> bool:
            self._look_for_refusal()
            return self.has([*keys.values()])

        if not wait_until(are_here, limit, when_late=warn):
            self.refuse(f"{self._name(missing(keys, self.has))} did not come within {limit:g} s")
        said = [self.hear(rank) for rank in keys]
        self._look_for_refusal()
        for other in said[1:]:
            _compare(said[0], other)
        return said

    def knock(self, mine: Hello) -> None:
        """A server that came later: say so, and wait to be asked in."""
        self.root.set(f"hello/{mine.rank}", json.dumps(asdict(mine)))
        store: Any = self.root  # whose stubs lack this call
        store.append(CAME, f"{mine.rank} ")

    def who_came(self) -> list[int]:
        """The numbers of servers that came later, in their order."""
        return list(map(int, self.root.get(CAME).split())) if self.has([CAME]) else []

    def hear(self, rank: int) -> Hello:
        said = json.loads(self.root.get(f"hello/{rank}"))
        # Another version may say more; that it is another one is found by `_compare`.
        return Hello(**{name: value for name, value in said.items() if name in Hello.__dataclass_fields__})

    def open_door(self, door: Door | str) -> None:
        """A server says where it listens, or why it cannot."""
        self.root.set(f"door/{self.split.rank}", json.dumps(door if isinstance(door, str) else asdict(door)))

    def find_door(self, server: int, timeout_s: float) -> Door:
        """Where a server listens that was met. CADPeerError where it does not say so in time, or cannot listen."""
        key = f"door/{server}"
        if not wait_until(lambda: self.has([key]), timeout_s):
            what = self.hear(server).what
            raise CADPeerError(f"{what} came and did not listen within {timeout_s:g} s: it died or hangs")
        if isinstance(said := json.loads(self.root.get(key)), str):
            raise CADPeerError(f"{self.hear(server).what} cannot listen: {said}")
        return Door(**said)

    def refuse(self, reason: str) -> None:
        """End the meeting on every rank that is still at it. Raises CADConfigError."""
        self.root.set(REFUSED, reason)
        raise CADConfigError(reason)

    def leave(self, reason: str) -> None:
        """This trainer ends without having met the servers; `reason` is empty where it ended well. The first word
        counts: the exit code of a process that an error ended comes after the error."""
        left = f"left/{self.split.rank}"
        if not self.has([left]):
            self.root.set(left, reason)

    def has(self, keys: list[str]) -> bool:
        try:
            return self.root.check(keys)
        except (RuntimeError, OSError) as error:
            raise CADPeerError(
                "the job's store is gone: the process that holds it (trainer 0, or the launcher) ended"
            ) from error

    def _look_for_refusal(self) -> None:
        if self.has([REFUSED]):
            raise CADConfigError(self.root.get(REFUSED).decode())
        if not self.split.is_server:
            return
        for rank in range(self.split.trainers):
            if self.has([f"left/{rank}"]):
                reason = self.root.get(f"left/{rank}").decode()
                words = f"trainer {rank} ended without having trained with CAD"
                raise CADPeerError(f"{words}: {reason}") if reason else Abandoned(words)

    def _name(self, ranks: list[int]) -> str:
        return ", ".join(f"{'trainer' if rank < self.split.trainers else 'server'} {rank}" for rank in ranks)


class Abandoned(CADError):
    """The trainers ended well without having trained with CAD: there is nothing to serve."""


def _compare(first: Hello, other: Hello) -> None:
    """Raise CADConfigError where two ranks do not belong together."""
    if other.version != first.version:
        raise CADConfigError(
            f"{other.what} has deepspeed_cad {other.version} and {first.what} has {first.version}: install the same "
            "version everywhere"
        )
    if keys := [key for key in first.config if other.config.get(key) != first.config[key]]:
        different = "; ".join(f"{key}: {first.config[key]!r} and {other.config.get(key)!r}" for key in keys)
        raise CADConfigError(
            f'{first.what} and {other.what} have different "cad" blocks ({different}): give every rank the same '
            "configuration"
        )
    if (other.trainers, other.servers) != (first.trainers, first.servers):
        raise CADConfigError(
            f"{first.what} counts {first.trainers} trainers and {first.servers} servers, {other.what} "
            f"{other.trainers} and {other.servers}: start all of them with one command, or as its hosts' equals"
        )


def offer_places(meeting: Rendezvous, mine: Hello) -> None:
    job = {"attempt": meeting.split.attempt, **asdict(mine)}
    dist.PrefixStore(PREFIX, open_store(meeting.split.rendezvous, meeting.timeout_s)).set(JOB, json.dumps(job))


def take_place(rendezvous: str, timeout_s: float) -> tuple[Split, CADConfig]:
    """The next free place of a server in a job, and the job's configuration.

    Raises CADPeerError where there is no job in time, CADConfigError where it has another version, wants no server from
    another launch, or has all of them."""
    store = dist.PrefixStore(PREFIX, open_store(rendezvous, timeout_s))
    if not wait_until(lambda: store.check([JOB]), timeout_s):
        raise CADPeerError(
            f"the store at {rendezvous} is there, but no training with reserved servers came to it within "
            f'{timeout_s:g} s. Its "cad" block must say {{"servers": {{"joined": n}}}}'
        )
    job = json.loads(store.get(JOB))
    # First of all: the configuration of another version may have keys that are unknown here.
    if job["version"] != __version__:
        raise CADConfigError(
            f"the job at {rendezvous} has deepspeed_cad {job['version']} and this server has {__version__}: install "
            "the same version everywhere"
        )
    config = CADConfig.from_dict(job["config"])
    joins, changes = "joined" in config.servers, may_change(config)
    if not joins and not changes:
        raise CADConfigError(
            f'the job at {rendezvous} has "servers": {json.dumps(config.servers)}: it launches its servers itself. For '
            'servers of another launch it must say {"joined": n}, or "on_server_failure": "continue"'
        )
    number = dist.PrefixStore(str(job["attempt"]), store).add("joined", 1) + (0 if joins else job["servers"])
    if number > job["servers"] and not changes:
        raise CADConfigError(
            f"the job at {rendezvous} has its {job['servers']} servers already, and this one would be number {number}: "
            "two launches use the same rendezvous, too many servers were started, or one of them ended before all had "
            'met: start the training anew. Servers may come while it runs where it says "on_server_failure": "continue"'
        )
    return Split(job["trainers"], job["servers"], job["trainers"] + number - 1, rendezvous, job["attempt"]), config


def open_board(meeting: Rendezvous, goes_on: bool) -> Liveness:
    role = meeting.split
    liveness = Liveness(dist.PrefixStore("board", meeting.root), role.rank, role.ranks, meeting.timeout_s / 2)
    liveness.may_change = goes_on
    return liveness


def open_group(meeting: Rendezvous, members: Members, liveness: Liveness, device: torch.device) -> OwnGroup:
    """The process group of the present members. Collective over them; `meeting` tells the number of this one.

    A server may die here, too. So nothing waits inside a store or a constructor on the thread that must notice: ranks
    first leave a word in the store, and meet the way torch makes groups on a thread that may be lost. Raises
    ServerLostError where a server is lost meanwhile and training goes on."""
    split, generation, limit = meeting.split, members.generation, meeting.timeout_s
    here = {number: f"here/{generation}/{number}" for number in members.numbers}
    meeting.root.set(here[split.rank], "1")
    opening = "ranks to open a group of trainers and servers"
    if not liveness.patiently(
        lambda: meeting.has([*here.values()]), opening, with_servers=True, longest_pause_s=PAUSE_S, timeout_s=limit
    ):
        absent = missing(here, meeting.has)
        raise CADPeerError(f"rank {liveness.rank} waited {limit:g} s for ranks {absent} of {opening}")
    name, place = f"deepspeed_cad servers {split.attempt}.{generation}", members.numbers.index(split.rank)

    def make() -> OwnGroup:
        # A connection of its own: gloo waits inside the store, and nobody else could ask it anything meanwhile.
        store = dist.PrefixStore(f"group/{generation}", Rendezvous(split, limit).root)
        return make_group(store, place, members.ranks, device, name, limit)

    made = run_aside("opens a group", make, device)
    if not liveness.patiently(made.done, opening, with_servers=True, timeout_s=limit):
        raise CADPeerError(f"rank {liveness.rank} waited {limit:g} s for {opening}")
    with Liveness.watch(liveness, opening, with_servers=True):
        return made.result()


def open_again(
    meeting: Rendezvous, members: Members, liveness: Liveness, device: torch.device, transport: str,
    transports: tuple[str, ...],
) -> Opened:  # fmt: skip
    """Through what other members than before exchange; `transports`: may be used. Collective, see `open_group`."""
    group = open_group(meeting, members, liveness, device)
    opened = open_transport(
        transport, group, device, partial(numbers_of, group, liveness), liveness, meeting.timeout_s, transports
    )
    opened.transport.exchanges = members.exchanges
    return opened


def wait_to_be_asked_in(liveness: Liveness) -> None:
    """A server that came later, until trainers come to a step in which it takes part; raises as `look_for_end`."""
    wait_until(lambda: liveness.look_up(f"{ASKED}/{liveness.rank}"), math.inf, lambda: look_for_end(liveness))


def look_for_errors(liveness: Liveness) -> None:
    """For a server that waits for trainers to connect. Raises CADPeerError where one of them has stopped."""
    if reason := liveness.why_hopeless():
        raise CADPeerError(f"server {liveness.rank} waited for trainers to connect: {reason}")


def look_for_end(liveness: Liveness) -> None:
    """For a server that came later and waits for trainers. Raises Abandoned where the training has ended, CADPeerError
    where trainers go on without this server."""
    if reason := liveness.look_up(f"{GIVEN_UP}/{liveness.rank}"):
        raise CADPeerError(f"the trainers go on without it: {reason}")
    try:
        ended = liveness.store.check([LEFT])
    except (RuntimeError, OSError):
        ended = True
    if ended or liveness.why_hopeless():
        raise Abandoned("the training ended before it came to a step that this server could take part in")
