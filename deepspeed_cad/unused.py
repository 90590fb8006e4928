"""Keys that a user set and that do nothing in this run, or not on all ranks: one line each that says why and what to
change.

In: the configuration, and where it runs. Out: lines, empty where every key acts. Pure. A key that has its default was
not asked for, so nothing is said of it.
"""

from __future__ import annotations

from deepspeed_cad.config import CADConfig
from deepspeed_cad.profiles import Profile


def unused_keys(config: CADConfig, cost: Profile) -> list[str]:
    """Of any session, with the costs that its plans take."""
    said = []
    reserved = config.servers != "all"
    if not config.trainers_serve and not reserved:
        said.append(
            '"trainers_serve" is false and does nothing: no rank is reserved, so every rank trains and serves. Reserve '
            'servers ("servers"), or leave it out'
        )
    if reserved:
        if config.keep == "host":
            said.append(
                '"keep" is "host" and does nothing on reserved servers: trainers park what they keep, servers hold it '
                "on their GPU. Where a server runs out of memory, reserve more servers or use smaller micro-batches"
            )
    if not _asks_for_relief(config):
        return said
    begin = f'"straggler_relief" is {config.straggler_relief} and does nothing'
    if reserved:
        said.append(
            f"{begin}: beside reserved servers a wait does not tell which rank is slow, because trainers also wait for "
            "servers that are busy. Leave it out"
        )
    elif cost.unit != "seconds":
        said.append(
            f"{begin}: lateness is measured in seconds, and costs are {cost.name}. Set "
            '"cost" to a profile that `deepspeed-cad profile` wrote'
        )
    return said


def unused_in_pipelines(config: CADConfig, cost: Profile) -> list[str]:
    """Of a DeepSpeed pipeline, beside what `unused_keys` says."""
    said = []
    if _asks_for_relief(config) and cost.unit == "seconds":
        said.append(
            f'"straggler_relief" is {config.straggler_relief} and does nothing in a pipeline: waits tell of its '
            "bubbles too, not only of slow ranks. Leave it out"
        )
    return said


def unused_outside_pipelines(config: CADConfig) -> list[str]:
    """Of a model that is not a DeepSpeed pipeline, beside what `unused_keys` says."""
    if not config.pipeline_in_flight:
        return []
    return [
        f'"pipeline_in_flight" is {config.pipeline_in_flight} and does nothing: the model is not a DeepSpeed '
        "PipelineModule. Leave it out, or cut the model into stages (deepspeed_cad.to_pipeline)"
    ]


def _asks_for_relief(config: CADConfig) -> bool:
    return config.straggler_relief not in (0.0, CADConfig.straggler_relief)
