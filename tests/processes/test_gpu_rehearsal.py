"""The checks that `make test-gpu` runs on GPUs, rehearsed on CPU processes, so that the scripts stay right."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
from gpu_check import Launch, start

GPU = Path(__file__).parents[1] / "gpu"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("groups", "ranks", "checks"),
    [
        (
            "kernels,transports,models,streams,exactness,speeds,lifetimes",
            2,
            "kernel rows transport model two exactness speeds lifetimes",
        ),
        # Two trainers, which are a world of their own.
        ("servers", 3, "reserved"),
    ],  # fmt: skip
    ids=["all", "servers"],
)
def test_rehearsal(tmp_path: Path, groups: str, ranks: int, checks: str) -> None:
    """Groups that run without GPUs, with everything they compare."""
    command = [sys.executable, str(GPU / "gpu_check.py"), "--device", "cpu", "--patience", "4", "--budget", "550"]
    command += ["--gpus", str(ranks), "--only", groups, "--output", str(tmp_path / "found.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert {row["state"] for row in found["table"]} == {"passed"}
    assert f"{len(found['table'])} passed, 0 failed, 0 skipped in " in done.stdout.splitlines()[-1]
    assert {row["what"].split()[0] for row in found["table"]} == set(checks.split())


def test_a_hang_is_one_failed_line(tmp_path: Path) -> None:
    """The rank that waits is killed at the limit, named with its case, and its output is shown."""
    options = argparse.Namespace(gpus=2, device="cpu", kernel="auto")
    ended = start(Launch("failures", "c10d: hangs before its lengths", dies=7), options, tmp_path, 9.0)
    failed = [line for line in ended.lines if line["state"] == "failed"]
    assert [line["detail"] for line in failed][-1] == "the process of rank 1 did not end within 9 s"
    assert "hangs before its lengths" in failed[-1]["case"]
    assert "--- failures c10d: hangs before its lengths, rank 0" in ended.log
