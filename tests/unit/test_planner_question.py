"""The question as a JSON file, field by field; costs, each term by itself."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_cad import profiles
from deepspeed_cad.cost import PAIRS, TILE, CostModel, count_pairs, window_start
from deepspeed_cad.errors import CADConfigError
from deepspeed_cad.planner import HeadShape, PlanInput
from deepspeed_cad.planner.question import KEYS, read_question

HEADS: dict[str, Any] = {"heads": 8, "kv_heads": 4, "head_dim": 16}
STREAM = HEADS | {"documents": [300, 0, 50, 200], "tokens_per_rank": 150}
LISTS = HEADS | {"ranks": [[9, 0, 4], [], [5]]}
TERMS = CostModel("one of each", "seconds", pair=1.0, row=1e3, key=1e6, task=1e9)


def test_defaults_are_those_of_the_planner() -> None:
    problem = read_question(LISTS).problem
    for name in ("tolerance", "granularity", "window", "base_load", "speed", "hosts"):
        assert getattr(problem, name) == getattr(PlanInput, name), name
    assert problem.shape == HeadShape(8, 4, 16, 16, 2) and problem.cost == PAIRS


def test_every_key_reaches_its_field() -> None:
    fields = LISTS | {
        "value_head_dim": 12, "bytes_per_element": 4, "window": 7, "tolerance": 0, "granularity": 3,
        "ranks_per_node": 2, "speeds": [1, 2.5, 0], "base_load": [0, 3, 4],
    }  # fmt: skip
    problem = read_question(fields).problem
    assert problem.shape == HeadShape(8, 4, 16, 12, 4)
    assert (problem.window, problem.tolerance, problem.granularity) == (7, 0.0, 3)
    assert problem.hosts is not None and problem.hosts.tolist() == [0, 0, 1]
    assert problem.speed is not None and problem.speed.tolist() == [1.0, 2.5, 0.0]
    assert problem.base_load is not None and problem.base_load.tolist() == [0.0, 3.0, 4.0]
    assert read_question({key: value for key, value in LISTS.items() if key != "kv_heads"}).problem.shape.groups == 8
    measured = LISTS | {"head_dim": 128, "cost": str(Path(profiles.__file__).parent / "h200_flash_attn_4.json")}
    alone, linked = (read_question(measured | more).problem.cost for more in ({}, {"links": {"between": 50}}))
    assert linked == replace(alone, byte_between=2 / 50e9) and alone.byte_inside > 0


def test_documents_in_a_stream() -> None:
    question = read_question(STREAM)
    assert question.number == [0, 2, 3]
    assert question.problem.tick.ranks == 4 and question.problem.tick.query_tokens.tolist() == [150] * 4
    assert read_question(STREAM | {"ranks": 6}).problem.tick.ranks == 6
    assert read_question(STREAM | {"documents": []}).problem.tick.ranks == 1
    assert read_question(STREAM | {"documents": [150, 150]}).problem.tick.ranks == 2
    longest = STREAM | {"documents": [(1 << 31) - 1], "tokens_per_rank": 1 << 31}
    assert read_question(longest).problem.tick.query.end.tolist() == [(1 << 31) - 1]


@pytest.mark.parametrize("change, ranks, speed", [
    ({"servers": "all"}, 3, None), ({"servers": [0, 2]}, 3, [1.0, 0.0, 1.0]),
    ({"servers": [0, 2], "speeds": [3, 2, 1]}, 3, [3.0, 0.0, 1.0]), ({"servers": 2}, 5, None),
    ({"servers": 2, "speeds": [3, 2, 1]}, 5, [3.0, 2.0, 1.0, 1.0, 1.0]),
])  # fmt: skip
def test_servers(change: dict[str, Any], ranks: int, speed: list[float] | None) -> None:
    problem = read_question(LISTS | {"base_load": [1, 2, 3]} | change).problem
    assert problem.base_load is not None and problem.base_load.tolist() == [1.0, 2.0, 3.0] + [0.0] * (ranks - 3)
    assert problem.tick.ranks == ranks and problem.tick.query_tokens.tolist() == [13, 0, 5] + [0] * (ranks - 3)
    assert (None if problem.speed is None else problem.speed.tolist()) == speed


@pytest.mark.parametrize("fields, words", [
    ([], "holds a list; expected an object with the keys documents, "),
    (STREAM | {"ranks": [[1]]}, "both given"),
    (HEADS, "neither documents"),
    (HEADS | {"ranks": [[1], [2, -1]]}, r"ranks\[1\]\[1\] is -1"),
    (STREAM | {"documents": [1 << 31]}, r"documents\[0\] is 2147483648; expected a whole number from 0 to 2\^31"),
    (STREAM | {"tokens_per_rank": None}, "tokens_per_rank is missing: with documents"),
    (LISTS | {"heads": 6}, "kv_heads is 4 and heads is 6"),
    (LISTS | {"heads": 0}, "heads is 0; expected a whole number of at least 1"),
    (LISTS | {"tolerance": -0.1}, "tolerance is -0.1"),
    (LISTS | {"ranks_per_node": [2, 2]}, "hosts of 2, 2 ranks have 4; there are 3"),
    (LISTS | {"ranks_per_node": [4, -1]}, r"ranks_per_node\[1\] is -1; expected above 0"),
    (LISTS | {"hosts": [0, 1]}, r"hosts is \[0, 1\]; expected a list of 3 values, each a whole number"),
    (LISTS | {"hosts": [0, 1, 0], "ranks_per_node": 2}, "both given: give one"),
    (LISTS | {"links": {"between": 0}}, "links.between is 0; expected GB/s above 0"),
    (LISTS | {"links": {"inside": 5}}, "the cost of attention is in pairs: give a profile as cost"),
    (LISTS | {"servers": []}, r"servers is \[\]; expected .* ranks from 0 to 2"),
    (LISTS | {"speeds": [1, True, 1]}, r"speeds\[1\] is True; expected a number \(relative speed"),
    (LISTS | {"base_load": [1, -2, 1]}, "base_load of rank 1 is -2.0; it must be a number of at least 0"),
    (LISTS | {"cost": 5}, 'cost is 5; expected "pairs" or the path'),
    (LISTS | {"widow": 5}, "unknown key 'widow': did you mean 'window'"),
])  # fmt: skip
def test_what_is_refused(fields: Any, words: str) -> None:
    with pytest.raises(CADConfigError, match=words):
        read_question(fields)


@pytest.mark.parametrize("fields, expected", [
    ({"hosts": [7, -1, 7]}, [7, -1, 7]),
    ({"ranks_per_node": 2, "servers": 2}, [0, 0, 1, 1, 2]),
    ({"ranks_per_node": [4, 1], "servers": 2}, [0, 0, 0, 0, 1]),
])  # fmt: skip
def test_hosts_of_any_mix(fields: Any, expected: list[int]) -> None:
    assert read_question(LISTS | fields).problem.hosts.tolist() == expected


def test_keys_of_other_programs_are_ignored_with_a_word(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        read_question(LISTS | {"comment": "from the cluster"})
    assert "'comment' is not known and ignored" in caplog.text and all(key in caplog.text for key in KEYS)
    caplog.clear()
    read_question(LISTS)
    assert not caplog.text


@settings(deadline=None)
@given(st.integers(0, 50), st.integers(0, 50), st.one_of(st.none(), st.integers(1, 60)))
def test_terms_as_counted_one_by_one(begin: int, rows: int, window: int | None) -> None:
    reads = [
        [key for key in range(row + 1) if window is None or key > row - window] for row in range(begin, begin + rows)
    ]
    pairs, start = sum(map(len, reads)), int(window_start(begin, window))
    assert count_pairs(begin, begin + rows, window) == pairs
    expected = pairs + 1e3 * rows + 1e6 * (begin + rows - start) + 1e9 if rows else 0.0
    assert TERMS.of(begin, begin + rows, window) == expected
    assert PAIRS.of(begin, begin + rows, window) == pairs
    if rows:
        assert reads[0][0] - TILE < start <= reads[0][0]


def test_keys_begin_at_a_whole_tile() -> None:
    """A row then has the same bits as in its whole document; real windows are multiples of a tile: one key more."""
    rows = np.array([0, 64, 512, 4096, 4097])
    assert window_start(rows, 512).tolist() == [0, 0, 0, 3584, 3584]
    assert window_start(rows, 100).tolist() == [0, 0, 384, 3968, 3968]
    assert not window_start(rows, None).any()
