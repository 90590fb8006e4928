"""Look-ahead: read a loader one step ahead and announce it, so that plans are ready when the forward starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from deepspeed_cad.ahead.feed import Feed
from deepspeed_cad.ahead.step import Due, StepAhead
from deepspeed_cad.errors import CADConfigError, CADDataError


def counts_what_is_read(loader: Any) -> bool:
    """Whether a loader, DeepSpeed's sampler, or what its RepeatingLoader repeats, has a state: checkpoints hold it, and
    it counts what was read, not what was trained."""
    if loader is None:
        return False
    stateful = hasattr(loader, "state_dict") and getattr(loader, "use_stateful_dataloader", True)
    sampled = hasattr(getattr(loader, "data_sampler", None), "state_dict")
    return bool(stateful or sampled or counts_what_is_read(getattr(loader, "loader", None)))


class LookAheadLoader:
    """A loader that behaves like the one it wraps and announces each step while the one before it trains.

    `accumulation`: micro-batches per optimizer step, or what says how many there are now; those of one step may be
    given out in another order, or with documents of other ranks (see step.py), those of different steps never are.
    `trained`: says how many micro-batches and optimizer steps there were so far, where steps go on from one epoch into
    the next (DeepSpeed). `follower`: the model's binding, which may be looked at with the loader's batches instead of
    trained. `batches`: an epoch of the loader that is under way; None: each iteration begins one. `settle`: decides as
    an epoch begins to train whether documents are dealt out."""

    def __init__(
        self, loader: Any, feed: Feed, accumulation: int | Callable[[], int] = 1,
        trained: Callable[[], tuple[int, int]] | None = None, follower: Any = None,
        batches: Iterator[Any] | None = None, settle: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._loader, self._feed, self._follower, self._batches = loader, feed, follower, batches
        self._settle = settle
        self._says = accumulation if callable(accumulation) else lambda: accumulation
        self._trained, self._steps = trained, StepAhead(feed, self._says())
        self._reads_ahead = feed.read_ahead = bool(feed.config.look_ahead) and not counts_what_is_read(loader)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader) if self._batches is None else self._batches
        source, model, given = Source(self._loader, batches), self._follower, 0
        # Forwards so far that trained, and those without backward that all ranks ran together.
        before = (0, 0) if model is None else (model.forwards, model.looked)
        looks = model is not None and model.looks_at_loader()
        # A model that is in eval mode now may be in train mode when its first batch comes.
        while looks and (taken := source.take(1)):
            given += 1
            yield taken[0]
            looks = model.forwards == before[0]
        if not looks:
            yield from self._announced(source, given)
        source.finish()
        if model is None or model.forwards > before[0]:
            return
        if not looks:  # a model in train mode, but without gradients
            self._feed.begin_epoch()
        if looks or model.looked > before[1]:
            model.follow()

    def _announced(self, source: Source, given: int) -> Iterator[Any]:
        if not self._reads_ahead:
            while taken := source.take(1):
                yield taken[0]
            return
        self._settle()
        self._steps.accumulation = self._says()
        epoch, whole = self._feed.begin_epoch(), False
        try:
            yield from self._by_step(source, given)
            whole = True
        finally:  # also where the script breaks off
            self._feed.end_epoch(epoch, whole)

    def _by_step(self, source: Source, given: int) -> Iterator[Any]:
        begun = (given if self._trained is None else self._trained()[0]) % self._steps.accumulation
        step = self._submit(source, source.take(self._steps.accumulation - begun))
        while step is not None:
            self._read_accumulation()
            batches, step = step(), None
            following: list[Any] = []
            for i, batch in enumerate(batches):
                if i < len(batches) - 1:
                    following += source.take(1)
                else:
                    following += source.take(self._steps.accumulation - len(following))
                    step = self._submit(source, following)
                source.given_out(last=step is None and i == len(batches) - 1)
                self._feed.give_out()
                before = self._trained and self._trained()
                yield batch
                self._compare_steps(before)

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_loader"), name)  # a copy under way has none

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Accelerate asks by isinstance for loaders of its own, where it makes one of another."""
        return type(self._loader)

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
        else:
            setattr(self._loader, name, value)

    def _read_accumulation(self) -> None:
        """A step that was arranged cannot get another number of micro-batches."""
        before, now = self._steps.accumulation, self._says()
        if before != now and self._steps.together:
            self._feed.fail(
                CADConfigError(
                    f"a step has {now} micro-batches and no longer {before}, but the one that begins was arranged with "
                    'as many as before. Set "documents" to "in_order" where that changes inside an epoch'
                )
            )
        self._steps.accumulation = now

    def _compare_steps(self, before: tuple[int, int] | None) -> None:
        """A step that was arranged must not end elsewhere. A checkpoint that was loaded may go back."""
        now, size = self._trained and self._trained(), self._steps.accumulation
        if not before or not now or not self._steps.together:
            return
        due, ended = now[0] // size - before[0] // size, now[1] - before[1]
        if 0 <= ended != due:
            self._feed.fail(
                CADConfigError(
                    f"the engine ended {ended} optimizer steps where {due} had been arranged. Where the script ends "
                    'them itself, as by set_gradient_accumulation_boundary, set "documents" to "in_order"'
                )
            )

    def _submit(self, source: Source, batches: list[Any]) -> Due | None:
        """The next step; None where the loader ended, which the other ranks are told, or failed."""
        if source.error is None or batches:
            return self._steps.submit(batches, source.ended and source.error is None)
        source.tell_of_error(self._feed)
        return None


class Source:
    """An epoch of a loader. Accelerate's loaders say which batch is the last; that stays true of batches given out."""

    def __init__(self, loader: Any, batches: Iterator[Any]) -> None:
        self._loader, self._batches = loader, batches
        self._says_end = isinstance(getattr(loader, "end_of_dataloader", None), bool)
        self.ended = False
        self.error: Exception | None = None

    def take(self, count: int) -> list[Any]:
        taken: list[Any] = []
        while len(taken) < count and not self.ended:
            try:
                taken.append(next(self._batches))
            except StopIteration:
                self.ended = True
            except Exception as error:
                self.ended, self.error = True, error
            else:
                # Asked once more, Accelerate's loader would leave its state before the batches read ahead were trained.
                self.ended = self._says_end and self._loader.end_of_dataloader
        return taken

    def tell_of_error(self, feed: Feed) -> None:
        """Here it is raised when its batch is due; the other ranks need not wait for that."""
        error = f"its loader raised {type(self.error).__name__}: {self.error}"
        feed.fail_later(CADDataError(f"rank {feed.rank}: {error}"))

    def finish(self) -> None:
        """All batches were trained; an error of the loader is raised now, when its batch is due."""
        if self.error is not None:
            raise self.error
        if self._says_end and self.ended:
            next(self._batches, None)

    def given_out(self, last: bool) -> None:
        if self._says_end and self.ended:
            self._loader.end_of_dataloader = last
