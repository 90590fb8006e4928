"""What all ranks of a group do when they open their transport: which one, on which hosts, and how fast links are.

Out: a Transport, the same kind on every rank; for `doctor`, what each needs that this machine lacks. A fallback of
"auto" is warned about once, with its reason; a transport asked for by name that cannot work is refused.
"""

import logging
import socket
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from deepspeed_cad.errors import CADError, CADUnsupportedError, ServerLostError, in_one_line
from deepspeed_cad.exchange.failure.board import Liveness
from deepspeed_cad.exchange.failure.watchdog import Alarm
from deepspeed_cad.exchange.group import Group, numbers_of, rank_of
from deepspeed_cad.exchange.landed import LandingTransport
from deepspeed_cad.exchange.links import Gather, Links, measure_links
from deepspeed_cad.exchange.native_calls import CudaCalls, UnreachedError, open_nccl, peer_reach, symmetric_memory
from deepspeed_cad.exchange.nccl import NcclTransport
from deepspeed_cad.exchange.packed import c10d_transport
from deepspeed_cad.exchange.transport import Transport

logger = logging.getLogger("deepspeed_cad")

NAMES = ("nvlink", "mixed", "nccl", "c10d")
"""Fastest first."""

NOT_OPENED = (CADUnsupportedError, UnreachedError)
"""What `open_transport` raises on every rank of a group."""

_UNREACHED = -1
"""A rank's answer to whether it could make a transport: 0 and 1 are no and yes."""

DETERMINISTIC = "not measured, because torch's deterministic algorithms are on"
"""Where plans must not depend on times, figures for links do not either."""


@dataclass(frozen=True, eq=False)
class Opened:
    group: Group
    transport: Transport
    hosts: list[int]
    links: Links = Links(None, None, "not measured")


def open_transport(
    name: str, group: Group, device: torch.device, agree: Gather, liveness: Liveness | None, timeout_s: float,
    auto: tuple[str, ...] = NAMES,
) -> Opened:  # fmt: skip
    """Open the transport of a group, and find the host of every rank. Collective; arguments as below."""
    hosts = agree(host_number())
    host = hosts[rank_of(group)]
    return Opened(group, choose_transport(name, group, device, agree, liveness, timeout_s, host, auto), hosts)


def with_links(opened: Opened, device: torch.device, agree: Gather, given: object) -> Opened:
    """And its links. Collective. `given`: these in GB/s, "inside" and "between"; else they are measured."""
    if isinstance(given, Mapping):
        return replace(opened, links=Links(given["inside"] * 1e9, given["between"] * 1e9, "given"))
    if any(agree(int(torch.are_deterministic_algorithms_enabled()))):
        return replace(opened, links=Links(None, None, DETERMINISTIC))
    return replace(opened, links=measure_links(opened.transport, device, rank_of(opened.group), opened.hosts, agree))


def choose_transport(
    name: str, group: Group, device: torch.device, agree: Gather | None = None, liveness: Liveness | None = None,
    timeout_s: float = 300.0, host: int | None = None, auto: tuple[str, ...] = NAMES,
) -> Transport:  # fmt: skip
    """The transport of a group. Collective: all ranks call it with the same name and get the same kind. `host`: the
    number of this rank's host. `auto`: transports that "auto" may take. Raises CADUnsupportedError, on every rank,
    where `name` is a transport that does not work here."""
    if name not in ("auto", *NAMES):
        raise CADUnsupportedError(f'there is no transport "{name}"; there are: auto, {", ".join(NAMES)}')
    gather = agree or partial(numbers_of, group, liveness)
    host = host_number() if host is None else host
    hosts = gather(host) if name != "c10d" else []
    refusals: list[str] = []
    wanted = (name,)
    if name == "auto":
        copies = ("nvlink",) if len(set(hosts)) == 1 else ("mixed",) if len(set(hosts)) < len(hosts) else ()
        wanted = tuple(one for one in (*copies, "nccl", "c10d") if one in auto)
    for candidate in wanted:
        near: list[int] = []
        reason = _refusal(candidate, device, gather, len(set(hosts)))
        if reason is None and candidate in ("nvlink", "mixed"):
            near, unreached = _neighbourhoods(device, host, hosts, gather)
            if candidate == "nvlink" or (name == "auto" and len(set(near)) == len(near)):
                reason = unreached
        if reason is None:
            alarm = Alarm(rank_of(group), liveness, timeout_s)
            kinds: dict[str, Callable[[], Transport]] = {
                "nvlink": partial(LandingTransport, group, device, alarm),
                "mixed": partial(LandingTransport, group, device, alarm, near),
                "nccl": partial(NcclTransport, group, device, alarm, len(set(hosts)) > 1),
                "c10d": partial(c10d_transport, group, device, alarm),
            }
            found, reason = _make(kinds[candidate], gather)
            if found is not None:
                _say(found.name, refusals, hosts, near, device.type == "cuda" and rank_of(group) == 0)
                return found
        refusals.append(f"{candidate}: {reason}")
    todo = 'Leave "transport" out to take one that works.'
    if name == "auto":
        todo = 'Set "on_server_failure" to "stop" to take another one.'
    raise CADUnsupportedError(f'transport "{name}" does not work here: {"; ".join(refusals)}. {todo}')


