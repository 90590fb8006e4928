"""Chunked attention (Llama 4): layers in which a token sees those of its own chunk of its document.

In: what such a model hands to the mask and attention functions. Out: the size of a chunk, and queries as they are in a
document alone. Chunks are counted from the begin of each document, as in a document alone; transformers counts them,
and the temperature of layers without rotary positions, from the begin of a packed row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from deepspeed_cad.attention.microbatch import MaskDescriptor
from deepspeed_cad.errors import CADUnsupportedError
from deepspeed_cad.session import Session

KIND = "chunked_attention"
"""In `layer_types`."""


def has_chunks(config: Any) -> bool:
    """Whether some layers of a model attend in chunks."""
    return KIND in (getattr(config, "layer_types", None) or ())


def chunk_of(given: Mapping[str, Any]) -> int | None:
    """The size of the chunks of a mask, in tokens; None where it has a window, or all keys. `given`: what a mask
    function got. No model has both."""
    config: Any = given.get("config")
    size: int | None = given.get("local_size")
    return size if size is not None and has_chunks(config) and size == config.attention_chunk_size else None


def refuse_beside_chunks(session: Session) -> None:
    """Raise CADUnsupportedError for what knows documents and windows only."""
    for found, what in (
        (session.servers.at_start > 0, 'reserved servers ("servers")'), (session.shares.pieces, "Ulysses"),
        (session.config.verify > 0, '"verify"'),
    ):  # fmt: skip
        if found:
            raise CADUnsupportedError(f"layers of this model attend in chunks, beside which {what} cannot be had")


def as_alone(module: Any, query: torch.Tensor, descriptor: MaskDescriptor) -> torch.Tensor:
    """Queries [B, H, S, D] scaled by their positions in documents, where a layer scaled them by those in rows."""
    if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return query
    micro_batch = descriptor.micro_batch
    position = micro_batch.local(descriptor.nano_batch).positions()
    batch, _, width, _ = query.shape
    farthest = max(width - 1, int(position.max(initial=0)))
    if len(position) != batch * width or farthest + 1 < module.floor_scale:
        return query
    in_row = np.arange(width)
    position = np.where(position < 0, np.tile(in_row, batch), position).reshape(batch, width)

    def temperature(at: np.ndarray) -> torch.Tensor:
        steps = torch.floor((torch.from_numpy(at).to(query.device).float() + 1.0) / module.floor_scale)
        return (torch.log1p(steps) * module.attn_scale + 1.0).to(torch.promote_types(query.dtype, torch.float32))

    factor = temperature(position) / temperature(in_row)
    return (query * factor[:, None, :, None]).to(query.dtype)
