"""The demo and the DeepSpeed example under the `deepspeed` launcher."""

import json
import os
import subprocess
import sys
from pathlib import Path

import demo
import packing
import pytest
import torch
from scripts import ROOT, printed_losses

pytestmark = pytest.mark.timeout(900)


def _run(*command: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=840)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.long
def test_demo(tmp_path: Path) -> None:
    data = tmp_path / "documents"
    data.mkdir()
    for index, words in enumerate([900, 40, 300, 20, 600, 80, 10, 500]):
        (data / f"{index}.txt").write_text(" ".join(f"word{(7 * word) % 97}" for word in range(words)))
    printed = _run(
        sys.executable, "examples/demo.py", "--steps", "2", "--tokens", "512", "--processes", "2", "--data", str(data),
        "--out", str(tmp_path / "out"),
    )  # fmt: skip
    on, off = (
        [json.loads(line) for line in (tmp_path / "out" / f"cad_{name}.jsonl").read_text().splitlines()]
        for name in ("on", "off")
    )
    assert len(on) == len(off) == 2 and demo.BEFORE not in off[0]
    assert demo.largest_difference(on, off) < 1e-5 and demo.average(on, demo.BEFORE) > 1.2
    assert demo.average(on, demo.AFTER) < demo.average(on, demo.BEFORE), "how much less, measured links say"
    assert (tmp_path / "out" / "load.png").is_file() and "load.png" in printed and "Largest difference" in printed


def _finetune(*arguments: str, steps: int = 3) -> list[float]:
    printed = _run(
        *demo.launcher(), "--num_gpus", "2", "--master_port", str(demo.free_port()),
        "examples/finetune_deepspeed.py", "--tiny", "--steps", "3", "--learning-rate", "0.01", *arguments,
    )  # fmt: skip
    losses = printed_losses(printed)
    assert len(losses) == steps
    return losses


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="compares in fp32, on the CPU")
def test_example(tmp_path: Path) -> None:
    """ZeRO-3 with and without the block, gone on from a step, and documents that span ranks."""
    with_cad = _finetune("--save", str(tmp_path / "trained"), "--checkpoint", str(tmp_path / "state"), "--every", "1")
    without = _finetune("--no-cad")
    assert max(abs(a - b) for a, b in zip(with_cad, without, strict=True)) < 1e-5
    assert "cad" not in (tmp_path / "trained" / "config.json").read_text()
    (tmp_path / "state" / "latest").write_text("global_step1")
    went_on = _finetune("--checkpoint", str(tmp_path / "state"), steps=2)
    assert max(abs(a - b) for a, b in zip(with_cad[1:], went_on, strict=True)) < 1e-6, "as without a stop"
    span, zigzag = (_finetune("--span", *more) for more in ([], ["--zigzag"]))
    assert max(abs(a - b) for a, b in zip(span, zigzag, strict=True)) < 1e-5, "another place for the same rows"


def test_pack() -> None:
    """Rows are full, positions start again with each document, and first tokens are nobody's targets."""
    rows = packing.pack(iter([[1, 2, 3], [4, 5, 6, 7], list(range(100, 150)), [8], [9, 9, 9, 9, 9]]), tokens=5, rows=3)
    assert [row["input_ids"][0].tolist() for row in rows] == [
        [1, 2, 3, 4, 5], [6, 7, 100, 101, 102], [103, 104, 8, 9, 9],
    ]  # fmt: skip
    assert [row["position_ids"][0].tolist() for row in rows] == [[0, 1, 2, 0, 1], [0, 1, 0, 1, 2], [0, 1, 0, 0, 1]]
    assert rows[0]["labels"][0].tolist() == [-100, 2, 3, -100, 5]
