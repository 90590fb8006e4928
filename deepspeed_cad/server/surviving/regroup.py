"""How trainers and servers open a group of other ranks than before. Every rank of it runs this at the same time.

A server may die here too. So nothing waits inside a store or a constructor on the thread that must notice: ranks first
leave a word in the store, and meet the way torch makes groups on a thread that may be lost.

In: who is there, by agreement. Out: group, transport and hosts. ServerLostError where a server is lost meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

import torch
import torch.distributed as dist

from deepspeed_cad.config import CADConfig
from deepspeed_cad.errors import CADPeerError, ServerLostError
from deepspeed_cad.exchange.failure.board import Liveness
from deepspeed_cad.exchange.failure.patience import wait_until
from deepspeed_cad.exchange.group import OwnGroup, make_group
from deepspeed_cad.exchange.opening import Opened, open_again
from deepspeed_cad.server.rendezvous import Rendezvous
from deepspeed_cad.server.split import Split
from deepspeed_cad.server.surviving.members import Members, transports_of
from deepspeed_cad.threads import start_daemon

PAUSE_S = 0.005


def regroup(split: Split, crew: Members, config: CADConfig, device: torch.device, liveness: Liveness) -> Opened:
    """Open the group of a crew. Collective over its ranks; `split.rank` is the number of this one."""
    meeting = Rendezvous(split, config.timeout_s)
    here = {number: f"here/{crew.generation}/{number}" for number in crew.numbers}
    meeting.root.set(here[split.rank], "1")

    def missing() -> list[int]:
        return [number for number, key in here.items() if not meeting.has(key)]

    wait = partial(_wait, liveness, config.timeout_s)
    wait(lambda: not missing(), lambda: f"ranks {missing()} to open another group")
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
    wait(made.done, lambda: "the group of trainers and servers")
    with Liveness.watch(liveness, "the group of trainers and servers", with_servers=True):
        group = made.result()

    def agree(value: int) -> list[int]:
        return group.numbers(value, liveness)

    auto = transports_of(config, device)
    opened = open_again(config.transport, group, device, agree, liveness, config.timeout_s, auto)
    opened.transport.exchanges = crew.exchanges
    return opened


def _wait(liveness: Liveness, timeout_s: float, is_there: Callable[[], bool], waited_for: Callable[[], str]) -> None:
    """Raises ServerLostError where a server is lost, CADPeerError where a trainer is, or time is up."""

    def ask() -> bool:
        if liveness.losses is not None and (lost := liveness.losses.why()):
            raise ServerLostError(lost)
        return is_there()

    def look_around() -> None:
        if found := liveness.why_hopeless():
            raise CADPeerError(f"rank {liveness.rank} waited for {waited_for()}: {found}")

    if not wait_until(ask, timeout_s, PAUSE_S, look_around):
        raise CADPeerError(f"rank {liveness.rank} waited {timeout_s:g} s for {waited_for()}")
