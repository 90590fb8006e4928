"""One way to wait for what other ranks do, where nothing wakes this one: look, pause, and look around now and then.

In: what is waited for, and for how long. Out: what it gave. Nobody is named here: whoever waits knows for whom.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Answer = TypeVar("Answer")

LOOK_S = 0.5
"""Seconds between two looks around while a rank waits."""


def wait_until(
    ask: Callable[[], Answer], timeout_s: float, pause_s: float, look_around: Callable[[], object] = lambda: None
) -> Answer:
    """What `ask` gives as soon as that is true, or when time is up.

    Args:
        ask: looks whether it is there; may raise.
        timeout_s: seconds after which it is asked for the last time.
        pause_s: seconds between two questions.
        look_around: called about every LOOK_S; raises where waiting is in vain.
    """
    began = looked = time.monotonic()
    while not (answer := ask()):
        now = time.monotonic()
        if now - began > timeout_s:
            break
        if now - looked > LOOK_S:
            looked = now
            look_around()
        time.sleep(pause_s)
    return answer
