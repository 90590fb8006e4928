"""The `nccl` transport: grouped sends and receives on a communicator and a stream of its own.

For ranks without access to each other's memory, across nodes too. Slices are packed by one index operation per field,
travel as one message per peer and field, and are put into place by one more.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist

from deepspeed_cad.errors import CADPeerError
from deepspeed_cad.exchange.copies import placements
from deepspeed_cad.exchange.liveness import Liveness
from deepspeed_cad.exchange.native_calls import NativeCallError, NcclCalls, Table, new_unique_id, open_nccl
from deepspeed_cad.exchange.peers import open_store
from deepspeed_cad.exchange.placement import Placement, place, put_on_device, upload
from deepspeed_cad.exchange.transport import Outgoing, Returning
from deepspeed_cad.exchange.watchdog import Watchdog
from deepspeed_cad.schedule import HOME, KEY, QUERY, SERVER, Schedule


@dataclass(frozen=True, eq=False)
class _Kind:
    """Index tensors and row counts of one kind of one schedule."""

    home_row: torch.Tensor
    home_group: torch.Tensor
    own_row: torch.Tensor
    own_group: torch.Tensor
    own_served: torch.Tensor
    received_row: torch.Tensor
    """Row of the group-major buffer for every row that arrives."""
    sent: Table
    """[ranks]: rows to each peer, as a home."""
    received: Table
    placement: Placement


def join_ranks(group: dist.ProcessGroup, device: torch.device) -> NcclCalls:
    """A communicator of the ranks of a group, apart from torch's. Collective."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    library, _ = open_nccl()
    # Through the job's store: a broadcast would make a communicator of torch's own first.
    store = open_store(group, "nccl")
    if rank == 0:
        store.set("unique id", new_unique_id(library).hex())
    unique_id = bytes.fromhex(store.get("unique id").decode())
    with torch.cuda.device(device):
        return NcclCalls(library, unique_id, ranks, rank)


