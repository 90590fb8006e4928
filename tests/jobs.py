"""Processes of trainers and reserved servers as a launcher starts them, for tests of how they end."""

import json
import os
import subprocess
import time
from pathlib import Path

from forked import Script
from ports import free_port
from scripts import ROOT

SCRIPT = str(ROOT / "tests" / "processes" / "script_servers.py")
BLOCK = {"granularity": 16, "servers": {"reserved": 1}, "timeout_s": 300}
LIMIT_S = 120.0
"""All end soon after the first; without word of it they would wait for "timeout_s"."""


class Job:
    """Processes as a launcher starts them, and nobody who ends them when one fails."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port, self.processes = folder, free_port(), dict[str, Script]()

    def start(self, name: str, words: list[str], **variables: object) -> Script:
        """One process; its output goes to a file."""
        env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
        env |= {key: str(value) for key, value in variables.items()}
        self.processes[name] = Script(words, self.folder, env, self.folder / name)
        return self.processes[name]

    def launch_all(self, world: int, *script: str, block: dict = BLOCK) -> None:
        """Every rank under the launcher of CAD."""
        words = ["-m", "deepspeed_cad.run", "--cad", json.dumps(block), SCRIPT, *script]
        for rank in range(world):
            self.start(
                f"rank{rank}", words, RANK=rank, WORLD_SIZE=world, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=world,
                MASTER_ADDR="127.0.0.1", MASTER_PORT=self.port,
            )  # fmt: skip

    def serve(self, name: str, *words: str) -> Script:
        return self.start(name, ["-m", "deepspeed_cad.cli", "serve", "--rendezvous", f"127.0.0.1:{self.port}", *words])

    def said(self, name: str) -> str:
        return (self.folder / name).read_text()

    def wait_for(self, name: str, words: str) -> None:
        """Until a process writes something."""
        while words not in self.said(name):
            assert self.processes[name].poll() is None, self.said(name)
            time.sleep(0.05)

    def ends(self, first: str) -> dict[str, int]:
        """Exit codes; all end within LIMIT_S of the first."""
        self.processes[first].wait(240)
        end = time.monotonic() + LIMIT_S
        codes = {}
        for name, process in self.processes.items():
            try:
                codes[name] = process.wait(max(end - time.monotonic(), 0.01))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"{name} still runs {LIMIT_S} s after {first} ended:\n{self.said(name)}") from None
        return codes
