"""Room: in how many waves a tick goes so that what lands fits, what is said where nothing does, what ranks learn."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from deepspeed_cad.attention.layer import whole_rank_tasks
from deepspeed_cad.attention.memory import NO_LIMIT, SMALLER, ExchangeMemory, rows_of_layers, rows_of_ticks
from deepspeed_cad.errors import CADError
from deepspeed_cad.exchange.landing import NoRoomError
from deepspeed_cad.feedback.memory_limit import ALL, MARGIN, Limit, MemoryLimit
from deepspeed_cad.layout import Layout
from deepspeed_cad.planner import HeadShape
from deepspeed_cad.schedule import build_slices, waves
from deepspeed_cad.schedule.waves import Cut, Room, room_needed, too_much, waves_within, with_headroom

SHAPE = HeadShape(32, 8, 128, 128, 2)
LONG = Layout.from_stream([1 << 20], 4, 1 << 18)
"""One document of a million tokens over four ranks."""


def needed(tasks: np.ndarray, cut: Cut, room: Room) -> float:
    parts = [build_slices(LONG.tick(), part) for part in waves.split_tasks(LONG.tick(), tasks, None, cut)]
    return room_needed(room, [(part.served_rows, part.landed_rows) for part in parts])[0]


@pytest.fixture(scope="module")
def tasks() -> np.ndarray:
    """A plan by rows and head groups. Ranks 0 and 1 read keys of all others; what stays at home is in it."""
    rows = [
        (0, 262144, 0, 8, 0), (262144, 524288, 0, 8, 1), (524288, 614784, 5, 7, 2), (524288, 770560, 7, 8, 2),
        (524288, 786432, 0, 5, 2), (614784, 1048576, 5, 7, 0), (770560, 1048576, 7, 8, 1), (786432, 883456, 4, 5, 0),
        (786432, 1048576, 0, 4, 3), (883456, 1048576, 4, 5, 3),
    ]  # fmt: skip
    return np.array([(0, *row) for row in rows], np.int64)


def test_headroom_is_what_the_limit_leaves() -> None:
    room = Room(1000, (10, 100), (1, 1))
    assert with_headroom(room, 500).headroom == with_headroom(room, 0).headroom == waves.HEADROOM
    assert with_headroom(room, 900).headroom == 1000 / 900 and with_headroom(room, 1000).headroom == 1
    assert with_headroom(room, 1001).headroom == 1, "who asks regardless gets what is needed"


@pytest.mark.parametrize("limit_gib, most", [(100, 1), (8, 6), (4.6, 16), (3.5, 16), (3.1, 32)])
def test_a_million_tokens_fit_where_they_should(tasks: np.ndarray, limit_gib: float, most: int) -> None:
    """Every rank cuts alike, and no more than it must."""
    room = ExchangeMemory(limit_gib * 2**30, "a test").room(SHAPE)
    ranks = [waves_within(LONG.tick(), tasks, rank, 8, None, Cut(), room).schedules for rank in (0, 3)]
    assert len(ranks[0]) == len(ranks[1]) <= most
    assert room_needed(room, [(one.served_rows, one.landed_rows) for one in ranks[0]])[0] <= room.limit
    for one, other in zip(*ranks, strict=True):
        assert one.digest == other.digest
    if len(ranks[0]) > 1:
        assert needed(tasks, Cut(), room) > room.limit


def test_a_share_is_not_why_a_document_cannot_be_trained(tasks: np.ndarray) -> None:
    """A million tokens on four ranks need more than 2 GiB, however they are cut."""
    room = ExchangeMemory(2**30, '"memory": "auto"', most=40 * 2**30).room(SHAPE)
    size = needed(tasks, waves_within(LONG.tick(), tasks, 1, 8, None, Cut(), room).cut, room)
    assert 2 * 2**30 < size < 3 * 2**30
    with pytest.raises(CADError, match="1.00 GiB that"):
        waves_within(LONG.tick(), tasks, 1, 8, None, Cut(), room._replace(most=0.99 * size))


def test_ranks_hardly_hold_each_other_up(tasks: np.ndarray) -> None:
    """Of the cuts that fit not the first is taken: in eight waves by head groups ranks wait a fifth of their time."""
    tick, room = LONG.tick(), ExchangeMemory(4.4 * 2**30, "a test").room(SHAPE)

    def longer(cut: Cut) -> float:
        return waves.stretch(tick, waves.split_tasks(tick, tasks, None, cut), None)

    assert longer(Cut()) == 1 and longer(Cut(8)) > 1.15 and needed(tasks, Cut(8), room) < room.limit
    found = waves_within(tick, tasks, 1, 8, None, Cut(), room).cut
    assert longer(found) <= waves.LONGER and needed(tasks, found, room) <= room.limit
    more = room._replace(most=2 * room.limit)
    assert waves_within(tick, tasks, 1, 8, None, Cut(), more).cut == found, "not more than the limit where that fits"


def test_a_limit_that_nobody_set_is_no_reason_to_wait(tasks: np.ndarray) -> None:
    """In what fits into 3 GiB ranks hold each other up: twice that may be taken where training leaves it free."""
    given = Room(3 * 2**30, *rows_of_layers(SHAPE))
    whole = needed(tasks, Cut(), given)

    def cut(limit: float, most: float) -> Cut:
        return waves_within(LONG.tick(), tasks, 1, 8, None, Cut(), given._replace(limit=limit, most=most)).cut

    least = cut(3 * 2**30, 0)
    assert least.waves > 16 and cut(3 * 2**30, 3 * 2**30) == least, "a user's limit; no more is free"
    assert cut(3 * 2**30, whole) == Cut() and cut(0.45 * whole, whole).waves > 1, "up to twice"
    assert cut(3 * 2**30, 0.99 * whole) == Cut(4), "what training leaves"
    assert cut(3 * 2**30, float("inf")) == least, "before the first backward nobody knows"


def test_what_does_not_fit_is_one_error_with_the_figures(tasks: np.ndarray) -> None:
    room = ExchangeMemory(0.2 * 2**30, 'the key "memory"').room(SHAPE)
    said = []
    for rank in range(4):
        with pytest.raises(CADError, match="smallest waves") as error:
            waves_within(LONG.tick(), tasks, rank, 8, None, Cut(), room)
        said.append(str(error.value))
    assert len(set(said)) == 1
    # The figure that it names is enough.
    least = float(said[0].split('"memory" to at least ')[1].split(" ")[0])
    assert "0.2" not in said[0].split("at least")[1] and "204.8 MiB" in said[0].replace("205 MiB", "204.8 MiB")
    waves_within(LONG.tick(), tasks, 0, 8, None, Cut(), room._replace(limit=(least + 0.01) * 2**30))


def test_bytes_of_a_row_are_those_of_the_pass_that_has_more() -> None:
    """4 query heads of 128 in bf16 are 1024 bytes, K and V of a head 512, LSE 16."""
    assert rows_of_layers(SHAPE) == ((2048, 512), (1040, 512)), "dO and Q; O and LSE"
    assert rows_of_ticks(SHAPE) == ((3088, 512), (1040, 512)), "dO, Q, O and LSE"
    # In fp64 LSE is too; here dQ is wider than O with LSE.
    assert rows_of_ticks(HeadShape(4, 2, 64, 16, 8)).out == (1024 + 2 * 256 + 16, 640)


class Landing:
    """A transport that has memory for so many bytes."""

    def __init__(self, has: float) -> None:
        self.has, self.asked = has, list[float]()

    def make_room(self, schedules: Any, room: Room, nano_batch: int) -> None:
        size, _ = room_needed(room, [(one.served_rows, one.landed_rows) for one in schedules])
        size *= room.headroom
        self.asked.append(size)
        if size > self.has:
            raise NoRoomError("rank 2: 7 MiB were wanted, 3 are free.")


def cut_again(memory: ExchangeMemory, tasks: np.ndarray) -> Any:
    return lambda: waves_within(LONG.tick(), tasks, 1, 8, None, Cut(), memory.room(SHAPE)).schedules


def test_waves_become_smaller_where_a_rank_has_less_memory_than_was_thought(tasks: np.ndarray) -> None:
    """Ranks that only follow are told before each try."""
    heard, lacked, told = [], [], []
    memory = ExchangeMemory(100 * 2**30, "a test", needed=heard.append, lacked=lacked.append)
    again, transport = cut_again(memory, tasks), Landing(5.5 * 2**30)
    found = memory.make_room(transport, again(), SHAPE, 0, again, lambda room: told.append(len(transport.asked)))  # type: ignore[arg-type]
    assert len(found) > waves.BACK and transport.asked[-1] <= transport.has < transport.asked[-2]
    assert heard == transport.asked[-1:] and told == list(range(len(transport.asked)))
    # The first try, without a limit, had all of the headroom.
    assert lacked[0] == pytest.approx(SMALLER * transport.asked[0] / waves.HEADROOM) and memory.limit == lacked[-1]
    assert transport.asked[-1] <= memory.limit + 1


def test_no_memory_at_all_names_rank_figures_and_key(tasks: np.ndarray) -> None:
    memory = ExchangeMemory(100 * 2**30, "a test")
    again = cut_again(memory, tasks)
    with pytest.raises(CADError, match="rank 2: 7 MiB were wanted, 3 are free. Smaller waves do not help: .*memory"):
        memory.make_room(Landing(0), again(), SHAPE, 0, again)  # type: ignore[arg-type]
    assert NO_LIMIT.limit == float("inf"), "shared by all that have none"


def test_a_tick_that_moves_nothing_is_not_tried_for_ever() -> None:
    """Landing areas have a least size: where not even that is there, no cut needs less."""
    layout, memory = Layout.from_rank_lengths([[64], [64]]), ExchangeMemory(2**30, "a test")
    room, transport = memory.room(SHAPE), Landing(-1)
    schedules = waves_within(layout.tick(), whole_rank_tasks(layout, 8), 0, 8, None, Cut(), room).schedules
    with pytest.raises(CADError, match="rank 2: 7 MiB were wanted, 3 are free. Nothing is exchanged in this tick"):
        memory.make_room(transport, schedules, SHAPE, 0, lambda: schedules)  # type: ignore[arg-type]
    assert transport.asked == [0.0], "tried again though nothing can be smaller"


def gpu(monkeypatch: pytest.MonkeyPatch, free: int, reserved: int = 0, peak: int = 0) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 1 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak)


def test_all_ranks_take_the_limit_of_the_one_with_least(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = SimpleNamespace(yes=False, pauses=False)
    one = MemoryLimit(None, torch.device("cuda", 0), [0, 2, 4], lambda: trained.yes, lambda: trained.pauses)

    def hears(*reports: tuple[int, int]) -> Limit:
        one.hear(0, np.array(reports))
        return one.now

    gpu(monkeypatch, 1 << 29)
    assert tuple(one.report(0)) == (2**30 // 32, 0), "before the first backward its peak is not known"
    assert hears((32, 0), (20, 0), (0, 0)) == (20.0, '"memory": "auto" (by rank 2)', float("inf"))
    assert hears((32, 90), (20, 80)) == (20.0, '"memory": "auto" (by rank 2)', 80.0), "a share is a choice"
    trained.yes = True
    one.needs(1000.0)
    for peak in (2000, 100):  # a script that logs torch's peak may reset it
        gpu(monkeypatch, 1 << 29, reserved=5000, peak=peak)
        assert one.report(0)[1] == int((1 << 29) + 3000 + 1000 - MARGIN * 2**30)
    gpu(monkeypatch, 0)
    assert one.report(0)[1] == 1000, "what it has it keeps"
    assert hears((100, 90), (100, 60), (100, 70)) == (60.0, "what training leaves free on rank 2", 0.0)
    assert hears((100, 90), (100, 0), (100, 70)).size == 100, "one rank does not know yet"
    trained.pauses = True
    assert one.report(0)[1] == 0
    assert hears((100, 0), (100, 3)).size == 100
    one.lacks(50.0)
    assert one.report(0)[0] == 50
    assert hears((50, 0), (50, 3)).size == 50 and not one.now.most, "there was not more than that"
    one.lacks(0.5)
    assert one.report(0)[0] == 1, "0 would be no limit"


def test_beside_reserved_servers_only_what_training_leaves_free_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    trained = SimpleNamespace(yes=False)
    one = MemoryLimit(None, torch.device("cuda", 0), [0], lambda: trained.yes, share=ALL)
    gpu(monkeypatch, 1 << 29)
    assert tuple(one.report(0)) == (1 << 30, 0)
    trained.yes = True
    one.hear(0, np.array([one.report(0)]))
    assert one.now == (int((1 << 29) - MARGIN * 2**30), "what training leaves free on rank 0", 0.0)
    gpu(monkeypatch, 0)
    assert one.report(0)[1] == 1, "0 would be not known"
    one.hear(0, np.array([[1, 1], [2, 1]]))
    assert one.now == (1.0, '"memory": "auto" (by rank 0)', 1.0)


def test_given_and_unlimited() -> None:
    given = MemoryLimit(0.5, torch.device("cpu"), [0])
    assert tuple(given.report(0)) == (1 << 29, 0) and given.now.size == 2**29
    given.hear(0, np.array([[1 << 29, 0]]))
    assert given.now == (2**29, 'the key "memory"', 0.0), "what a user says is no choice"
    cpu = MemoryLimit(None, torch.device("cpu"), [0, 1])
    cpu.hear(0, np.stack([cpu.report(0)] * 2))
    assert not cpu.report(0).any() and cpu.now.size == float("inf")


def test_users_are_told_of_all_nano_batches_together() -> None:
    room = Room(2**30, (1, 1), (1, 1), parts=2)
    assert "at rank 3 needs 3.00 GiB at once, 1.00 GiB more than the 2.00 GiB" in str(too_much(room, 1.5 * 2**30, 3))
    assert 'Set "memory" to at least 3.02 (GiB)' in str(too_much(room, 1.5 * 2**30, 3))
