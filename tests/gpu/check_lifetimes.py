"""Memory that streams still use when what holds it ends early, and numbers of exchanges that come round.

What is under way on a stream that is held up is let go of by another thread, whose current stream is another one, as
where garbage is collected. Then new tensors take all memory that torch's allocator has free for tensors of that size,
and are filled. If memory under a copy is among it, the copy writes into them, or carries on what they were filled with.
Each case first runs without what guards it: only where memory is spoiled then does the case show anything.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from check_growth import make_swap, one_round
from check_transports import Round, make_schedules
from lines import Found, Lines, Place

from deepspeed_cad.attention import overlap, parking
from deepspeed_cad.attention.setup import WavesOut
from deepspeed_cad.exchange import landed, nccl, probe
from deepspeed_cad.exchange.failure.identity import Flags
from deepspeed_cad.exchange.group import Group
from deepspeed_cad.exchange.transport import Transport
from deepspeed_cad.exchange.waits import Waits
from deepspeed_cad.groups import open_exchange
from deepspeed_cad.schedule import Schedule
from deepspeed_cad.threads import start_daemon

CYCLES = 600_000_000
"""For which streams are held up: about 0.3 s, where a host needs a few ms to spoil what is free."""
BYTES = 16 << 20
"""Of a tensor that is parked, or written beside."""
ROWS = {"cuda": 8000, "cpu": 300}
"""Of the document that every rank has and the next one serves."""
MARK = 255
"""The byte that new tensors are filled with: not a number in the types that travel."""
TRIES = 3
"""Without its guard. Each holds streams up for twice as long, and has another stream for training: some share a queue
of the GPU, and what is queued behind a stream that is held up is too late to spoil anything."""

HALF = 1 << 31
COUNTS = ((HALF + 9, 0), (HALF + 99, HALF - 5), (HALF + 199, 2 * HALF - 5), (2 * HALF + 299, 3 * HALF + 95))
"""Exchanges in all, and by flags: behind a change of servers, around 2^31, around 2^32, and where lanes rested for half
a round of 2^32."""

Case = Callable[[int], int]
"""Holds streams up for so many cycles; gives how many values are wrong on this rank."""


def run(place: Place, lines: Lines, case: str) -> None:
    """`case`: transports, comma-separated."""
    where = f", hosts {','.join(map(str, place.hosts))}" if place.hosts else ""
    if not place.hosts:
        lines.check("lifetimes", "a parcel on its way back", lambda: compare(place, partial(fetch_parcel, place)))
        lines.check("lifetimes", "a pass on two streams", lambda: compare(place, partial(run_beside, place)))
    group = open_exchange(None, timedelta(seconds=300), place.device)
    for name in case.split(","):
        lines.check(f"lifetimes by {name}", f"an exchange{where}", partial(check_exchange, place, name, group))
        if name == "nvlink":
            lines.check(f"lifetimes by {name}", "flags that come round", partial(check_flags, place, group))


def compare(place: Place, case: Case) -> Found:
    """Nothing is wrong where memory is guarded, and something where it is not."""
    wrong_in(place, case, 0)  # a kernel that is launched for the first time may wait for the whole GPU
    cycles, spoiled = CYCLES, 0
    for _ in range(TRIES if place.on_gpu else 1):
        with unguarded():
            spoiled = wrong_in(place, case, cycles)
        if spoiled:
            break
        cycles *= 2
    wrong = wrong_in(place, case, cycles)
    right = wrong == 0 and (spoiled > 0 or not place.on_gpu)
    return right, f"{wrong} values are wrong; {spoiled} without a guard"


def wrong_in(place: Place, case: Case, cycles: int) -> int:
    """On all ranks; nothing is under way anywhere before and after."""
    with torch.cuda.stream(torch.cuda.Stream(place.device)) if place.on_gpu else nullcontext():
        found = case(cycles)
        place.synchronize()
        return sum(place.gather(found))


def fetch_parcel(place: Place, cycles: int) -> int:
    """No backward takes what is on its way back from the host."""
    lot = parking.Parking(place.device, BYTES)
    parcels = [lot.park([torch.zeros(BYTES, dtype=torch.uint8, device=place.device)], "a layer")]
    lot.settle()
    place.synchronize()
    hold_up(place, [lot._stream], cycles)
    parcels[0].fetch()
    let_go(place, parcels)
    return spoil(place, [BYTES])


def run_beside(place: Place, cycles: int) -> int:
    """A pass ends between two of its steps, while the second stream writes into memory of the first."""
    aside = torch.cuda.Stream(place.device, priority=-1) if place.on_gpu else None
    place.synchronize()
    let_go(place, [begin_pass(place, aside, cycles)])
    return spoil(place, [BYTES])


def begin_pass(place: Place, aside: torch.cuda.Stream | None, cycles: int) -> overlap.Return:
    """All but its last step. Its functions alone name what they write, as those of serve_forward name O."""
    written = torch.empty(BYTES, dtype=torch.uint8, device=place.device)

    def run(batches: object) -> None:
        if aside is not None and torch.cuda.current_stream(place.device) == aside:
            hold_up(place, [aside], cycles)
        written.fill_(0)

    def serve(wave: int, arrived: list[torch.Tensor]) -> Any:
        return None, SimpleNamespace(wait=lambda: None)

    setup: Any = SimpleNamespace(
        aside=aside, device=place.device, transport=None, modes=SimpleNamespace(local_first=True),
        schedule=SimpleNamespace(local=[(), ()]), counts=SimpleNamespace(waits=Waits()),
        span=lambda *_, **__: nullcontext(),
    )  # fmt: skip
    start: Any = lambda wave: SimpleNamespace(wait=list)  # noqa: E731
    out = WavesOut(1, start, [])
    out.begin()
    return overlap.run_tasks(setup, out, run, serve)[1]


def check_exchange(place: Place, name: str, group: Group) -> Found:
    """The last rank lets go of an exchange that it never waits for; the others get what it sent."""
    transport = probe.choose_transport(name, group, place.device, place.gather, timeout_s=60.0)
    plans = make_swap(place.ranks, ROWS[place.device.type])
    wrong = wrong_in(place, lambda _: one_round(place, transport, plans, 1), 0)
    for _ in range(2):  # both areas of its lane get their memory now: that waits for the GPU
        wrong += wrong_in(place, partial(lose_exchange, place, transport, plans), 0)
    right, text = compare(place, partial(lose_exchange, place, transport, plans))
    wrong += wrong_in(place, lambda _: one_round(place, transport, plans, 2), 0)
    transport.close()
    return right and wrong == 0, f"{text}; {wrong} before and after"


def lose_exchange(place: Place, transport: Transport, plans: list[Schedule], cycles: int) -> int:
    one = Round(plans, place.rank, 7, 0, place.device)
    place.synchronize()
    place.gather(None)
    if place.rank < place.ranks - 1:
        one.start(transport)
        return int(torch.stack(one.differences(one.out.wait())).sum())
    hold_up(place, streams_of(transport), cycles)
    one.start(transport)
    sizes = [x.untyped_storage().nbytes() for x in tensors_of(one.out)]
    one.homes[place.rank] = []
    let_go(place, [one.__dict__.pop("out")])
    return spoil(place, sizes)


def streams_of(transport: Any) -> list[Any]:
    """On which a transport reads what goes out, and writes what arrives; none on a CPU."""
    if isinstance(transport, landed.LandingTransport):
        far = transport.strangers
        return [transport._out.stream, *([far.messages.out.stream] if far else [])]
    return [transport.messages.out.stream] if transport.name == "nccl" else []


def tensors_of(out: Any) -> list[torch.Tensor]:
    """What is read and written for a dispatch, landing areas aside."""
    fields = vars(out.parcel)
    return [x for name in ("sources", "packed", "arrived") for x in fields.get(name, ())]


def check_flags(place: Place, group: Group) -> Found:
    """Exchanges are right and in order, for streams and for a host that looks at flags, wherever their numbers are."""
    transport = probe.choose_transport("nvlink", group, place.device, place.gather, timeout_s=20.0)
    assert isinstance(transport, landed.LandingTransport)
    plans = make_schedules(place.ranks, 1, 900)
    flags = transport._flags.tensor[: landed.FLAG_BYTES * place.ranks].view(torch.int32)
    wrong, missed, early = 0, 0, 0
    for exchanges, pushed in COUNTS:
        place.synchronize()
        place.gather(None)
        transport.exchanges, transport._pushed = exchanges, pushed
        flags.fill_((pushed + HALF) % (2 * HALF) - HALF)
        for seed in range(4):
            place.synchronize()
            place.gather(None)
            one = Round(plans, place.rank, seed, seed % 2, place.device)
            if place.rank == place.ranks - 1:
                hold_up(place, [torch.cuda.current_stream(place.device)], CYCLES // 8)
            one.start(transport)
            one.serve(transport)
            one.collect()
            wrong += int(torch.stack(one.wrong).sum())
        reader = Flags(flags)
        missed += not comes(partial(reader.reached, transport._pushed))
        early += comes(partial(reader.reached, transport._pushed + 1), 0.05)
    found = place.gather((wrong, missed, early))
    transport.close()
    text = "; ".join(f"rank {rank}: {words}" for rank, words in enumerate(found) if any(words))
    return not text, text or f"{8 * len(COUNTS)} exchanges, the last by number {transport.exchanges}"


def comes(reached: Callable[[], bool], seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while not reached():
        if time.monotonic() > end:
            return False
        time.sleep(0.001)
    return True


def hold_up(place: Place, streams: list[Any], cycles: int) -> None:
    for stream in streams if place.on_gpu and cycles else ():
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)


def let_go(place: Place, held: list[Any]) -> None:
    start_daemon("lets go", held.clear, place.device).join()


def spoil(place: Place, sizes: list[int]) -> int:
    """Take all memory that is free for tensors of these sizes in bytes, and fill it; gives how many bytes of it are
    others when all streams are done."""
    taken = []
    for size in filter(None, sizes):
        fill = partial(torch.full, (size,), MARK, dtype=torch.uint8, device=place.device)
        before = torch.cuda.memory_reserved(place.device)
        taken.append(fill())
        # Else it was memory that the allocator did not have before.
        while place.on_gpu and torch.cuda.memory_reserved(place.device) == before:
            taken.append(fill())
    place.synchronize()
    return sum(int((x != MARK).sum()) for x in taken)


@contextmanager
def unguarded() -> Iterator[None]:
    with ExitStack() as stack:
        for room in (parking, nccl, landed):
            stack.enter_context(mock.patch.object(room, "leave_to_streams", lambda *_: None))
        stack.enter_context(mock.patch.object(overlap.Return, "__del__", lambda self: None))
        yield
