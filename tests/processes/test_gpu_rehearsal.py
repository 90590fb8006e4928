"""The checks that `make test-gpu` runs on GPUs, rehearsed on CPU processes, so that the scripts stay right."""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO

import gpu_check
import pytest
from forked import Script

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
