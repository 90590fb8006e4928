"""The checks that `make test-gpu` runs on GPUs, rehearsed on CPU processes, so that the scripts stay right."""

import argparse
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO

import gpu_check
import pytest
import torch
from forked import Script
from gpu_check import Launch, start

LONG, MOST = pytest.mark.long, "kernels,models,streams,exactness,lifetimes,wrappers"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Fork(Script):
    def __init__(self, command: list[str], env: Mapping[str, str], stdout: BinaryIO, stderr: BinaryIO) -> None:
        super().__init__(command[1:], Path.cwd(), env, Path(stdout.name))

    @property
    def returncode(self) -> int | None:
        return self.poll()


@pytest.fixture(autouse=True)
def processes_are_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have imported torch and transformers already."""
    monkeypatch.setattr(gpu_check, "subprocess", SimpleNamespace(Popen=Fork, run=subprocess.run))


@pytest.mark.parametrize("groups, ranks, checks", [
    ("transports", 2, "transport"),
    pytest.param(MOST, 2, "kernel model rows two exactness lifetimes wrapper", marks=LONG),
    # Two trainers, which are a world of their own.
    pytest.param("servers", 3, "reserved", marks=LONG),
], ids=["some", "most", "servers"])  # fmt: skip
def test_rehearsal(tmp_path: Path, capsys: pytest.CaptureFixture[str], groups: str, ranks: int, checks: str) -> None:
    """Groups that run without GPUs, with everything they compare."""
    command = ["--device", "cpu", "--patience", "6", "--budget", "850", "--ranks", str(ranks), "--only", groups]
    code = gpu_check.main([*command, "--output", str(tmp_path / "found.json")])
    said = capsys.readouterr().out
    assert code == 0, said[-6000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert {row["state"] for row in found["table"]} == {"passed"}
    assert f"{len(found['table'])} passed, 0 failed, 0 skipped in " in said.splitlines()[-1]
    assert {row["what"].split()[0] for row in found["table"]} == set(checks.split())


def test_without_gpus_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert gpu_check.main([]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert "sees no GPU" in first and last == f"0 passed, 0 failed, {len(gpu_check.GROUPS)} skipped"


def test_a_hang_is_one_failed_line(tmp_path: Path) -> None:
    """The rank that waits is killed at the limit, named with its case, and its output is shown."""
    options = argparse.Namespace(ranks=2, shared=False, device="cpu", kernel="auto")
    ended = start(Launch("failures", "c10d: hangs before its lengths", dies=7), options, tmp_path, 9.0)
    failed = [line for line in ended.lines if line["state"] == "failed"]
    assert [line["detail"] for line in failed][-1] == "the process of rank 1 did not end within 9 s"
    assert "hangs before its lengths" in failed[-1]["case"]
    assert "--- failures c10d: hangs before its lengths, rank 0" in ended.log
