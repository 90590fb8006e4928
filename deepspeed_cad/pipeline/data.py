"""The micro-batches of a pipeline's step, read from the loader before the step begins.

DeepSpeed's first and last stages load data, each the same pairs (inputs, labels). All micro-batches of a step are
pulled at once, so that their documents are known before the first forward. In: what a loader gives, pairs or the dicts
of transformers' collators. Out: pairs for DeepSpeed, with their documents.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deepspeed_cad.ahead.documents import Announcement, read_documents, with_ids
from deepspeed_cad.errors import CADDataError, CADUnsupportedError


@dataclass(frozen=True, eq=False)
class Loaded:
    pair: tuple[Any, Any]
    """Inputs and labels, as DeepSpeed loads them."""
    documents: Announcement
    """With its token ids, which stages compare."""
    given_out: Any
    """What the loader gave, of which `change` made this."""
    change: Callable[[Any], Any] | None


def read_micro_batch(given_out: Any, has_loss: bool, change: Callable[[Any], Any] | None = None) -> Loaded:
    """A micro-batch as DeepSpeed takes it, and its documents. `given_out`: by a loader; `change`: makes of it what is
    trained (`set_batch_fn`).

    `has_loss`: the module has a loss function, so labels are needed. Inputs are token ids [batch, tokens], or a tuple
    of token ids and position ids; of a dict everything is read that says where documents are. Raises CADDataError
    where inputs are something else, contradict themselves, or nothing is trained, and CADUnsupportedError for padding.
    """
    batch = change(given_out) if change else given_out
    inputs, labels = _pair(batch)
    if has_loss:
        _check_labels(labels)
    given = _given(inputs)
    mine = with_ids(read_documents({**batch, **given} if isinstance(batch, Mapping) else given), given)
    local = mine.local
    padding = local.tokens - int((local.end - local.begin).sum())
    if padding and given["input_ids"].numel():
        raise CADUnsupportedError(
            f"{padding} tokens of a micro-batch are padding, which stages of a pipeline do not see: pack documents "
            "instead of padding them, and pass position_ids"
        )
    if len(local.begin) and local.begin.any():
        raise CADDataError(
            f"a document of a micro-batch starts at position {int(local.begin.max())}: in a pipeline every "
            "micro-batch holds whole documents"
        )
    return Loaded((inputs, labels), mine, given_out, change)


def _pair(batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, Mapping):
        if "input_ids" not in batch:
            raise CADDataError(f"a micro-batch has no input_ids, only {', '.join(map(str, batch))}")
        ids = batch["input_ids"]
        if (positions := batch.get("position_ids")) is None:
            positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        return (ids, positions.contiguous()), batch.get("labels")
    if not isinstance(batch, Sequence) or isinstance(batch, str) or len(batch) != 2:
        raise CADDataError(
            f"the loader gave a {type(batch).__name__}; a pipeline needs pairs (inputs, labels), or a dict with "
            "input_ids, position_ids and labels"
        )
    return batch[0], batch[1]


def _given(inputs: Any) -> dict[str, Any]:
    """The inputs by the names of transformers."""
    tensors: Any = inputs if isinstance(inputs, tuple | list) else [inputs]
    if not tensors or not all(isinstance(x, torch.Tensor) for x in tensors):
        raise CADDataError(
            f"the inputs of the pipeline are a {type(inputs).__name__}; expected token ids, or a tuple of token ids "
            "and position ids"
        )
    given = dict(zip(("input_ids", "position_ids"), tensors))
    ids, *more = given.values()
    if more and (more[0].shape != ids.shape or more[0].is_floating_point() or more[0].dtype == torch.bool):
        raise CADDataError(
            f"the second input of the pipeline has shape {tuple(more[0].shape)} and type {more[0].dtype}; expected "
            f"position ids: whole numbers of shape {tuple(ids.shape)}, like the token ids before them"
        )
    return given


def _check_labels(labels: Any) -> None:
    tensors = [x for x in (labels if isinstance(labels, tuple | list) else [labels]) if isinstance(x, torch.Tensor)]
    if not tensors:
        raise CADDataError(
            "a micro-batch has no labels, so the last stage cannot compute its loss: give the loader's batches labels"
        )
    first = tensors[0]
    if not first.is_floating_point() and not first.is_cuda and first.numel() and not bool((first != -100).any()):
        raise CADDataError("all labels of a micro-batch are -100: it has no loss. Leave such micro-batches out")


class Reader:
    """Reads loaders ahead. What was read and is not trained yet comes first when its loader is read again."""

    def __init__(self) -> None:
        self._ahead: list[tuple[Callable[[], Any], list[Loaded | Exception]]] = []

    def peek(
        self, iterator: Iterator[Any] | None, count: int, has_loss: bool, change: Callable[[Any], Any] | None = None,
        early: bool = False,
    ) -> list[Loaded] | None:  # fmt: skip
        """The next micro-batches of a loader, which stay the next ones; None where it ends before. Read again where
        `change` is another now. `early`: where one cannot be read, None too, and the error when it is due."""
        if iterator is None:
            raise CADDataError(
                "this stage loads data and has none: pass data_iter to train_batch on the first and the last stage"
            )
        ahead = self._of(iterator)
        for at in range(count):
            try:
                if at == len(ahead):
                    ahead.append(read_micro_batch(next(iterator), has_loss, change))
                elif isinstance(known := ahead[at], Loaded) and known.change is not change:
                    ahead[at] = read_micro_batch(known.given_out, has_loss, change)
            except StopIteration:
                return None
            except Exception as error:
                ahead[at : at + 1] = [error]
            if isinstance(found := ahead[at], Exception):
                if early:
                    return None
                raise found
        return [one for one in ahead[:count] if isinstance(one, Loaded)]

    def drop(self, iterator: Iterator[Any] | None, count: int) -> None:
        del self._of(iterator)[:count]

    def _of(self, iterator: Any) -> list[Loaded | Exception]:
        if (found := next((ahead for known, ahead in self._ahead if known() is iterator), None)) is None:
            found = []
            # Those of which nothing is kept are forgotten, such as of evaluations, and those that the script let go.
            self._ahead = [*(one for one in self._ahead if one[1] and one[0]() is not None), (_refer(iterator), found)]
        return found


def _refer(iterator: Any) -> Callable[[], Any]:
    """Gives the iterator, or None once nobody else holds it, so that a loader's processes end with it."""
    try:
        return weakref.ref(iterator)
    except TypeError:  # of a list, a zip, a map
        return lambda: iterator
