"""How trainers and servers open a group of other ranks than before. Every rank of it runs this at the same time.

A server may die here too. So nothing waits inside a store or a constructor on the thread that must notice: ranks first
leave a word in the store, and meet the way torch makes groups on a thread that may be lost.

In: who is there, by agreement. Out: group, transport and hosts. ServerLostError where a server is lost meanwhile.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from deepspeed_cad.config import CADConfig
from deepspeed_cad.errors import CADPeerError
from deepspeed_cad.exchange.failure.board import Liveness
from deepspeed_cad.exchange.failure.patience import PAUSE_S
from deepspeed_cad.exchange.failure.roll_call import missing
from deepspeed_cad.exchange.group import OwnGroup, make_group
from deepspeed_cad.exchange.probe import Opened, open_transport
from deepspeed_cad.server.rendezvous import Rendezvous
from deepspeed_cad.server.surviving.members import Members, transports_of
from deepspeed_cad.threads import run_aside


def regroup(
    meeting: Rendezvous, members: Members, config: CADConfig, device: torch.device, liveness: Liveness
) -> Opened:
    """Open the group of the present members. Collective over them; `meeting` tells the number of this one."""
    split, generation = meeting.split, members.generation
    here = {number: f"here/{generation}/{number}" for number in members.numbers}
    meeting.root.set(here[split.rank], "1")

    limit, opening = config.timeout_s, "ranks to open another group"
    if not liveness.patiently(
        lambda: meeting.has([*here.values()]), opening, with_servers=True, longest_pause_s=PAUSE_S, timeout_s=limit
    ):
        absent = missing(here, meeting.has)
        raise CADPeerError(f"rank {liveness.rank} waited {limit:g} s for ranks {absent} to open another group")
    name, opening = f"deepspeed_cad servers {split.attempt}.{generation}", "the group of trainers and servers"
    place = members.numbers.index(split.rank)

    def make() -> OwnGroup:
        # A connection of its own, because gloo waits inside the store.
        store = dist.PrefixStore(f"group/{generation}", Rendezvous(split, limit).root)
        return make_group(store, place, members.ranks, device, name, limit)

    made = run_aside("opens a group", make, device)
    if not liveness.patiently(made.done, opening, with_servers=True, timeout_s=limit):
        raise CADPeerError(f"rank {liveness.rank} waited {limit:g} s for {opening}")
    with Liveness.watch(liveness, opening, with_servers=True):
        group = made.result()
    opened = open_transport(
        config.transport, group, device, lambda value: group.numbers(value, liveness), liveness, limit,
        transports_of(config, device),
    )  # fmt: skip
    opened.transport.exchanges = members.exchanges
    return opened
