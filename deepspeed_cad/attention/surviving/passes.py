"""The passes of this rank that some rank may still have to run again, and where the training thread stands in them.

A pass is one direction of one attention call: the forward, or the backward. All trainers enter the same passes in the
same order. When a server is lost a thread of its own, not the training thread, meets the other trainers: they may be
anywhere, also in a collective of the script's own, waiting for a trainer that waits for the lost server. It halts the
training thread at its next step of a pass, and runs again every pass that all trainers entered and some did not finish.
Then the training thread goes on, with the results at hand.

What a pass reads is held until all trainers are known to have finished it. They are known to when this rank has met
them in the first exchange of a later pass: whatever was finished here before this rank entered that, is finished there.

On a GPU a trainer may be through with the first step of a pass that others have not entered. Where servers change then,
it begins again there, before anything that the training thread did later: all ranks exchange in the same order.

In: steps of passes, from call.py; halts and decisions, from server/surviving/change.py. Nothing here communicates.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from deepspeed_cad.errors import CADError, CADPeerError


class Repeatable(Protocol):
    """A pass whose result was not collected yet."""

    index: int
    """Counts the passes of a rank from 1, in the order in which they are entered; 0 before, and after it was undone."""

    @property
    def repeat(self) -> Callable[[], object]:
        """All of it again, with the present servers."""

    @property
    def has_result(self) -> bool:
        """Whether all of it ran."""

    def begin(self) -> None:
        """Its first step, again."""

    def run_again(self) -> None:
        """`repeat`, for its result."""

    def forget_progress(self) -> None:
        """Hold nothing of an exchange that was lost."""


class Passes:
    """Of one rank."""

    def __init__(self) -> None:
        self.generation = 0
        """How often the servers changed."""
        self.entered = 0
        self._unfinished: dict[int, Repeatable] = {}
        """Entered here and not left."""
        self._finished: dict[int, Callable[[], object]] = {}
        """Left here, maybe not elsewhere: all that is held of them is what runs them again."""
        self._open: dict[int, frozenset[int]] = {}
        """Passes that were unfinished when another one was entered, by that one."""
        self._place: dict[Repeatable, int] = {}
        """In the order in which the training thread came to them: passes that it has not left."""
        self._places = 0
        self._begun: set[Repeatable] = set()
        """Whose first step is over, and of which it is not known that all ranks have entered them."""
        self._undone: list[Repeatable] = []
        """Those of them that were taken back: they begin again, in this order."""
        self._changed = threading.Condition()
        self._inside = 0
        self._halted = False
        self._failure: CADError | None = None

    # The training thread

    @contextmanager
    def inside(self) -> Iterator[int]:
        """A step of a pass; gives the generation. Waits while halted; raises the CADError of a change that failed."""
        with self._changed:
            self._wait_while_halted()
            self._inside += 1
            generation = self.generation
        try:
            yield generation
        finally:
            with self._changed:
                self._inside -= 1
                self._changed.notify_all()

    def enter(self, current: Repeatable) -> None:
        """Its first step begins."""
        self.entered += 1
        current.index = self.entered
        if current not in self._place:
            self._places += 1
            self._place[current] = self._places
        self._open[current.index] = frozenset(self._unfinished)
        self._unfinished[current.index] = current

    def begun(self, current: Repeatable) -> None:
        """Its first step is over."""
        self._begun.add(current)

    def follows(self, current: Repeatable, other: Repeatable) -> None:
        """`current`, which is new, is a part of `other`: whatever comes before that comes before this."""
        if other in self._place:
            self._place[current] = self._place[other]

    def has_undone(self, before: Repeatable) -> bool:
        """Whether a pass has to begin again before a step of this one."""
        return bool(self._undone) and self._place[self._undone[0]] <= self._place.get(before, self._places)

    def take_undone(self, before: Repeatable) -> Repeatable | None:
        """The first pass that has to begin again before a step of this one, which may be this one itself."""
        with self._changed:
            self._wait_while_halted()
            return self._undone.pop(0) if self.has_undone(before) else None

    def met(self, current: Repeatable) -> None:
        """All ranks have come to its first exchange."""
        self._begun.discard(current)
        unfinished = self._open.pop(current.index, None)
        if unfinished is None:
            return
        for index in [index for index in self._finished if index < current.index and index not in unfinished]:
            del self._finished[index]

    def leave(self, current: Repeatable) -> None:
        """Its last step is over."""
        del self._unfinished[current.index]
        self._finished[current.index] = current.repeat
        self._place.pop(current, None)

    def wait_for_change(self, generation: int) -> None:
        """Until servers have changed since a generation. Raises the CADError of a change that failed."""
        with self._changed:
            while self.generation == generation and self._failure is None:
                self._changed.wait()
            self._wait_while_halted()

    def _wait_while_halted(self) -> None:
        while self._halted and self._failure is None:
            self._changed.wait()
        if self._failure is not None:
            raise type(self._failure)(str(self._failure))

    # The thread that changes servers

    def halt(self) -> None:
        """Let the training thread begin no further step; returns when it is in none."""
        with self._changed:
            self._halted = True
            while self._inside:
                self._changed.wait()

    def go_on(self, failure: CADError | None = None) -> None:
        """Let the training thread run again, or end with an error."""
        with self._changed:
            self._halted, self._failure = False, failure
            self._changed.notify_all()

    @property
    def without_result(self) -> list[int]:
        """Passes that were entered and did not run to their end."""
        return [index for index, entered in self._unfinished.items() if not entered.has_result]

    def undo(self, entered: int) -> None:
        """Take back what is entered here beyond the passes that all ranks have entered: it begins again."""
        for index in [index for index in self._unfinished if index > entered]:
            alone = self._unfinished.pop(index)
            self._open.pop(index, None)
            alone.forget_progress()
            alone.index = 0
            if alone in self._begun:
                self._begun.remove(alone)
                self._undone.append(alone)
        self._undone.sort(key=self._place.__getitem__)
        self.entered = entered

    def change(self, generation: int) -> None:
        """Other servers from now on."""
        with self._changed:
            self.generation = generation
            self._changed.notify_all()

    def run_again(self, indices: Sequence[int]) -> None:
        """Run passes again, one after the other, with the present servers."""
        for unfinished in self._unfinished.values():
            if not unfinished.has_result:
                unfinished.forget_progress()
        for index in indices:
            if index in self._unfinished:
                self._unfinished[index].run_again()
            elif index in self._finished:
                self._finished[index]()
            else:
                raise CADPeerError(
                    f"attention pass {index} has to run again, and this rank holds nothing of it any more "
                    f"(it entered {self.entered} and holds {sorted({*self._unfinished, *self._finished})})"
                )

    def close(self) -> None:
        """Hold nothing any more."""
        self._finished.clear()
