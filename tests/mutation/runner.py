"""Runs tests on a copy of the checkout, in a process forked from this one, which has imported what tests need.

In: a copy and arguments of pytest. Out: its exit code and seconds. The workers of tests/pool.py are forked from here
too, so nothing is imported twice; what belongs to the package is imported after the fork, from the copy.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from mutation.copies import ROOT


def preload() -> None:
    """Import what tests need and what knows nothing of the package, so that forked processes have it."""
    import importlib
    from multiprocessing import forkserver, resource_tracker

    sys.path.insert(0, str(ROOT / "tests"))
    import pool

    for name in ["pytest", "_pytest.assertion.rewrite", "hypothesis", "hypothesis.extra.numpy", "highspy",
                 *pool._PRELOAD, *pool._HOSTS]:  # fmt: skip
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    del sys.modules["pool"]
    sys.path.remove(str(ROOT / "tests"))
    # Child processes then wait for the import of deepspeed as always.
    os.environ.pop("DEEPSPEED_CAD_AUTOLOAD", None)
    import torch

    torch.set_num_threads(1)
    resource_tracker.ensure_running()
    start = forkserver.util.spawnv_passfds

    def fork_instead(path: bytes, args: list[Any], passed: list[int]) -> int:
        """The pool's fork server: a fork of this process instead of a Python that imports everything anew."""
        if "multiprocessing.forkserver" not in str(args[-1]):
            return start(path, args, passed)
        pid = os.fork()
        if pid:
            return pid
        try:
            # Whoever starts the server holds its lock, and workers may start processes too.
            forkserver._forkserver._lock = threading.Lock()
            _wrap_deepspeed()
            exec(str(args[-1]))
        finally:
            os._exit(0)

    forkserver.util.spawnv_passfds = fork_instead


def _wrap_deepspeed() -> None:
    """Importing deepspeed wraps its `initialize`; here it was imported before the package could be."""
    if "deepspeed" in sys.modules:
        with contextlib.suppress(Exception):
            import deepspeed_cad

            deepspeed_cad.install()


def run_tests(copy: Path, arguments: list[str], limit: float, plugins: Iterable[Any] = ()) -> tuple[int | None, float]:
    """pytest's exit code on a copy, None where it did not end in time; and seconds."""
    started = time.monotonic()
    pid = os.fork()
    if not pid:
        _in_child(copy, arguments, list(plugins))
    status = None
    while status is None and time.monotonic() - started < limit:
        found, code = os.waitpid(pid, os.WNOHANG)
        status = code if found else None
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if status is None:
        os.waitpid(pid, 0)
        return None, time.monotonic() - started
    return os.waitstatus_to_exitcode(status), time.monotonic() - started


def _in_child(copy: Path, arguments: list[str], plugins: list[Any]) -> None:
    code = 70
    try:
        os.setsid()
        os.chdir(copy)
        log = os.open(copy / "tests.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1), os.dup2(log, 2)
        os.environ["PYTHONPATH"] = str(copy)
        sys.dont_write_bytecode = False
        sys.path[:0] = [str(copy)]
        if hasattr(sys.modules["__main__"], "__file__"):
            del sys.modules["__main__"].__file__  # or every worker would import this script
        from multiprocessing import forkserver

        import hypothesis
        import pytest

        phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
        hypothesis.settings.register_profile("mutate", phases=phases, database=None, derandomize=True)
        hypothesis.settings.load_profile("mutate")
        files = {copy / one.split("::")[0] for one in arguments if one.startswith("tests")}
        if not files or any("workers" in file.read_text() for file in files if file.is_file()):
            # Before any thread runs.
            forkserver.ensure_running()
            _wrap_deepspeed()
        code = int(pytest.main(["-q", "-p", "no:cacheprovider", "--no-header", *arguments], plugins=plugins))
    finally:
        os._exit(code)
