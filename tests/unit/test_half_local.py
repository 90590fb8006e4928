"""Rows that stay in place while keys of other ranks come to them: what moves, what is run, and that nothing changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from attention_ranks import DIM, HEADS, LseTransposed, Ranks

from deepspeed_cad.attention.device_schedule import upload_schedule
from deepspeed_cad.attention.forward import Kept
from deepspeed_cad.attention.setup import Modes
from deepspeed_cad.kernels.interface import MaskRule
from deepspeed_cad.layout import Layout
from deepspeed_cad.planner.constants import IN_PLACE
from deepspeed_cad.schedule import HOME, KEY, KIND, QUERY, SERVER, build, build_slices, schedule_rank

LONG = Layout.from_stream([300], 3, 100)
"""One document over three ranks."""
TASKS = np.array(
    [
        (0, 0, 100, 0, 3, 0),
        # Rank 1 runs its own rows of all head groups; and of one those of rank 2.
        (0, 100, 200, 0, 3, 1), (0, 200, 300, 2, 3, 1),
        (0, 200, 300, 0, 2, 2),
    ]
)  # fmt: skip
SINKS = torch.linspace(-1, 2, HEADS, dtype=torch.float64)


def test_own_rows_stay_and_only_keys_come() -> None:
    slices = build_slices(LONG.tick(), TASKS)
    # Of queries only those of rank 2's head group 2 move, of keys all that is read.
    assert slices.served_rows.tolist() == [[0, 0], [100, 2 * 200 + 300], [0, 2 * 300]]
    queries = slices.table[slices.table[:, KIND] == QUERY]
    assert queries[:, [HOME, SERVER]].tolist() == [[2, 1]]
    # Keys that rows of others read come first: those of head group 2, which rank 1's own rows read in part.
    assert slices.half_local.tolist() == [
        [1, 0, 2, 0, 100, 300, 200, 200],
        [1, 2, 3, 0, 100, 0, 200, 300],
        [2, 0, 2, 0, 100, 0, 300, 300],
    ]
    schedule = schedule_rank(LONG.tick(), slices, 1, 3)
    assert [(b.q_row, b.k_row, b.q_rows, b.k_rows, b.k_step) for b in schedule.half_local] == [
        (0, 300, 100, 200, 200),
        (0, 0, 100, 200, 300),
    ]
    assert upload_schedule(schedule, torch.device("cpu")).waves[0].keys_overlap, "head group 2 is read twice"
    alone = schedule_rank(LONG.tick(), slices, 2, 3)
    assert not upload_schedule(alone, torch.device("cpu")).waves[0].keys_overlap
    keys = slices.table[(slices.table[:, KIND] == KEY) & (slices.table[:, SERVER] == 2)]
    assert set(keys[:, HOME]) == {0, 1, 2}, "its own keys lie beside the others"


@pytest.mark.parametrize(("rows", "stay"), [(32, True), (31, False)])
def test_few_rows_run_with_those_of_others(rows: int, stay: bool) -> None:
    """A kernel call of their own would cost more than copying them."""
    own = 32 * IN_PLACE
    layout = Layout.from_stream([2 * own], 2, own)
    tasks = np.array([(0, 0, own, 0, 3, 0), (0, own, own + rows, 0, 3, 1), (0, own + rows, 2 * own, 0, 3, 0)])
    slices = build_slices(layout.tick(), tasks)
    assert len(slices.half_local) == stay and slices.served_rows[1, QUERY] == (0 if stay else 3 * rows)


class GroupByGroup(LseTransposed):
    """One head group at a time, of copies: a product of several at once may differ in its last digit."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
        made = [
            super(GroupByGroup, self).forward(*(x.contiguous() for x in one), rest[0], rest[1])
            for one in zip(*(x.chunk(k.shape[1], 1) for x in (q, k, v)))
        ]
        return tuple(torch.cat(parts, 1) for parts in zip(*made))

    def backward(self, *given: Any) -> tuple[torch.Tensor, ...]:
        groups = given[2].shape[1]
        made = [
            super(GroupByGroup, self).backward(*(x.contiguous() for x in one), given[6], given[7])
            for one in zip(*(x.chunk(groups, 1) for x in given[:6]))
        ]
        return tuple(torch.cat(parts, 1) for parts in zip(*made))


@pytest.mark.parametrize("waves", [1, 2])
@pytest.mark.parametrize("window", [None, 130])
def test_the_same_bits_as_with_copies(waves: int, window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for share in (IN_PLACE, 0):
        monkeypatch.setattr(build, "IN_PLACE", share)
        ranks = Ranks(
            LONG, MaskRule(DIM**-0.5, window), Modes(), SINKS, dtype=torch.bfloat16, tasks=[TASKS],
            waves=waves, kernel=GroupByGroup(),
        )  # fmt: skip
        runs = [wave.half_local for calls in ranks.calls[0] for wave in calls.setup.schedule.waves]
        assert any(runs) == bool(share)
        outputs = ranks.forward()
        ranks.backward(outputs)
        found.append([*outputs, *(leaf[n].grad for leaf in ranks.leaves for n in ("q", "k", "v", "sinks"))])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_server_keeps_no_second_o_of_its_own_rows() -> None:
    ranks = Ranks(LONG, MaskRule(DIM**-0.5), tasks=[TASKS])
    ranks.forward()
    kept = [call.expect(Kept) for call in ranks.calls[0]]
    assert [len(one.served[0].o_RGV) for one in kept] == [0, 100, 0]
