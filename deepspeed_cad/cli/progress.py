"""What a subcommand says: its answer, and on stderr what it is at while it takes long.

In: an answer and where it goes; words for what begins. Out: JSON or text; now and then a line with the last words, none
where it is done before the first.
"""

import argparse
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deepspeed_cad.errors import CADConfigError

QUIET = 4.0
"""Seconds between two lines."""


@contextmanager
def progress(text: str = "", loud: bool = True) -> Iterator[Callable[[str], None]]:
    """A thread says what was told last, also while something is imported; gives the function that tells."""
    said, begin, done = [text], time.monotonic(), threading.Event()

    def say_now_and_then() -> None:
        while not done.wait(QUIET):
            print(f"… {said[-1]}, {time.monotonic() - begin:.0f} s", file=sys.stderr)

    thread = threading.Thread(target=say_now_and_then, name="deepspeed_cad progress")
    if loud:
        thread.start()
    try:
        yield said.append
    finally:
        done.set()
        if loud:
            thread.join()


def write(answer: dict[str, Any], args: argparse.Namespace) -> None:
    """The answer as JSON, to where options say."""
    output = args.output or ("-" if args.json else None)
    if output == "-":
        print(json.dumps(answer))
    elif output:
        try:
            Path(output).write_text(json.dumps(answer) + "\n")
        except OSError as error:
            raise CADConfigError(f"--output: {output} cannot be written: {error.strerror}") from error


def say(text: str, args: argparse.Namespace) -> None:
    """Print for people: on stderr where stdout has JSON."""
    print(text, file=sys.stderr if args.json or args.output == "-" else sys.stdout)
