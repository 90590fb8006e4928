"""What is said on the error board where servers come and go: servers that came later read there how they stand."""

from __future__ import annotations

import math
from functools import partial

from deepspeed_cad.errors import CADPeerError
from deepspeed_cad.exchange.failure.board import Liveness
from deepspeed_cad.exchange.failure.patience import wait_until
from deepspeed_cad.server.rendezvous import Abandoned

LEFT, ASKED, GIVEN_UP = "left", "asked", "given up"
"""The training has ended; a server that came later is asked in; trainers go on without a server."""


def wait_to_be_asked_in(liveness: Liveness) -> None:
    """A server that came later, until trainers come to a step in which it takes part; raises as `look_for_end`."""
    asked = f"{ASKED}/{liveness.rank}"
    wait_until(lambda: liveness.look_up(asked), math.inf, partial(look_for_end, liveness))


def look_for_end(liveness: Liveness) -> None:
    """For a server that came later and waits for trainers. Raises Abandoned where the training has ended, CADPeerError
    where trainers go on without this server."""
    if reason := liveness.look_up(f"{GIVEN_UP}/{liveness.rank}"):
        raise CADPeerError(f"the trainers go on without it: {reason}")
    try:
        ended = liveness.store.check([LEFT])
    except (RuntimeError, OSError):
        ended = True
    if ended or liveness.why_hopeless():
        raise Abandoned("the training ended before it came to a step that this server could take part in")
