"""Trainers and reserved servers of a case in workers of the pool, and servers that are killed or stopped.

The store at which they meet belongs to the process that runs the cases, as a launcher's does: no rank has to outlive
the others.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist

from deepspeed_cad.config import CADConfig
from deepspeed_cad.launch.armed import farewell
from deepspeed_cad.request import VARIABLE, Request
from deepspeed_cad.server import loop, process
from deepspeed_cad.server.launch import take_role
from deepspeed_cad.server.meeting import take_place
from fuzz.case import Case, Fate
from fuzz.play import TIMEOUT_S, Played, play, quiet, whole_block

PAUSE_S = 1.0
"""How long a server is stopped that goes on."""


def play_role(rank: int, processes: int, port: int, line: str) -> Played:
    """As `play` for a trainer. A server's `Played` has its exit code, and its error is what it still holds."""
    case = Case.from_line(line)
    launched = str(case.world + case.servers)
    variables = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": launched,
        "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": launched, "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }  # fmt: skip
    made: list[loop.Loop] = []
    fates = [fate for fate in case.fates if case.world + fate.server == rank]
    with mock.patch.dict(os.environ, variables), _loops(made, fates), quiet() as said:
        # What it publishes is for this process alone, and gone when the environment is restored.
        os.environ.pop(VARIABLE, None)
        if rank >= case.world + case.servers:
            role, config = take_place(f"127.0.0.1:{port}", TIMEOUT_S)
            time.sleep(case.comes[rank - case.world - case.servers])
            return Played(rank, exit_code=process.serve(role, config, process.choose_device("cpu")))
        request, server = take_role(Request(CADConfig.from_dict(whole_block(case)), "a fuzz case"))
        if server is not None:
            code = process.serve(server, request.config)
            held = made[0].held if made else 0
            return Played(rank, exit_code=code, held=held, said=said.getvalue().strip().rpartition("\n")[2])
        request.publish()
        dist.init_process_group("gloo")
        return play(dist.get_rank(), dist.get_world_size(), line, lambda reason: farewell(reason))


@contextmanager
def _loops(made: list[loop.Loop], fates: list[Fate]) -> Iterator[None]:
    """Remember the loop of a server, and let it meet its fate."""

    class Mortal(loop.Loop):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(self)

        def follow(self, order: Any) -> None:
            for fate in fates:
                if _is_meant(fate, order.head):
                    return self._die(fate, order)
            super().follow(order)

        def _die(self, fate: Fate, order: Any) -> None:
            if fate.what.endswith(" served"):
                serve = "serve_arrived_backward" if fate.what.startswith("backward") else "serve_arrived"
                run = getattr(loop, serve)

                def run_and_end(*given: Any) -> Any:
                    found = run(*given)
                    _strike(fate)
                    return found

                with mock.patch.object(loop, serve, run_and_end):
                    return super().follow(order)
            if not fate.what.endswith(" done"):
                _strike(fate)
            super().follow(order)
            if fate.what.endswith(" done"):
                _strike(fate)

    with mock.patch.object(process, "Loop", Mortal):
        yield


def _is_meant(fate: Fate, head: dict[str, Any]) -> bool:
    what = fate.what.removesuffix(" served").removesuffix(" done")
    said = f"{'backward ' if head.get('backward') else ''}{head['do']}"
    here = {"turn": fate.turn, "layer": fate.layer, "wave": fate.wave}
    return said == what and all(head.get(name, value) == value for name, value in here.items())


def _strike(fate: Fate) -> None:
    if fate.signal == "PAUSE":
        subprocess.Popen(["sh", "-c", f"sleep {PAUSE_S}; kill -CONT {os.getpid()}"])
    number = signal.SIGKILL if fate.signal == "KILL" else signal.SIGSTOP
    if fate.after and fate.signal != "PAUSE":
        timer = threading.Timer(fate.after, os.kill, (os.getpid(), number))
        timer.daemon = True
        timer.start()
    else:
        os.kill(os.getpid(), number)
