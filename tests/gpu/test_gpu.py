"""What `make test-gpu` runs, for `pytest -m gpu`: one test for every group of checks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gpu_check import GROUPS

HERE = Path(__file__).parent

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(600),
]


@pytest.mark.parametrize("group", GROUPS)
def test_group(group: str, tmp_path: Path) -> None:
    result = tmp_path / "found.json"
    command = [sys.executable, str(HERE / "gpu_check.py"), "--only", group, "--output", str(result)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.exists(), done.stdout[-4000:] + done.stderr[-4000:]
    rows = json.loads(result.read_text())["table"]
    wrong = [row for row in rows if row["state"] == "failed"]
    assert done.returncode == 0 and not wrong, wrong
    if all(row["state"] == "skipped" for row in rows):
        pytest.skip(rows[0]["detail"])
