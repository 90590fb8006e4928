"""DeepSpeed's instructions for lockstep rounds, in place of its 1F1B schedule.

In: `Rounds` and a stage. Out: instructions for DeepSpeed's PipelineEngine. Forward and backward become instructions of
CAD's own that every stage runs in every round which has such a tick, with a micro-batch or without; everything else is
DeepSpeed's.

At the end of a round, activations go one stage on and gradients one stage back. Sends block until they are received, so
of two neighbours one sends first: for activations the even stage, for gradients as well. Activations come first,
because DeepSpeed receives both into one buffer and copies only activations out of it.
"""

from __future__ import annotations

from collections.abc import Iterator

from deepspeed.runtime.pipe.schedule import (
    LoadMicroBatch,
    OptimizerStep,
    PipeInstruction,
    PipeSchedule,
    RecvActivation,
    RecvGrad,
    ReduceGrads,
    ReduceTiedGrads,
    SendActivation,
    SendGrad,
)

from deepspeed_cad.pipeline.rounds import Rounds


class ForwardTicks(PipeInstruction):
    """The forward ticks of a round: `round_`, `micro_batch` (None: serve only) and `buffer_id`."""


class BackwardTicks(PipeInstruction):
    """The backward ticks of a round, likewise."""


class LockstepSchedule(PipeSchedule):
    def __init__(self, rounds: Rounds, stage_id: int) -> None:
        super().__init__(rounds.micro_batches, rounds.stages, stage_id)
        self.rounds = rounds

    def num_pipe_buffers(self) -> int:
        return self.rounds.buffers(self.stage_id)

    def steps(self) -> Iterator[list[PipeInstruction]]:
        rounds, stage = self.rounds, self.stage_id
        first, last = stage == 0, stage == rounds.stages - 1
        for r in range(rounds.count):
            now: list[PipeInstruction] = []
            forward, backward = rounds.forward(r, stage), rounds.backward(r, stage)
            if forward is not None and (first or last):
                now.append(LoadMicroBatch(self._buffer(forward)))
            if rounds.has_forward(r):
                now.append(ForwardTicks(buffer_id=self._buffer(forward), round_=r, micro_batch=forward))
            if rounds.has_backward(r):
                now.append(BackwardTicks(buffer_id=self._buffer(backward), round_=r, micro_batch=backward))
            arriving = None if first else rounds.forward(r + 1, stage)
            activations = [
                *([] if last or forward is None else [SendActivation(self._buffer(forward))]),
                *([] if arriving is None else [RecvActivation(self._buffer(arriving))]),
            ]
            returning = None if last else rounds.backward(r + 1, stage)
            gradients = [
                *([] if first or backward is None else [SendGrad(self._buffer(backward))]),
                *([] if returning is None else [RecvGrad(self._buffer(returning))]),
            ]
            even = stage % 2 == 0
            now += activations if even else activations[::-1]
            now += gradients if even else gradients[::-1]
            if r == rounds.count - 1:
                now += [ReduceTiedGrads(), ReduceGrads(), OptimizerStep()]
            yield now

    def _buffer(self, micro_batch: int | None) -> int:
        return 0 if micro_batch is None else micro_batch % self.num_pipe_buffers()
