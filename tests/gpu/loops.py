"""How the loops of ranks differ in the group `loaders`: what only the last rank does, and how many batches each has."""

import re
from typing import Any

CASES: dict[str, dict[str, Any]] = {
    "3 and 4 batches, both stop after 3": {"lengths": (3, 4), "stop": 3}, "3 and 4 batches": {"lengths": (3, 4)},
    "one rank breaks after 2 of 4": {"lengths": (4, 4), "break": 2},
    "one rank catches an exception": {"lengths": (4, 4), "raise": 1},
    "one rank looks alone": {"lengths": (4, 4), "look": 3}, "one rank moves positions": {"lengths": (4, 4), "move": 2},
    "one rank evaluates between": {"lengths": (4, 4), "evaluate": True}, "equal loaders": {"lengths": (4, 4)},
}  # fmt: skip
RIGHT = ("equal loaders", "one rank evaluates between")
"""Cases in which an error is wrong."""

TIME_OUT, WHILE_GROWING = "time-out", "time-out while growing"
"""How the last rank leaves an exchange out in the group `timeouts`: all buffers are there, or it makes one."""


def names(text: str, rank: int) -> bool:
    return re.search(rf"\brank (\d+, )*{rank}\b", text) is not None
