"""The ranks that exchange attention, from one change of the servers to the next.

Trainers stay for as long as the job. A server may die, and others may come. Each has a number for life, by which it is
called in messages, and a place among the ranks of the present group: trainers first, then servers by their numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from deepspeed_cad.config import CADConfig
from deepspeed_cad.exchange.probe import NAMES

CHANGING = ("nvlink", "nccl")
"""Transports that let go of a server that is lost while GPUs use them."""


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

    def place(self, number: int) -> int:
        """Rank in the group."""
        return self.numbers.index(number)

    def to_head(self) -> dict[str, Any]:
        """For a frame."""
        return {"generation": self.generation, "servers": self.servers, "exchanges": self.exchanges}

    @staticmethod
    def from_head(trainers: int, head: dict[str, Any]) -> Members:
        """The inverse of `to_head`."""
        return Members(head["generation"], trainers, tuple(head["servers"]), head["exchanges"])

    def in_words(self) -> str:
        """With whom training goes on."""
        if not self.servers:
            return "the trainers alone"
        return f"server{'s' * (len(self.servers) > 1)} {', '.join(map(str, self.servers))}"


def transports_of(config: CADConfig, device: torch.device) -> tuple[str, ...]:
    """The transports that "auto" may take. Where servers may change on GPUs: those that can be given up."""
    changes = config.on_server_failure == "continue" and device.type == "cuda"
    return CHANGING if changes else NAMES


def why_not_change(config: CADConfig, device: torch.device) -> str:
    """Why servers cannot change while a job runs on this device, if it asks for that; else ""."""
    if config.on_server_failure != "continue" or device.type != "cuda":
        return ""
    if config.transport in ("auto", *CHANGING):
        return ""
    return (
        f'"cad": key "on_server_failure" is "continue", attention runs on {device}, and key "transport" is '
        f'"{config.transport}", of which nothing can be given up there while a server is waited for. Leave "transport" '
        'out, set it to "nvlink" or "nccl", or set "on_server_failure" to "stop"'
    )
