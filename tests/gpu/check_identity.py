"""A rank that leaves a backward out and goes on: every rank gets the error that names both exchanges, soon."""

import time
from functools import partial
from typing import Any

import torch.distributed as dist
from check_transports import Round, make_schedules
from lines import Found, Lines, Place

from deepspeed_cad.errors import CADPeerError
from deepspeed_cad.exchange import probe
from deepspeed_cad.exchange.failure.board import open_board
from deepspeed_cad.exchange.failure.identity import Moment

SECONDS = 5.0
"""Within which every rank has its error; a comparison takes a fraction of one, where sizes differ up to a second."""


def run(place: Place, lines: Lines, case: str) -> None:
    """`case`: transports, and whether the exchanges that meet have other sizes."""
    names, _, sizes = case.partition(": ")
    for name in names.split(","):
        lines.check(f"identity by {name}", sizes or "same sizes", partial(check, place, name, bool(sizes)))


def check(place: Place, name: str, other_sizes: bool) -> Found:
    """Good rounds, more of them than the ring of numbers has rows; then the last rank is in another micro-batch."""
    group = dist.new_group(backend="nccl" if place.on_gpu else "gloo")
    board = open_board(dist.new_group(backend="gloo"), place.rank, place.ranks)
    transport = probe.choose_transport(name, group, place.device, place.gather, board, timeout_s=30.0)
    plans = make_schedules(place.ranks, 1, 300)
    for turn in range(140 if place.on_gpu else 20):
        wrong = one_round(place, transport, plans, Moment(turn))
    place.synchronize()
    good = int(sum(int(one) for one in wrong))
    place.gather(None)
    last = place.rank == place.ranks - 1
    there = make_schedules(place.ranks, 2, 300) if other_sizes and last else plans
    begun, told = time.perf_counter(), ""
    while not told and time.perf_counter() - begun < 2 * SECONDS:
        try:
            one_round(place, transport, there, Moment(2001) if last else Moment(2000, 3, backward=True))
            place.synchronize()
        except CADPeerError as error:
            told = str(error)
    seconds = time.perf_counter() - begun
    place.gather(None)
    wanted = ("forward of micro-batch 2001, layer 0", "backward of micro-batch 2000, layer 3")
    named = all(words in told for words in wanted)
    return good == 0 and named and seconds < SECONDS, f"after {seconds:.1f} s: {told[:200]}"


def one_round(place: Place, transport: Any, plans: list[Any], moment: Moment) -> list[Any]:
    one = Round(plans, place.rank, 1, 0, place.device)
    one.moment = moment
    return one.run(transport)
