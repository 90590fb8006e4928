"""The benchmarks: one small run of each on CPU processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import training
from forked import launch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "docs")]

import servers_picture  # noqa: E402

CAD = json.dumps({"granularity": 16, "links": training.LINKS})
"""Where something must move, however slow a busy machine finds its links."""


def torchrun(processes: int, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a benchmark; its output is shown where it fails."""
    return launch(processes, command, ROOT, CUDA_VISIBLE_DEVICES="")


@pytest.mark.slow
@pytest.mark.parametrize("workload", [pytest.param("heavy_64k_4r", marks=pytest.mark.long), "stream_64k_4r"])
def test_modes_train_the_same(tmp_path: Path, workload: str) -> None:
    pytest.importorskip("deepspeed")
    size = "--layers 2 --hidden 64 --heads 8 --kv-heads 4 --ffn 96 --vocab 128 --tokens-per-rank 256 --scale".split()
    run = torchrun(
        2, "benchmarks/train_step.py", "--workload", f"benchmarks/workloads/{workload}.json", *size,
        "--mode", "dp,dp:kept,dp:kept_host,ulysses,ulysses:kept,ulysses:kept_host,ulysses_joined,allgather_cp,cad,"
        'cad:recompute,cad@{"overlap":"pingpong"},bound,bound_qkv', "--steps", "2", "--warmup", "1", "--repeats", "2",
        "--until", "1", "--cad", CAD, "--output", str(tmp_path),
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    (path,) = tmp_path.glob("*.json")
    assert {file.suffix for file in tmp_path.iterdir()} >= {".json", ".md"}
    results = json.loads(path.read_text())
    exact = {name: mode for name, mode in results["modes"].items() if mode["exact"]}
    assert len(exact) == (11 if workload.startswith("heavy") else 8)
    # 2 layers in 2 steps; Ulysses trains the rows of all ranks in turn.
    for name, calls in (("dp", 4), ("ulysses", 4 if workload.startswith("stream") else 8)):
        modes = [results["modes"][name + kept] for kept in ("", ":kept", ":kept_host")]
        assert [mode["attention_calls"]["forward"] for mode in modes] == [[2 * calls] * 2, [calls] * 2, [calls] * 2]
        assert [mode["attention_calls"]["backward"] for mode in modes] == [[calls] * 2] * 3
    first = next(iter(exact.values()))
    for name, mode in exact.items():
        assert mode["gradient_difference"] < 1e-5, name
        assert mode["loss"] == pytest.approx(first["loss"], rel=1e-5), name
        assert mode["gradient_norm"] == pytest.approx(first["gradient_norm"], rel=1e-4), name
        assert mode["attention_s_mean_without_recompute"] > 0
        assert mode["tokens_per_s_per_gpu"]["median"] > 0
    assert results["modes"]["cad"]["exposed_exchange_share"]["mean"] > 0
    assert set(results["bounds"]) == {"bound", "bound_qkv"}
    assert results["collective_GBps"]["inside"] > 0
    assert results["settings"]["repeats"] == 1 and "pass 1," in run.stderr and "pass 2," not in run.stderr
    assert "| cad |" in run.stdout


@pytest.mark.long
@pytest.mark.slow
def test_alst_and_cad_train_the_same(tmp_path: Path) -> None:
    """Full optimizer steps: losses after the first show gradients too."""
    pytest.importorskip("deepspeed")
    size = "--tokens 512 --layers 2 --hidden 64 --heads 8 --kv-heads 4 --ffn 96 --vocab 128 --tile 100".split()
    for mode in ("alst", "alst:kept", "cad"):
        run = torchrun(
            2, "benchmarks/alst_step.py", "--mode", mode, *size, "--steps", "2", "--lr", "0.01",
            "--cad", '{"granularity": 16, "keep": "host"}', "--output", str(tmp_path / f"{mode}.json"),
        )  # fmt: skip
        assert run.returncode == 0, run.stderr[-4000:]
    alst, kept, cad = (json.loads((tmp_path / f"{mode}.json").read_text()) for mode in ("alst", "alst:kept", "cad"))
    assert cad["ranks"][0]["losses"] == pytest.approx(alst["ranks"][0]["losses"], rel=1e-5)
    assert kept["ranks"][0]["losses"] == pytest.approx(alst["ranks"][0]["losses"], rel=1e-5)
    assert kept["ranks"][0]["parked"] > 0
    assert len(set(cad["ranks"][0]["losses"])) == 3
    assert cad["ranks"][0]["parked"] > 0 and cad["ranks"][0]["waited"] > 0 and alst["ranks"][0]["waited"] is None
    words = [sys.executable, "benchmarks/alst_step.py", "--table", str(tmp_path)]
    table = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True).stdout
    assert re.search(r"^\| alst \|.* 1\.000 ", table, re.MULTILINE) and "| cad |" in table
    assert re.search(r"^\| alst:kept \|.* \| 1\.000 \| 0\.0 ", table, re.MULTILINE)


