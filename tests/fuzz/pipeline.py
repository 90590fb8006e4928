"""One rank plays a case whose model is cut into stages: losses and gradients of steps, and of evaluations between.

The steps are DeepSpeed's, without its optimizer: gradients stand in place of the weights while they are read, by the
names that weights have in the unmodified model, and are compared with those of each document alone there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from pipelines import config, start, summed_gradients

import deepspeed_cad
from fuzz.case import FORMS, Case
from fuzz.data import ORACLE, form_of, micro_batch
from fuzz.play import Played, alone, model_of, tolerance_of, whole_block

EVALUATED = 900
"""First of the micro-batches that are evaluated."""


def run_pipeline(case: Case, rank: int, played: Played) -> None:
    """Train as many steps as the case says; what is wrong is written down in `played`."""
    player = _Pipeline(case, rank, played)
    batches = player.batches(range(case.batches[rank] * case.accumulation))
    for step in range(case.batches[rank]):
        player.train(step, batches)
        if case.evaluate and step % case.evaluate == 0:
            player.evaluate(step)
    player.engine.destroy()


class _Pipeline:
    def __init__(self, case: Case, rank: int, played: Played) -> None:
        deepspeed = start()
        self.case, self.rank, self.played = case, rank, played
        self.reference, self.tolerance = model_of(case), tolerance_of(case)
        self.module = deepspeed_cad.to_pipeline(
            model_of(case), case.stages, activation_checkpoint_interval=int(bool(case.checkpoint))
        )
        reentrant = {"use_reentrant": case.checkpoint == "reentrant"}
        settings = config(case.accumulation, pipeline=reentrant, cad=whole_block(case))
        optimizer = torch.optim.SGD(self.module.parameters(), lr=1.0)
        self.engine, *_ = deepspeed.initialize(model=self.module, optimizer=optimizer, config=settings)
        self.sums = summed_gradients(self.engine)
        self.replica = self.engine.grid.get_data_parallel_id()
        self.replicas = self.engine.grid.get_data_parallel_world_size()

    def batches(self, indices: range) -> Iterator[Any]:
        for index in indices:
            given = micro_batch(self.case, self.replica, index)
            labels = given["input_ids"].masked_fill(given["place"] == 0, -100)
            if form_of(self.case, self.replica, index) == FORMS["row"] and index % 2:
                yield (given["input_ids"], given["position_ids"]), labels
            else:
                yield {**{name: value for name, value in given.items() if name not in ORACLE}, "labels": labels}

    def expected(self, first: int, gradients: bool) -> float:
        """The mean over micro-batches of the mean over targets, each document alone; over all replicas."""
        total, count = 0.0, self.case.accumulation
        for replica in range(self.replicas):
            for index in range(first, first + count):
                batch = micro_batch(self.case, replica, index)
                documents, places, reads = (batch[name].flatten() for name in ("document", "place", "reads"))
                parts = []
                for number in documents.unique().tolist():
                    begin = int((reads - places)[documents == number][0])
                    parts.append(alone(self.case, self.reference, number, begin))
                loss = torch.cat(parts).mean() / count
                if gradients:
                    (loss / self.replicas).backward()
                total += float(loss.detach()) / self.replicas
        return total

    def train(self, step: int, batches: Iterator[Any]) -> None:
        self.reference.zero_grad()
        for gradient in self.sums.values():
            gradient.zero_()
        loss = float(self.engine.train_batch(batches))
        self._compare("training", step, loss, self.expected(step * self.case.accumulation, gradients=True))
        wanted = {name: value.grad for name, value in self.reference.named_parameters() if value.grad is not None}
        largest = max(float(gradient.abs().max()) for gradient in wanted.values())
        limit = 10 * self.tolerance if self.case.dtype == "fp64" else 1e-4
        for name, gradient in self.gradients().items():
            if name in wanted and not (off := float((gradient - wanted[name]).abs().max()) / largest) <= limit:
                self.played.wrong.append(f"rank {self.rank}, step {step}: gradient of {name} off by {off:.3g}")
        self.played.trained += self.case.accumulation

    def gradients(self) -> dict[str, torch.Tensor]:
        weights = {name: parameter.data for name, parameter in self.module.named_parameters()}
        for name, parameter in self.module.named_parameters():
            parameter.data = self.sums[name]
        found = self.module.named_weights()
        for name, parameter in self.module.named_parameters():
            parameter.data = weights[name]
        return found

    def evaluate(self, step: int) -> None:
        first = EVALUATED - self.case.accumulation * (step % 2)
        loss = self.engine.eval_batch(self.batches(range(first, first + self.case.accumulation)))
        self._compare("evaluation", step, float(loss), self.expected(first, gradients=False))

    def _compare(self, what: str, step: int, found: float, expected: float) -> None:
        # DeepSpeed gives losses in fp32.
        if not abs(found - expected) <= max(self.tolerance, 1e-5) * (1 + abs(expected)):
            self.played.wrong.append(
                f"rank {self.rank}, {what} at step {step}: loss {found:.9g} instead of {expected:.9g}"
            )
