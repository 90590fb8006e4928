"""`deepspeed-cad plan`: the files it reads and writes, what it says of bad input, and what a data set would gain."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plan_checks import check_coverage
from plans_said import SAID
from plans_said import said as said_to
from test_compare_modes import made

from deepspeed_cad import profiles
from deepspeed_cad.cli import foresee, main, picture, progress
from deepspeed_cad.cli.plan import add_arguments
from deepspeed_cad.errors import CADError
from deepspeed_cad.forecast import Setting
from deepspeed_cad.forecast.attention import WAIT
from deepspeed_cad.forecast.compare import MODES, Comparison, label
from deepspeed_cad.forecast.setting import ModelShape
from deepspeed_cad.layout import Layout

GOOD: dict[str, Any] = {
    "documents": [30000, 0, 500, 20000, 15000], "tokens_per_rank": 16384, "ranks": 4, "heads": 8, "kv_heads": 4,
    "head_dim": 16, "bytes_per_element": 2, "window": None, "cost": "pairs", "tolerance": 0.02,
}  # fmt: skip


def plan(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str]:
    """Exit code and all that was said."""
    return main(["plan", *map(str, words)]), "".join(capsys.readouterr())


def options(*words: str) -> argparse.Namespace:
    add_arguments(parser := argparse.ArgumentParser())
    return parser.parse_args(words)


def test_documents_in_plan_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "in.json", tmp_path / "out.json"
    source.write_text(json.dumps(GOOD))
    code, said = plan(capsys, source, "--output", target)
    out = json.loads(target.read_text())
    load = np.array(out["load"])
    loads = load / load.mean()
    moved, most = (f"{count / 2**20:.1f} MiB" for count in (sum(out["sent_bytes"]), max(out["received_bytes"])))
    assert code == 0 and said.startswith(
        f"attention max/mean 1.670 -> {loads.max():.3f}, min/mean {loads.min():.3f}; moved {moved} in a layer's "
        f"forward, {most} to the hottest rank; {len(out['tasks'])} tasks in "
    )
    assert set(out) >= {"tasks", "load", "sent_bytes", "received_bytes", "planning_ms"}
    tasks = np.array(out["tasks"])
    assert 1 not in tasks[:, 0] and tasks[:, 0].max() == 4
    tasks[tasks[:, 0] > 1, 0] -= 1
    check_coverage(tasks, Layout.from_stream(GOOD["documents"], 4, 16384).tick(), 4)
    assert loads.max() <= 1.02 and loads.min() >= 0.98 and sum(out["sent_bytes"]) == sum(out["received_bytes"]) > 0
    assert main(["plan", str(source), "--output", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["tasks"] == out["tasks"]
    assert "--micro-batches is for a data set: a question has keys" in plan(capsys, source, "--micro-batches", "2")[1]
    source.write_text(json.dumps(GOOD | {"documents": []}))
    assert "max/mean 1.000 -> 1.000, min/mean 1.000; moved 0.0 MiB" in plan(capsys, source)[1]


@pytest.mark.parametrize("question", SAID)
def test_what_is_said_and_answered_changes_on_purpose(question: str) -> None:
    assert said_to(question) == SAID[question]


def test_a_hybrid_with_documents_that_span_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command of docs/million-tokens.md: how long its layers that carry state wait."""
    (tmp_path / "million.json").write_text(json.dumps([1 << 20] * 2))
    words = "--model qwen3.5-9b --ranks 8 --context 131072 --offload-optimizer --keep host --packing spanning".split()
    assert main(["plan", str(tmp_path / "million.json"), *words, "--modes", "cad", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["state_layers"]["over_own_rows"] == pytest.approx(1 + 7 * WAIT) and answer["modes"][0]["fits"]
    assert main(["plan", str(tmp_path / "million.json"), *words, "--pipeline", "2"]) == 2


def test_bad_values_are_found_before_anything_is_loaded(tmp_path: Path) -> None:
    """The model and the data do not exist, torch is not imported."""
    script = "import sys; from deepspeed_cad.cli import main; code = main(); "
    script += "sys.exit(code if not {'torch', 'transformers', 'datasets'} & set(sys.modules) else 9)"
    for words, said in (
        (["--tolerance", "2"], 'key "tolerance" is 2.0; allowed: a number between 0 and 1'),
        (["--ranks-per-node", "3,2"], "hosts of 3, 2 ranks have 5; there are 8"),
        ([], "nosuch.jsonl does not exist"),
    ):
        command = ["plan", "nosuch.jsonl", "--model", "nosuch", *words]
        done = subprocess.run([sys.executable, "-c", script, *command], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_a_profile_of_ones_own_is_taken_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    def attention(*words: str) -> float:
        assert main(["plan", "long-mix", "--steps", "1", "--modes", "plain", "--json", *words]) == 0
        return float(json.loads(capsys.readouterr().out)["modes"][0]["seconds"]["attention"])

    given = str(Path(profiles.__file__).parent / "h200_flash_attn_4.json")
    assert attention("--machine", "a100", "--cost", given) == attention(), "not as many times as an A100 takes longer"


@pytest.mark.parametrize("sharding", ["zero1", "zero3"])
def test_pictures_of_what_is_foreseen(sharding: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(progress, "QUIET", 0.001)
    folder = tmp_path / "of a run" / "pictures"
    if sharding == "zero3":
        folder.mkdir(parents=True)
    words = f"long-mix --ranks 4 --steps 1 --context 16384 --sharding {sharding} --modes".split()
    code, said = plan(capsys, *words, "plain,cad,cad reserved", "--pictures", folder)
    names = {"step.png", "ranks.png", "context.png", *["reserved.png"] * (sharding == "zero1")}
    assert code == 0 and {path.name for path in folder.iterdir()} == names
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in folder.iterdir())
    assert all(f"drew {folder / name}" in said for name in names)
    assert "… pictures: 4 GPUs, " in said
    assert re.search(r"^ +tokens/s.* exposed$\n^ +/GPU.* exch. %$", said, re.MULTILINE)


@pytest.mark.parametrize("more, ranks, per_host, servers", [
    ("", (2, 4, 8, 16, 32, 64), 8, (1, 2, 3, 4, 6, 8)),
    ("--tensor 2 --pipeline 2 --ranks-per-node 12,4", (8, 16, 32, 64), 4, (1, 2)),
])  # fmt: skip
def test_points_of_curves(more: str, ranks: Any, per_host: int, servers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four steps of the same documents at each, be there more or fewer; a mode is drawn where it fits."""
    asked, drawn = [], {}

    def compare(own: Setting, steps: Any, modes: Any, reserved: int | None, fewer: Any) -> Comparison:
        asked.append((own.cluster.ranks, own.cluster.per_host, max(steps[0][0].segments.end), reserved, modes))
        rows = [np.bincount(one.segments.rank, minlength=own.seats) for step in steps for one in step]
        assert len(steps) == 4 and len(rows) == 8 and (np.array(rows) == 3).all()
        assert own.seats > 2 or len(fewer(1)) == 8, "one trainer alone needs twice as many"
        return Comparison((made("plain", 1.0, peak=200.0), made("cad", 0.5)), {})

    monkeypatch.setattr(foresee, "compare", compare)
    monkeypatch.setattr(foresee, "draw_step", lambda *_: None)
    monkeypatch.setattr(foresee, "draw_curves", lambda over, curves, path: drawn.update({over: curves}))
    words = "x --ranks 16 --context 4096 --packing none --batch 3 --micro-batches 2 --pictures x"
    args, names, contexts = options(*words.split(), *more.split()), ["plain", "cad"], [1024 << n for n in range(5)]
    given = foresee.read_setting(args, ModelShape()), [1000, 20000] * 60, args, names, len
    assert foresee.draw(Comparison((), {}), *given) == ["x/step.png", "x/ranks.png", "x/context.png"]
    assert asked == [
        *((one, min(one, per_host), 4096, None, names) for one in ranks),
        *((16, per_host, one, None, names) for one in contexts),
        *((16, per_host, 4096, one, ["cad reserved", "cad"]) for one in servers),
    ]
    assert drawn == {
        over: {"plain": [], "cad": [(one, 500.0) for one in values]}
        for over, values in (("GPUs", ranks), ("tokens a GPU packs", contexts))
    }


@pytest.fixture
def axes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What pictures are drawn on."""
    pytest.importorskip("matplotlib")
    made, subplots = list[Any](), picture._subplots
    monkeypatch.setattr(picture, "_subplots", lambda **how: made.append(subplots(**how)) or made[-1])
    return made


def test_a_step_in_files(tmp_path: Path, axes: list[Any]) -> None:
    """The bar of a mode is as long as its step, and its parts follow one another."""
    found = Comparison((made("plain", 1.0), made("plain kept", 0.8), made("cad", 0.5, waiting=0.1)), {})
    picture.draw_step(found, str(tmp_path / "step.png"))
    (_, axis) = axes[0]
    ends = [0.0, 0.0, 0.0]
    for bar in axis.patches:
        row = round(bar.get_y() + bar.get_height() / 2)
        assert bar.get_x() == pytest.approx(ends[row])
        ends[row] += bar.get_width()
    assert ends == pytest.approx([one.seconds.total for one in found.found]) and max(ends) < axis.get_xlim()[1]
    assert axis.get_legend_handles_labels()[1] == list(picture.PARTS) and axis.get_legend()
    assert [one.get_text() for one in axis.get_yticklabels()] == [label(one) for one in found.found]
    said = [f"{one.tokens_per_second:,.0f} tokens/s/GPU" for one in found.found]
    assert [(one.get_text().strip(), one.get_position()) for one in axis.texts] == list(zip(said, zip(ends, (0, 1, 2))))
    assert (tmp_path / "step.png").read_bytes()[:4] == b"\x89PNG"
    for wrong in (tmp_path / "none" / "step.png", tmp_path / "step.nosuch"):
        with pytest.raises(CADError, match=f"picture {wrong} cannot be written"):
            picture.draw_curves("GPUs", {}, str(wrong))  # nothing fits anywhere


@pytest.mark.parametrize("values, scale", [((2, 4, 8), "log"), ((2, 4, 7), "linear"), ((8,), "linear")])
def test_a_curve_for_each_mode_that_fits_somewhere(tmp_path: Path, axes: list[Any], values: Any, scale: str) -> None:
    points = [(one, 10.0 * one) for one in values]
    picture.draw_curves("GPUs", {"plain": points, "cad": [], "plain kept": points}, str(tmp_path / "x.png"))
    (_, axis) = axes[0]
    drawn = [
        (one.get_label(), one.get_linestyle(), one.get_color(), *map(tuple, one.get_xydata())) for one in axis.lines
    ]
    assert drawn == [(MODES[mode], style, "C0", *points) for mode, style in (("plain", "-"), ("plain kept", "--"))]
    assert axis.get_legend() and axis.get_ylim()[0] == 0
    assert (axis.get_xlabel(), axis.get_ylabel(), axis.get_xscale()) == ("GPUs", "tokens/s/GPU", scale)
    assert scale != "log" or [one.get_text() for one in axis.get_xticklabels()] == [str(one) for one in values]


@pytest.mark.parametrize("words, modes, servers", [
    (["--modes=cad, plain"], "cad,plain,plain kept", None), (["--modes=cad,ulysses"], "cad,ulysses", None),
    (["--modes=plain kept,plain,cad"], "plain kept,plain,cad", None), ([], ",".join(MODES), None),
    (["--modes=plain,cad", "--no-checkpointing"], "plain,cad", None), (["--modes=cad reserved"], "cad reserved", None),
    (["--modes=cad reserved,cad", "--reserve=none"], "cad", None), (["--reserve=3"], ",".join(MODES), 3),
])  # fmt: skip
def test_modes_that_are_foreseen(words: list[str], modes: str, servers: int | None) -> None:
    assert foresee.wanted_modes(options("x", *words)) == (modes.split(","), servers)
