"""The native planner gives what the reference gives: tasks to the row, loads to the bit, bytes exactly."""

from __future__ import annotations

import ast
import dataclasses
import math
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_planner import SECONDS, SHAPE, problems

from deepspeed_cad.cost import PAIRS
from deepspeed_cad.layout import Layout
from deepspeed_cad.planner import PlanInput, constants, make_plan, native, reference
from deepspeed_cad.planner.aim import Aim, Solution, Units, per_rank
from deepspeed_cad.planner.answer import answer
from deepspeed_cad.planner.constants import UNBOUNDED
from deepspeed_cad.planner.flows import Flows
from deepspeed_cad.planner.round import Round
from deepspeed_cad.planner.search import Search

pytestmark = pytest.mark.skipif(not native.is_available(), reason="the native library is not built")


def assert_same(problem: PlanInput, units: Units = Units.NONE, share: float = 0.0, kept: int = -1) -> Solution:
    """Both cores; with units they come down by a share of the way to the mean."""
    aim = Aim(problem.tolerance, kept=kept)
    if units:
        even = reference.solve(problem, Aim(UNBOUNDED))
        base, speed = per_rank(problem.base_load, problem, 0.0), per_rank(problem.speed, problem, 1.0)
        top, mean = Search(problem, even, reference.solve, base, speed).span(units)
        aim = Aim(problem.tolerance, units, top - share * (top - mean), kept)
    ours, theirs = native.solve(problem, aim), reference.solve(problem, aim)
    for name in ("tasks", "work", "work_before"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), err_msg=name)
    for field in dataclasses.fields(Flows):
        found, expected = getattr(ours.flows, field.name), getattr(theirs.flows, field.name)
        np.testing.assert_array_equal(found, expected, err_msg=field.name)
    return ours


@settings(max_examples=400, deadline=None)
@given(
    problems(),
    st.sampled_from([None, None, 1e3, 3e4, 3e5]),
    st.sampled_from(Units),
    st.floats(0, 1),
    st.sampled_from([-1, 0, 1, 2]),
)
def test_equal_on_small_inputs(
    problem: PlanInput, bytes_each: float | None, units: Units, share: float, kept: int
) -> None:
    memory = None if bytes_each is None else np.full(problem.tick.ranks, bytes_each)
    assert_same(dataclasses.replace(problem, memory=memory), units, share, kept)


@pytest.mark.parametrize("seed", range(25))
def test_equal_on_real_sizes(seed: int) -> None:
    random = np.random.default_rng(seed)
    ranks, tokens = int(random.choice([4, 16, 32])), int(random.choice([16384, 131072]))
    lengths = np.minimum(random.lognormal(np.log(tokens / 8), 1.5, 40 * ranks).astype(int) + 1, 4 * tokens)
    lengths = lengths[np.cumsum(lengths) <= ranks * tokens].tolist()
    if seed % 3:
        layout = Layout.from_stream(lengths, ranks, tokens, zigzag=seed % 3 == 2)
    else:
        layout = Layout.from_rank_lengths([lengths[rank::ranks] for rank in range(ranks)])
    problem = PlanInput(
        layout.tick(),
        SHAPE,
        SECONDS if seed % 2 else PAIRS,
        window=4096 if seed % 5 == 4 else None,
        tolerance=0.02,
        hosts=random.permutation(np.arange(ranks) // 4) if seed % 4 == 3 else None,
        speed=np.where(np.arange(ranks) % 3, 1.0, 0.5) if seed % 7 == 6 else None,
        memory=np.full(ranks, tokens * 600.0) if seed % 6 == 5 else None,
    )
    found = assert_same(problem, Units(seed // 2 % 4), 0.6, seed % 4 - 1)
    assert found.flows.sent.sum() == found.flows.received.sum()


@pytest.mark.parametrize("there", [True, False])
def test_make_plan_takes_the_native_core_where_it_is(there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = PlanInput(Layout.from_stream([40000, 3000, 200], 4, 10800).tick(), SHAPE, PAIRS)
    expected = answer(problem, reference.solve).tasks
    unused = reference if there else native
    monkeypatch.setattr(unused, "solve", lambda *_: pytest.fail("the other core was asked"))
    monkeypatch.setattr(native, "is_available", lambda: there)
    np.testing.assert_array_equal(make_plan(problem).tasks, expected)


def test_one_long_document_over_many_ranks_is_equal() -> None:
    assert_same(PlanInput(Layout.from_stream([48 * 1024], 48, 1024).tick(), SHAPE, PAIRS, hosts=np.arange(48) // 8))


def test_constants_are_those_of_the_compiled_core() -> None:
    """The header has every number that it shares with Python, under the same name; which is which is in its comment."""
    header = (Path(__file__).parents[2] / "csrc" / "planner_constants.h").read_text()
    found = re.findall(r"^constexpr \w+ k(\w+?)(?:\[\])? = ([^;]+);", header, re.MULTILINE)
    assert len(found) == header.count("constexpr ")
    for camel, value in found:
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", camel).upper()
        assert ast.literal_eval(value.replace("{", "(").replace("}", ")")) == getattr(constants, name), name
    transfers = {"HOST_BORDER", "TRAVELS", "FORWARD_SHARE", "WAVES", "WAVES_IN_TURN", "WAVE_SECONDS"}
    python_only = transfers | {"TRIES", "MANY_RANKS", "FEW_TRIES", "NARROWING", "UNBOUNDED", "ROUNDING"}
    python_only |= {"KEPT", "FINER", "LIGHTER", "WORTH"}
    assert {name for name in vars(constants) if name.isupper()} - python_only == {
        re.sub(r"(?<!^)(?=[A-Z])", "_", camel).upper() for camel, _ in found
    }


def test_no_bare_numbers_in_the_heuristic() -> None:
    """What decides has a name in constants.py."""
    folder = Path(constants.__file__).parent
    for name in (
        "reference",
        "round",
        "offers",
        "levels",
        "columns",
        "answer",
        "search",
        "finish",
        "flows",
        "spread",
        "starts",
    ):
        for node in ast.walk(ast.parse((folder / f"{name}.py").read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, float):
                assert node.value in (0.0, 0.5, 1.0, 1e3), f"{name}.py:{node.lineno}: {node.value}"


@pytest.mark.parametrize("bytes_each", [math.inf, 3e6, 1.5e6])
def test_many_short_documents_are_equal(bytes_each: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole short documents leave in company (`Round.follow`), as far as memory goes."""
    random = np.random.default_rng(0)
    lengths = [random.integers(50, 1000, 300 if rank % 2 else 20).tolist() for rank in range(4)]
    tick = Layout.from_rank_lengths(lengths).tick()
    problem = PlanInput(tick, SHAPE, PAIRS, tolerance=0.02, memory=np.full(4, bytes_each))
    found = assert_same(problem)
    monkeypatch.setattr(Round, "follow", lambda self, donor, move: None)
    assert not np.array_equal(reference.solve(problem, Aim(0.02)).tasks, found.tasks), "nothing followed"
