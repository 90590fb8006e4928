"""What a cluster would do with your documents in every mode, foreseen from measured figures of one GPU.

In: a `Setting` (model, cluster, split, sharding), layouts of a step's micro-batches. Out: `Foreseen`: seconds and where
they go, bytes, memory. Pure Python and numpy, the real planner inside; no torch, no processes, no GPU.

    machine, setting            a GPU, links and collectives; a model, its work outside attention, how it is trained
    packing                     documents by name, how they become rows and steps
    attention                   seconds of documents and tasks, what plans move; what layers that carry state move
    bytes_held                  memory
    schedule                    who waits for whom
    modes, modes_cad            what each mode does with a step
    step                        what is foreseen of one, and how far predictions were off
    compare                     all modes beside each other, and which one to take
"""

from deepspeed_cad.forecast.machine import Cluster, Machine
from deepspeed_cad.forecast.setting import Setting, seat_shape
from deepspeed_cad.forecast.step import Foreseen, Seconds

__all__ = ["Cluster", "Foreseen", "Machine", "Seconds", "Setting", "seat_shape"]
