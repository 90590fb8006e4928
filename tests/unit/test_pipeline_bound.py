"""Arithmetic of a pipeline's step: where its answer is known, and the figures of the published run."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest
from scripts import load_script

from deepspeed_cad.planner.plan import HeadShape
from deepspeed_cad.profiles import Profile
from deepspeed_cad.profiles.choice import SHIPPED
from deepspeed_cad.simulator.attention import FORWARD_SHARE

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
