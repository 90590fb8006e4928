"""Identities of exchanges: what they say, when they differ, and that every transport compares them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from check_transports import Round, make_schedules
from test_exchange_mixed import CPU, Network, calls, collectives, group, landing_transport, network  # noqa: F401
from test_roll_call import on_ranks

from deepspeed_cad.errors import CADPeerError
from deepspeed_cad.exchange.failure import identity as comparison
from deepspeed_cad.exchange.failure.identity import RING, Moment, Register, compare, describe
from deepspeed_cad.exchange.failure.watchdog import Alarm
from deepspeed_cad.exchange.nccl import NcclTransport
from deepspeed_cad.exchange.packed import ComparedFirst
from deepspeed_cad.exchange.transport import Outgoing, Returning
from deepspeed_cad.schedule import QUERY, Schedule

SCHEDULE, HERE = make_schedules(3, 1, 300)[0], Moment(5, 2)


def number(moment: Moment = HERE, nano_batch: int = 0, is_return: bool = False, of: Schedule = SCHEDULE) -> int:
    return Register().next(1, moment, nano_batch, is_return, of).number


def test_a_number_can_be_read_and_fits_into_two_words() -> None:
    assert describe(number(Moment(17, 3, True))) == "the dispatch in the backward of micro-batch 17, layer 3"
    assert describe(number(Moment(0), 1, True)) == "the return in the forward of micro-batch 0, layer 0, nano-batch 1"
    largest = number(Moment((1 << 40) - 1, (1 << 20) - 1, True, 31), 1, True)
    assert 0 < largest < 1 << 62
    assert describe(largest) == "the return in the backward of micro-batch 16383, layer 1023, nano-batch 1, wave 31"


OTHERS = {
    "turn": number(Moment(6, 2)), "a turn whose last bits are the same": number(Moment(5 + (1 << 15), 2)),
    "layer": number(Moment(5, 3)), "backward": number(Moment(5, 2, True)), "nano-batch": number(nano_batch=1),
    "wave": number(Moment(5, 2, wave=1)), "return": number(is_return=True),
    "schedule": number(of=make_schedules(3, 2, 300)[0]), "window": number(of=replace(SCHEDULE, window=7)),
    "a window of one key": number(of=replace(SCHEDULE, window=1)), "groups": number(of=replace(SCHEDULE, groups=7)),
}  # fmt: skip


@pytest.mark.parametrize("what", OTHERS)
def test_everything_counts(what: str) -> None:
    assert OTHERS[what] != number()
    assert "ranks meet in different exchanges" in compare({0: number(), 1: OTHERS[what]})


def test_all_ranks_have_the_same_number() -> None:
    numbers = {rank: number(of=one) for rank, one in enumerate(make_schedules(3, 1, 300))}
    assert len(set(numbers.values())) == 1 and compare(numbers) == ""
    said = compare({**numbers, 1: number(Moment(6, 2))})
    assert "ranks 0, 2 are in the dispatch in the forward of micro-batch 5, layer 2; rank 1 is in the" in said


def test_what_once_differed_differs_for_ever() -> None:
    one, other = Register(), Register()
    one.next(1, Moment(1), 0, False, SCHEDULE)
    other.next(1, Moment(2), 0, False, SCHEDULE)
    for index in range(2, 40):
        pair = [register.next(index, Moment(3), 0, False, SCHEDULE).number for register in (one, other)]
        assert pair[0] != pair[1]
        assert "but with different schedules, or after different exchanges" in compare(dict(enumerate(pair)))


class Exchanges:
    """All ranks of one transport in this process, a step at a time."""

    def __init__(self, kind: str, near: list[int], network: Network) -> None:  # noqa: F811
        ranks = range(len(near))
        self.network, self.plans = network, make_schedules(len(near), 1, 300)
        self.transports: list[Any] = collectives(len(near)) if kind == "c10d" else []
        if kind == "nccl":
            self.transports = [NcclTransport(group(rank, len(near)), CPU, Alarm(rank, None, 300.0)) for rank in ranks]
        elif kind != "c10d":
            own = near if kind == "mixed" else None
            self.transports = [landing_transport(rank, len(near), own) for rank in ranks]

    def run(self, moments: list[Moment]) -> None:
        """One exchange out and back, for each rank at its moment."""
        given = []
        for transport, plan, moment in zip(self.transports, self.plans, moments):
            given.append(transport.dispatch(plan, [Outgoing(QUERY, torch.ones(plan.query_tokens, 4, 2))], 0, moment))
        self.network.deliver()
        back = []
        for transport, plan, moment, out in zip(self.transports, self.plans, moments, given):
            home = torch.zeros(plan.query_tokens, 4, 2)
            back.append(transport.give_back(plan, [Returning(QUERY, out.wait()[0], home)], 0, moment))
        self.network.deliver()
        for one in back:
            one.wait()


KINDS = [("nvlink", [0, 0, 0]), ("mixed", [0, 0, 2]), ("mixed", [0, 1, 2]), ("nccl", [0, 1, 2]), ("c10d", [0, 0, 0])]


@pytest.mark.parametrize(("kind", "near"), KINDS)
def test_a_rank_at_another_moment_is_found_by_every_rank(kind: str, near: Any, network: Any, monkeypatch: Any) -> None:  # noqa: F811
    """And equal moments are found equal, also when the ring has come round."""
    compared: list[dict[int, int]] = []
    monkeypatch.setattr(comparison, "compare", lambda numbers: compared.append(numbers) or compare(numbers))
    exchanges = Exchanges(kind, near, network)
    for turn in range(RING // 2 + 9):
        exchanges.run([Moment(turn)] * 3)
        if turn % 50 == 0:
            for transport in exchanges.transports:
                transport._watchdog._pop()
                assert transport._comparison.finish() == ""
    assert len(compared) > RING and all(len(numbers) > 1 for numbers in compared)
    for turn in range(RING // 2 + 9):  # nobody looks until the ring has come round
        exchanges.run([Moment(turn)] * 3)
    late, early = Moment(17, 3, backward=True), Moment(18)
    exchanges.run([early, late, early])
    for transport in exchanges.transports:
        with pytest.raises(CADPeerError) as error:
            transport.close()
        assert "rank 1 is in the dispatch in the backward of micro-batch 17, layer 3" in str(error.value)
        assert "the dispatch in the forward of micro-batch 18, layer 0" in str(error.value)
        with pytest.raises(CADPeerError, match="stopped: ranks meet in different exchanges"):
            transport.dispatch(exchanges.plans[0], [], 0, early)


@pytest.mark.parametrize("same_sizes", [True, False])
@pytest.mark.parametrize("waits", [True, False])
def test_on_cpus_numbers_are_compared_before_rows_move(same_sizes: bool, waits: bool, network: Network) -> None:  # noqa: F811
    """Rank 1 leaves an exchange out, or its return; sizes that differ would end a process."""
    transports, plans = collectives(3, ComparedFirst, 30.0), make_schedules(3, 1, 300)

    def play(rank: int) -> None:
        one = Round(plans, rank, 0, 0, CPU)
        for turn in range(20):
            one.moment = Moment(turn)
            one.start(transports[rank])  # what nobody waits for on any rank harms nothing
            one.run(transports[rank])
        one.moment = Moment(17, 3, backward=True)
        if rank != 1:
            one.run(transports[rank])
        elif not waits:
            one.start(transports[rank])
        after = one if same_sizes else Round(make_schedules(3, 2, 300), rank, 0, 0, CPU)
        after.moment = Moment(18)
        after.run(transports[rank])

    for rank, error in enumerate(on_ranks(play, 3)):
        assert isinstance(error, CADPeerError), error
        assert f"rank {rank} stopped: ranks meet in different exchanges" in str(error)
        assert "rank 1 is in the dispatch in the forward of micro-batch 18, layer 0" in str(error)
        way = "dispatch" if waits else "return"
        assert f"ranks 0, 2 are in the {way} in the backward of micro-batch 17, layer 3" in str(error)
