"""Messages by NCCL: a communicator of all ranks of a group, apart from torch's, on a stream of its own. And who sends
them: the `nccl` transport, where the rows of a field to a peer are one message, and `Strangers`, a part of `mixed`.

Ahead of the messages of an exchange, and in a call of their own, travel its numbers (failure/identity.py): if ranks are
in different exchanges, sizes differ and NCCL may hang in the messages, but the numbers are there.
"""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

import numpy as np
import torch

from deepspeed_cad.errors import CADError, CADPeerError
from deepspeed_cad.exchange.copies import FarPart, far_part, list_messages
from deepspeed_cad.exchange.failure.identity import RING, Comparison, Identity
from deepspeed_cad.exchange.failure.roll_call import RollCall
from deepspeed_cad.exchange.failure.watchdog import Alarm, Watchdog
from deepspeed_cad.exchange.group import Group, OwnGroup, has_ways_apart, open_store, rank_of, size_of
from deepspeed_cad.exchange.native_calls import NcclCalls, Table, UnreachedError, new_unique_id, open_nccl
from deepspeed_cad.exchange.packed import Counts, PackedTransport
from deepspeed_cad.exchange.placement import take, upload
from deepspeed_cad.exchange.transport import Outgoing, Returning, leave_to_streams
from deepspeed_cad.exchange.waits import Transfers
from deepspeed_cad.native import NativeCallError
from deepspeed_cad.schedule import KEY, QUERY, Schedule
from deepspeed_cad.threads import is_over, run_aside, start_daemon

NUMBER_BYTES = 8
PRIORITY = -2
"""Of the streams that messages run on: before all attention, which has 0 and -1. Kernels of a stream that is not ahead
start only when all blocks of attention queued earlier have: the exchange would run behind what is to hide it."""


def join_ranks(group: Group, device: torch.device, alarm: Alarm) -> NcclCalls:
    """A communicator of the ranks of a group, apart from torch's. Collective; CADPeerError where a rank is missing."""
    rank, ranks = rank_of(group), size_of(group)
    # Through the job's store: a broadcast would make a communicator of torch's own first.
    roll_call = RollCall(open_store(group, "nccl"), ranks, alarm)
    unique_id, problem = "", ""
    try:
        open_nccl()
        unique_id = new_unique_id().hex() if rank == 0 else ""
    except CADError as error:
        problem = str(error)
    # Nobody enters NCCL before all are here: it waits without an end for a rank that never comes.
    roll_call.agree("opening NCCL", problem)
    unique_id = roll_call.call("opening NCCL", unique_id)[0]
    return _in_time(run_aside("joining NCCL", lambda: NcclCalls(bytes.fromhex(unique_id), ranks, rank), device), alarm)


def _in_time(joined: Future[NcclCalls], alarm: Alarm) -> NcclCalls:
    """NCCL cannot be interrupted while it joins ranks: where time is up, or a server is lost, its thread stays behind,
    and leaves what it gets too late."""
    try:
        if alarm.liveness.patiently(joined.done, "opening NCCL", with_servers=True, timeout_s=alarm.timeout_s):
            return joined.result()
        raise UnreachedError(
            f"NCCL did not join the ranks within {alarm.timeout_s:g} s, though all of them were there: they cannot "
            "reach each other. Set NCCL_SOCKET_IFNAME to the network that connects the hosts; NCCL_DEBUG=INFO says more"
        )
    except (UnreachedError, CADPeerError):
        joined.add_done_callback(_leave)
        raise


def _leave(late: Future[NcclCalls]) -> None:
    if late.exception() is None:
        late.result().leave()


class TwoWays:
    """Messengers of one transport: for what goes out, and for what comes back."""

    def __init__(self, group: Group, device: torch.device, alarm: Alarm, apart: bool) -> None:
        """Collective. `apart`: each way has a communicator and a stream of its own, so that a wave comes back while the
        next is still on its way out. All ranks start exchanges in the same order, so no two can wait for each other."""
        self.out = Messenger(group, device, alarm)
        try:
            self.back = Messenger(group, device, alarm) if apart else self.out
        except BaseException:
            self.out.calls.leave()
            raise

    def leave(self) -> None:
        """Leave the communicators and stop what is under way; harmless when called again. Leaving in good order would
        wait for ranks that may be gone."""
        try:
            self.out.calls.leave()
        finally:
            if self.back is not self.out:
                self.back.calls.leave()


