"""The one way to wait for what other ranks do, where nothing wakes this one: ask, pause, and look around now and then.

In: what is waited for, and for how long. Out: what it gave. Nobody is named here: whoever waits knows for whom.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Answer = TypeVar("Answer")

LOOK_S = 0.5
"""Between two looks at the error board while a rank waits."""
LATE_S = 10.0
"""Of waiting after which ranks that did not come are named."""
WORDS_S = 5.0
"""How long survivors wait for each other's word before they call the silent ranks dead."""
FIRST_PAUSE_S, EXCHANGE_PAUSE_S, PAUSE_S = 20e-6, 1e-3, 0.25
"""Between two questions: at first; at most where an exchange is waited for; at most where many ranks ask one store."""
SHARE = 1 / 8
"""A pause is as long as this share of what was waited before it, so nobody waits much longer than is needed."""


def _nothing(*given: object) -> None:
    pass


def wait_until(
    ask: Callable[[], Answer],
    timeout_s: float,
    look_around: Callable[[], object] = _nothing,
    longest_pause_s: float = PAUSE_S,
    when_late: Callable[[float], object] = _nothing,
) -> Answer:
    """What `ask` gives as soon as that is true, or when time is up.

    Args:
        ask: looks whether it is there; may raise.
        timeout_s: seconds after which it is asked for the last time.
        look_around: called about every LOOK_S; raises where waiting is in vain.
        longest_pause_s: between two questions.
        when_late: called once, after LATE_S, with the seconds so far.
    """
    began = looked = time.monotonic()
    while not (answer := ask()):
        waited_s = (now := time.monotonic()) - began
        if waited_s > LATE_S:
            when_late(waited_s)
            when_late = _nothing
        if waited_s > timeout_s:
            break
        if now - looked > LOOK_S:
            looked = now
            look_around()
        time.sleep(min(max(SHARE * waited_s, FIRST_PAUSE_S), longest_pause_s))
    return answer
