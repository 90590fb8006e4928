"""A reserved server's process: from the meeting with the trainers to its exit code.

In: its role, the "cad" block, its GPU. Out: exit code 0 where all trainers ended well; else 1, and a line that says who
ended and why. Nothing of torch.distributed's world is there: the group is made of a store.
"""

import logging
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import Any, cast

import torch

from deepspeed_cad import native
from deepspeed_cad.ahead.worker import Worker
from deepspeed_cad.config import CADConfig
from deepspeed_cad.errors import CADConfigError, CADError, CADPeerError, ServerLostError, in_one_line
from deepspeed_cad.exchange.group import OwnGroup, numbers_of
from deepspeed_cad.exchange.probe import NOT_OPENED, Opened, with_links
from deepspeed_cad.kernels.registry import choose
from deepspeed_cad.notice import counted, notice
from deepspeed_cad.profiles.speed import find_speeds
from deepspeed_cad.server.launch import Split
from deepspeed_cad.server.links import TrainerLinks
from deepspeed_cad.server.loop import Loop
from deepspeed_cad.server.meeting import (
    Abandoned,
    Hello,
    Members,
    Rendezvous,
    look_for_end,
    look_for_errors,
    may_change,
    open_again,
    open_board,
    transports_of,
    wait_to_be_asked_in,
    why_not_change,
)
from deepspeed_cad.server.orders import REGROUP
from deepspeed_cad.server.sockets import Listener

logger = logging.getLogger("deepspeed_cad")

FAILED = 1
BUDGET_SHARE = 0.8
"""Of the GPU's free memory at the start, for what is held for backwards; the rest is for what arrives and runs. A
choice."""
LAST_WORD_S = 1.5
"""For trainers to say why an exchange failed, which may be what ended this server."""
STUCK_S = 6.0
"""After the trainers ended, for a GPU or an exchange that does not let go."""
SAME_SIGNAL_S = 5.0
"""Within which a second signal is the first one's, sent by a scheduler and by a launcher. A choice."""
FAREWELL_S = 3.0
"""For trainers to end after this server failed: a launcher may end them as soon as it sees this process go."""


def choose_device(named: str = "") -> torch.device:
    """By default the GPU that the launcher means for this process, or the CPU where trainers use it too. Raises
    CADConfigError for one that is not there."""
    if not named and torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu":
        named = f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % torch.cuda.device_count()}"
    try:
        chosen = torch.device(named or "cpu")
        if chosen.type == "cuda":
            torch.cuda.set_device(chosen)
    except (RuntimeError, AttributeError, AssertionError) as error:
        raise CADConfigError(f"there is no device {named!r} here: {in_one_line(error)}") from error
    return chosen


def serve(split: Split, config: CADConfig, device: torch.device | None = None) -> int:
    """Serve until the trainers end; gives the exit code."""
    server = _Server(split, config, device or choose_device())
    _take_signals(server)
    try:
        server.open()
        return server.run()
    except Abandoned as end:
        notice(f"server {split.rank} ends: {end}")
        return 0
    except (CADError, RuntimeError) as error:  # torch's, of the store or the GPU
        if server.trainers is not None:
            server.trainers.fail(str(error))
        return _say(split, str(error))


