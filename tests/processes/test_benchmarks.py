"""The benchmarks: one small run of each on CPU processes."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import training
from forked import launch
from scripts import ROOT


def torchrun(processes: int, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a benchmark; its output is shown where it fails."""
    return launch(processes, command, ROOT, CUDA_VISIBLE_DEVICES="")


TINY = "--layers 2 --hidden 64 --heads 8 --kv-heads 4 --ffn 96 --vocab 128".split()


@pytest.mark.slow
def test_modes_train_the_same(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    modes = (
        "dp,dp:kept,dp:kept_host,ulysses,ulysses:kept,ulysses:kept_host,ulysses_joined,allgather_cp,cad,cad:recompute,"
        'cad@{"overlap":"none"},bound,bound_qkv'
    )
    # Something must move, however slow a busy machine finds its links.
    run = torchrun(
        2, "benchmarks/train_step.py", "--workload", "benchmarks/workloads/stream_64k_4r.json", *TINY, "--scale",
        "--tokens-per-rank", "256", "--mode", modes, "--steps", "2", "--warmup", "1", "--repeats", "2",
        "--until", "1", "--cad", json.dumps({"granularity": 16, "links": training.LINKS}), "--output", str(tmp_path),
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    (path,) = tmp_path.glob("*.json")
    results = json.loads(path.read_text())
    assert {file.suffix for file in tmp_path.iterdir()} >= {".json", ".md"}
    exact = [mode for mode in results["modes"].values() if mode["exact"]]
    assert len(exact) == 8
    for name in ("dp", "ulysses"):  # 2 layers in 2 steps
        modes = [results["modes"][name + kept] for kept in ("", ":kept", ":kept_host")]
        assert [mode["attention_calls"]["forward"] for mode in modes] == [[8] * 2, [4] * 2, [4] * 2]
        assert [mode["attention_calls"]["backward"] for mode in modes] == [[4] * 2] * 3
    for mode in exact:
        assert mode["gradient_difference"] < 1e-5 and mode["loss"] == pytest.approx(exact[0]["loss"], rel=1e-5)
        assert mode["gradient_norm"] == pytest.approx(exact[0]["gradient_norm"], rel=1e-4)
        assert mode["attention_s_mean_without_recompute"] > 0 < mode["tokens_per_s_per_gpu"]["median"]
    assert results["modes"]["cad"]["exposed_exchange_share"]["mean"] > 0
    assert set(results["bounds"]) == {"bound", "bound_qkv"} and results["collective_GBps"]["inside"] > 0
    assert results["settings"]["repeats"] == 1 and "pass 1," in run.stderr and "pass 2," not in run.stderr
    assert "| cad |" in run.stdout


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
@pytest.mark.parametrize("name, sizes, last", [
    ("headline", "--tokens-per-rank 256 --scale --steps 1 --warmup 1", r"÷ Ulysses kept \|(?s:.*)\n\| cad \| "),
    ("pipeline", "--layers 2 --tokens 256 --scale --repeats 1 --steps 1", r"\| 2 × 1 \| meet_64k_2r \| \d"),
    ("finetune", "--tiny --context 256 --synthetic 64 --steps 3", r"median [\d.]+ s off, [\d.]+ s on"),
    ("dealt", "--divide 128 --steps 2", r"\| dealt \| (?s:.*)padded, .* losses are at most \d\.\de-0[789] apart"),
    ("rollouts", "--batch 8 --divide 128 --context 512", r"\| cad \| (?s:.*)by_length.*modes differ by at most 0"),
    ("servers", "--tokens 2048", r"\| reserved_nvlink \| 1 \+ 1 \| c10d \| "),
    ("shares", "--tokens 512 --steps 1 --repeats 1", r"ulysses 2 × 2 .* 1\.70 → 1\.[0-3].* most (0|\S+e-0[789])"),
])  # fmt: skip
def test_measurements_by_name(tmp_path: Path, name: str, sizes: str, last: str) -> None:
    workload = str(ROOT / "benchmarks" / "workloads" / "meet_64k_2r.json")
    tiny = sizes if name == "finetune" else f"{' '.join(TINY)} {sizes}"
    more = {"MORE" if name in ("headline", "pipeline") else "SIZES": tiny, "LINKS": "nvlink"}
    run = gpus(name, str(tmp_path), workload, GPUS="4" if name == "shares" else "2", **more)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]
    assert re.search(last, run.stdout) and list(tmp_path.rglob("*.json"))
