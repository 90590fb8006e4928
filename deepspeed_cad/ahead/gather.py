"""Gathering: what every rank tells all others, on a gloo group and a thread of its own.

All collectives of the session's CPU group run on the look-ahead thread. Each begins with a header of fixed size that
says what this rank is at: its `Subject`. Headers are compared before anything that came along is used, so ranks whose
loops went apart (a loader that ended, a break, an exception that a script caught) end in one error that says where each
rank is, and never in plans of different micro-batches. Version, configuration and model travel in the header too.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
import torch.distributed as dist

from deepspeed_cad.errors import CADDataError, CADError, CADPeerError
from deepspeed_cad.exchange.failure.board import Liveness
from deepspeed_cad.feedback import Reporter
from deepspeed_cad.layout import Ints
from deepspeed_cad.notice import name_ranks
from deepspeed_cad.shares import Shares
from deepspeed_cad.version import __version__


class What(IntEnum):
    CHOICE = 0
    LENGTHS = 1
    """Of a micro-batch that a loader announced."""
    FORWARD = 2
    """Of one that no loader announced."""
    LOOK = 3
    STEP = 4
    DEAL = 5
    """Which rank trains which document of a step."""
    PLAN = 6
    LOADER = 7
    """Whether the batches of a loader reach the model as they are, or how many they are."""
    LAYERS = 8


_WORDS = (
    "choice of transport",
    "document lengths",
    "document lengths at the forward",
    "document lengths at the forward without backward",
    "documents of the step",
    "deal of documents",
    "plan",
    "answers about a loader's batches",
    "attention layers of pipeline stages",
)


@dataclass(frozen=True)
class Subject:
    """What a collective is about: the same on every rank, or the ranks' loops went apart."""

    what: What
    model: int = 0
    """Which of the process's models, in the order in which CAD was turned on for them; below 0: of those that are only
    looked at, in the order in which all ranks first ran them."""
    epoch: int = 0
    index: int = 0
    """Micro-batch (or step) of the epoch; where no loader announces, of the run."""

    def __str__(self) -> str:
        words = _WORDS[self.what]
        if self.what == What.CHOICE:
            return words
        of = f"of model {self.model}" if self.model > 0 else f"of reference model {-self.model - 1}"
        model = f" {of}" if self.model else ""
        if self.what in (What.LENGTHS, What.STEP, What.DEAL):
            unit = "micro-batch" if self.what == What.LENGTHS else "step"
            return f"{words} of {unit} {self.index} in epoch {self.epoch}{model}"
        return f"{words} number {self.index}{model}"


class State(IntEnum):
    GOING = 0
    ENDED = 1
    FAILED = 2
    """It cannot go on; the reason is on the error board."""


_VERSION, _CONFIG, _MODEL, _WHAT, _WHICH, _EPOCH, _INDEX, _STATE, _VALUE, _COUNT, _WIDTH = range(11)
"""Columns of a header; what reporters say follows behind them."""
_LEARNS = (What.LENGTHS, What.FORWARD, What.LOOK, What.STEP)
_NO_MODEL = 1 << 30

APART = (
    "Every rank must train as many micro-batches, in the same order. Look for a break, an exception that the script "
    "caught, early stopping or a skipped batch on some rank only"
)


def digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 2


@dataclass(frozen=True, eq=False)
class Said:
    state: State
    value: int
    payload: Ints
    """One dimension; empty from a rank that is not GOING."""
    model: int = 0
    """That of its subject; from a rank that ran out of forwards without backward, of what the others run."""


