"""Streams of passes that run again: they run beside what the training thread has queued, on a stream of their own.

The training thread may have queued a collective of the script behind the passes that run again, which waits for a
trainer that waits for these passes. So the thread that changes servers waits for nothing of a GPU but what a pass
reads, and what it queued itself. In: the stream that is current where a pass begins. On a CPU all of it is nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


class Origin:
    """Where a pass began: what it reads is there when its stream has come to this point."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._reached = None if self._stream is None else self._stream.record_event()

    def await_inputs(self) -> None:
        """What is queued on the current stream from now on runs behind what the pass reads."""
        if self._stream is not None and self._reached is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._reached)

    def hand_over(self, results: Iterable[torch.Tensor | None]) -> None:
        """Results that were made on the current stream are read, and freed, by the stream of the pass."""
        for one in results:
            if self._stream is not None and one is not None:
                one.record_stream(self._stream)


@contextmanager
def stream_beside(device: torch.device) -> Iterator[None]:
    """Queue what is inside on a new stream; at its end all of that is over, also where it ends with an error: passes
    that ran again before one are not run once more."""
    if device.type != "cuda":
        yield
        return
    # One that is ahead: streams of the same priority may share a queue, and wait for each other in it.
    stream = torch.cuda.Stream(device, priority=-1)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        stream.synchronize()
