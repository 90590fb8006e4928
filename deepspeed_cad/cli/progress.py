"""What a subcommand is at, on stderr, while it takes long.

In: words for what begins. Out: now and then a line with the last words; none where it is done before the first.
"""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType

QUIET = 4.0
"""Seconds between two lines."""


class Progress:
    """A context; while it lasts a thread of its own says what was told last, also while something is imported."""

    def __init__(self, text: str = "", loud: bool = True) -> None:
        self._text, self._begin, self._done = text, time.monotonic(), threading.Event()
        if not loud:
            self._done.set()
        self._thread = threading.Thread(target=self._say, name="deepspeed_cad progress", daemon=True)

    def tell(self, text: str) -> None:
        """What begins now."""
        self._text = text

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._done.set()
        self._thread.join()

    def _say(self) -> None:
        while not self._done.wait(QUIET):
            print(f"… {self._text}, {time.monotonic() - self._begin:.0f} s", file=sys.stderr, flush=True)
