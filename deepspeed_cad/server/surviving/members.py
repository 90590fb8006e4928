"""The ranks that exchange attention, from one change of the servers to the next.

Trainers stay for as long as the job. A server may die, and others may come. Each has a number for life, by which it is
called in messages, and a place among the ranks of the present group: trainers first, then servers by their numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deepspeed_cad.config import CADConfig
from deepspeed_cad.exchange.probe import NAMES


@dataclass(frozen=True)
class Members:
    """Who is there."""

    generation: int
    """Changes so far."""
    trainers: int
    servers: tuple[int, ...]
    """Their numbers, ascending."""
    exchanges: int = 0
    """How many had been started before it."""

    @property
    def ranks(self) -> int:
        """Size of the group."""
        return self.trainers + len(self.servers)

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of all ranks, by their places."""
        return (*range(self.trainers), *self.servers)


def may_change(config: CADConfig) -> bool:
    """Whether training goes on where a server is lost, and others may come."""
    return config.on_server_failure == "continue"


def transports_of(config: CADConfig, device: torch.device) -> tuple[str, ...]:
    """The transports that may be used: where servers may change, those that let go of one that is lost."""
    return ("nvlink", "nccl") if may_change(config) and device.type == "cuda" else NAMES


def why_not_change(config: CADConfig, device: torch.device) -> str:
    """Why servers cannot change while a job runs on this device, if it asks for that; else ""."""
    if config.transport in ("auto", *transports_of(config, device)):
        return ""
    return (
        f'"cad": key "on_server_failure" is "continue", attention runs on {device}, and key "transport" is '
        f'"{config.transport}", of which nothing can be given up there while a server is waited for. Leave "transport" '
        'out, set it to "nvlink" or "nccl", or set "on_server_failure" to "stop"'
    )
