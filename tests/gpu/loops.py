"""How the last rank leaves an exchange out, and whether an error names it."""

from __future__ import annotations

import re

TIME_OUT, WHILE_GROWING = "time-out", "time-out while growing"
"""How the last rank leaves an exchange out in the group `timeouts`: all buffers are there, or it makes one."""


def names(text: str, rank: int) -> bool:
    """Whether an error names a rank, alone or among others."""
    return re.search(rf"\brank (\d+, )*{rank}\b", text) is not None
