"""What a cluster would do with your documents in every mode, foreseen from measured figures of one GPU.

In: a `Setting` (model, cluster, split, sharding), layouts of a step's micro-batches. Out: `Foreseen`: seconds and where
they go, bytes, memory. Pure Python and numpy, the real planner inside; no torch, no processes, no GPU.

    data/                               documents, lengths and models, read from files
    model_shape, distributions          shapes of models; named distributions of document lengths
    packing, steps                      how documents become rows, and rows steps
    machine                             figures of a GPU and its links; how long collectives take on a cluster
    attention_seconds                   of documents and tasks, by the cost model of a profile
    non_attention_seconds               of everything else in a layer, by counted work
    exchanges                           bytes that plans move, and when they have arrived
    bytes_held                          memory
    schedule                            who waits for whom
    modes, modes_cad                    what each mode does with a step
    interleaved                         two parts that alternate beside reserved servers
    compared                            which predictions were compared with runs, and how far off they were
    outlook, compare                    one step's plan; all modes beside each other, and which one to take
"""

from deepspeed_cad.forecast.machine import Cluster, Machine
from deepspeed_cad.forecast.setting import Setting, seat_shape
from deepspeed_cad.forecast.step import Foreseen, Seconds

__all__ = ["Cluster", "Foreseen", "Machine", "Seconds", "Setting", "seat_shape"]
