"""Scripts in processes that have imported torch and the host frameworks already: forks of the pool's fork server.

What takes a Python six seconds of a core is there at once, and the process behaves as a Python of its own does: command
line, environment, output, exit code, what runs at exit. Tests of launchers, and of what an import does, start a Python.
"""

import atexit
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import torch
from pool import fork_server
from ports import free_port


class Script:
    """A process that runs `python WORDS`; as much of subprocess.Popen as tests need."""

    def __init__(self, words: Sequence[str], folder: Path, environment: Mapping[str, str], output: Path) -> None:
        """`folder`: where it runs; what it writes goes to the file `output`."""
        output.touch()
        self._words = words
        self._process = fork_server().Process(target=_run, args=(words, str(folder), dict(environment), str(output)))
        self._process.start()

    def poll(self) -> int | None:
        """The exit code, or minus the signal that ended it; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The same when it has ended. Raises subprocess.TimeoutExpired."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self._words, timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        """Unless it has ended."""
        if self._process.exitcode is None and self._process.pid is not None:
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def launch(count: int, words: Sequence[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """What torchrun does on one host: `count` ranks of `python WORDS` in a folder, and when one fails the others end.
    Gives the first exit code that is not 0, and what all ranks wrote, one after the other, as stdout and as stderr."""
    environment = {**os.environ, **variables, "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    outputs = tempfile.mkdtemp()  # a TemporaryDirectory would go where a fork of this process ends
    files = [Path(outputs, f"rank{rank}.log") for rank in range(count)]
    scripts = [
        Script(words, folder, {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, file)
        for rank, file in enumerate(files)
    ]
    try:
        while None in (codes := [script.poll() for script in scripts]) and not any(codes):
            time.sleep(0.05)
        said = "\n".join(file.read_text() for file in files)
    finally:
        for script in scripts:
            script.kill()
        shutil.rmtree(outputs)
    return subprocess.CompletedProcess(list(words), next(filter(None, codes), 0), said, said)


def _run(words: Sequence[str], folder: str, environment: dict[str, str], output: str) -> NoReturn:
    written = os.open(output, os.O_WRONLY | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(written, stream)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    code = _main(words)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)


def _main(words: Sequence[str]) -> int:
    """The exit code of what the interpreter would run."""
    try:
        if words[0] == "-m":
            sys.argv = [words[1], *words[2:]]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(words[1], "<string>", "exec"), vars(sys.modules["__main__"]))
        else:
            sys.argv = list(words)
            sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        sys.stderr.write(f"{end.code}\n")
        return 1
    except BaseException as error:
        sys.last_value = error  # as the interpreter does
        sys.excepthook(type(error), error, error.__traceback__)
        return 1
    return 0
