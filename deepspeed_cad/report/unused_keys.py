"""Keys that a user set and that do nothing in this run, or not on all ranks: one line each that says why and what to
change.

In: the configuration, and where it runs. Out: lines, empty where every key acts. Pure. A key that has its default was
not asked for, so nothing is said of it.
"""

from __future__ import annotations

from deepspeed_cad.config import CADConfig


def unused_keys(config: CADConfig) -> list[str]:
    lines = []
    if not config.trainers_serve and config.servers == "all":
        lines.append(
            '"trainers_serve" is false and does nothing: no rank is reserved, so every rank trains and serves. Reserve '
            'servers ("servers"), or leave it out'
        )
    reserved = config.servers != "all"
    if reserved and config.on_server_failure == "continue" and "joined" not in config.servers:
        lines.append(
            '"on_server_failure" is "continue" and servers are part of the launch: torchrun, accelerate launch and '
            "deepspeed end all processes of a launch when one fails, the trainers too. Set "
            '"servers" to {"joined": n} and start each server by itself: deepspeed-cad serve --rendezvous HOST:PORT'
        )
    if config.keep == "host" and reserved:
        lines.append(
            '"keep" is "host" and does nothing on reserved servers: trainers park what they keep, servers hold it '
            "on their GPU. Where a server runs out of memory, reserve more servers or use smaller micro-batches"
        )
    return lines
