"""A pass on a server: it does what a trainer's does, in the same order, and reads no order for another one."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from deepspeed_cad.attention.overlap import run_tasks
from deepspeed_cad.attention.setup import WavesOut
from deepspeed_cad.errors import CADError
from deepspeed_cad.exchange.waits import Waits
from deepspeed_cad.server.loop import ServedPass

Events = list[tuple[str, int]]


class UnderWay:
    def __init__(self, events: Events, what: str, wave: int) -> None:
        self.wait = lambda: events.append((what, wave)) or [wave]  # type: ignore[func-returns-value]


def setup(events: Events, waves: int) -> Any:
    """What a pass needs of its call."""

    def give_back(wave: int, fields: list, backward: bool) -> UnderWay:
        events.append(("return", wave))
        return UnderWay(events, "placed", wave)

    return SimpleNamespace(
        span=lambda *what, **more: nullcontext(), give_back=give_back, label="layer 3", turn=7, aside=None, gain=None,
        device=SimpleNamespace(type="cpu"), counts=SimpleNamespace(waits=Waits()),
        modes=SimpleNamespace(local_first=True), transport=None,
        schedule=SimpleNamespace(local=((),) * (waves + 1)),
    )  # fmt: skip


def out(events: Events, waves: int) -> WavesOut:
    def start(wave: int) -> UnderWay:
        events.append(("dispatch", wave))
        return UnderWay(events, "arrived", wave)

    return WavesOut(waves, start, [])


def of_a_trainer(waves: int) -> Events:
    events: Events = []
    call, under_way = setup(events, waves), out(events, waves)
    under_way.begin()

    def serve(wave: int, arrived: list) -> Any:
        events.append(("served", wave))
        return None, call.give_back(wave, [], False)

    run_tasks(call, under_way, lambda batches: None, serve)[1].finish(call)
    return events


def server(events: Events, waves: int) -> ServedPass:
    def serve(wave: int, arrived: list) -> list:
        assert arrived == [wave]
        events.append(("served", wave))
        return []

    return ServedPass(setup(events, waves), False, out(events, waves), serve)


@pytest.mark.parametrize("waves", [1, 2, 3, 7])
def test_a_server_does_as_trainers_do(waves: int) -> None:
    """Trainers' exchanges are its orders; between them it serves and waits where they do."""
    expected, events = of_a_trainer(waves), Events()
    one = server(events, waves)
    for what, wave in expected:
        assert not one.is_over or what == "placed"
        if what == "dispatch":
            one.dispatch(wave)
        elif what == "return":
            one.give_back(wave)
    assert one.is_over and events == expected


@pytest.mark.parametrize(
    ("orders", "says"),
    [
        ([("dispatch", 1)], "to dispatch wave 1, where wave 0 of 4"),
        ([("dispatch", 0), ("dispatch", 0)], "to dispatch wave 0, where wave 1 of 4"),
        ([("dispatch", 0), ("give_back", 0)], "to return wave 0 before it was served"),
        ([("dispatch", 0), ("dispatch", 1), ("give_back", 1)], "to return wave 1, where wave 0 of 4"),
        ([("dispatch", 0), ("dispatch", 1), ("give_back", 0), ("give_back", 1)], "to return wave 1 before it was"),
        ([("dispatch", wave) for wave in range(5)], "to dispatch wave 2 before wave 0 was returned"),
    ],
)
def test_orders_in_another_order(orders: list[tuple[str, int]], says: str) -> None:
    one = server([], 4)
    with pytest.raises(CADError, match=f"the forward of layer 3 in micro-batch 7.*{says}"):
        for what, wave in orders:
            getattr(one, what)(wave)