class Gatherer:
    def __init__(
        self, group: dist.ProcessGroup | None, rank: int, ranks: int, liveness: Liveness | None, shares: Shares,
        settings: str = "", reporters: Sequence[Reporter] = (), begun: int = 0,
    ) -> None:  # fmt: skip
        """`group`: over gloo; None where there is one rank. `liveness`: the board on which ranks say why they end.
        `settings`: what ranks compare before they train. `reporters`: what travels with document lengths. `begun`:
        collectives of this group before it was made."""
        self.group, self.rank, self.ranks = group, rank, ranks
        self.liveness = liveness or Liveness(dist.HashStore(), rank, 1)
        self.shares, self._members = shares, shares.members
        self._settings, self._reporters = digest(settings), tuple(reporters)
        self.broken: CADError | None = None
        """Why no collective of this rank can be trusted any more."""
        self.begun = begun
        """Collectives so far, the same number on every rank that has come as far."""
        self.inside: tuple[int, Subject] | None = None
        """The collective that the look-ahead thread is in, with its number, counted from 1."""

    def numbers(self, value: int, subject: Subject) -> list[int]:
        said = self.gather(subject, value=value)
        return [said[rank].value for rank in self._members]

    def agree(self, value: int, subject: Subject) -> None:
        """Raise CADPeerError, naming ranks, unless every rank of the CAD group has the same number."""
        if odd := [self._members[one] for one in _minority(self.numbers(value, subject))]:
            raise self._give_up(
                f"ranks {odd} have another {subject} than the rest: all ranks must run the same code on the same "
                "input. Check that package versions and the compiled library are equal on all machines"
            )

    def gather(
        self, subject: Subject, payload: Ints | None = None, value: int = 0, state: State = State.GOING, model: str = ""
    ) -> list[Said]:
        """What every rank of the job says about a subject, this one included; runs on the look-ahead thread. `subject`:
        compared; a rank that is at another one ends this in an error on all ranks. `payload`: whole numbers, as many as
        a rank likes; `value`: one that needs none. `state`: whether this rank goes on. `model`: fingerprint, compared.
        Raises CADDataError where some rank failed, with its reason, and CADPeerError where ranks differ in version,
        configuration, subject or model, or died."""
        if self.broken is not None:
            raise type(self.broken)(str(self.broken))
        mine = np.zeros(0, np.int64) if payload is None else payload
        header = [digest(__version__), self._settings, digest(model), subject.what, subject.model, subject.epoch,
                  subject.index, state, value, len(mine)]  # fmt: skip
        self.begun += 1
        self.inside = self.begun, subject
        try:
            headers, rows = self._meet(np.array(header, np.int64), mine, subject)
        finally:
            self.inside = None
        return [
            Said(State(head[_STATE]), int(head[_VALUE]), row[: int(head[_COUNT])], int(head[_WHICH]))
            for row, head in zip(rows, headers, strict=True)
        ]

    def _meet(self, header: Ints, mine: Ints, subject: Subject) -> tuple[np.ndarray, list[np.ndarray]]:
        """Headers of all ranks, [ranks, _WIDTH], and their payloads, each padded to the longest."""
        waited_for, learns = f"the other ranks' {subject}", subject.what in _LEARNS
        # A rank that has no forwards left hears of the model that the others run, and measured nothing of it.
        model = subject.model if header[_STATE] == State.GOING else _NO_MODEL
        reports = [one.report(model) if learns else np.zeros(one.columns, np.int64) for one in self._reporters]
        messages = np.stack(self._all(np.concatenate([header, *reports]), waited_for))
        headers, said = messages[:, :_WIDTH], messages[self._members, _WIDTH:]
        _join(headers)
        self._compare(headers)
        for reporter in self._reporters if learns else ():
            reporter.hear(int(headers[self.rank, _WHICH]), said[:, : reporter.columns])
            said = said[:, reporter.columns :]
        widest = int(headers[:, _COUNT].max())
        padded = np.pad(mine, (0, widest - len(mine)))
        return headers, self._all(padded, waited_for) if widest else [padded] * self.ranks

    def _give_up(self, reason: str) -> CADError:
        """From now on the order of collectives means nothing: every later one of this rank raises this error."""
        self.broken = CADPeerError(reason)
        return self.broken

    def _compare(self, headers: np.ndarray) -> None:
        if failed := np.flatnonzero(headers[:, _STATE] == State.FAILED).tolist():
            # All ranks met, so their collectives are still in step: what was announced before can be trained.
            known = [(rank, self.liveness.reason(rank) or "could not read its micro-batch") for rank in failed]
            reasons = "; ".join(f"rank {rank}: {reason}" for rank, reason in known)
            raise CADDataError(f"no micro-batch was trained: {reasons}")
        self._same(headers[:, _VERSION], "version of deepspeed_cad", "install the same version everywhere")
        self._same(headers[:, _CONFIG], '"cad" block', "give every rank the same configuration")
        at = [Subject(What(row[_WHAT]), *(int(x) for x in row[_WHICH : _INDEX + 1])) for row in headers]
        if len(set(at)) > 1:
            where = [(one, [rank for rank, other in enumerate(at) if other == one]) for one in dict.fromkeys(at)]
            words = "; ".join(f"{name_ranks(ranks)} at the {one}" for one, ranks in where)
            raise self._give_up(f"the ranks are not at the same point: {words}. {APART}")
        self._same(headers[:, _MODEL], "model", "load the same model on every rank")

    def _same(self, values: np.ndarray, what: str, remedy: str) -> None:
        if odd := _minority(values.tolist()):
            raise self._give_up(f"ranks {odd} have another {what} than the rest; {remedy}")

    def _all(self, values: np.ndarray, what: str) -> list[np.ndarray]:
        if self.group is None or self.ranks == 1:
            return [values]
        mine = torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64))
        everyone = [torch.empty_like(mine) for _ in range(self.ranks)]
        with Liveness.watch(self.liveness, what):
            work = dist.all_gather(everyone, mine, group=self.group, async_op=True)
            self.liveness.patiently(work.get_future().done, what, collective=self.begun)
            work.wait()
        return [tensor.numpy() for tensor in everyone]


def _join(headers: np.ndarray) -> None:
    """Ranks that ran out of forwards without backward follow the others, whichever model these run next."""
    looks = headers[:, _WHAT] == What.LOOK
    ended = headers[:, _STATE] == State.ENDED
    if len(going := np.flatnonzero(looks & (headers[:, _STATE] == State.GOING))):
        columns = [_MODEL, _WHICH, _EPOCH, _INDEX]
        headers[np.ix_(looks & ended, columns)] = headers[going[0], columns]


def _minority(values: Sequence[int]) -> list[int]:
    common = max(set(values), key=values.count)
    return [rank for rank, value in enumerate(values) if value != common]
