"""Prepared loaders of Accelerate: each micro-batch is announced while the one before it trains.

A loader stays what it is; only its iterator changes, and only where it is seen that its batches are trained as they
are: CAD is on for one model, the first batch of the epoch was its next training forward, unchanged, on every rank. So
loaders of evaluation, and batches that a script shortens or joins, go straight through; of loaders that give every rank
as many batches, forwards without backward are balanced. What does not go together with CAD is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from types import ModuleType
from typing import TYPE_CHECKING, Any

from deepspeed_cad.integrations.forward_only import given_out, wrap_once

from deepspeed_cad.ahead.documents import read_documents
from deepspeed_cad.ahead.loader import LookAheadLoader
from deepspeed_cad.errors import CADError, CADUnsupportedError
from deepspeed_cad.session import current_session

if TYPE_CHECKING:
    from deepspeed_cad.integrations.transformers import Binding

DISPATCHED = (
    "dispatch_batches is on: the main process reads the batches of all ranks and concatenates them, which breaks "
    "packed rows. It is Accelerate's default for an IterableDataset. Set dispatch_batches=False "
    '(TrainingArguments(accelerator_config={"dispatch_batches": False}), or '
    "Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))) and give each rank its share"
)


def install_loader_hooks(module: ModuleType) -> None:
    """Wrap the iteration of prepared loaders of the module `accelerate.data_loader`. Idempotent."""
    wrap_once(module.DataLoaderShard, "__iter__", lambda original, self: PreparedIterator(self, original(self)))


class PreparedIterator(Iterator[Any]):
    """The batches of a prepared loader, announced from the second of an epoch on where the first was trained."""

    def __init__(self, loader: Any, batches: Iterator[Any]) -> None:
        self.loader, self.plain = loader, batches
        """The batches, for somebody else to announce; only before the first was taken."""
        # Nothing here is held by what it holds: where a script breaks off, this goes with its loop and ends the pass.
        self._batches = _Epoch(loader).give_out(batches)

    def __next__(self) -> Any:
        return next(self._batches)


class _Epoch:
    """One pass over a prepared loader."""

    def __init__(self, loader: Any) -> None:
        session = current_session()
        together = {} if session is None or session.group_ranks == 1 else session.bindings
        self.loader = loader
        self._models: list[Binding] = list(together.values())
        # Training forwards of each model so far, and those without backward that ranks ran together.
        self._before = [(one.forwards, one.looked) for one in self._models]

    def drop(self, binding: Binding) -> None:
        """Nothing more of this epoch is trained: what was announced is dropped, on every rank."""
        if binding.announcer is self:
            binding.announcer = None
            binding.feed.begin_epoch()

    def give_out(self, plain: Iterator[Any]) -> Iterator[Any]:
        looking = [one for one in self._models if one.looks_at_loader()] if _gives_as_many(self.loader) else []
        for batch in self._announced(plain):
            given_out(batch, looking)
            yield batch
        looked = [one for one, (_, before) in zip(self._models, self._before) if one.looked > before]
        if looked and not self._trained():
            looked[0].follow()

    def _trained(self) -> list[Binding]:
        return [one for one, (before, _) in zip(self._models, self._before) if one.forwards > before]

    def _announced(self, plain: Iterator[Any]) -> Iterator[Any]:
        for binding in (one for one in self._models if not one.looks_at_loader()):
            if binding.announcer is not None and binding.announcer.loader is self.loader:
                binding.announcer.drop(binding)  # the epoch before was broken off, and its iterator is still there
        yield from (first := list(islice(plain, 1)))
        # Every rank gets here after its first step, or none does: evaluation and looking around train nothing.
        binding = next(iter(self._trained()), None)
        if binding is None or binding.announcer is not None or not binding.session.config.look_ahead:
            yield from plain
        # What was a model before may not be gone yet on some rank, so ranks ask each other whether there is one only.
        elif not binding.feed.agree_to_announce(
            len(self._models) == 1 and binding.forwards == self._before[0][0] + 1 and _reads(binding, first)
        ):
            yield from plain
        else:
            binding.announcer = self
            try:
                yield from LookAheadLoader(self.loader, binding.feed, batches=plain)
            finally:
                self.drop(binding)


def _gives_as_many(loader: Any) -> bool:
    """Whether a prepared loader is known to give every rank as many batches."""
    sampler = getattr(loader, "batch_sampler", None)
    return type(sampler).__name__ == "BatchSamplerShard" and bool(getattr(sampler, "even_batches", False))


def _reads(binding: Binding, first: list[Any]) -> bool:
    """Whether the first batch of a loader, if it has one, has the documents that the model trained last."""
    try:
        mine = read_documents(first[0])
    except (CADError, AttributeError, IndexError, TypeError):
        return False
    return binding.last_read is not None and mine.local.same_as(binding.last_read)


def refuse_accelerator(accelerator: Any) -> None:
    """Raise CADUnsupportedError for parallelism or loading that CAD does not combine with."""
    if getattr(getattr(accelerator, "parallelism_config", None), "cp_enabled", False):
        raise CADUnsupportedError(
            "context parallelism (cp_size) is on in Accelerate's parallelism_config beside CAD; CAD spreads attention "
            "over all data-parallel ranks by itself. Set it to 1 or take CAD out"
        )
    if accelerator.distributed_type == "MEGATRON_LM":
        raise CADUnsupportedError("Megatron-LM has attention of its own that CAD cannot switch; use FSDP or DeepSpeed")
    if getattr(accelerator.dataloader_config, "dispatch_batches", None):
        raise CADUnsupportedError(DISPATCHED)


def refuse_loader(loader: Any) -> None:
    """Raise CADUnsupportedError for a prepared loader that cannot give each rank packed rows of its own."""
    if any(cls.__name__ == "DataLoaderDispatcher" for cls in type(loader).__mro__):
        raise CADUnsupportedError(DISPATCHED)
