"""Threads of this package: daemons that ask about CUDA events, on the GPU of their process; and how they end.

A process ends when its main thread does, with the exit code of that, whatever its daemons are in. A daemon that sits in
C++ then, in a rendezvous with a rank that died for one, comes back to an interpreter that is going down.
"""

import atexit
import ctypes
import functools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch

from deepspeed_cad import native

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


def start_daemon(name: str, run: Callable[[], None], device: torch.device | None) -> threading.Thread:
    """Start `run` on a thread that the interpreter does not wait for; `device` is that of the events it asks about."""
    _park_at_exit()

    def on_device() -> None:
        if device is not None and device.type == "cuda":
            # A new thread is on GPU 0: to ask about an event there would make a context on it, for every rank.
            torch.cuda.set_device(device)
            _enter_context(device)
        run()

    thread = threading.Thread(target=on_device, name=f"deepspeed_cad {name}", daemon=True)
    thread.start()
    return thread


def run_aside(name: str, make: Callable[[], Result], device: torch.device | None = None) -> Future[Result]:
    """What `make` will give, on a daemon of its own: whoever waits for it may give up, and leave the thread behind."""
    made: Future[Result] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except BaseException as error:
            made.set_exception(error)

    start_daemon(name, run, device)
    return made


def is_over(event: torch.cuda.Event) -> bool:
    """`event.query()` with the interpreter's lock released. torch holds it meanwhile: where the call stood on a GPU, so
    did all threads of its process. On GPUs of AMD it is torch's. Raises RuntimeError as that does."""
    if torch.version.hip is not None or not event.cuda_event:
        return event.query()
    code = _cuda_driver().cuEventQuery(ctypes.c_void_p(event.cuda_event))
    if code not in (0, 600):  # CUDA_ERROR_NOT_READY
        raise RuntimeError(f"cuEventQuery failed with error {code}")
    return code == 0


@functools.cache
def _cuda_driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _enter_context(device: torch.device) -> None:
    """What the driver wants of a thread that asks it: `set_device` leaves one on GPU 0 as it is."""
    context = ctypes.c_void_p()
    if torch.version.hip is None and not _cuda_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device.index):
        _cuda_driver().cuCtxSetCurrent(context)


@functools.cache
def _park_at_exit() -> None:
    """From the end of the main thread on, a daemon that comes back from C++ stands still instead of aborting all.

    Python before 3.14 unwinds such a thread, and C++ does not let itself be unwound there: the process would end by
    SIGABRT, "terminate called without an active exception" (csrc/parting.cpp)."""
    park: Callable[[], int] = native.load().cad_park_unwound_threads

    def at_exit() -> None:
        if park():
            logger.debug("threads that sit in C++ at the end of this process may abort it")

    atexit.register(at_exit)
