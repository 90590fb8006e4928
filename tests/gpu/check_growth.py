"""Landing areas grow where memory is short: torch's allocator holds most of it, or one rank has none left."""

import time

import numpy as np
import torch
import torch.distributed as dist
from check_transports import GROUPS, Round
from lines import Found, Lines, Place

from deepspeed_cad.attention.memory import ExchangeMemory
from deepspeed_cad.errors import CADError
from deepspeed_cad.exchange import probe
from deepspeed_cad.exchange.transport import Transport
from deepspeed_cad.layout import Layout
from deepspeed_cad.planner.plan import HeadShape
from deepspeed_cad.schedule import Schedule, build_slices, schedule_rank
from deepspeed_cad.schedule.waves import Cut, room_needed, waves_within

LEFT = 256 << 20
"""Bytes that the driver still has when areas grow by several times as much."""
LEFT_FOR_WAVES = 640 << 20
"""The same where smaller waves must fit: what `check_waves` exchanges needs 1587 MiB at once, 465 in 12 waves."""
ROWS = {"cuda": 200_000, "cpu": 300}
"""Of the document that every rank has and the next one serves."""


def run(place: Place, lines: Lines, case: str) -> None:
    """`case`: a transport. What ends in an error comes last."""
    what = f"growth by {case}"
    lines.check(what, "allocator holds the memory", lambda: check_held(place, case))
    few = "the last rank has little memory left, so all take smaller waves"
    lines.check(what, few, lambda: check_waves(place, case))
    if place.on_gpu:
        lines.check(what, "the last rank has no memory left", lambda: check_full(place, case))


def make_swap(ranks: int, rows: int) -> list[Schedule]:
    """Every rank has one document, and the next rank serves all of it."""
    tick = Layout.from_rank_lengths([[rows]] * ranks).tick()
    tasks = np.array([(r, 0, rows, 0, GROUPS, (r + 1) % ranks) for r in range(ranks)], np.int64)
    slices = build_slices(tick, tasks)
    return [schedule_rank(tick, slices, rank, GROUPS) for rank in range(ranks)]


def hold(place: Place, left: int) -> list[torch.Tensor]:
    if not place.on_gpu:
        return []
    torch.cuda.empty_cache()
    held = []
    while (more := torch.cuda.mem_get_info(place.device)[0] - left) > 8 << 20:
        held.append(torch.empty(min(more, 8 << 30), dtype=torch.uint8, device=place.device))
    return held


def one_round(place: Place, transport: Transport, plans: list[Schedule], seed: int) -> int:
    return int(torch.stack(Round(plans, place.rank, seed, 0, place.device).run(transport)).sum())


def check_held(place: Place, name: str) -> Found:
    """What torch's allocator has cached, and nobody uses, is there for landing areas."""
    transport = open_transport(place, name)
    small, large = make_swap(place.ranks, 50), make_swap(place.ranks, ROWS[place.device.type])
    wrong = one_round(place, transport, small, 1)
    hold(place, LEFT).clear()  # freed, and kept by torch's allocator
    free = torch.cuda.mem_get_info(place.device)[0] if place.on_gpu else 0
    wrong += one_round(place, transport, large, 2) + one_round(place, transport, small, 3)
    place.gather(None)
    transport.close()
    sent = transport.bytes_sent >> 20
    return wrong == 0, f"{wrong} values are wrong; {sent} MiB sent, {free >> 20} MiB were free outside of torch"


def check_full(place: Place, name: str) -> Found:
    """One rank cannot grow: every rank says so, soon."""
    transport = open_transport(place, name, 10.0)
    large = make_swap(place.ranks, ROWS[place.device.type])
    one_round(place, transport, make_swap(place.ranks, 50), 1)
    last = Round(large, place.rank, 2, 0, place.device)
    held = hold(place, LEFT) if place.rank == place.ranks - 1 else []
    place.gather(None)
    begun = time.perf_counter()
    try:
        last.start(transport)
        place.synchronize()
        last.serve(transport)
        last.collect()
        place.synchronize()
        return False, "no error"
    except CADError as error:
        seconds = time.perf_counter() - begun
        return seconds < 30, f"after {seconds:.1f} s: {type(error).__name__}: {str(error)[:300]}"
    finally:
        held.clear()


def check_waves(place: Place, name: str) -> Found:
    """A tick for which one rank lacks memory goes in waves that fit, on all; its exchanges need no more than that."""
    transport = open_transport(place, name)
    rows = ROWS[place.device.type]
    tick = Layout.from_rank_lengths([[rows]] * place.ranks).tick()
    tasks = np.array([(r, 0, rows, 0, GROUPS, (r + 1) % place.ranks) for r in range(place.ranks)], np.int64)
    # As Round has them: 4 query heads of 64, values of 32.
    shape = HeadShape(4 * GROUPS, GROUPS, 64, 32, 2)
    memory = ExchangeMemory(granularity=64)

    def cut(rank: int) -> tuple[Schedule, ...]:
        return waves_within(tick, tasks, rank, GROUPS, None, Cut(granularity=64), memory.room(shape)).schedules

    whole = cut(place.rank)
    if not place.on_gpu:
        # Nothing can run out of memory here: a rehearsal begins with a limit.
        one_wave = [(one.served_rows, one.landed_rows) for one in whole]
        memory.limit = 0.5 * room_needed(memory.room(shape), one_wave)[0]
        whole = cut(place.rank)
    held = hold(place, LEFT_FOR_WAVES) if place.rank == place.ranks - 1 else []
    place.gather(None)
    begun = time.perf_counter()
    waves = len(memory.make_room(transport, whole, shape, 0, lambda: cut(place.rank)))
    seconds = time.perf_counter() - begun
    made, wrong = transport.landing_bytes, 0
    plans = [cut(rank) for rank in range(place.ranks)]
    held.clear()
    for wave in range(waves):
        one = Round([own[wave] for own in plans], place.rank, 3, 0, place.device, wave)
        wrong += int(torch.stack(one.run(transport)).sum())
    place.gather(None)
    grown = transport.landing_bytes - made
    transport.close()
    found = f"{waves} waves, agreed in {seconds:.1f} s, {made >> 20} MiB of landing areas"
    return waves > 1 and not wrong and not grown, f"{found}; {wrong} values are wrong, {grown >> 20} MiB came later"


def open_transport(place: Place, name: str, timeout_s: float = 20.0) -> Transport:
    group = dist.new_group(backend="nccl" if place.on_gpu else "gloo")
    return probe.choose_transport(name, group, place.device, place.gather, timeout_s=timeout_s)
