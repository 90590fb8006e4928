"""Kernels and transports on this machine's GPUs: runs gpu_check.py over two processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
    pytest.mark.timeout(900),
]


@pytest.mark.parametrize("only", ["kernels", "transports"])
def test_every_line_is_right(only: str, tmp_path: Path) -> None:
    check(2, ["--only", only], tmp_path)


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
@pytest.mark.parametrize("hosts", ["0,0,1,1", "0,1,0,1", "0,0,0,1", "0,1,2,3"])
def test_the_mixed_transport_on_pretended_hosts(hosts: str, tmp_path: Path) -> None:
    check(4, ["--only", "mixed", "--hosts", hosts], tmp_path)


def check(ranks: int, options: list[str], tmp_path: Path) -> None:
    script, result = Path(__file__).with_name("gpu_check.py"), tmp_path / "lines.json"
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [*launch, str(script), *options, "--output", str(result)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert result.exists(), done.stdout[-4000:] + done.stderr[-4000:]
    wrong = [line for part in json.loads(result.read_text()) for line in part if not line["ok"]]
    assert done.returncode == 0 and not wrong, wrong
