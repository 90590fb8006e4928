"""What a session says of itself, from `SessionFacts`: lines for the log, and the few that every user sees. Pure."""

import math
import textwrap
from dataclasses import dataclass

from deepspeed_cad.config import CADConfig
from deepspeed_cad.notice import counted
from deepspeed_cad.report.statistics import Statistics

IDLE = 0.15
"""Share of their time that ranks may be idle before somebody should know. A choice: a server more or less among eight
changes its share by about as much."""
EVERY = 32
"""Micro-batches over which shares are taken. A choice: some seconds of training. The first ones are left out: kernels
compile, and linear layers are not known yet."""


@dataclass(frozen=True)
class SessionFacts:
    rank: int
    trainers: int
    shares: int
    """Among so many ranks the heads of each micro-batch are divided."""
    pieces: bool
    """Outside attention such ranks have pieces of its tokens (Ulysses)."""
    servers_at_start: int
    transport: str
    """Empty where there is nothing to exchange; so `links`."""
    overlap: str
    tolerance: float
    cost: str
    speeds: str
    """In words, as a part of a list; empty where all ranks are equal."""
    links: str
    kernels: tuple[str, ...]
    landing_bytes: int
    landing_limit: float
    parked_bytes: int | None
    """Host memory for what attention keeps; None where it stays on the device."""
    arranged: str
    """How micro-batches of a step are arranged, in words, and what would arrange more; empty where they are not."""
    statistics: Statistics


def describe(facts: SessionFacts) -> str:
    servers = f" beside {counted(facts.servers_at_start, 'reserved server')}" if facts.servers_at_start else ""
    held, limit = facts.landing_bytes / 2**30, facts.landing_limit / 2**30
    most = "" if math.isinf(limit) else f" of at most {limit:.3g}"
    areas = f"landing areas {held:.3g}{most} GiB, " if most or held else ""
    return (
        f"rank {facts.rank} of {facts.trainers} attention servers{servers}{_shares(facts)}, {_transport(facts)}, "
        f"overlap {facts.overlap}, tolerance {facts.tolerance}, cost {facts.cost}, {areas}{_links(facts)}{facts.speeds}"
    ).removesuffix(", ")


def summary(facts: SessionFacts) -> str:
    """What CAD did since the session opened, on this rank."""
    parked = ""
    if facts.parked_bytes is not None:
        parked = f"; {facts.parked_bytes >> 20} MiB of host memory for what attention keeps"
    done = facts.statistics.in_words(_balance(facts))
    return f"{done}{parked}; rank {facts.rank} of {facts.trainers}{_shares(facts)}, {_means(facts)}"


def first_line(facts: SessionFacts) -> str:
    """That CAD is on, and what to expect; for when the first micro-batch was planned."""
    gain = f"{_balance(facts)} in the first micro-batch"
    sent = f"rank 0 sent {facts.statistics.bytes_sent / 2**20:.1f} MiB in its forward"
    ranks = counted(facts.trainers, "rank")
    if facts.servers_at_start:
        ranks = f"{counted(facts.trainers, 'trainer')} and {counted(facts.servers_at_start, 'reserved server')}"
    arranged = f"; {facts.arranged}" if facts.arranged else ""
    if facts.shares == facts.trainers > 1:
        return f"CAD is on: {ranks}{_shares(facts)}: there is nothing to balance, and attention stays where it is"
    return f"CAD is on: {ranks}{_shares(facts)}, {_means(facts)}; {gain}, {sent}{arranged}"


def last_line(facts: SessionFacts, reason: str) -> str:
    """What CAD did, and the `reason` for which training ended early; empty where it went well."""
    begin = f"CAD stopped early ({textwrap.shorten(reason, 200)})" if reason else "CAD is done"
    return f"{begin}: {summary(facts)}"


def _balance(facts: SessionFacts) -> str:
    return f"attention max/mean {facts.statistics.imbalance_before:.2f} → {facts.statistics.imbalance:.2f}"


def _means(facts: SessionFacts) -> str:
    return f"{_transport(facts)}, {_links(facts)}{facts.speeds}kernel {', '.join(facts.kernels) or 'not chosen yet'}"


def _shares(facts: SessionFacts) -> str:
    if facts.shares == 1:
        return ""
    of = "Ulysses" if facts.pieces else "tensor parallelism"
    return f" ({counted(facts.trainers // facts.shares, 'replica')} of {facts.shares} by {of})"


def _transport(facts: SessionFacts) -> str:
    return f"transport {facts.transport}" if facts.transport else "nothing to exchange"


def _links(facts: SessionFacts) -> str:
    return f"{facts.links}, " if facts.links else ""


def unused_keys(config: CADConfig) -> list[str]:
    """Lines for keys that a user set and that do nothing in this run, or not on all ranks."""
    lines = []
    reserved = config.servers != "all"
    if config.speeds is not None and not reserved:
        lines.append('"speeds" does nothing: no rank is reserved. In place ranks learn speeds while they train')
    if reserved and config.on_server_failure == "continue" and "joined" not in config.servers:
        lines.append(
            '"on_server_failure" is "continue" and servers are part of the launch: torchrun, accelerate launch and '
            "deepspeed end all processes of a launch when one fails, the trainers too. Set "
            '"servers" to {"joined": n} and start each server by itself: deepspeed-cad serve --rendezvous HOST:PORT'
        )
    if config.keep == "host" and reserved:
        lines.append(
            '"keep" is "host" and does nothing on reserved servers: trainers park what they keep, servers hold it '
            "on their GPU. Where a server runs out of memory, reserve more servers or use smaller micro-batches"
        )
    return lines


def advise(
    servers_idle: float,
    trainers_idle: float,
    servers: int,
    trainers: int,
    where: str = f"trainer 0 for {{}} of {EVERY} micro-batches",
) -> str:
    """What idle ranks mean; empty where neither are idle for long. Shares of time in which servers did not attend, and
    trainer 0, or the mean trainer, waited for exchanges; `where` says which, with a place for the share."""
    shares = f"servers were idle for {servers_idle:.0%} and {where.format(f'{trainers_idle:.0%}')}"
    if servers_idle > IDLE and trainers_idle > IDLE:
        return (
            f"{shares}: they wait for each other. Look whether nano-batches alternate over the whole decoder "
            "(docs/interleave.md) and how fast links are; another number of servers does not help"
        )
    if servers_idle > IDLE:
        fewer = f"{servers - 1} servers" if servers > 1 else 'none ("servers": "all")'
        return f"{shares}: reserve fewer of them, {fewer}, so that more ranks train"
    if trainers_idle > IDLE and trainers > 1:
        return f"{shares}: reserve more servers, {servers + 1}, so that trainers get their attention sooner"
    if trainers_idle > IDLE:
        return f"{shares}: attention takes longer than all else. Add servers, or train in place"
    return ""
