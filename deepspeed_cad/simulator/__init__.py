"""The step simulator: what a cluster would do with your documents in every mode, from measured figures of one GPU.

In: a `Setting` (model, cluster, split, sharding), layouts of a step's micro-batches. Out: `Foreseen`: seconds and where
they go, bytes, memory. Pure Python and numpy, the real planner inside; no torch, no processes, no GPU.

    machine, cluster     figures of a GPU and its links; how long collectives take on them
    work, attention      seconds of linear layers; seconds of attention by the cost model of a profile
    traffic, finish      bytes that plans move, and when they have arrived
    memory               bytes that ranks hold
    schedule, pipeline   who waits for whom
    modes, modes_cad     what each mode does with a step
    interleaved          two parts that alternate beside reserved servers
    compare, sweep       all modes beside each other; one figure over ranks, context, reserved servers
    lengths, picture     named distributions of document lengths; charts
"""

from deepspeed_cad.simulator.cluster import Cluster
from deepspeed_cad.simulator.machine import Machine
from deepspeed_cad.simulator.setting import Setting, seat_shape
from deepspeed_cad.simulator.step import Foreseen, Seconds

__all__ = ["Cluster", "Foreseen", "Machine", "Seconds", "Setting", "seat_shape"]
