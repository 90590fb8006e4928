"""Arithmetic of a pipeline's step: where its answer is known, and the figures of the published run."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from scripts import load_script

from deepspeed_cad.forecast.attention_seconds import Both
from deepspeed_cad.planner.constants import FORWARD_SHARE
from deepspeed_cad.planner.plan import HeadShape
from deepspeed_cad.profiles import Profile
from deepspeed_cad.profiles.choice import SHIPPED

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = ROOT / "benchmarks" / "results" / "README.md"
COST = Profile.load(SHIPPED / "h200_flash_attn_4.json").cost_for(HeadShape(32, 8, 128, 128, 2))


@pytest.fixture
def bound() -> ModuleType:
    return load_script("benchmarks/pipeline_bound.py")


def _write(folder: Path, steps: list[list[list[int]]], **more: object) -> Path:
    path = folder / "small.json"
    path.write_text(json.dumps({"ranks": len(steps[0]), "tokens_per_rank": 4096, "steps": steps, **more}))
    return path


def _attention(length: int, layers: int, factor: float) -> float:
    """Seconds of a document, forward and backward once."""
    return float(COST.of(0, length)) * 8 * layers * factor


@pytest.mark.parametrize(("stages", "micro_batches", "ranks"), [(2, 2, 2), (2, 5, 4), (4, 3, 4), (1, 3, 1)])
def test_even_documents_fill_every_slot(
    bound: ModuleType, tmp_path: Path, stages: int, micro_batches: int, ranks: int
) -> None:
    """1F1B then takes the bound and, in every slot, the forward that the recompute repeats."""
    path = _write(tmp_path, [[[4096], [4096]]])
    options = bound.parse(
        f"--workload {path} --without-attention 3 --stages {stages} --micro-batches {micro_batches} --ranks {ranks} "
        "--layers 4 --factor 2 --steps 1".split()
    )
    (step,) = bound.foresee_all(options)
    slots, own = micro_batches + stages - 1, _attention(4096, 4 // stages, 2.0)
    assert step.bound == pytest.approx(3 + slots * own)
    again = FORWARD_SHARE * (own - COST.key * 4096 * 8 * (4 // stages) * 2)
    assert step.one_f_one_b == pytest.approx(3 + slots * (own + again))


def test_a_long_micro_batch_is_waited_for(bound: ModuleType) -> None:
    """Slots of 4 s: forwards of 2 and 1 s, backwards of 8 and 3.

    Stage 1 gives the long one back after 2 + 2 + 8 s; stage 0 then runs its backward, and the one that waited: 8 + 3.
    """
    attention = Both(np.array([[1.0], [0.0]]), np.array([[4.0], [0.0]]))
    assert bound.foresee(attention, 12.0, 2) == (23.0, 12.0 + 3 * 2.5)


def test_replicas_are_dealt_rows_in_turn(bound: ModuleType, tmp_path: Path) -> None:
    """The first has rows 0 and 2, the other 1 and 3; the slower one counts. The second step begins with row 0 again."""
    path = _write(tmp_path, [[[4096], [512] * 8], [[2048] * 2, [1024] * 4]])
    words = f"--workload {path} --without-attention 1e-9 --stages 1 --micro-batches 2 --ranks 2 --layers 1 --factor 1"
    first, second = bound.foresee_all(bound.parse(words.split()))
    rows = [count * _attention(length, 1, 1.0) for count, length in ((1, 4096), (8, 512), (2, 2048), (4, 1024))]
    assert first == second
    assert first.bound == pytest.approx(sum(rows) / 2, rel=1e-4)
    again = (
        2 * FORWARD_SHARE * 8 * 4096 * COST.row + FORWARD_SHARE * 8 * COST.pair * (4096 * 4097 + 2 * 2048 * 2049) / 2
    )
    assert first.one_f_one_b == pytest.approx(rows[0] + rows[2] + again, rel=1e-4)


def test_rows_of_a_stream_and_of_even_documents(bound: ModuleType, tmp_path: Path) -> None:
    stream = _write(tmp_path, [[3000, 5192], [8192]], stream=True)  # type: ignore[list-item]
    assert bound.read_rows(str(stream)) == [[3000, 5192], [8192]]
    assert bound.read_rows(str(stream), 3000) == [[3000, 3000, 2192]] * 2
    with pytest.raises(SystemExit, match="no such file, and none of .*prolong_64k_2r"):
        bound.read_rows("nothing")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--workload x --stages 2 --layers 8 --micro-batches 8", "give --without-attention, or a --result"),
        ("--workload x --without-attention 1 --layers 8 --micro-batches 8", "give --stages"),
        ("--workload x --without-attention 1 --stages 3 --layers 8 --micro-batches 8", "multiples of 3 stages"),
    ],
)
def test_what_is_missing_is_said(bound: ModuleType, words: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        bound.parse(words.split())
    assert text in capsys.readouterr().err


def test_the_figures_of_the_published_run(bound: ModuleType) -> None:
    """Those of benchmarks/results/README.md, by the command that it names."""
    said = PUBLISHED.read_text()
    command = re.search(r"^ +python benchmarks/pipeline_bound\.py (.*?)\n\n", said, re.MULTILINE | re.DOTALL)
    assert command is not None
    words = [
        str(ROOT / word) if word.endswith(".json") else word for word in shlex.split(command[1].replace("\\\n", ""))
    ]
    options = bound.parse(words)
    steps = bound.foresee_all(options)
    ratios = re.search(r"1F1B takes ([\d.]+) and ([\d.]+) times as long", said)
    assert ratios is not None
    assert [f"{one.one_f_one_b / one.bound:.2f}" for one in steps] == [ratios[1], ratios[2]]
    text = bound.table(steps, options.measured)
    foreseen, of_bound = (float(value) for value in re.findall(r"measured: ([\d.]+)", text))
    within, share = re.search(r"foresees 1F1B within ([\d.]+) %, and CAD is at ([\d.]+) of", said).groups()
    assert abs(foreseen - 1) <= float(within) / 100 and f"{of_bound:.2f}" == share
    options.factor = 1.0
    mean = sum(one.one_f_one_b for one in bound.foresee_all(options)) / len(steps)
    (plain,) = re.search(r"`--factor 1`\) 1F1B is foreseen within ([\d.]+) %", said).groups()
    assert abs(mean / options.measured["1f1b"] - 1) <= float(plain) / 100
    assert f"CAD ÷ 1F1B is {options.measured['1f1b'] / options.measured['cad']:.3f}." in said
