"""How a process ends while a daemon of this package sits in C++: as its main thread would have it end."""

import os
import subprocess
import sys

import pytest
from scripts import ROOT

SCRIPT = """
import ctypes, logging, sys, threading, time
from datetime import timedelta
import torch.distributed as dist
from deepspeed_cad.threads import start_daemon

class EndsSlowly:
    # While modules are taken down: by then no other thread may enter the interpreter.
    def __del__(self, sleep=time.sleep):
        sleep(1.5)

def rendezvous():
    # The other rank never comes: an exception after a second, on its way back into Python.
    dist.ProcessGroupGloo(dist.HashStore(), 0, 2, timedelta(seconds=1))

sys.ends_slowly = EndsSlowly()
start_daemon("opens a group", rendezvous, None)
time.sleep(0.3)
print("last words", end="")
"""


@pytest.mark.parametrize(("ending", "code"), [("sys.exit(3)", 3), ("raise ValueError('no more data')", 1)])
def test_a_thread_in_a_rendezvous_changes_neither_code_nor_words(ending: str, code: int) -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", SCRIPT + ending], env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (code, "last words"), done.stderr
    assert "terminate" not in done.stderr and ("no more data" in done.stderr) == (code == 1)
