"""Lockstep rounds of a pipeline: which micro-batch a stage runs forward and which backward in every round. Pure.

Every round has a forward tick and a backward tick that all stages have in common, so attention tasks of all stages meet
in one pool, and a stage without a micro-batch serves. Of P stages, stage s runs micro-batch m forward in round m + s
and backward in round m + 2 (P − 1) − s. That makes as many ticks as 1F1B, 2 (M + P − 1): in the first P − 1 rounds no
stage runs backward, in the last P − 1 none runs forward.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Rounds:
    stages: int
    micro_batches: int

    @property
    def count(self) -> int:
        return self.micro_batches + 2 * (self.stages - 1)

    def forward(self, round_: int, stage: int) -> int | None:
        begun = round_ - stage
        return begun if 0 <= begun < self.micro_batches else None

    def backward(self, round_: int, stage: int) -> int | None:
        return self.forward(round_ - 2 * (self.stages - 1) + stage, 0)

    def has_forward(self, round_: int) -> bool:
        """Whether any stage runs forward in a round: only then there is a forward tick."""
        return round_ < self.micro_batches + self.stages - 1

    def has_backward(self, round_: int) -> bool:
        return round_ >= self.stages - 1

    def in_flight(self, stage: int) -> int:
        """Most micro-batches whose activations a stage holds at a time."""
        return min(self.micro_batches, 2 * (self.stages - 1 - stage) + 1)

    def buffers(self, stage: int) -> int:
        """Buffers that a stage needs, micro-batch m in buffer m modulo that number: one more than are in flight, as the
        next input arrives before the gradient that lies in its input's buffer has been sent."""
        return max(2, min(self.in_flight(stage) + 1, self.micro_batches))


def order_micro_batches(work: Sequence[Sequence[float]]) -> list[list[int]]:
    """Which micro-batch of a step comes when: gives for each replica its micro-batches in order.

    `work[r][m]`: attention of replica r's micro-batch m. A tick holds consecutive micro-batches of each replica; the
    more alike these are, the fewer bytes move. In the first and the last rounds some stages have none, and all that
    they serve is moved to them, so the lightest come first and last."""
    rising = [sorted(range(len(own)), key=own.__getitem__) for own in work]
    return [own[0::2] + own[1::2][::-1] for own in rising]
