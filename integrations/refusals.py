"""What of Accelerate does not go together with CAD: kinds of parallelism, and ways of loading.

In: an Accelerator, or a loader that it prepared. Out: nothing, or one error that says what to change. Wraps nothing.
"""

from __future__ import annotations

from typing import Any, NoReturn

from accelerate.data_loader import DataLoaderDispatcher
from accelerate.utils import DistributedType

from deepspeed_cad.errors import CADUnsupportedError


def refuse_accelerator(accelerator: Any) -> None:
    """Raise CADUnsupportedError for parallelism or loading that CAD does not combine with."""
    parallel = getattr(accelerator, "parallelism_config", None)
    if getattr(parallel, "cp_enabled", False):
        raise CADUnsupportedError(
            "context parallelism (cp_size) is on in Accelerate's parallelism_config beside CAD; CAD spreads attention "
            "over all data-parallel ranks by itself. Set it to 1 or take CAD out"
        )
    if accelerator.distributed_type == DistributedType.MEGATRON_LM:
        raise CADUnsupportedError("Megatron-LM has attention of its own that CAD cannot switch; use FSDP or DeepSpeed")
    if getattr(accelerator.dataloader_config, "dispatch_batches", None):
        refuse_dispatcher()


def refuse_loader(loader: Any) -> None:
    """Raise CADUnsupportedError for a prepared loader that cannot give each rank packed rows of its own."""
    if isinstance(loader, DataLoaderDispatcher):
        refuse_dispatcher()


def refuse_dispatcher() -> NoReturn:
    """Say what is wrong with `dispatch_batches`."""
    raise CADUnsupportedError(
        "dispatch_batches is on: the main process reads the batches of all ranks and concatenates them, which breaks "
        "packed rows. It is Accelerate's default for an IterableDataset. Set dispatch_batches=False "
        '(TrainingArguments(accelerator_config={"dispatch_batches": False}), or '
        "Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))) and give each rank its share"
    )
