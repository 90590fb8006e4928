"""Threads of this package: daemons that ask about CUDA events, on the GPU of their process."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch


def start_daemon(name: str, run: Callable[[], None], device: torch.device | None) -> threading.Thread:
    """Start `run` on a thread that the interpreter does not wait for; `device` is that of the events it asks about."""

    def on_device() -> None:
        if device is not None and device.type == "cuda":
            # A new thread is on GPU 0: to ask about an event there would make a context on it, for every rank.
            torch.cuda.set_device(device)
        run()

    thread = threading.Thread(target=on_device, name=f"deepspeed_cad {name}", daemon=True)
    thread.start()
    return thread
