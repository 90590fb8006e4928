"""Look-ahead: read a loader one step ahead and announce it, so that plans are ready when the forward starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from deepspeed_cad.ahead.feed import Feed
from deepspeed_cad.ahead.step import StepAhead, allow_exchange, announce
from deepspeed_cad.config import NOT_GLOBAL
from deepspeed_cad.errors import CADConfigError
from deepspeed_cad.session import Session


class LookAheadLoader:
    """A loader that behaves like the one it wraps and announces each step while the one before it trains.

    `accumulation`: micro-batches per optimizer step; those of one step may be given out in another order, or with
    documents of other ranks (see step_ahead), those of different steps never are. `trained`: says how many
    micro-batches were trained before an epoch starts, where steps go on from one epoch into the next (DeepSpeed).
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


def look_ahead(
    session: Session, loader: Any, model: torch.nn.Module, accumulation: int | None, global_loss: bool
) -> LookAheadLoader:
    """A loader for a training loop of one's own.

    `accumulation`: micro-batches per optimizer step; None: what a DeepSpeed engine says, else 1. With
    `"documents": "exchange"` documents change ranks; `global_loss` states that the loss is a sum over tokens divided by
    one number for the whole step of all ranks. Raises CADConfigError where that is not stated, and CADUnsupportedError
    for a model whose loss is no sum over tokens.
    """
    from deepspeed_cad.integrations.transformers import find_binding

    binding = find_binding(model)
    if binding is None:
        raise CADConfigError(f"CAD is not on for {type(model).__name__}: call deepspeed_cad.apply(model) first")
    if session.config.documents == "exchange":
        if not global_loss:
            raise CADConfigError(NOT_GLOBAL)
        allow_exchange(binding.feed, model)
    engine: Any = model
    if accumulation is None:
        says = getattr(engine, "gradient_accumulation_steps", None)
        accumulation = int(says()) if callable(says) else 1
    trained = (lambda: int(engine.micro_steps)) if hasattr(engine, "micro_steps") else None
    return LookAheadLoader(loader, binding.feed, accumulation, trained)


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


__all__ = ["LookAheadLoader", "announce", "look_ahead"]
