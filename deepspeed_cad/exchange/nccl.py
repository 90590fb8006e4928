"""The carrier of the `nccl` transport: grouped sends and receives on a communicator and a stream of its own.

Across nodes too. Rows travel as one message per peer and field. Between hosts, and beside reserved servers, what comes
back has a communicator and a stream of its own: it crosses what is on its way out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from deepspeed_cad.exchange.arrival import wait_for
from deepspeed_cad.exchange.carriers import Load
from deepspeed_cad.exchange.failure.identity import RING, Comparison, Identity
from deepspeed_cad.exchange.failure.watchdog import Alarm, Watchdog
from deepspeed_cad.exchange.group import Group, OwnGroup, has_ways_apart, rank_of, size_of
from deepspeed_cad.exchange.messages import TwoWays
from deepspeed_cad.exchange.split import list_messages
from deepspeed_cad.exchange.streams import leave_to_streams
from deepspeed_cad.threads import start_daemon


@dataclass(eq=False)
class UnderWay:
    """One exchange."""

    identity: Identity
    done: torch.cuda.Event | None
    """None: nothing moves."""
    packed: list[torch.Tensor]
    """Held until the transfer is over."""
    arrived: list[torch.Tensor]
    producer: torch.cuda.Stream
    messages: torch.cuda.Stream
    """Where NCCL reads what is packed and writes what arrives."""

    def __del__(self) -> None:
        # An error fell before `finish` or `release`.
        leave_to_streams([*self.packed, *self.arrived], [self.messages])


class NcclCarrier:
    """See the top of this file, and Carrier."""

    name = "nccl"
    most_waves = 8

    def __init__(self, group: Group, device: torch.device, alarm: Alarm, several_hosts: bool = False) -> None:
        """Collective: every rank of the group makes one at the same time, `several_hosts` alike.

        Each way has a communicator of its own between hosts, and beside reserved servers, whose results come home while
        the next nano-batch goes out.
        """
        self.group, self.device, self.alarm = group, device, alarm
        self.rank, self.ranks = rank_of(group), size_of(group)
        self.two_ways = has_ways_apart(group, alarm.liveness.may_change)
        self.messages = TwoWays(group, device, alarm, several_hosts or self.two_ways)
        self.stream: torch.cuda.Stream | None = None
        ring = torch.zeros(RING, self.ranks, dtype=torch.int64, device=device)
        # Message streams write the numbers: not before they are zeros.
        for way in (self.messages.out, self.messages.back):
            way.stream.wait_stream(torch.cuda.current_stream(device))
        self._comparison = Comparison(ring, self.rank)
        self._watchdog = Watchdog(alarm, self.messages.leave, device, self._comparison)
        self._unfinished: set[UnderWay] = set()
        """Where training goes on without a server that is lost: what NCCL may still read and write."""

    def start(self, load: Load) -> UnderWay:
        identity, packed, counts = load.identity, load.packed, load.counts
        self._comparison.newest = identity.index
        arrived = [rows.new_empty(int(received.sum()), rows.shape[1]) for rows, (_, received) in zip(packed, counts)]
        messages = [np.zeros((0, 4), np.int64)]
        for out, into, (sent, received) in zip(packed, arrived, counts):
            width = out.shape[1] * out.element_size()
            for is_send, tensor, rows in ((True, out, sent), (False, into, received)):
                runs = np.stack([np.arange(self.ranks), np.cumsum(rows) - rows, rows], axis=1)[rows > 0]
                messages.append(list_messages(is_send, runs, tensor.data_ptr(), width))
        way = self.messages.back if load.is_return else self.messages.out
        under_way = UnderWay(identity, None, packed, arrived, torch.cuda.current_stream(self.device), way.stream)
        if self.alarm.goes_on:
            going = {one for one in self._unfinished if one.done is None or not one.done.query()}
            self._unfinished = {under_way, *going}
        under_way.done = way.exchange(
            identity, np.ascontiguousarray(np.concatenate(messages)), self._comparison, self._watchdog, load.transfers
        )
        self.stream = way.stream
        return under_way

    def finish(self, under_way: UnderWay) -> list[torch.Tensor]:
        """See Carrier. What is queued on the current stream from now on begins when the exchange is over."""
        self.alarm.check()
        if self.alarm.goes_on and under_way.done is not None:
            wait_for(
                under_way.done.query, self.alarm, self._watchdog, under_way.identity, under_way.identity.index
            )  # fmt: skip
        current = torch.cuda.current_stream(self.device)
        before, after = torch.cuda.Event(), torch.cuda.Event()
        before.record(current)
        if under_way.done is not None:
            current.wait_event(under_way.done)
        after.record(current)
        if under_way.done is not None and current != under_way.producer:
            under_way.producer.wait_event(under_way.done)
        under_way.packed.clear()
        self._watchdog.track(before, after, under_way.identity)
        return under_way.arrived

    def release(self, under_way: UnderWay) -> None:
        """What arrived has been read by work queued on the current stream; its memory goes back to its producer's."""
        current = torch.cuda.current_stream(self.device)
        if current != under_way.producer:
            under_way.producer.wait_event(current.record_event())
        under_way.arrived = []

    def close(self) -> None:
        """Leave the communicator."""
        if not self.alarm.sounded:
            torch.cuda.synchronize(self.device)  # the watchdog ends what a dead peer never will
        try:
            self._watchdog.close()
        finally:
            self.messages.leave()

    def abandon(self) -> Callable[[], None]:
        assert isinstance(self.group, OwnGroup)
        self._watchdog.abandon()
        self.group.abandon()
        held = [self._unfinished]
        self._unfinished = set()

        def leave() -> None:
            # Not on the thread that changes servers: to leave may wait for the whole GPU, and another stream of it for
            # a trainer that waits for this one. Buffers stay until no kernel of NCCL can touch them.
            try:
                self.messages.leave()
            finally:
                for way in (self.messages.out, self.messages.back):
                    way.stream.synchronize()
                held.clear()

        start_daemon("leaves NCCL", leave, self.device)
        return lambda: None