def probe(name: str) -> tuple[bool, str]:
    """For `doctor`: whether a transport can work on this machine, by what one process can see."""
    if name == "c10d":
        return True, "torch.distributed, any device"
    if not torch.cuda.is_available():
        return False, "torch sees no GPU"
    device = torch.device("cuda", torch.cuda.current_device())
    if (reason := _local_refusal(name, device)) is not None:
        return False, reason
    if name == "nccl":
        version = open_nccl()
        return True, f"NCCL {version // 10000}.{version // 100 % 100}.{version % 100} as torch loads it"
    others = len(peer_reach(device)) - 1
    if not others:
        return False, f"GPU {device.index} reaches the memory of no other GPU that this process sees"
    return True, f"GPU {device.index} reaches the memory of {others} others; driver and symmetric memory found"


def _make(build: Callable[[], Transport], gather: Gather) -> tuple[Transport | None, str]:
    """The transport, if every rank could make it; else none and the reason. Raises UnreachedError, on every rank, where
    hosts do not reach each other: any other transport would wait for that once more."""
    made: Transport | None = None
    unreached: UnreachedError | None = None
    reason = "another rank could not start it"
    try:
        made = build()
    except ServerLostError:
        raise
    except UnreachedError as error:
        unreached = error
    except (RuntimeError, OSError, AttributeError, TypeError, KeyError) as error:
        reason = f"{type(error).__name__}: {in_one_line(error)}"
    try:
        answers = gather(_UNREACHED if unreached is not None else int(made is not None))
    except ServerLostError:
        if made is not None:
            made.abandon()()
        raise
    if min(answers) > 0:
        return made, ""
    if made is not None:
        made.close()
    if _UNREACHED in answers:
        raise unreached or UnreachedError(f"NCCL did not join rank {answers.index(_UNREACHED)} to the others")
    return None, reason


def _refusal(name: str, device: torch.device, gather: Gather, hosts: int) -> str | None:
    """Why some rank cannot use a transport, or None; on every rank alike."""
    if name == "c10d":
        return None
    reason = _local_refusal(name, device)
    fits = gather(int(reason is None))
    if not min(fits):
        return reason or f"rank {fits.index(0)} cannot use it"
    if name == "nvlink" and hosts > 1:
        return f"the ranks are on {hosts} hosts"
    return "the ranks are on one host" if name == "mixed" and hosts == 1 else None


def _neighbourhoods(device: torch.device, host: int, hosts: list[int], gather: Gather) -> tuple[list[int], str | None]:
    """For every rank the first of those whose memory it shares, itself where that is none; the same on every rank. All
    ranks of a host share their memory, or none does. And why some host's ranks do not, or None."""
    # A process that sees only its own GPU cannot ask about the others: making the buffers will tell.
    indexes = gather(device.index if torch.cuda.device_count() > 1 else -1)
    here = [index for index, at in zip(indexes, hosts) if at == host and index >= 0]
    reached = peer_reach(device)
    missing = [i for i in here if i not in reached] if torch.cuda.device_count() > 1 else []
    reach = gather(int(not missing))
    cut_off = {at for at, fits in zip(hosts, reach) if not fits}
    near = [rank if at in cut_off else hosts.index(at) for rank, at in enumerate(hosts)]
    if missing:
        return near, f"GPU {device.index} cannot reach the memory of GPU {missing[0]}"
    if not min(reach):
        return near, f"the GPU of rank {reach.index(0)} cannot reach the memory of all others"
    return near, None


def _local_refusal(name: str, device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"it needs NVIDIA GPUs, this rank computes on {device.type}"
    if torch.version.hip is not None:
        return "it needs NVIDIA GPUs, this torch is built for AMD"
    try:
        if name in ("nccl", "mixed"):
            open_nccl()
        if name in ("nvlink", "mixed"):
            with torch.cuda.device(device):
                torch.cuda.current_stream(device).synchronize()
                CudaCalls()
            symmetric_memory()
    except CADError as error:
        return str(error)
    return None


def _say(name: str, refusals: list[str], hosts: list[int], near: list[int], loud: bool) -> None:
    if refusals and loud:
        logger.warning("core attention is exchanged by %s, because %s", name, "; ".join(refusals))
    else:
        logger.info("core attention is exchanged by %s", name)
    apart = [rank for rank, at in enumerate(near) if hosts.count(hosts[rank]) > 1 and near.count(at) == 1]
    if name == "mixed" and loud and apart:
        logger.warning(
            "the GPUs of ranks %s do not reach each other's memory inside their host: nccl carries what they exchange",
            ", ".join(map(str, apart)),
        )


def host_number() -> int:
    """This process's host as a number: equal exactly on one running operating system."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return zlib.crc32(f"{boot.read_text() if boot.exists() else ''}{socket.gethostname()}".encode())
