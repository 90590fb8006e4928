"""When ranks are done with a layer's attention, exchanges included: the planner's model of a pass.

In: seconds of attention of each rank, what its plan moves, seconds per byte. Out: seconds of a rank, both ways. The
model, and what it is in words: planner/finish.py.
"""

from __future__ import annotations

import numpy as np

from deepspeed_cad.forecast.attention_seconds import Both, Floats
from deepspeed_cad.forecast.bytes_moved import Traffic
from deepspeed_cad.planner.constants import WAVE_SECONDS
from deepspeed_cad.planner.finish import Routes, Trip, end_of_pass


def done(traffic: Traffic, own: Both, waiting: Both, links: Floats, waves: int = 1, layers: int = 1) -> Both:
    """[ranks]: seconds until a rank has all of its O, and all of its dQ, dK and dV, in all layers.

    `own`: of all tasks of a rank, `waiting`: of those that read something of another rank; `links`: [2], seconds per
    byte inside a host and between hosts; all of these in all layers. `waves`: in how many parts an exchange goes.
    """
    per_byte = links[:, None]
    home, server, where, with_rows = traffic.pairs
    routes = Routes(home, server, where, np.clip(traffic.parts, 1.0, waves))
    every = np.ones(len(home), bool)
    qkv = Trip(traffic.sent * per_byte, traffic.asked * per_byte, every)
    o = Trip(traffic.returned * per_byte, traffic.answered * per_byte, with_rows > 0)
    # Backward: dO goes out with Q, K and V; dQ, dK and dV come home.
    out = Trip(qkv.home + o.home, qkv.server + o.server, every)
    begun = (waves - 1) * WAVE_SECONDS * layers
    forward = end_of_pass(routes, qkv, o, own.forward, waiting.forward)
    backward = end_of_pass(routes, out, qkv, own.backward, waiting.backward)
    return Both(forward + begun, backward + begun)