class NcclTransport:
    """Exchange through an NCCL communicator of its own."""

    name = "nccl"

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        liveness: Liveness | None = None,
        timeout_s: float = 300.0,
    ) -> None:
        """Collective: every rank of the group makes one at the same time."""
        self.group, self.device, self.liveness = group, device, liveness
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.exchanges = 0
        self.bytes_sent = 0
        self.calls = join_ranks(group, device)
        self.stream = torch.cuda.Stream(device)
        self._kinds: WeakKeyDictionary[Schedule, tuple[_Kind, _Kind]] = WeakKeyDictionary()
        self._stuck = ""
        self._watchdog = Watchdog(timeout_s, self._give_up, device)

    def dispatch(self, schedule: Schedule, fields: list[Outgoing], slot: int) -> _Dispatched:
        """See Transport.dispatch; slots need no care here, every exchange has buffers of its own."""
        kinds = self._index(schedule)
        packed = [f.home[kinds[f.kind].home_row, kinds[f.kind].home_group] for f in fields]
        counts = [(kinds[f.kind].sent, kinds[f.kind].received) for f in fields]
        return _Dispatched(self, schedule, fields, kinds, self._start(packed, counts))

    def give_back(self, schedule: Schedule, fields: list[Returning], slot: int) -> _Returned:
        """See Transport.give_back."""
        kinds = self._index(schedule)
        packed = [f.served[kinds[f.kind].received_row] for f in fields]
        counts = [(kinds[f.kind].received, kinds[f.kind].sent) for f in fields]
        return _Returned(self, fields, kinds, self._start(packed, counts))

    def close(self) -> None:
        """Leave the communicator."""
        if not self._stuck:
            torch.cuda.synchronize(self.device)  # the watchdog ends what a dead peer never will
        self._watchdog.close()
        # Nothing is under way any more; leaving in good order would wait for ranks that may be gone.
        self.calls.leave(abort=True)

    def finish(self, under_way: _UnderWay) -> None:
        """Queue on the current stream: until the exchange is over."""
        self._raise_if_stuck()
        current = torch.cuda.current_stream(self.device)
        before, after = torch.cuda.Event(), torch.cuda.Event()
        before.record(current)
        current.wait_event(under_way.done)
        after.record(current)
        if current != under_way.producer:
            under_way.producer.wait_event(under_way.done)
        under_way.packed.clear()
        self._watchdog.track(before, after, f"core-attention exchange {under_way.number}")

    def release(self, under_way: _UnderWay) -> None:
        """What arrived has been read by work queued on the current stream; its memory goes back to its producer's."""
        current = torch.cuda.current_stream(self.device)
        if current != under_way.producer:
            under_way.producer.wait_event(current.record_event())
        under_way.arrived = []

    def _start(self, packed: list[torch.Tensor], counts: list[tuple[Table, Table]]) -> _UnderWay:
        self._raise_if_stuck()
        arrived = [rows.new_empty(int(received.sum()), rows.shape[1]) for rows, (_, received) in zip(packed, counts)]
        messages = []
        for out, into, (sent, received) in zip(packed, arrived, counts):
            width = out.shape[1] * out.element_size()
            for is_send, tensor, rows in ((1, out, sent), (0, into, received)):
                begin = tensor.data_ptr() + (np.cumsum(rows) - rows) * width
                peers = np.flatnonzero(rows * width)
                column = np.full(len(peers), is_send)
                messages.append(np.stack([column, peers, begin[peers], rows[peers] * width], axis=1))
            self.bytes_sent += int(sent.sum()) * width
        table = np.ascontiguousarray(np.concatenate(messages), np.int64) if messages else np.zeros((0, 4), np.int64)
        self.exchanges += 1
        producer = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(producer)
        try:
            with torch.cuda.device(self.device):
                self.calls.exchange(self.stream.cuda_stream, table)
        except NativeCallError as error:
            raise self._explain(f"core-attention exchange {self.exchanges}", error) from error
        return _UnderWay(self.exchanges, self.stream.record_event(), packed, arrived, producer)

    def _index(self, schedule: Schedule) -> tuple[_Kind, _Kind]:
        found = self._kinds.get(schedule)
        if found is None:
            found = self._kinds[schedule] = (self._build(schedule, QUERY), self._build(schedule, KEY))
        return found

    def _build(self, schedule: Schedule, kind: int) -> _Kind:
        home = schedule.home_index(schedule.sends, kind)
        own = schedule.home_index(schedule.own, kind)
        return _Kind(
            home_row=upload(home // schedule.groups, self.device),
            home_group=upload(home % schedule.groups, self.device),
            own_row=upload(own // schedule.groups, self.device),
            own_group=upload(own % schedule.groups, self.device),
            own_served=upload(schedule.server_index(schedule.own, kind), self.device),
            received_row=upload(schedule.server_index(schedule.receives, kind), self.device),
            sent=schedule.rows_by_peer(schedule.sends, SERVER, kind),
            received=schedule.rows_by_peer(schedule.receives, HOME, kind),
            placement=put_on_device(placements(schedule, kind), self.device),
        )

    def _give_up(self, waited_for: str) -> None:
        """Called by the watchdog: stop what is under way, so that the streams go on; the next call raises."""
        self._stuck = waited_for
        self.calls.leave(abort=True)

    def _raise_if_stuck(self) -> None:
        if self._stuck:
            raise self._explain(self._stuck, RuntimeError(f"no sign of it within {self._watchdog.timeout_s:g} s"))

    def _explain(self, waited_for: str, error: BaseException) -> CADPeerError:
        if self.liveness is None:
            return CADPeerError(f"rank {self.rank} waited for {waited_for}: {error}")
        return self.liveness.explain(waited_for, error)


@dataclass(eq=False)
class _UnderWay:
    number: int
    done: torch.cuda.Event
    packed: list[torch.Tensor]
    """Held until the transfer is over."""
    arrived: list[torch.Tensor]
    producer: torch.cuda.Stream


@dataclass(eq=False)
class _Dispatched:
    transport: NcclTransport
    schedule: Schedule
    fields: list[Outgoing]
    kinds: tuple[_Kind, _Kind]
    under_way: _UnderWay

    def wait(self) -> list[torch.Tensor]:
        """See exchange.transport.Dispatched."""
        self.transport.finish(self.under_way)
        buffers = []
        for f, arrived in zip(self.fields, self.under_way.arrived):
            kind = self.kinds[f.kind]
            rows = int(self.schedule.served_rows[self.schedule.rank, f.kind])
            buffer = f.home.new_empty(rows, f.home.shape[2])
            buffer[kind.received_row] = arrived
            buffer[kind.own_served] = f.home[kind.own_row, kind.own_group]
            buffers.append(buffer)
        self.transport.release(self.under_way)
        self.fields = []
        return buffers


@dataclass(eq=False)
class _Returned:
    transport: NcclTransport
    fields: list[Returning]
    kinds: tuple[_Kind, _Kind]
    under_way: _UnderWay

    def wait(self) -> None:
        """See exchange.transport.Returned."""
        self.transport.finish(self.under_way)
        for f, arrived in zip(self.fields, self.under_way.arrived):
            place(self.kinds[f.kind].placement, arrived, f.served, f.home, f.add)
        self.transport.release(self.under_way)
        self.fields = []
