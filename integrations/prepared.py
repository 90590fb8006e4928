"""Prepared loaders of Accelerate: each micro-batch is announced while the one before it trains.

A loader stays what it is; only its iterator changes, and only where it is seen that its batches are trained as they
are: CAD is on for one model, the first batch of the epoch was its next training forward, unchanged, on every rank. So
loaders of evaluation, and batches that a script shortens or joins, go straight through; of loaders that give every rank
as many batches, forwards without backward are balanced. What does not go together with CAD is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from deepspeed_cad.integrations.forward_only import given_out, wrap_once

from deepspeed_cad.ahead.documents import read_documents
from deepspeed_cad.ahead.loader import LookAheadLoader
from deepspeed_cad.errors import CADError, CADUnsupportedError
from deepspeed_cad.session import current_session

if TYPE_CHECKING:
    from deepspeed_cad.integrations.transformers import Binding


def install_loader_hooks(module: ModuleType) -> None:
    """Wrap the iteration of prepared loaders of the module `accelerate.data_loader`. Idempotent."""
    wrap_once(module.DataLoaderShard, "__iter__", lambda original, self: PreparedIterator(self, original(self)))


class PreparedIterator(Iterator[Any]):
    """The batches of a prepared loader, announced from the second of an epoch on where the first was trained."""

    def __init__(self, loader: Any, batches: Iterator[Any]) -> None:
        self.loader, self.plain = loader, batches
        """The batches, for somebody else to announce; only before the first was taken."""
        self._binding: Binding | None = None
        self._even = _gives_as_many(loader)
        self._counted = (0, 0)
        """Training forwards, and those without backward that ranks ran together, before the first batch."""
        self._batches = self._announced()

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except StopIteration:
            self._follow()
            raise
        given_out(batch if self._even else None)
        return batch

    def drop(self) -> None:
        """Nothing more of this epoch is trained: what was announced is dropped, on every rank."""
        if self._binding is not None and self._binding.announcer is self:
            self._binding.announcer = None
            self._binding.feed.begin_epoch()

    def _announced(self) -> Iterator[Any]:
        binding = self._binding = self._find_binding()
        before = None if binding is None or binding.looks_at_loader() else binding.announcer
        if before is not None and before.loader is self.loader:
            before.drop()  # the epoch before was broken off, and its iterator is still there
        try:
            first = next(self.plain)
        except StopIteration:
            return
        if binding is not None:
            self._counted = binding.forwards, binding.looked
        yield first
        # Every rank gets here after its first step, or none does: evaluation and looking around train nothing.
        if binding is None or binding.announcer is not None or binding.forwards != self._counted[0] + 1:
            yield from self.plain
        elif not binding.feed.agree_to_announce(_reads(binding, first)):
            yield from self.plain
        else:
            binding.announcer = self
            try:
                yield from LookAheadLoader(self.loader, binding.feed, batches=self.plain)
            finally:
                # Also where the script breaks off: the iterator goes with its loop.
                self.drop()

    def _follow(self) -> None:
        """The epoch is over: attend for ranks that have more of it, where it was one of forwards without backward."""
        binding = self._binding
        if binding is not None and binding.forwards == self._counted[0] and binding.looked > self._counted[1]:
            self._counted = binding.forwards, binding.looked
            binding.follow()

    def _find_binding(self) -> Binding | None:
        """The model that may train these batches, if there is one only, and plans can be made ahead."""
        session = current_session()
        if session is None or session.group_ranks == 1 or not session.config.look_ahead or len(session.bindings) != 1:
            return None
        # Its state, which checkpoints hold, counts what was read and not what was trained.
        if getattr(self.loader, "use_stateful_dataloader", False):
            return None
        return next(iter(session.bindings.values()))


def _gives_as_many(loader: Any) -> bool:
    """Whether a prepared loader is known to give every rank as many batches."""
    sampler = getattr(loader, "batch_sampler", None)
    return type(sampler).__name__ == "BatchSamplerShard" and bool(getattr(sampler, "even_batches", False))


def _reads(binding: Binding, batch: Any) -> bool:
    """Whether a batch has the documents that the model trained last."""
    try:
        mine = read_documents(batch)
    except (CADError, AttributeError, TypeError):
        return False
    return binding.last_read is not None and mine.local.same_as(binding.last_read)


def refuse_accelerator(accelerator: Any) -> None:
    """Raise CADUnsupportedError for parallelism or loading that CAD does not combine with."""
    parallel = getattr(accelerator, "parallelism_config", None)
    if getattr(parallel, "cp_enabled", False):
        raise CADUnsupportedError(
            "context parallelism (cp_size) is on in Accelerate's parallelism_config beside CAD; CAD spreads attention "
            "over all data-parallel ranks by itself. Set it to 1 or take CAD out"
        )
    if accelerator.distributed_type == "MEGATRON_LM":
        raise CADUnsupportedError("Megatron-LM has attention of its own that CAD cannot switch; use FSDP or DeepSpeed")
    if getattr(accelerator.dataloader_config, "dispatch_batches", None):
        _refuse_dispatcher()


def refuse_loader(loader: Any) -> None:
    """Raise CADUnsupportedError for a prepared loader that cannot give each rank packed rows of its own."""
    if any(cls.__name__ == "DataLoaderDispatcher" for cls in type(loader).__mro__):
        _refuse_dispatcher()


def _refuse_dispatcher() -> NoReturn:
    raise CADUnsupportedError(
        "dispatch_batches is on: the main process reads the batches of all ranks and concatenates them, which breaks "
        "packed rows. It is Accelerate's default for an IterableDataset. Set dispatch_batches=False "
        '(TrainingArguments(accelerator_config={"dispatch_batches": False}), or '
        "Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))) and give each rank its share"
    )