@pytest.mark.long
@pytest.mark.slow
def test_hybrid_trains_the_same(tmp_path: Path) -> None:
    """State stays inside documents in every mode; only the attending layers count as attention."""
    size = "--layers 4 --hidden 64 --heads 8 --kv-heads 4 --ffn 96 --vocab 128 --tokens-per-rank 256 --scale".split()
    run = torchrun(
        2, "benchmarks/train_step.py", "--workload", "benchmarks/workloads/heavy_64k_2r.json", *size,
        "--model", "hybrid", "--mode", "dp,cad,bound_qkv", "--steps", "2", "--warmup", "1", "--repeats", "1",
        "--cad", CAD, "--output", str(tmp_path),
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    results = json.loads(next(tmp_path.glob("*.json")).read_text())
    assert results["settings"]["attending_layers"] == 1 and "hybrid" in results["workload"]
    plain, cad = results["modes"]["dp"], results["modes"]["cad"]
    assert cad["loss"] == pytest.approx(plain["loss"], rel=1e-5) and cad["gradient_difference"] < 1e-5
    assert cad["attention_s_mean"] > 0 and set(results["bounds"]) == {"bound_qkv"}


@pytest.mark.slow
def test_pretended_hosts_train_the_same(tmp_path: Path) -> None:
    size = "--layers 2 --hidden 64 --heads 8 --kv-heads 4 --ffn 96 --vocab 128 --tokens-per-rank 256 --scale".split()
    run = torchrun(
        2, "benchmarks/train_step.py", "--workload", "benchmarks/workloads/meet_64k_2r.json", *size,
        "--mode", "dp,cad", "--steps", "3", "--warmup", "1", "--repeats", "1",
        "--cad", '{"granularity": 16}', "--hosts", "0,1", "--output", str(tmp_path),
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    modes = json.loads(next(tmp_path.glob("*.json")).read_text())["modes"]
    for name, mode in modes.items():
        assert mode["loss"] == pytest.approx(modes["dp"]["loss"], rel=1e-5), name
        assert mode["gradient_difference"] < 1e-5, name


TINY = "--layers 2 --hidden 64 --heads 8 --kv-heads 4 --ffn 96 --vocab 128".split()


@pytest.mark.long
@pytest.mark.parametrize(("model", "groups"), [("gpt_oss", 4), ("deepseek", 8)])
def test_other_shapes_of_attention_train_the_same(tmp_path: Path, model: str, groups: int) -> None:
    """Sinks and windows, and values smaller than keys: what plain training folds and masks, CAD does too."""
    run = torchrun(
        2, "benchmarks/train_step.py", "--workload", "benchmarks/workloads/meet_64k_2r.json", *TINY, "--model", model,
        "--kv-heads", str(groups), "--tokens-per-rank", "512", "--scale", "--mode", "dp,cad,bound_qkv", "--steps", "2",
        "--warmup", "1", "--repeats", "1", "--cad", CAD, "--output", str(tmp_path),
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    modes = json.loads(next(tmp_path.glob("*.json")).read_text())["modes"]
    assert modes["cad"]["loss"] == pytest.approx(modes["dp"]["loss"], rel=1e-5)
    # Something really travelled, and with gradients of sinks too: one wrong by half is off by 1e-3.
    assert 0 < modes["cad"]["gradient_difference"] < 1e-5
    assert modes["bound_qkv"]["loss"] != modes["dp"]["loss"]


@pytest.mark.long
def test_rows_with_a_reserved_server_and_in_place(tmp_path: Path) -> None:
    """The same rows in other numbers of micro-batches."""
    rows = ["--workload", "benchmarks/workloads/heavy_128k_4r.json", "--rows", "6", "--tokens", "512"]
    for name, block in (("reserved_rows", {"servers": {"reserved": 1}}), ("in-place_rows", {})):
        launcher = ["-m", "deepspeed_cad.run", "--cad", json.dumps(block), "benchmarks/servers_step.py"]
        run = torchrun(3, *launcher, *rows, *TINY, "--warmup", "1", "--output", str(tmp_path / f"{name}.json"))
        assert run.returncode == 0, run.stderr[-4000:]
    (tmp_path / "another.json").write_text('{"modes": {}}')
    reserved, in_place = (json.loads((tmp_path / f"{name}_rows.json").read_text()) for name in ("reserved", "in-place"))
    assert [one["ranks"][0]["micro_batches"] for one in (reserved, in_place)] == [3, 2]
    assert reserved["tokens"] == in_place["tokens"] == 6 * 512
    assert reserved["ranks"][0]["loss"] == pytest.approx(in_place["ranks"][0]["loss"], rel=1e-5)
    command = [sys.executable, ROOT / "benchmarks/servers_step.py", "--table", tmp_path]
    table = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert "| reserved_rows | 2 + 1 |" in table and "| in-place_rows | 3 + 0 |" in table


@pytest.mark.long
@pytest.mark.parametrize(("limit", "code"), [(60, 0), (0, 1)])
def test_a_server_killed_in_mid_step(tmp_path: Path, limit: int, code: int) -> None:
    """The others end with its name; where they do not end in time, the exit code says so."""
    command = [sys.executable, "benchmarks/killed_server.py", "--ranks", "2", "--limit", str(limit)]
    script = ["--cad", '{"granularity": 16}', "--output", str(tmp_path / "killed.json"), "--", "--tokens", "512", *TINY]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run([*command, *script], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert run.returncode == code, run.stdout + run.stderr
    found = json.loads((tmp_path / "killed.json").read_text())
    assert found["passed"] == (code == 0) and found["killed_after_s"] > 0
    if code == 0:
        assert "server 1 ended: its process died" in found["killed"][0]["words"]
    else:
        assert "still runs" in run.stdout


def gpus(*words: str, script: str = "gpus", **variables: str) -> subprocess.CompletedProcess[str]:
    """benchmarks/gpus where there are none."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}
    return subprocess.run(
        [str(ROOT / "benchmarks" / script), *words], env={**environment, **variables}, capture_output=True, text=True,
        timeout=500, check=False,
    )  # fmt: skip


def test_the_measurements_have_names() -> None:
    usage = gpus().stderr
    names = re.findall(r"^  ([a-z_0-9]+) +\d+  ", usage, re.MULTILINE)
    assert {"headline", "servers_rows", "finetune"} <= set(names) and usage == gpus(script="two_gpus").stderr
    cases = re.findall(r"^  ([a-z_0-9]+)\)", (ROOT / "benchmarks" / "gpus").read_text(), re.MULTILINE)
    assert sorted(cases) == sorted(names)
    missing = gpus("headline", "nowhere", GPUS="", PATH="/usr/bin:/bin")
    assert missing.returncode == 2 and "GPUS=2" in missing.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "sizes", "last"),
    [
        ("headline", "--tokens-per-rank 256 --scale --steps 1 --warmup 1", r"÷ Ulysses kept \|(?s:.*)\n\| cad \| "),
        ("pipeline", "--layers 2 --tokens 256 --scale --repeats 1 --steps 1", r"\| 2 × 1 \| meet_64k_2r \| \d"),
        ("finetune", "--tiny --context 256 --synthetic 64 --steps 3", r"median [\d.]+ s off, [\d.]+ s on"),
    ],
)
def test_measurements_by_name(tmp_path: Path, name: str, sizes: str, last: str) -> None:
    workload = str(ROOT / "benchmarks" / "workloads" / "meet_64k_2r.json")
    more = {"SIZES": sizes} if name == "finetune" else {"MORE": f"{' '.join(TINY)} {sizes}"}
    run = gpus(name, str(tmp_path), workload, script="two_gpus", **more)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    assert re.search(last, run.stdout) and list(tmp_path.rglob("*.json"))


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [False, pytest.param(True, marks=pytest.mark.long)])
def test_one_document_with_a_reserved_server_and_in_place(tmp_path: Path, hosts: bool) -> None:
    # Servers tell twice a second how long they attended: as many steps as last longer.
    size = (
        "--layers 2 --hidden 64 --heads 8 --kv-heads 4 --ffn 96 --vocab 128 --tokens 512 --warmup 1 --steps 15".split()
    )
    launcher = ["benchmarks/run_on_hosts.py", "0,1", "host"] if hosts else ["-m", "deepspeed_cad.run"]
    for name, block in (("reserved_x", {"servers": {"reserved": 1}}), ("in-place_x", {})):
        script = ["--cad", json.dumps(block), "benchmarks/servers_step.py", *size]
        run = torchrun(2, *launcher, *script, "--output", str(tmp_path / f"{name}.json"))
        assert run.returncode == 0, run.stderr[-4000:]
    reserved, in_place = (json.loads((tmp_path / f"{name}_x.json").read_text()) for name in ("reserved", "in-place"))
    assert (reserved["trainers"], reserved["servers"]) == (1, 1) and (in_place["trainers"], in_place["servers"]) == (
        2,
        0,
    )
    assert reserved["ranks"][0]["loss"] == pytest.approx(in_place["ranks"][0]["loss"], rel=1e-5)
    assert reserved["ranks"][0]["linear_s_per_token"][0] > 0 and 0 < reserved["ranks"][0]["servers_idle"] < 1
    for one in (reserved, in_place):
        assert ("between" in one["ranks"][0]["links"]) == hosts, one["ranks"][0]["links"]
        assert bool(one["link_GBps"]["between"]) == hosts
        assert len(set(one["settings"]["hosts"].split(","))) == 1 + hosts
        assert one["settings"]["heads"] == 8 and one["kernel"] == "torch_math"
    table = subprocess.run(
        [sys.executable, ROOT / "benchmarks/servers_step.py", "--table", tmp_path], capture_output=True, text=True,
        check=True, timeout=120,
    ).stdout  # fmt: skip
    assert re.search(r"\| reserved_x \| 1 \+ 1 \| c10d \|", table) and "| in-place_x | 2 + 0 | c10d |" in table


@pytest.mark.long
@pytest.mark.slow
def test_a_product_beside_a_rank_and_the_picture_of_a_timeline(tmp_path: Path) -> None:
    size = "--layers 2 --hidden 64 --heads 8 --kv-heads 4 --ffn 96 --vocab 128 --tokens 512 --warmup 3".split()
    trace = {"trace": str(tmp_path / "timeline" / "trace.json")}
    script = ["benchmarks/servers_step.py", *size]
    alone = [*script, "--slowed", "0", "--alone", "--in-place", json.dumps({"speeds": "measure"})]
    block = {"speeds": "measure", "servers": {"reserved": 1}, **trace}
    beside = ["-m", "deepspeed_cad.run", "--cad", json.dumps(block), *script, "--slowed", "1"]
    for name, command in (("in-place", alone), ("reserved", beside)):
        run = torchrun(2, *command, "--output", str(tmp_path / f"{name}.json"))
        assert run.returncode == 0, run.stderr[-4000:]
        planned = re.search(r"CAD is done: (\d+) micro-batches", run.stderr)
        # Three steps to warm up and two timed: what is measured alone is measured without CAD.
        assert planned and int(planned[1]) == 5, run.stderr[-2000:]
    found = json.loads((tmp_path / "in-place.json").read_text())
    assert all(one["alone"]["linear_s"] > 0 < one["alone"]["attention_s"] for one in found["ranks"])
    command = [sys.executable, ROOT / "benchmarks/slowed.py", "--table", tmp_path]
    table = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
    assert re.search(r"\| in-place \| 0 \| [\d.]+ [\d.]+ \| [\d.]+ \| [\d.]+ \| [\d.]+ \|", table)
    assert "| reserved | 1 | " in table
    timeline = tmp_path / "timeline" / "trace.json"
    rows, bars, length = servers_picture.read_bars(timeline)
    assert rows == ["trainer 0", "server 1"] and 0 < max(bar.end for bar in bars) <= length + 1e-9
    # Two layers there and back, of both parts; the trainer runs the rest of the model.
    served = [bar for bar in bars if bar.row == 1]
    assert [bar.kind for bar in served].count("attention A") == 4 == [bar.lane for bar in served].count(1)
    assert {"A", "B", "waiting"} <= {bar.kind for bar in bars if bar.row == 0}
    picture = servers_picture.draw(rows, bars, length)
    assert picture.count("<rect") == 1 + 2 + len(bars) + len(servers_picture.COLOURS)
