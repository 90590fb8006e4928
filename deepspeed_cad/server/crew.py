"""The ranks that exchange attention, from one change of the servers to the next.

Trainers stay for as long as the job. A server may die, and others may come. Each has a number for life, by which it is
called in messages, and a place among the ranks of the present group: trainers first, then servers by their numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from deepspeed_cad.config import CADConfig


@dataclass(frozen=True)
class Crew:
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
    def from_head(trainers: int, head: dict[str, Any]) -> Crew:
        """The inverse of `to_head`."""
        return Crew(head["generation"], trainers, tuple(head["servers"]), head["exchanges"])

    def in_words(self) -> str:
        """With whom training goes on."""
        if not self.servers:
            return "the trainers alone"
        return f"server{'s' * (len(self.servers) > 1)} {', '.join(map(str, self.servers))}"


def why_not_change(config: CADConfig, device: torch.device) -> str:
    """Why servers cannot change while a job runs on this device, if it asks for that; else ""."""
    if config.on_server_failure != "continue" or device.type == "cpu":
        return ""
    return (
        f'"cad": key "on_server_failure" is "continue", and attention runs on {device}: a GPU that waits for a rank '
        "that died cannot be taken out of that exchange to go on in another one, so this works on CPUs only. Set it to "
        '"stop", and start again from a checkpoint where a server dies'
    )
