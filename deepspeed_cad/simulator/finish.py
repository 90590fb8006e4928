"""When ranks are done with a layer's attention, exchanges included: the planner's model of a pass, in arrays.

In: seconds of attention of each rank, what its plan moves, seconds per byte. Out: seconds of a rank, both ways.

A server has what it waits for when the slowest of those that send to it has sent everything; then it runs the tasks
that waited, and what it made goes home. Own tasks run before and after. Every rank sends and receives at once, inside
its host and between hosts at once. planner/finish.py has the same in words, for the planner.
"""

from __future__ import annotations

import numpy as np

from deepspeed_cad.simulator.attention import Both, Floats
from deepspeed_cad.simulator.traffic import Bools, Traffic


def done(traffic: Traffic, own: Both, waiting: Both, links: Floats) -> Both:
    """[ranks]: seconds until a rank has all of its O, and all of its dQ, dK and dV.

    `own`: of all tasks of a rank, `waiting`: of those that read something of another rank; `links`: [2], seconds per
    byte inside a host and between hosts.
    """
    per_byte = links[:, None]
    asked, sent = traffic.asked * per_byte, traffic.sent * per_byte
    answered, returned = traffic.answered * per_byte, traffic.returned * per_byte
    every = np.ones(traffic.pairs.shape[1], bool)
    with_rows = traffic.pairs[3] > 0
    forward = _pass(traffic, own.forward, waiting.forward, (sent, asked), every, (answered, returned), with_rows)
    # Backward: dO goes out with Q, K and V; dQ, dK and dV come home.
    out = (sent + returned, asked + answered)
    backward = _pass(traffic, own.backward, waiting.backward, out, every, (asked, sent), every)
    return Both(forward, backward)


def _pass(
    traffic: Traffic,
    own: Floats,
    waiting: Floats,
    out: tuple[Floats, Floats],
    out_pairs: Bools,
    back: tuple[Floats, Floats],
    back_pairs: Bools,
) -> Floats:
    """One way and back; `out` and `back`: seconds of who sends and of who receives, [2, ranks] each."""
    home, server, where, _ = traffic.pairs
    arrive = out[1].max(0)
    np.maximum.at(arrive, server[out_pairs], out[0][where, home][out_pairs])
    served = arrive + waiting
    ended = np.maximum(own, np.where(waiting > 0.0, served, 0.0))
    trip = np.maximum(back[0][where, server], back[1][where, home])
    np.maximum.at(ended, home[back_pairs], (served[server] + trip)[back_pairs])
    return ended
