"""What a subcommand says: its answer, and on stderr what it is at while it takes long.

In: an answer and where it goes; words for what begins. Out: JSON or text; now and then a line with the last words, none
where it is done before the first.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from deepspeed_cad.errors import CADConfigError

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


def write(answer: dict[str, Any], args: argparse.Namespace) -> None:
    """The answer as JSON, to where options say."""
    output = args.output or ("-" if args.json else None)
    if output == "-":
        print(json.dumps(answer))
    elif output:
        try:
            Path(output).write_text(json.dumps(answer) + "\n", encoding="utf-8")
        except OSError as error:
            raise CADConfigError(f"--output: {output} cannot be written: {error.strerror}") from error


def say(text: str, args: argparse.Namespace) -> None:
    """Print for people: on stderr where stdout has JSON."""
    print(text, file=sys.stderr if args.json or args.output == "-" else sys.stdout)
