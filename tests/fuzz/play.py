"""One rank plays a case: it trains the loop, and compares each loss, and some gradients, with each document alone.

Runs in a worker process. Gives a `Played`: plain data for judge.py. Ranks talk to each other through CAD (and DDP)
alone, so nothing but CAD notices where their loops go apart.
"""

from __future__ import annotations

import io
import itertools
import logging
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from model_cases import FAMILIES, tiny_model

import deepspeed_cad
from deepspeed_cad.session import close_session
from fuzz.case import MIXTURES, Case
from fuzz.data import document, micro_batch

TIMEOUT_S = 30.0
"""Longer than a case may take: what waits for this is never right."""
CHANGES: dict[str, dict[str, Any]] = {"gemma2": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}}
"""Besides those of FAMILIES. A soft cap that tiny logits do not reach would not be noticed if it were left out."""


class Planted(RuntimeError):
    """An exception of the script's own."""


@dataclass
class Played:
    """What became of a case on one rank."""

    rank: int
    trained: int = 0
    """Micro-batches whose loss was compared."""
    caught: int = 0
    """Planted exceptions that the script caught."""
    wrong: list[str] = field(default_factory=list)
    """Losses or gradients that are not those of the documents alone."""
    error: tuple[str, list[str], str, str] | None = None
    """How the loop ended: type, its bases, message, traceback; None: at its end."""
    seconds: float = 0.0
    sums: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    """Gradients, and this rank's share of what they should be, where only sums over ranks can be compared."""


def play(rank: int, world: int, line: str) -> Played:
    """Play a case on this rank."""
    begin, played = time.monotonic(), Played(rank)
    with _quiet():
        try:
            _Player(Case.from_line(line), rank, played).run()
        except BaseException as error:
            names = [one.__name__ for one in type(error).__mro__]
            played.error = (type(error).__name__, names, str(error), traceback.format_exc())
        played.seconds = time.monotonic() - begin
        close_session()
    return played


@contextmanager
def _quiet() -> Iterator[None]:
    """Warnings and log lines of some hundred cases say nothing that a failure does not."""
    cad, host = (logging.getLogger(name) for name in ("deepspeed_cad", "transformers"))
    before = (cad.level, cad.propagate, host.level)
    # Some lines go to stderr where no handler shows them.
    nowhere = logging.StreamHandler(io.StringIO())
    cad.addHandler(nowhere)
    cad.setLevel(logging.INFO)
    cad.propagate = False
    host.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            cad.removeHandler(nowhere)
            level, cad.propagate, host_level = before
            cad.setLevel(level)
            host.setLevel(host_level)


