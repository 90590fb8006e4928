"""Lines that a user sees whatever the host framework does with logging: that CAD is on, and what it did.

In: a text. Out: a record of this package's logger where a handler shows it, else the same line on stderr.
"""

import logging
import sys
from collections.abc import Sequence

logger = logging.getLogger("deepspeed_cad")


def notice(text: str) -> None:
    """Log at level INFO, or write to stderr where nothing shows that level. For the few lines that are worth it."""
    at: logging.Logger | None = logger if logger.isEnabledFor(logging.INFO) else None
    while at is not None:
        if any(one.level <= logging.INFO and not isinstance(one, logging.NullHandler) for one in at.handlers):
            logger.info(text)
            return
        at = at.parent if at.propagate else None
    # Not a handler of the logger: it would show what the host framework's level hides.
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("deepspeed_cad: %(message)s"))
    handler.handle(logger.makeRecord(logger.name, logging.INFO, __file__, 0, text, (), None))


def counted(number: int, what: str) -> str:
    """A number of things in words: 1 server, 2 servers, 3 micro-batches."""
    return f"{number} {what}{'' if number == 1 else 'es' if what.endswith('ch') else 's'}"


def name_ranks(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 0, 1": 16 by number."""
    shown = ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
