"""One packed stream of documents for all ranks: in which order, and which rows of it each rank trains.

In: a batch that all ranks hold, or lengths of documents. Out: a rank's part of it, or an order. Plain indexing of
whatever the batch holds; neither torch nor torch.distributed is needed.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from deepspeed_cad.cost import count_pairs
from deepspeed_cad.errors import CADDataError
from deepspeed_cad.layout import Ints, cut_stream


def shard_stream(
    batch: dict[str, Any], rank: int, ranks: int, *, zigzag: bool = False, ranks_per_host: int | None = None
) -> dict[str, Any]:
    """This rank's part of one packed stream that all ranks hold: documents may span ranks.

    Rank r gets n = ⌈tokens / ranks⌉ tokens, [r·n, (r+1)·n) of the stream; the last ranks may get fewer, or none.
    `labels` become targets of the next token *before* the cut and are returned as both `labels` and `shift_labels`,
    which transformers' loss takes as they are: no target is lost at a cut.

    `batch`: tensors or arrays of shape [1, tokens]; `input_ids`, `position_ids` (a document starts where it is 0) and
    optionally `labels` and other per-token fields. `zigzag`: deal the rows of a document that lies on several ranks out
    among them, half from its front and half, mirrored, from its end (`layout.cut_stream`): the ranks then have equal
    attention before any of it moves, and send about as many keys each. For links between hosts; needs CAD, and
    positions then jump. `ranks_per_host`: first put the documents into such an order that few lie on two hosts
    (`order_by_host`). The loss of a step is the same sum over the same documents.

    Raises CADDataError where fields do not fit each other, or the stream does not begin with a document."""
    if not 0 <= rank < ranks:
        raise CADDataError(f"rank {rank} of {ranks}: ranks are 0 to {ranks - 1}")
    if "position_ids" not in batch:
        raise CADDataError("shard_stream needs position_ids: they say where documents start")
    shape = tuple(batch["position_ids"].shape)
    if len(shape) != 2 or shape[0] != 1:
        raise CADDataError(f"shard_stream cuts one packed row, [1, tokens]; position_ids has shape {shape}")
    per_rank = -(-shape[1] // ranks)
    here: slice | Any = slice(min(rank * per_rank, shape[1]), min((rank + 1) * per_rank, shape[1]))
    if (zigzag or ranks_per_host is not None) and shape[1]:
        positions = batch["position_ids"]
        as_array = isinstance(positions, np.ndarray)
        here = _rows((positions if as_array else positions.cpu().numpy())[0], rank, ranks, zigzag, ranks_per_host)
        here = here if as_array else positions.new_tensor(here)  # tensors stay on their device
    shard: dict[str, Any] = {}
    for name, value in batch.items():
        if name.startswith(("cu_seq", "max_length_")):
            continue  # of the whole stream; positions say it of a part
        if name == "labels":
            if tuple(value.shape) != shape:
                raise CADDataError(f"labels has shape {tuple(value.shape)}, position_ids {shape}")
            targets = value.clone() if hasattr(value, "clone") else value.copy()
            targets[:, :-1], targets[:, -1:] = value[:, 1:], -100
            targets[:, :-1][batch["position_ids"][:, 1:] == 0] = -100
            shard["labels"] = shard["shift_labels"] = targets[:, here]
        elif tuple(getattr(value, "shape", ()))[:2] == shape:
            shard[name] = value[:, here]
        elif getattr(value, "ndim", 0) > 1:
            raise CADDataError(f"{name} has shape {tuple(value.shape)}; per-token fields must start with {shape}")
        else:
            shard[name] = value
    return shard


def order_by_host(lengths: Sequence[int], ranks: int, tokens_per_rank: int, ranks_per_host: int) -> list[int]:
    """Numbers of documents in an order in which few lie on two hosts when the stream is cut.

    Documents longer than a host come first, each from the begin of a host on. The others go, the longest first, to the
    host with least attention that has room for them. Those that fit nowhere fill what is left, across borders.

    Raises CADDataError where there are no hosts, or the documents do not fit."""
    if not 1 <= ranks_per_host <= ranks:
        raise CADDataError(f"ranks_per_host is {ranks_per_host}; expected 1 to {ranks}, the number of ranks")
    total, budget, hosts = int(sum(lengths)), ranks_per_host * tokens_per_rank, -(-ranks // ranks_per_host)
    if total > ranks * tokens_per_rank:
        raise CADDataError(f"{total} tokens do not fit into {ranks} ranks of {tokens_per_rank}")
    room = np.full(hosts, budget, np.int64)
    room[-1] = ranks * tokens_per_rank - (hosts - 1) * budget
    load = np.zeros(hosts)
    on_host: list[list[int]] = [[] for _ in range(hosts)]
    over: list[int] = []
    free = 0
    for document in sorted(range(len(lengths)), key=lambda one: (-lengths[one], one)):
        length = int(lengths[document])
        begins = np.zeros(1, np.int64)
        if length > budget and free + -(-length // budget) <= hosts:
            begins = np.arange(0, length, budget)
            host, free = free, free + len(begins)
        elif len(fits := np.flatnonzero(room >= length)):
            host = int(fits[load[fits].argmin()])
        else:
            over.append(document)
            continue
        ends, here = np.minimum(begins + budget, length), slice(host, host + len(begins))
        on_host[host].append(document)
        room[here] -= ends - begins
        load[here] += count_pairs(begins, ends)
    # Host after host, each filled with documents that fit nowhere, the longest first.
    order: list[int] = []
    held = 0
    for host, own in enumerate(on_host):
        order += own
        held += sum(int(lengths[one]) for one in own)
        while over and held < (host + 1) * budget:
            held += int(lengths[over[0]])
            order.append(over.pop(0))
    return order + over


def _rows(positions: Ints, rank: int, ranks: int, zigzag: bool, ranks_per_host: int | None) -> Ints:
    """The rows of the stream that a rank gets, in order. Raises CADDataError where it begins inside a document."""
    if positions[0] != 0:
        raise CADDataError(
            f"the stream begins at position {positions[0]}: documents can be dealt out or reordered only whole, so "
            "position_ids must start at 0"
        )
    starts, per_rank = np.flatnonzero(positions == 0), -(-len(positions) // ranks)
    lengths = np.diff(np.append(starts, len(positions)))
    if ranks_per_host is not None:
        order = order_by_host(lengths.tolist(), ranks, per_rank, ranks_per_host)
        starts, lengths = starts[order], lengths[order]
    pieces = cut_stream(lengths, per_rank, zigzag)
    own = [starts[document] + np.arange(begin, end) for document, to, begin, end in pieces if to == rank]
    return np.concatenate([np.zeros(0, np.int64), *own])
