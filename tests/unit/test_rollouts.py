"""Steps of rollouts: dealt out as their trainers do it, passes without backward, and what CAD is worth there."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from deepspeed_cad.forecast import Cluster, Machine, Setting, seat_shape
from deepspeed_cad.forecast.compare import compare
from deepspeed_cad.forecast.packing import DEALT, NAMED, Rows, deal_by_length, layouts
from deepspeed_cad.forecast.setting import SHAPES
from deepspeed_cad.planner.question import read_cost
from deepspeed_cad.profiles.profile import SHIPPED

LENGTHS = NAMED["rollouts"].draw(12_000_000)
MODEL, MACHINE = SHAPES["llama-8b"], Machine.load("h200")


def setting(sharding: str = "fsdp", **changes: object) -> Setting:
    cost = read_cost(str(SHIPPED / MACHINE.profile), seat_shape(MODEL, 1))
    return replace(Setting(MODEL, Cluster(8, 8, MACHINE), cost, sharding=sharding), **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("packing", DEALT)
def test_rollouts_are_dealt_out_as_trainers_do_it(packing: str) -> None:
    """Each once, as many to every rank, no micro-batch too long, ranks and micro-batches as even as they can be."""
    for number, step in enumerate(list(deal_by_length(LENGTHS, 8, Rows(65536, packing, 1, 64)))[:3]):
        found = [(rank, int(n)) for one in step for rank, n in zip(one.segments.rank, one.segments.end)]
        assert Counter(n for _, n in found) == Counter(LENGTHS[512 * number : 512 * (number + 1)])
        assert set(Counter(rank for rank, _ in found).values()) == {64}
        work = np.zeros((8, len(step)))
        for turn, one in enumerate(step):
            assert one.tokens.max() <= 65536
            lengths = one.segments.end.astype(float)
            each = lengths if packing == "by_length" else lengths * (24576 + lengths)
            work[:, turn] = np.bincount(one.segments.rank, each, 8)
        assert np.ptp(work.sum(1)) < 0.01 * work.sum(1).mean()
        assert (np.diff(work, axis=1) <= 0).all()


def test_a_step_that_lacks_documents_is_left_out() -> None:
    rows = Rows(100, "by_length", 1, 2)
    assert [len(list(deal_by_length([9] * count, 2, rows))) for count in (3, 4, 7, 8)] == [0, 1, 1, 2]
    assert [len(list(layouts([9] * count, 2, Rows(100, "none", 1, 2), 1))) for count in (3, 4, 7, 8)] == [0, 1, 1, 2]


def test_passes_add_up_and_servers_are_left_out() -> None:
    steps = list(deal_by_length(LENGTHS, 8, Rows(65536, "by_length", 1, 16)))[:2]
    modes = ["plain kept", "cad", "cad reserved"]
    trained, alone, both = (
        compare(one, steps, modes[: 2 + (one.forwards > 0)])
        for one in (setting(), setting().of_forward, setting(forwards=2))
    )
    assert "passes without backward" in both.left_out["cad reserved"]
    for mode in modes[:2]:
        found = [one.of(mode) for one in (trained, alone, both)]
        assert all(found)
        first, second, whole = found
        assert whole.seconds.total == pytest.approx(first.seconds.total + 2 * second.seconds.total)
        assert first.seconds.optimizer > 0 == second.seconds.optimizer
        assert whole.peak == first.peak and whole.tokens == first.tokens and not whole.measured
        assert whole.mfu / whole.tokens_per_second == pytest.approx(5 / 3 * first.mfu / first.tokens_per_second)