class Messenger:
    """Sends and receives what belongs to exchanges of one transport, one behind the other."""

    def __init__(self, group: Group, device: torch.device, alarm: Alarm) -> None:
        self.device, self.alarm = device, alarm
        self.rank, self.ranks = rank_of(group), size_of(group)
        self.calls = join_ranks(group, device, alarm)
        self.stream = torch.cuda.Stream(device, priority=PRIORITY)
        self._numbers = torch.zeros(RING, dtype=torch.int64, device=device)
        """Of this rank's exchanges, to be sent from here: as many as a ring holds, so none is overwritten too early."""

    def exchange(
        self, identity: Identity, messages: Table, comparison: Comparison, watchdog: Watchdog,
        transfers: Transfers | None = None,
    ) -> torch.cuda.Event | None:  # fmt: skip
        """Queue the messages ([n, 4], see NcclCalls.exchange) of an exchange behind what the current stream holds now.
        Gives what happens when they are over; None where there are none. `transfers` notes how long they took: from
        when the numbers are here, which is when the ranks have met, so no waiting for a late rank is in it."""
        stream = self.stream
        stream.wait_stream(torch.cuda.current_stream(self.device))
        everybody = self.alarm.goes_on
        if not len(messages) and not everybody:
            return None
        row = identity.index % RING
        mine, theirs = self._numbers[row : row + 1], comparison.ring[row]
        pairs = np.unique(messages[:, :2], axis=0)
        if everybody:
            # Who has an exchange behind it knows then that all ranks have come to it: passes are held as long.
            pairs = np.array([(way, one) for way in (0, 1) for one in range(self.ranks) if one != self.rank], np.int64)
        # A number to every rank that gets messages, and one from every rank that sends some.
        address = np.where(pairs[:, 0] == 1, mine.data_ptr(), theirs.data_ptr() + pairs[:, 1] * NUMBER_BYTES)
        size_of_each = np.full(len(pairs), NUMBER_BYTES)
        numbers = np.ascontiguousarray(np.stack([*pairs.T, address, size_of_each], axis=1), np.int64)
        with torch.cuda.device(self.device), torch.cuda.stream(stream):
            mine.fill_(identity.number)
        before = stream.record_event()
        self._queue(identity, numbers, watchdog)
        size = None if transfers is None else transfers.size_of_messages(messages)
        known, done = (torch.cuda.Event(enable_timing=size is not None) for _ in range(2))
        known.record(stream)
        senders = numbers[numbers[:, 0] == 0, 1].tolist()
        watchdog.track(before, known, identity, partial(comparison.arrived, identity, senders))
        if len(messages):
            self._queue(identity, messages, watchdog)
        done.record(stream)
        if transfers is not None and size is not None:
            transfers.expect(known, done, size)
        watchdog.track(known, done, identity)
        return done

    def _queue(self, identity: Identity, messages: Table, watchdog: Watchdog) -> None:
        try:
            # The first message between two ranks connects them, and the host waits for that inside the call.
            with torch.cuda.device(self.device), watchdog.inside(identity):
                self.calls.exchange(self.stream.cuda_stream, messages)
        except NativeCallError as error:
            raise self.alarm.explain(str(identity), error) from error


@dataclass(eq=False)
class Parcel:
    identity: Identity
    packed: list[torch.Tensor]
    arrived: list[torch.Tensor]
    producer: torch.cuda.Stream
    messages: torch.cuda.Stream
    """Where NCCL reads what is packed and writes what arrives."""
    done: torch.cuda.Event | None = None

    def __del__(self) -> None:
        # An error fell before it was received or released.
        leave_to_streams([*self.packed, *self.arrived], [self.messages])


