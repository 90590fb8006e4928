"""What trainers and servers open together once they have met: the error board and their process group.

And how servers of another launch find their places: trainer 0 leaves word of its job under a fixed key of the store.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from functools import partial

import torch
import torch.distributed as dist

from deepspeed_cad.config import CADConfig
from deepspeed_cad.errors import CADConfigError, CADPeerError
from deepspeed_cad.exchange.failure.board import Liveness
from deepspeed_cad.exchange.failure.patience import wait_until
from deepspeed_cad.exchange.group import OwnGroup, make_group
from deepspeed_cad.server.rendezvous import PREFIX, Abandoned, Hello, Rendezvous, open_store
from deepspeed_cad.server.split import Split

JOB = "job"
LEFT, ASKED, GIVEN_UP = "left", "asked", "given up"
"""On the board: the training has ended; a server that came later is asked in; trainers go on without a server."""


def open_board(meeting: Rendezvous, split: Split, config: CADConfig) -> Liveness:
    """The error board of trainers and servers."""
    board = dist.PrefixStore("board", meeting.root)
    liveness = Liveness(board, split.rank, split.ranks, meeting.timeout_s / 2)
    liveness.may_change = config.on_server_failure == "continue"
    return liveness


def wait_to_be_asked_in(liveness: Liveness) -> None:
    """A server that came later, until trainers come to a step in which it takes part; raises as `look_for_end`."""
    asked = f"{ASKED}/{liveness.rank}"
    wait_until(lambda: liveness.look_up(asked), math.inf, partial(look_for_end, liveness))


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


def open_group(split: Split, liveness: Liveness, device: torch.device, timeout_s: float) -> OwnGroup:
    """The process group of trainers and servers. Collective."""
    # A connection of its own: gloo waits inside the store, and nobody else could ask it anything meanwhile.
    store = dist.PrefixStore("group", Rendezvous(split, timeout_s).root)
    name = f"deepspeed_cad servers {split.attempt}"
    with Liveness.watch(liveness, "the group of trainers and servers"):
        return make_group(store, split.rank, split.ranks, device, name, timeout_s)


def offer_places(meeting: Rendezvous, mine: Hello) -> None:
    """Let servers of another launch find this job."""
    job = {"attempt": meeting.split.attempt, **asdict(mine)}
    dist.PrefixStore(PREFIX, open_store(meeting.split.rendezvous, meeting.timeout_s)).set(JOB, json.dumps(job))


def take_place(rendezvous: str, timeout_s: float, config: CADConfig | None, version: str) -> tuple[Split, CADConfig]:
    """The next free place of a server in a job, and the job's configuration.

    Raises CADPeerError where there is no job in time, CADConfigError where it has another version, wants no server from
    another launch, has all of them, or is configured otherwise than `config`.
    """
    store = dist.PrefixStore(PREFIX, open_store(rendezvous, timeout_s))
    if not wait_until(lambda: store.check([JOB]), timeout_s):
        raise CADPeerError(
            f"the store at {rendezvous} is there, but no training with reserved servers came to it within "
            f'{timeout_s:g} s. Its "cad" block must say {{"servers": {{"joined": n}}}}'
        )
    job = json.loads(store.get(JOB))
    # First of all: the configuration of another version may have keys that are unknown here.
    if job["version"] != version:
        raise CADConfigError(
            f"the job at {rendezvous} has deepspeed_cad {job['version']} and this server has {version}: install the "
            "same version everywhere"
        )
    theirs = CADConfig.from_dict(job["config"])
    joins = isinstance(theirs.servers, dict) and "joined" in theirs.servers
    changes = theirs.on_server_failure == "continue"
    if not joins and not changes:
        raise CADConfigError(
            f'the job at {rendezvous} has "servers": {json.dumps(theirs.servers)}: it launches its servers itself. For '
            'servers of another launch it must say {"joined": n}, or "on_server_failure": "continue"'
        )
    if config is not None and config != theirs:
        ours, other = config.to_dict(), theirs.to_dict()
        keys = ", ".join(key for key in ours if ours[key] != other[key])
        raise CADConfigError(
            f'the job at {rendezvous} has another "cad" block than this server ({keys}): leave out --cad and '
            "--cad_config to take the job's"
        )
    number = dist.PrefixStore(str(job["attempt"]), store).add("joined", 1) + (0 if joins else job["servers"])
    if number > job["servers"] and not changes:
        raise CADConfigError(
            f"the job at {rendezvous} has its {job['servers']} servers already, and this one would be number {number}: "
            "two launches use the same rendezvous, or too many servers were started. Servers may come while a job "
            'runs where it says "on_server_failure": "continue"'
        )
    rank = job["trainers"] + number - 1
    return Split(job["trainers"], job["servers"], rank, rendezvous, job["attempt"]), theirs