class _Server:
    def __init__(self, split: Split, config: CADConfig, device: torch.device) -> None:
        self.split, self.config, self.device = split, config, device
        self.trainers: TrainerLinks | None = None
        self.opened: Opened | None = None
        """None until its group is there."""

    def open(self) -> None:
        """Meet the trainers; raises a CADError, the same on all ranks where they do not belong together."""
        split, config, device = self.split, self.config, self.device
        meeting = self.meeting = Rendezvous(split, config.timeout_s)
        meeting.claim()
        mine = Hello.of(split, config)
        if reason := native.why_missing() or why_not_change(config, device):
            meeting.refuse(f"{mine.what}: {reason}")
        self.liveness = open_board(meeting, may_change(config))
        # Whoever starts training may first load a model for as long as it likes; nobody can connect meanwhile.
        if split.came_later:
            meeting.knock(mine)
            wait_to_be_asked_in(self.liveness)
        else:
            meeting.meet(mine)
        elsewhere = {meeting.hear(trainer).host for trainer in range(split.trainers)} - {mine.host}
        try:
            listener = Listener(split.rank, split.rendezvous, sorted(elsewhere))
        except CADPeerError as error:
            meeting.open_door(str(error))
            raise
        meeting.open_door(listener.door)
        look = partial(look_for_end if split.came_later else look_for_errors, self.liveness)
        connections = listener.accept(split.trainers, config.timeout_s, look)
        self.trainers = self._links = TrainerLinks(split.rank, connections, self.liveness)
        self._closed = threading.Event()
        threading.Thread(target=self._end_with_trainers, daemon=True).start()
        self.worker = Worker(device, config.timeout_s)
        self.loop = Loop(device, partial(choose, config.kernel, rank=split.rank), self.worker, _budget(device))
        if not split.came_later:
            self._begin_with(Members(0, split.trainers, tuple(range(split.trainers, split.ranks))))
        if self.liveness.may_change:
            self.liveness.watched, self.liveness.losses = range(split.trainers), self._links

    def _begin_with(self, members: Members) -> None:
        split, config, device, loop = self.split, self.config, self.device, self.loop
        transports = transports_of(config, device)
        opened = self.opened = open_again(self.meeting, members, self.liveness, device, config.transport, transports)
        if not members.generation:
            agree = partial(numbers_of, opened.group, self.liveness)
            with_links(opened, device, agree, config.links)
            # Trainers plan with what all ranks say of their speed; a server that comes later is taken for a mean one.
            find_speeds(config.speeds, device, config.kernel, agree, False)
        if loop.transport is None:
            budget = "" if loop.budget is None else f", {loop.budget / 2**30:.1f} GiB to hold for backwards"
            others = len(members.servers) - 1
            beside = f" beside {counted(others, 'other server')}" if others else ""
            notice(
                f"server {split.rank} is up: it serves {counted(split.trainers, 'trainer')}{beside}, on {device}, "
                f"transport {opened.transport.name}{budget}"
            )
        loop.begin_with(members.numbers.index(split.rank), opened.transport)

    def run(self) -> int:
        split, loop = self.split, self.loop
        began, reason = 0.0, ""
        try:
            while (order := self._links.orders.get()) is not None:
                # Until the first micro-batch comes, trainers load models and data.
                began = began or time.perf_counter()
                # An exchange that was lost with another server ends here, and what was told before servers changed.
                with suppress(ServerLostError):
                    if order.head["do"] == REGROUP:
                        self._regroup(order.head)
                    elif self._links.called <= self._links.generation:
                        loop.follow(order)
                self._links.busy = loop.busy.seconds(), time.perf_counter() - began
            if not (reason := self._links.reason):
                loop.end_trace()
        except Exception as error:
            reason = self._explain(error)
        seconds = time.perf_counter() - began if began else 0.0
        notice(
            f"server {split.rank} is done: {loop.micro_batches} micro-batches served, {loop.busy.seconds():.1f} s busy "
            f"of {seconds:.1f} s, at most {loop.most_held / 2**20:.1f} MiB held for backwards"
        )
        self._close()
        return _say(split, reason) if reason else 0

    def _regroup(self, head: dict[str, Any]) -> None:
        members = Members(head["generation"], self.split.trainers, tuple(head["servers"]), head["exchanges"])
        if self.opened is not None:
            release = self.opened.transport.abandon()
            self.opened = None
            release()
        self._links.generation = members.generation
        try:
            self._begin_with(members)
        except NOT_OPENED as error:  # trainers have it, too, and give up who has just come
            raise ServerLostError(str(error)) from error

    def _explain(self, error: Exception) -> str:
        """Why this server ends: what ended the trainers, if they did; else its own failure, which they are told."""
        if isinstance(error, CADPeerError) and (reason := self._links.wait_for_reason(LAST_WORD_S)):
            return reason
        logger.debug("where it happened", exc_info=True)
        reason = str(error) if isinstance(error, CADError) else f"{type(error).__name__}: {error}"
        if isinstance(error, torch.OutOfMemoryError):
            reason = (
                f"server {self.split.rank} has no memory left on {self.device} ({self.loop.held >> 20} MiB held for "
                f"backwards): {error}. Reserve more servers, or use smaller micro-batches"
            )
        if self._links.ended.is_set() and self._links.reason:
            return self._links.reason
        self.liveness.report(reason)
        self._links.fail(reason)
        self._links.wait_for_reason(FAREWELL_S)
        return reason

    def _end_with_trainers(self) -> None:
        """A thread that ends the process soon after the trainers did, where it is stuck in a GPU or an exchange."""
        self._links.ended.wait()
        if self._closed.wait(STUCK_S):
            return
        if self._links.reason:
            _say(self.split, self._links.reason)
        os._exit(FAILED if self._links.reason else 0)

    def _close(self) -> None:
        self.worker.close()
        if self.opened is not None:
            with suppress(CADError):  # of the exchange that failed: it is said already
                self.opened.transport.close()
            cast(OwnGroup, self.opened.group).close()
        self._closed.set()


def _budget(device: torch.device) -> int | None:
    return int(torch.cuda.mem_get_info(device)[0] * BUDGET_SHARE) if device.type == "cuda" else None


def _take_signals(server: _Server) -> None:
    """A launcher that is to end signals all processes at once. Trainers may need this server for the step after which
    they save a checkpoint, so it serves until they end, or until a signal comes again. Where they can go on without it,
    it ends at once."""
    first: list[float] = []

    def end(number: int, frame: FrameType | None) -> None:
        first.append(now := time.monotonic())
        links, name = server.trainers, f"{signal.Signals(number).name} from the launcher or the user"
        if links is not None and not may_change(server.config) and not links.ended.is_set():
            if len(first) == 1:
                _say(server.split, name, "serves until its trainers end, or a signal comes again")
            if now - first[0] < SAME_SIGNAL_S:
                return
        # The launcher may be first to notice that a trainer died; its socket says so too.
        reason = "" if links is None else links.wait_for_reason(2 * LAST_WORD_S)
        _say(server.split, reason or name)
        os._exit(128 + number)

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, end)
        signal.signal(signal.SIGINT, end)


def _say(split: Split, reason: str, what: str = "ended") -> int:
    sys.stderr.write(f"deepspeed_cad: server {split.rank} {what}: {reason}\n")
    sys.stderr.flush()
    return FAILED
