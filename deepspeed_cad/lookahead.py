"""Look-ahead: read a loader one step ahead and announce it, so that plans are ready when the forward starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from deepspeed_cad.session import Feed
from deepspeed_cad.step_ahead import StepAhead, announce


class LookAheadLoader:
    """A loader that behaves like the one it wraps and announces each step while the one before it trains.

    `accumulation`: micro-batches per optimizer step; those of one step may be given out in another order, or with
    documents of other ranks (see step_ahead), those of different steps never are. `trained`: says how many micro-batches
    were trained before an epoch starts, where steps go on from one epoch into the next (DeepSpeed).
    """

    def __init__(
        self, loader: Any, feed: Feed, accumulation: int = 1, trained: Callable[[], int] | None = None
    ) -> None:
        self._loader, self._feed = loader, feed
        self._accumulation, self._trained = accumulation, trained
        self._steps = StepAhead(feed)

    def __iter__(self) -> Iterator[Any]:
        self._feed.forget()
        source = _Source(self._loader)
        begun = 0 if self._trained is None else self._trained() % self._accumulation
        batches = source.take(self._accumulation - begun)
        step = self._steps.submit(batches) if batches else None
        while step is not None:
            batches, step = self._steps.hand_out(step), None
            following: list[Any] = []
            for i, batch in enumerate(batches):
                if i < len(batches) - 1:
                    following += source.take(1)
                else:
                    following += source.take(self._accumulation - len(following))
                    step = self._steps.submit(following) if following else None
                source.given_out(last=step is None and i == len(batches) - 1)
                yield batch
        source.finish()

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)


class _Source:
    """An epoch of a loader. Accelerate's loaders say which batch is the last; that stays true of batches given out."""

    def __init__(self, loader: Any) -> None:
        self._loader, self._batches = loader, iter(loader)
        self._says_end = isinstance(getattr(loader, "end_of_dataloader", None), bool)
        self._ended = False

    def take(self, count: int) -> list[Any]:
        """Up to `count` batches."""
        taken: list[Any] = []
        while len(taken) < count and not self._ended:
            try:
                taken.append(next(self._batches))
            except StopIteration:
                self._ended = True
                break
            # Asked once more, Accelerate's loader would leave its state before the batches read ahead were trained.
            self._ended = self._says_end and self._loader.end_of_dataloader
        return taken

    def finish(self) -> None:
        """All batches were trained."""
        if self._says_end and self._ended:
            next(self._batches, None)

    def given_out(self, last: bool) -> None:
        """The next batch goes to the training loop."""
        if self._says_end and self._ended:
            self._loader.end_of_dataloader = last


__all__ = ["LookAheadLoader", "announce"]