class NcclTransport(PackedTransport):
    """What comes back has a communicator of its own between hosts, and beside reserved servers."""

    name = "nccl"
    most_waves = 8

    def __init__(self, group: Group, device: torch.device, alarm: Alarm, several_hosts: bool = False) -> None:
        super().__init__(group, device, alarm)
        self.two_ways = has_ways_apart(group, alarm.liveness.may_change)
        self.messages = TwoWays(group, device, alarm, several_hosts or self.two_ways)
        ring = torch.zeros(RING, size_of(group), dtype=torch.int64, device=device)
        # Message streams write the numbers: not before they are zeros.
        for way in (self.messages.out, self.messages.back):
            way.stream.wait_stream(torch.cuda.current_stream(device))
        self._comparison = Comparison(ring, rank_of(group), alarm.in_job)
        self._watchdog = Watchdog(alarm, self.messages.leave, device, self._comparison)
        self._unfinished: set[Parcel] = set()
        """Where training goes on without a server that is lost: what NCCL may still read and write."""

    def _send(self, packed: list[torch.Tensor], counts: Counts, identity: Identity, is_return: bool) -> Parcel:
        self._comparison.newest = identity.index
        arrived = [rows.new_empty(int(received.sum()), rows.shape[1]) for rows, (_, received) in zip(packed, counts)]
        runs = [(_run_of_each(sent), _run_of_each(received)) for sent, received in counts]
        way = self.messages.back if is_return else self.messages.out
        parcel = Parcel(identity, packed, arrived, torch.cuda.current_stream(self.device), way.stream)
        if self.alarm.goes_on:
            going = {one for one in self._unfinished if one.done is None or not is_over(one.done)}
            self._unfinished = {parcel, *going}
        table = list_messages(runs, packed, arrived)
        parcel.done = way.exchange(identity, table, self._comparison, self._watchdog, self.transfers)
        self.stream = way.stream
        return parcel

    def _receive(self, parcel: Parcel) -> list[torch.Tensor]:
        self.alarm.check()
        if self.alarm.goes_on and parcel.done is not None:
            self._watchdog.wait_for(partial(is_over, parcel.done), parcel.identity)
        current = torch.cuda.current_stream(self.device)
        before, after = torch.cuda.Event(), torch.cuda.Event()
        before.record(current)
        if parcel.done is not None:
            current.wait_event(parcel.done)
        after.record(current)
        if parcel.done is not None and current != parcel.producer:
            parcel.producer.wait_event(parcel.done)
        parcel.packed.clear()
        self._watchdog.track(before, after, parcel.identity)
        return parcel.arrived

    def _release(self, parcel: Parcel) -> None:
        """What arrived has been read by work queued on the current stream; its memory goes back to its producer's."""
        current = torch.cuda.current_stream(self.device)
        if current != parcel.producer:
            parcel.producer.wait_event(current.record_event())
        parcel.arrived = []

    def close(self) -> None:
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


def _run_of_each(rows: Table) -> Table:
    """[peers, 3]: peer, first row and rows, one behind the other."""
    return np.stack([np.arange(len(rows)), np.cumsum(rows) - rows, rows], axis=1)


class Strangers:
    """What the `mixed` transport (landed.py) exchanges with ranks whose memory this one does not map.

    It is received straight into the landing areas, between the rows that neighbours copy there. Why not too early:
    every exchange makes the message stream wait for what was queued on the current stream before, whether it has
    messages or not. Areas take turns as landing.py says, so what landed in one before has been used by then."""

    def __init__(self, group: Group, device: torch.device, near: list[int], alarm: Alarm) -> None:
        """Collective. `near`: see LandingTransport."""
        if len(near) != size_of(group):
            raise CADError(f"{len(near)} numbers of neighbourhoods for a group of {size_of(group)} ranks")
        self.device = device
        self.messages = TwoWays(group, device, alarm, apart=True)
        self._members = np.flatnonzero(np.array(near) == near[rank_of(group)])
        self._far: WeakKeyDictionary[Schedule, list[tuple[FarPart, torch.Tensor]]] = WeakKeyDictionary()
        """Of query and of key rows; and on the device, what packs them."""

    def outgoing(
        self, schedule: Schedule, fields: list[Outgoing], landed: list[torch.Tensor]
    ) -> tuple[Messenger, Table, list[torch.Tensor]]:
        """The messages of a dispatch, by which way they go, and what they read; `landed`: where they arrive here."""
        far = self._look_up(schedule)
        packed = [take(f.home, far[f.kind][1]) for f in fields]
        runs = [(far[f.kind][0].packed, far[f.kind][0].served) for f in fields]
        return self.messages.out, list_messages(runs, packed, landed), packed

    def returning(
        self, schedule: Schedule, fields: list[Returning], landed: list[torch.Tensor]
    ) -> tuple[Messenger, Table, list[torch.Tensor]]:
        parts = [self._look_up(schedule)[f.kind][0] for f in fields]
        runs = [(part.served, part.landed) for part in parts]
        return self.messages.back, list_messages(runs, [f.served for f in fields], landed), []

    def _look_up(self, schedule: Schedule) -> list[tuple[FarPart, torch.Tensor]]:
        found = self._far.get(schedule)
        if found is None:
            parts = [far_part(schedule, self._members, kind) for kind in (QUERY, KEY)]
            found = self._far[schedule] = [(part, upload(part.home_index, self.device)) for part in parts]
        return found
