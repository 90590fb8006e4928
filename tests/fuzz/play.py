"""One rank plays a case: it trains the loop, and compares each loss, and some gradients, with each document alone.

Runs in a worker process. Gives a `Played`: plain data for judge.py. Ranks talk to each other through CAD (and DDP)
alone, so nothing but CAD notices where their loops go apart.
"""

from __future__ import annotations

import io
import itertools
import logging
import os
import random
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import training
from model_cases import BY_KIND, family

import deepspeed_cad
from deepspeed_cad.session import close_session
from fuzz.case import DENSE, Case
from fuzz.data import ORACLE, document, micro_batch

TIMEOUT_S = float(os.environ.get("FUZZ_TIMEOUT_S", "30"))
"""Longer than a case may take: what waits for this is never right. On a busy machine more: FUZZ_TIMEOUT_S."""
HUNG_S = 10.0
"""The same where a server hangs: half of it is the silence after which a server is lost."""
CHANGES: dict[str, dict[str, Any]] = {
    "gemma2": {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}, "qwen2": {"tie_word_embeddings": True},
}  # fmt: skip
"""Besides those of FAMILIES. A soft cap that tiny logits do not reach would not be noticed if it were left out."""


class Planted(RuntimeError):
    """An exception of the script's own."""


@dataclass
class Played:
    """What became of a case on one rank."""

    rank: int
    trained: int = 0
    """Micro-batches whose loss was compared."""
    wrong: list[str] = field(default_factory=list)
    """Losses or gradients that are not those of the documents alone."""
    error: tuple[str, list[str], str, str] | None = None
    """How the loop ended: type, its bases, message, traceback; None: at its end."""
    seconds: float = 0.0
    sums: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    """Gradients, and this rank's share of what they should be, where only sums over ranks can be compared."""
    sent: int = 0
    """Bytes that left this rank."""
    load: list[float] = field(default_factory=list)
    """Of the ranks that attend, in the last micro-batch."""
    changes: int = 0
    """How often servers changed."""
    repeated: int = 0
    """Passes that ran again because a server was lost."""
    exit_code: int | None = None
    """Of a reserved server."""
    held: int = 0
    """Bytes that a server has left for backwards, at its end."""
    said: str = ""
    """A server's last line."""


def play(rank: int, world: int, line: str, farewell: Callable[[str], None] = lambda reason: None) -> Played:
    """Play a case on this rank; `farewell` hears why its loop ended, if not at its end."""
    begin, played = time.monotonic(), Played(rank)
    case = Case.from_line(line)
    with quiet():
        try:
            if case.stages:
                from fuzz.pipeline import run_pipeline

                run_pipeline(case, rank, played)
            else:
                _Player(case, rank, played).run()
        except BaseException as error:
            names = [one.__name__ for one in type(error).__mro__]
            played.error = (type(error).__name__, names, str(error), traceback.format_exc())
            farewell(f"{type(error).__name__}: {error}")
        played.seconds = time.monotonic() - begin
        session = deepspeed_cad.current_session()
        if session is not None:
            played.sent, played.load = session.statistics.bytes_sent, session.statistics.load.tolist()
            played.changes = session.servers.members.generation
            played.repeated = getattr(session.servers, "repeated", 0)
        close_session()
    return played


def whole_block(case: Case) -> dict[str, Any]:
    block = {"timeout_s": timeout_of(case), **case.block}
    if case.servers:
        block["servers"] = {"reserved": case.servers}
    if block.get("cost") == "h200":
        block["cost"] = str(Path(deepspeed_cad.__file__).parent / "profiles" / "h200_torch_varlen.json")
    return block


def timeout_of(case: Case) -> float:
    """Seconds: short where a server hangs, which only time tells."""
    return HUNG_S if any(fate.signal == "STOP" for fate in case.fates) else TIMEOUT_S


