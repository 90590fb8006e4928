"""What every rank of a group does when it opens its transport: one function, because all its steps are collective.

In: the group, what was asked for, and a way to gather numbers. Out: the transport, the host of every rank, and links.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch

from deepspeed_cad.exchange.failure.board import Liveness
from deepspeed_cad.exchange.group import Group, rank_of
from deepspeed_cad.exchange.links import Links, measure_links
from deepspeed_cad.exchange.probe import NAMES, choose_transport, gather_hosts
from deepspeed_cad.exchange.transport import Transport

DETERMINISTIC = "not measured, because torch's deterministic algorithms are on"
"""Where plans must not depend on times, figures for links do not either."""


@dataclass(frozen=True, eq=False)
class Opened:
    """A group of ranks, and what they exchange through."""

    group: Group
    transport: Transport
    hosts: list[int]
    """Number of every rank's host."""
    links: Links = Links(None, None, "not measured")


def open_transport(
    name: str,
    group: Group,
    device: torch.device,
    agree: Callable[[int], list[int]],
    liveness: Liveness | None,
    timeout_s: float,
    given: Mapping[str, float] | None,
    auto: tuple[str, ...] = NAMES,
) -> Opened:
    """Open the transport of a group. Collective.

    Args:
        name: "auto" or the name of a transport.
        group: all ranks that exchange.
        device: where they compute.
        agree: gives one number of every rank.
        liveness: the error board.
        timeout_s: seconds to wait for a rank.
        given: speeds of links in GB/s, "inside" and "between"; None: they are measured.
        auto: transports that "auto" may take.
    """
    opened = open_again(name, group, device, agree, liveness, timeout_s, auto)
    if given is not None:
        return replace(opened, links=Links(given["inside"] * 1e9, given["between"] * 1e9, "given"))
    if any(agree(int(torch.are_deterministic_algorithms_enabled()))):
        return replace(opened, links=Links(None, None, DETERMINISTIC))
    return replace(opened, links=measure_links(opened.transport, device, rank_of(group), opened.hosts, agree))


def open_again(
    name: str,
    group: Group,
    device: torch.device,
    agree: Callable[[int], list[int]],
    liveness: Liveness | None,
    timeout_s: float,
    auto: tuple[str, ...] = NAMES,
) -> Opened:
    """The same for a job that knows its links. Collective; arguments as above."""
    hosts = gather_hosts(agree)
    transport = choose_transport(
        name, group, device, agree=agree, liveness=liveness, timeout_s=timeout_s, host=hosts[rank_of(group)], auto=auto
    )
    return Opened(group, transport, hosts)
