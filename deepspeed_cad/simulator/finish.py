"""When ranks are done with a layer's attention, exchanges included: the planner's model of a pass, in arrays.

In: seconds of attention of each rank, what its plan moves, seconds per byte. Out: seconds of a rank, both ways.

A server has what it waits for when the slowest of those that send to it has sent everything; then it runs the tasks
that waited, and what it made goes home. Own tasks run before and after. Every rank sends and receives at once, inside
its host and between hosts at once. In waves a part travels while the one before is served and the one before that goes
home. planner/finish.py has the same in words, for the planner.
"""

from __future__ import annotations

import numpy as np

from deepspeed_cad.planner.constants import WAVE_SECONDS
from deepspeed_cad.simulator.attention import Both, Floats
from deepspeed_cad.simulator.traffic import Bools, Traffic


def done(traffic: Traffic, own: Both, waiting: Both, links: Floats, waves: int = 1, layers: int = 1) -> Both:
    """[ranks]: seconds until a rank has all of its O, and all of its dQ, dK and dV, in all layers.

    `own`: of all tasks of a rank, `waiting`: of those that read something of another rank; `links`: [2], seconds per
    byte inside a host and between hosts; all of these in all layers. `waves`: in how many parts an exchange goes.
    """
    per_byte = links[:, None]
    asked, sent = traffic.asked * per_byte, traffic.sent * per_byte
    answered, returned = traffic.answered * per_byte, traffic.returned * per_byte
    every = np.ones(traffic.pairs.shape[1], bool)
    with_rows = traffic.pairs[3] > 0
    ways = (sent, asked), every, (answered, returned), with_rows
    forward = _pass(traffic, waves, own.forward, waiting.forward, *ways)
    # Backward: dO goes out with Q, K and V; dQ, dK and dV come home.
    out = (sent + returned, asked + answered)
    backward = _pass(traffic, waves, own.backward, waiting.backward, out, every, (asked, sent), every)
    begun = (waves - 1) * WAVE_SECONDS * layers
    return Both(forward + begun, backward + begun)


def _pass(
    traffic: Traffic,
    waves: int,
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
    # Of n equal parts the first takes its turn at each of the three, behind it the slowest has n - 1 more.
    count = np.clip(traffic.parts, 1, waves)
    later = (count - 1.0) / count
    slower = np.maximum(arrive, waiting)
    first = (arrive + waiting) / count
    served = first + later * slower
    ended = np.maximum(own, np.where(waiting > 0.0, served, 0.0))
    trip = np.maximum(back[0][where, server], back[1][where, home])
    returned = first[server] + trip / count[server] + later[server] * np.maximum(slower[server], trip)
    np.maximum.at(ended, home[back_pairs], returned[back_pairs])
    return ended