@contextmanager
def quiet() -> Iterator[io.StringIO]:
    """Warnings and log lines of some hundred cases say nothing that a failure does not; what they were."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()) as said, redirect_stderr(said):
        warnings.simplefilter("ignore")
        yield said


def model_of(case: Case) -> Any:
    """The model, in training mode, with the same weights whenever it is made."""
    dtype = torch.float64 if case.dtype == "fp64" else torch.float32
    layers = {"num_hidden_layers": 4} if case.stages > 2 else {}
    return family(case.model, dtype, **CHANGES.get(case.model, {}), **layers)


def tolerance_of(case: Case) -> float:
    """How far a loss may be off, relative, and a tenth of how far gradients may.

    Norms and positions of most models are computed in fp32 whatever their dtype: where 1e-15 turns a rounding,
    gradients of tiny models are off by some 1e-8. A family's own figure holds for outputs; a loss adds up some hundred
    of them. A wrong plan is off by 1e-3 and more.
    """
    return max(10 * BY_KIND[case.model].tolerance, 1e-7) if case.dtype == "fp64" else 2e-4


class _Player:
    def __init__(self, case: Case, rank: int, played: Played) -> None:
        self.case, self.rank, self.played = case, rank, played
        self.reference, model = model_of(case), training.checkpointed(model_of(case), case.checkpoint)
        if case.model == "gemma2":
            self.reference.set_attn_implementation("eager")  # sdpa knows no soft cap
        self.inner = deepspeed_cad.apply(model, whole_block(case))
        self.model: torch.nn.Module = self.inner
        if case.ddp:
            self.model = torch.nn.parallel.DistributedDataParallel(
                self.inner, find_unused_parameters=case.model not in DENSE, broadcast_buffers=False
            )
        self.tolerance = tolerance_of(case)
        self.alone: dict[tuple[int, int], torch.Tensor] = {}

    def run(self) -> None:
        case, loader = self.case, _Loader(self.case, self.rank)
        source: Any = loader
        if case.ahead:
            source = deepspeed_cad.current_session().look_ahead(loader, self.model, accumulation=case.accumulation)
        for epoch in range(case.epochs):
            loader.epoch = epoch
            batches = itertools.islice(source, case.stop) if case.stop and case.islice else source
            together: list[dict[str, torch.Tensor]] = []
            for at, batch in enumerate(batches):
                if (case.stop and at == case.stop) or case.hits(self.rank, epoch, at, "break"):
                    break
                if case.hits(self.rank, epoch, at, "skip"):
                    continue
                self.between(epoch, at)
                if case.flight == 1:
                    self.train(epoch, at, batch)
                    continue
                together.append(batch)
                if len(together) == case.flight:
                    self.train_together(epoch, at, together)
                    together = []
            if together:
                self.train_together(epoch, case.stop, together)

    def between(self, epoch: int, at: int) -> None:
        case = self.case
        if case.awaits and self.rank == 0 and self.played.trained == 2:
            servers = deepspeed_cad.current_session().servers
            while not servers.newcomers and not servers.members.generation:
                time.sleep(0.01)
        if case.evaluate and at % case.evaluate == 0:
            self.inner.eval()
            for again in range(1 if case.looks_together else self.rank + 1):
                batch = self.look_at(500 + again)
                self.compare("evaluation", epoch, at, self.loss(self.inner, batch), batch)
            self.inner.train()
        if (case.look and at % case.look == 0) or case.hits(self.rank, epoch, at, "look"):
            batch = self.look_at(600 + at)
            with torch.no_grad():
                self.compare("a look", epoch, at, self.loss(self.inner, batch), batch)

    def look_at(self, index: int) -> dict[str, torch.Tensor]:
        """A micro-batch without backward; where ranks run these alone, its documents lie on this rank."""
        if self.case.looks_together:
            return micro_batch(self.case, self.rank, index)
        forms = tuple(form for form in self.case.forms if form != "stream") or ("row",)
        return micro_batch(replace(self.case, forms=forms), self.rank, index)

    def train(self, epoch: int, at: int, batch: dict[str, torch.Tensor]) -> None:
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
            self.model.zero_grad()
            return
        finally:
            if handle is not None:
                handle.remove()
        self.compare("training", epoch, at, loss, batch)
        self.played.trained += 1
        if checked:
            self.compare_gradients(epoch, at, batch)

    def train_together(self, epoch: int, at: int, batches: list[dict[str, torch.Tensor]]) -> None:
        """Forwards of several micro-batches, then their backwards in any order, the same on all ranks."""
        self.model.zero_grad()
        losses = [self.loss(self.model, batch) for batch in batches]
        order = list(range(len(batches)))
        random.Random(f"{self.case.seed} {epoch} {at}").shuffle(order)
        for index in order:
            losses[index].backward()
        for loss, batch in zip(losses, batches, strict=True):
            self.compare("training in flight", epoch, at, loss, batch)
        self.played.trained += len(batches)
        self.compare_gradients(epoch, at, *batches)

    def loss(self, model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        logits = model(**{name: value for name, value in batch.items() if name not in ORACLE}, use_cache=False).logits
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).to(torch.float64), batch["shift_labels"].flatten(), reduction="sum"
        )

    # The oracle

    def expected(self, batch: dict[str, torch.Tensor], gradients: bool = False) -> torch.Tensor:
        """The same sum from each document alone: of a document on several ranks, the rows of this one."""
        total = torch.zeros((), dtype=torch.float64)
        documents, places, reads = (batch[name].flatten() for name in ("document", "place", "reads"))
        for number in documents[documents >= 0].unique().tolist():
            mine = documents == number
            rows, begin = places[mine], int((reads - places)[mine][0])
            found = self.alone.get((number, begin))
            if found is None or gradients:
                found = alone(self.case, self.reference, number, begin)
                self.alone[number, begin] = found.detach()
            total = total + found[rows[rows < len(found)]].sum()
        return total

    def compare(self, what: str, epoch: int, at: int, loss: torch.Tensor, batch: dict[str, torch.Tensor]) -> None:
        found, expected = float(loss.detach()), float(self.expected(batch))
        if not abs(found - expected) <= self.tolerance * (1 + abs(expected)):
            self.played.wrong.append(
                f"rank {self.rank}, {what} at micro-batch {at} of epoch {epoch}: loss {found:.9g} instead of "
                f"{expected:.9g}, {batch['input_ids'].numel()} tokens"
            )

    def compare_gradients(self, epoch: int, at: int, *batches: dict[str, torch.Tensor]) -> None:
        """Gradients of micro-batches; those that ranks share are compared as sums, by the judge."""
        self.reference.zero_grad()
        for batch in batches:
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


def alone(case: Case, model: torch.nn.Module, number: int, begin: int) -> torch.Tensor:
    """Cross entropy of each target of a document that is run alone, its first token at position `begin`."""
    ids = document(case, number)
    # Without gradients it would be a reference model, which CAD attends for.
    with torch.enable_grad():
        positions = torch.arange(begin, begin + len(ids))[None]
        logits = model(input_ids=ids[None], position_ids=positions, use_cache=False).logits[0, :-1]
        return torch.nn.functional.cross_entropy(logits.to(torch.float64), ids[1:], reduction="none")


def difference(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.abs(found - wanted).max() / max(float(np.abs(wanted).max()), 1e-3))


def _flat(model: torch.nn.Module) -> np.ndarray:
    parts = [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for _, p in sorted(model.named_parameters())]
    return torch.cat(parts).to(torch.float64).numpy()


def _plant(model: torch.nn.Module, where: str) -> Any:
    """A hook that raises in the forward or the backward of the second layer, before its attention."""
    layer = model.model.layers[1]
    names = ("input_layernorm", "operator_norm") if where == "forward" else ("post_attention_layernorm", "ffn_norm")
    module = next(getattr(layer, name) for name in names if hasattr(layer, name))

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
    ids = batch["input_ids"] if batch["input_ids"].shape[1] > 4 else torch.full((1, 8), 5)
    positions = torch.arange(ids.shape[1]).expand_as(ids).clone()
    positions[:, 3:] += 2
    nothing = torch.full_like(ids, -100)
    jumping = {"input_ids": ids, "position_ids": positions, "shift_labels": nothing, "document": nothing.clamp(-1)}
    return {**jumping, "place": positions, "reads": positions}