class _Player:
    def __init__(self, case: Case, rank: int, played: Played) -> None:
        self.case, self.rank, self.played = case, rank, played
        family = next(one for one in FAMILIES if one.kind == case.model)
        dtype = torch.float64 if case.dtype == "fp64" else torch.float32
        changes = {**family.changes, **CHANGES.get(case.model, {})}
        self.reference = tiny_model(case.model, dtype, **changes)
        if case.model == "gemma2":
            self.reference.set_attn_implementation("eager")  # sdpa knows no soft cap
        self.reference.train()
        model = tiny_model(case.model, dtype, **changes).train()
        if case.checkpoint:
            model.gradient_checkpointing_enable({"use_reentrant": case.checkpoint == "reentrant"})
        block = {"timeout_s": TIMEOUT_S, **case.block}
        if block.get("cost") == "h200":
            block["cost"] = str(Path(deepspeed_cad.__file__).parent / "profiles" / "h200_torch_varlen.json")
        self.inner = deepspeed_cad.apply(model, block)
        self.model: torch.nn.Module = self.inner
        if case.ddp:
            self.model = torch.nn.parallel.DistributedDataParallel(
                self.inner, find_unused_parameters=case.model in MIXTURES, broadcast_buffers=False
            )
        # Norms and positions of most models are computed in fp32 whatever their dtype: where 1e-15 turns a rounding,
        # gradients of tiny models are off by some 1e-8. A family's own figure holds for outputs; a loss adds up some
        # hundred of them. A wrong plan is off by 1e-3 and more.
        self.tolerance = max(10 * family.tolerance, 1e-7) if case.dtype == "fp64" else 2e-4
        self.alone: dict[int, torch.Tensor] = {}

    def run(self) -> None:
        case, loader = self.case, _Loader(self.case, self.rank)
        source: Any = loader
        if case.ahead:
            shared = {"global_loss": True} if case.block.get("documents") == "exchange" else {}
            source = deepspeed_cad.current_session().look_ahead(
                loader, self.model, accumulation=case.accumulation, **shared
            )
        for epoch in range(case.epochs):
            loader.epoch = epoch
            batches = itertools.islice(source, case.stop) if case.stop and case.islice else source
            for at, batch in enumerate(batches):
                if (case.stop and at == case.stop) or case.hits(self.rank, epoch, at, "break"):
                    break
                if case.hits(self.rank, epoch, at, "skip"):
                    continue
                self.between(epoch, at)
                self.train(epoch, at, batch)

    def between(self, epoch: int, at: int) -> None:
        """Evaluation, and forwards without gradients."""
        case = self.case
        if case.evaluate and at % case.evaluate == 0:
            self.inner.eval()
            for again in range(self.rank + 1):
                batch = self.whole(500 + again)
                self.compare("evaluation", epoch, at, self.loss(self.inner, batch), batch)
            self.inner.train()
        if (case.look and at % case.look == 0) or case.hits(self.rank, epoch, at, "look"):
            batch = micro_batch(case, self.rank, 600 + at)
            with torch.no_grad():
                self.compare("a look", epoch, at, self.loss(self.inner, batch), batch)

    def whole(self, index: int) -> dict[str, torch.Tensor]:
        """A micro-batch whose documents lie on this rank alone."""
        forms = tuple(form for form in self.case.forms if form != "stream") or ("packed",)
        return micro_batch(replace(self.case, forms=forms), self.rank, index)

    def train(self, epoch: int, at: int, batch: dict[str, torch.Tensor]) -> None:
        """Forward, backward, and what is planted between."""
        case, plant = self.case, self.case.plant
        checked = self.played.trained % case.gradients == 0
        if checked:
            self.model.zero_grad()
        handle = None
        try:
            for where in ("forward", "backward"):
                if case.hits(self.rank, epoch, at, where):
                    handle = _plant(self.inner, where)
            loss = self.loss(self.model, batch)
            if case.hits(self.rank, epoch, at, "loss"):
                raise Planted("between forward and backward")
            loss.backward()
        except Planted:
            if plant is None or not plant.caught:
                raise
            self.played.caught += 1
            self.model.zero_grad()
            return
        finally:
            if handle is not None:
                handle.remove()
        self.compare("training", epoch, at, loss, batch)
        self.played.trained += 1
        if checked:
            self.compare_gradients(epoch, at, batch)

    def loss(self, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Sum of the cross entropy over targets."""
        given = {name: value for name, value in batch.items() if name not in ("document", "shift_labels")}
        logits = model(**given, use_cache=False).logits
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).to(torch.float64), batch["shift_labels"].flatten(), reduction="sum"
        )

    # The oracle

    def expected(self, batch: dict[str, torch.Tensor], gradients: bool = False) -> torch.Tensor:
        """The same sum from each document alone: of a document on several ranks, the rows of this one."""
        total = torch.zeros((), dtype=torch.float64)
        names, positions = batch["document"].flatten(), batch["position_ids"].flatten()
        for number in names[names >= 0].unique().tolist():
            found = self.alone.get(number)
            if found is None or gradients:
                found = self._alone(number, gradients)
                self.alone[number] = found.detach()
            rows = positions[names == number]
            total = total + found[rows[rows < len(found)]].sum()
        return total

    def _alone(self, number: int, gradients: bool) -> torch.Tensor:
        """Cross entropy of each target of a document that is run alone."""
        ids = document(self.case, number)
        with torch.set_grad_enabled(gradients):
            logits = self.reference(
                input_ids=ids[None], position_ids=torch.arange(len(ids))[None], use_cache=False
            ).logits[0, :-1]
            return torch.nn.functional.cross_entropy(logits.to(torch.float64), ids[1:], reduction="none")

    def compare(self, what: str, epoch: int, at: int, loss: torch.Tensor, batch: dict[str, torch.Tensor]) -> None:
        """Remember a loss that is not that of the documents alone."""
        found, expected = float(loss.detach()), float(self.expected(batch))
        if not abs(found - expected) <= self.tolerance * (1 + abs(expected)):
            self.played.wrong.append(
                f"rank {self.rank}, {what} at micro-batch {at} of epoch {epoch}: loss {found:.9g} instead of "
                f"{expected:.9g}, {batch['input_ids'].numel()} tokens"
            )

    def compare_gradients(self, epoch: int, at: int, batch: dict[str, torch.Tensor]) -> None:
        """Gradients of a micro-batch; those that ranks share are compared as sums, by the judge."""
        self.reference.zero_grad()
        expected = self.expected(batch, gradients=True)
        if expected.requires_grad:
            expected.backward()
        found, wanted = _flat(self.inner), _flat(self.reference)
        self.model.zero_grad()
        if self.case.ddp or "stream" in self.case.forms:
            if len(self.played.sums) < 2:
                self.played.sums.append((found, wanted))
            return
        wrong = difference(found, wanted)
        if not wrong <= 10 * self.tolerance:
            self.played.wrong.append(
                f"rank {self.rank}, micro-batch {at} of epoch {epoch}: gradients off by {wrong:.3g}"
            )


def difference(found: np.ndarray, wanted: np.ndarray) -> float:
    """Largest difference, relative to the largest of what is wanted."""
    return float(np.abs(found - wanted).max() / max(float(np.abs(wanted).max()), 1e-3))


def _flat(model: torch.nn.Module) -> np.ndarray:
    parts = [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for _, p in sorted(model.named_parameters())]
    return torch.cat(parts).to(torch.float64).numpy()


def _plant(model: torch.nn.Module, where: str) -> Any:
    """A hook that raises in the forward or the backward of the second layer, before its attention."""
    name = "input_layernorm" if where == "forward" else "post_attention_layernorm"
    module = getattr(model.model.layers[1], name)

    def fail(*_: Any) -> None:
        raise Planted(f"in the {where}")

    def watch(_: Any, __: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(fail)

    return module.register_forward_hook(fail if where == "forward" else watch)


class _Loader:
    """A rank's loader; what is planted in the data happens where it is read."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case, self.rank, self.epoch = case, rank, 0
        if not case.generator:
            self.__class__ = _SizedLoader

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        epoch = self.epoch
        for index in range(self.case.batches[self.rank]):
            if self.case.hits(self.rank, epoch, index, "loader"):
                raise Planted("a torn file")
            batch = micro_batch(self.case, self.rank, index)
            if self.case.hits(self.rank, epoch, index, "positions"):
                batch = _jump(batch)
            yield batch


class _SizedLoader(_Loader):
    def __len__(self) -> int:
        return self.case.batches[self.rank]


def _jump(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Positions that jump: no documents can be read from them."""
    ids = batch["input_ids"] if batch["input_ids"].shape[1] > 4 else torch.full((1, 8), 5)
    positions = torch.arange(ids.shape[1]).expand_as(ids).clone()
    positions[:, 3:] += 2
    nothing = torch.full_like(ids, -100)
    return {"input_ids": ids, "position_ids": positions, "shift_labels": nothing, "document": nothing.clamp(-1)}
