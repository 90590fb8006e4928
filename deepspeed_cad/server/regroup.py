"""How trainers and servers open a group of other ranks than before. Every rank of it runs this at the same time.

A server may die here too. So nothing waits inside a store or a constructor on the thread that must notice: ranks first
leave a word in the store, and meet the way torch makes groups on a thread that may be lost.

In: who is there, by agreement. Out: group, transport and hosts. ServerLostError where a server is lost meanwhile.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass

import torch
import torch.distributed as dist

from deepspeed_cad.config import CADConfig
from deepspeed_cad.errors import CADPeerError, ServerLostError
from deepspeed_cad.exchange.group import OwnGroup, make_group
from deepspeed_cad.exchange.liveness import LOOK_S, Liveness
from deepspeed_cad.exchange.opening import open_again
from deepspeed_cad.exchange.transport import Transport
from deepspeed_cad.server.crew import Crew, transports_of
from deepspeed_cad.server.rendezvous import Rendezvous
from deepspeed_cad.server.split import Split
from deepspeed_cad.threads import start_daemon

PAUSE_S = 0.005


@dataclass(frozen=True, eq=False)
class Opened:
    """A group and what it exchanges through."""

    group: OwnGroup
    transport: Transport
    hosts: list[int]


def regroup(split: Split, crew: Crew, config: CADConfig, device: torch.device, liveness: Liveness) -> Opened:
    """Open the group of a crew. Collective over its ranks; `split.rank` is the number of this one."""
    watch = _Watch(liveness, config.timeout_s)
    meeting = Rendezvous(split, config.timeout_s)
    here = {number: f"here/{crew.generation}/{number}" for number in crew.numbers}
    meeting.root.set(here[split.rank], "1")
    while missing := [number for number, key in here.items() if not meeting.has(key)]:
        watch.look(f"ranks {missing} to open another group")
    store = dist.PrefixStore(f"group/{crew.generation}", Rendezvous(split, config.timeout_s).root)
    made: Future[OwnGroup] = Future()

    def make() -> None:
        name = f"deepspeed_cad servers {split.attempt}.{crew.generation}"
        try:
            made.set_result(
                make_group(store, crew.place(split.rank), crew.ranks, device, name, config.timeout_s)
            )  # fmt: skip
        except Exception as error:
            made.set_exception(error)

    start_daemon("opens a group", make, device)
    while not made.done():
        watch.look("the group of trainers and servers")
    with Liveness.watch(liveness, "the group of trainers and servers", with_servers=True):
        group = made.result()

    def agree(value: int) -> list[int]:
        return group.numbers(value, liveness)

    auto = transports_of(config, device)
    transport, hosts = open_again(config.transport, group, device, agree, liveness, config.timeout_s, auto)
    transport.exchanges = crew.exchanges
    return Opened(group, transport, hosts)


class _Watch:
    """Looks around while this rank waits."""

    def __init__(self, liveness: Liveness, timeout_s: float) -> None:
        self._liveness, self._timeout_s = liveness, timeout_s
        self._began = self._looked = time.monotonic()

    def look(self, waited_for: str) -> None:
        """Raises ServerLostError where a server is lost, CADPeerError where a trainer is, or time is up."""
        time.sleep(PAUSE_S)
        if self._liveness.losses is not None and (lost := self._liveness.losses.why()):
            raise ServerLostError(lost)
        now = time.monotonic()
        if now - self._looked > LOOK_S:
            self._looked = now
            if found := self._liveness.why_hopeless():
                raise CADPeerError(f"rank {self._liveness.rank} waited for {waited_for}: {found}")
        if now - self._began > self._timeout_s:
            raise CADPeerError(
                f"rank {self._liveness.rank} waited {self._timeout_s:g} s for {waited_for}"
            )  # fmt: skip
