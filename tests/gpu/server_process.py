"""A server that joins a training, as `deepspeed-cad serve` does, and may kill itself; check_servers.py starts it.

    python tests/gpu/server_process.py HOST:PORT DEVICE [ORDER MICRO_BATCH]

ORDER, "dispatch" or "backward dispatch": once it has done that for layer 0 of a micro-batch, which on a GPU means that
it is queued there, the process is gone.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]

from group import leave_with_parent  # noqa: E402

from deepspeed_cad.server import loop, process  # noqa: E402
from deepspeed_cad.server.meeting import take_place  # noqa: E402


def die_after(order: str, turn: int) -> None:

    class Mortal(loop.Loop):
        def follow(self, frame: Any) -> None:
            super().follow(frame)
            head = frame.head
            done = f"{'backward ' * bool(head.get('backward'))}{head['do']}"
            if (done, head.get("turn"), head.get("layer")) == (order, turn, 0):
                os.kill(os.getpid(), signal.SIGKILL)

    process.Loop = Mortal  # type: ignore[misc]


if __name__ == "__main__":
    leave_with_parent()
    rendezvous, device, *moment = sys.argv[1:]
    if moment:
        die_after(moment[0], int(moment[1]))
    role, config = take_place(rendezvous, 120.0)
    sys.exit(process.serve(role, config, process.choose_device(device)))
