"""The sampled check: the model's own mask function against the plan.

It looks at some hundred (query, key) pairs of this rank, and only now and then, because reading the answer from a GPU
waits for it. A difference is a CADUnsupportedError that says what the model's mask says and what CAD computes.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from deepspeed_cad.errors import CADUnsupportedError
from deepspeed_cad.layout import PADDING, Ints, LocalSegments

logger = logging.getLogger("deepspeed_cad")

DOCUMENTS, QUERIES = 16, 5
"""How many documents are looked at, and how many queries of each; every query is compared with about eight keys."""
_PLACES = ("cache_position", "attention_mask")
"""Arguments that lie where the mask function's own tensors do; newer versions of transformers say the device."""


def is_due(forwards: int) -> bool:
    """Whether forward number `forwards` is checked: 0, 1, 3, 7, 15 and so on."""
    return forwards & (forwards + 1) == 0


@dataclass(eq=False)
class ForwardCheck:
    """The check of one forward whose layers make their masks themselves: the first mask of each window is looked at."""

    local: LocalSegments
    forwards: int
    """Number of this forward on this rank, counted from 0."""
    _seen: set[int | None] = field(default_factory=set)

    def see(self, window: int | None, given: dict[str, Any]) -> None:
        """A layer made a mask; as `check_mask`."""
        if window not in self._seen:
            self._seen.add(window)
            check_mask(self.local, window, given, self.forwards)


def is_of_a_piece(local: LocalSegments, given: dict[str, Any], shares: int) -> bool:
    """Whether a mask was made for this rank's piece of the tokens, which are whole inside attention only: layers of a
    model whose norms run on pieces, or Ulysses. Such a mask says nothing of attention. `given`: as for `check_mask`."""
    batch, width, _, _ = _geometry(given)
    return shares > 1 and batch * width * shares == local.tokens


def check_mask(local: LocalSegments, window: int | None, given: dict[str, Any], forwards: int) -> None:
    """Compare samples of the mask function that transformers passes with what the plan computes. `given` are the
    keyword arguments of the mask interface function. Inside a document both must agree. Across documents the model may
    show more: CAD separates documents itself. Raises CADUnsupportedError where they differ."""
    function = given.get("mask_function")
    if not is_due(forwards):
        return
    if function is None:
        if forwards == 0:
            logger.warning("deepspeed_cad: transformers passed no mask function; the model's mask is not checked")
        return
    if (rows := local.tokens) == 0:
        return
    batch, width, query_base, key_base = _geometry(given)
    if batch * width != rows or int(given.get("kv_length", width)) != width:
        raise CADUnsupportedError(
            f"the model made a mask for {batch} x {width} queries and {given.get('kv_length', width)} keys, but its "
            f"micro-batch has {rows} tokens: a prompt or prefix was put in front of it, or a KV cache is in use"
        )
    document, position = _rows(local)
    query, key = _sample(document, window, np.random.default_rng([forwards, window or 0]))
    columns = np.stack([query // width, np.zeros_like(query), query % width + query_base, key % width + key_base])
    if (shown := _evaluate(function, columns, given, forwards)) is None:
        return
    distance = position[query] - position[key]
    expected = (distance >= 0) & (distance < (np.inf if window is None else window))
    if len(wrong := np.flatnonzero(shown != expected)):
        q, k = int(query[wrong[0]]), int(key[wrong[0]])
        said = "shows" if shown[wrong[0]] else "hides"
        does = "would use" if expected[wrong[0]] else "would not use"
        kind = "causal attention" if window is None else f"causal attention with a window of {window}"
        raise CADUnsupportedError(
            f"the model's own mask {said} key position {int(position[k])} to query position {int(position[q])} of the "
            f"same document (rows {k} and {q} of this rank), but CAD {does} it: it computes {kind}. "
            f"{len(wrong)} of {len(query)} samples differ, so CAD cannot reproduce this model"
        )


def _geometry(given: dict[str, Any]) -> tuple[int, int, int, int]:
    """Batch, queries per batch row, and the index that the mask function gives to the first query and key."""
    places = given.get("cache_position")
    batch = int(given.get("batch_size", 1))
    if isinstance(places, torch.Tensor):
        # Older versions of transformers; training starts without a cache, at place 0.
        return batch, len(places), 0, int(given.get("kv_offset", 0))
    return batch, int(given["q_length"]), int(given.get("q_offset", 0)), int(given.get("kv_offset", 0))


def _rows(local: LocalSegments) -> tuple[Ints, Ints]:
    """Segment and position of every row; segment -1 for padding. Not the document: of one that lies in pieces the
    model's own mask shows no piece to another."""
    document, position = np.full(local.tokens, -1, np.int64), local.positions()
    order = np.argsort(local.offset)
    document[position != PADDING] = np.repeat(order, (local.end - local.begin)[order])
    return document, position


def _sample(document: Ints, window: int | None, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """Pairs of rows in the same document: edges of documents and windows, the diagonal, and random ones."""
    border = np.concatenate([[True], np.diff(document) != 0, [True]])
    starts = np.flatnonzero(border[:-1] & (document >= 0))
    stops = np.flatnonzero(border[1:] & (document >= 0)) + 1
    longest = np.argsort(starts - stops)[: DOCUMENTS // 2]
    chosen = np.union1d(longest, rng.permutation(len(starts))[: DOCUMENTS - len(longest)]).astype(np.int64)
    start, stop = (np.tile(each[chosen], QUERIES) for each in (starts, stops))
    query = rng.integers(start, stop)
    query[: len(chosen)], query[len(chosen) : 2 * len(chosen)] = starts[chosen], stops[chosen] - 1
    keys = [query, query - 1, query + 1, start, stop - 1, *rng.integers(start, stop, (2, len(query)))]
    if window is not None:
        keys += [query - window, query - window + 1]
    query, key = np.tile(query, len(keys)), np.concatenate(keys)
    query, key = (each[(key >= 0) & (key < len(document))] for each in (query, key))
    inside = document[query] == document[key]
    return query[inside], key[inside]


def _evaluate(
    function: Callable[..., torch.Tensor], columns: Ints, given: dict[str, Any], forwards: int
) -> npt.NDArray[np.bool_] | None:
    """What the mask function says of pairs, [batch row, head, query, key]; None where it cannot be asked."""
    lies = next((one for name in _PLACES if isinstance(one := given.get(name), torch.Tensor)), None)
    device = given.get("device") or ("cpu" if lies is None else lies.device)
    try:
        with torch.no_grad():
            shown = function(*torch.from_numpy(columns).to(device).unbind(0))
        return shown.to(torch.bool).expand(columns.shape[1]).cpu().numpy()
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        if forwards == 0:
            logger.warning(
                "deepspeed_cad: the model's mask function cannot be evaluated at single positions (%s: %s); its mask "
                "is not checked against the plan",
                type(error).__name__, str(error).partition("\n")[0],
            )  # fmt: skip
        return None
