"""The functions that transformers calls in place of its own: the mask function and the attention function "cad".

Which micro-batch a running forward belongs to is in its `Scope`, which the hooks of a binding set; the mask function
gives layers a `MaskDescriptor` in place of a mask, by which they find it.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from deepspeed_cad.integrations.mask_check import check_mask, is_of_a_piece
from deepspeed_cad.integrations.positions import Unread
from deepspeed_cad.integrations.shares import PieceMask, attend_locally, refuse_heads, to_local
from deepspeed_cad.integrations.structure import default_attention, has_chunks, local_attention, name_layer
from deepspeed_cad.integrations.verify import Alone, Check
from torch.distributed.tensor import DTensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from deepspeed_cad.attention.layer import LayerInput
from deepspeed_cad.attention.microbatch import MaskDescriptor, MicroBatch
from deepspeed_cad.errors import CADDataError, CADError, CADUnsupportedError
from deepspeed_cad.function import attend
from deepspeed_cad.session import current_session

if TYPE_CHECKING:
    from deepspeed_cad.integrations.transformers import Binding

logger = logging.getLogger("deepspeed_cad")

NAME = "cad"
"""The attention name; transformers gives special meaning to names with "flash", "sdpa", "flex" or "/" in them."""


@dataclass(eq=False)
class Scope:
    """One running forward of a bound model."""

    binding: Binding
    micro_batch: MicroBatch | None
    """None: the model runs the attention it had before CAD (generation with a cache)."""
    training: bool = False
    shared: bool = False
    """Other ranks take part in its attention; so in all training."""
    unread: Unread | None = None
    empty: bool = False
    """This rank has no tokens: the model runs on one row of padding, which is taken out of its output."""
    alone: Check | None = None
    """The decoder runs without CAD, to be compared."""
    shown: int = 0
    """Tokens of the longest document, where a ready-made mask shows all of it to its last token."""
    in_pieces: bool = False
    """Evaluation with Ulysses: documents are read inside attention."""
    part: int | None = None
    """The nano-batch that the decoder runs on, where both alternate over it."""


_CHANGES = re.compile("indices|bias|alibi|score_mod|soft_?cap|sink|(head|block)_mask")
"""In names of arguments that change what attention computes; s_aux and softcap come under their own."""
running: ContextVar[Scope | None] = ContextVar("deepspeed_cad_scope", default=None)


@torch.compiler.disable
def cad_mask(*args: Any, **kwargs: Any) -> Any:
    """The mask function: the running forward's descriptor, or the model's own mask outside of one."""
    if (scope := running.get()) is not None and scope.in_pieces:
        return PieceMask(scope.binding, None, kwargs.get("local_size"))
    if scope is None or scope.micro_batch is None:
        name = scope.binding.original if scope is not None else default_attention(kwargs.get("config"))
        known = name in ALL_MASK_ATTENTION_FUNCTIONS._global_mapping
        return ALL_MASK_ATTENTION_FUNCTIONS[name if known else "sdpa"](*args, **kwargs)
    window, chunk = kwargs.get("local_size"), chunk_of(kwargs)
    if scope.alone is not None:
        return Alone(scope.alone.documents, window, scope.binding.original)
    if window is not None and scope.shown > window:
        scope.binding.feed.fail(
            CADUnsupportedError(
                f"a ready-made attention mask shows a document of {scope.shown} tokens whole, but layers of this model "
                f"have a window of {window} tokens, which such a mask takes the place of. Pass position_ids that start "
                "again at 0 at each document, and no mask"
            )
        )
    session = scope.binding.session
    local = scope.micro_batch.local(scope.part)
    # Where chunks begin in a packed row, the model's own mask does not know.
    checks = chunk is None and session.config.check == "sampled" and (scope.training or not scope.binding.forwards)
    if checks and not is_of_a_piece(local, kwargs, session.shares.count):
        try:
            check_mask(local, window, kwargs, scope.binding.forwards)
        except CADError as error:
            scope.binding.feed.fail(error)
    found = session.descriptor(scope.micro_batch, None if chunk else window, chunk=chunk)
    if scope.binding.ulysses is not None:
        return PieceMask(scope.binding, found, window)
    return found if scope.part is None else found.part(scope.part)


@torch.compiler.disable
def cad_attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
    scaling: float | None = None, dropout: float = 0.0, softcap: float | None = None, s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """The attention function. query [B, H, S, D], key and value [B, K, S, D]; gives [B, S, H, V]. What ranks divide
    among them comes as DTensors, or as this rank's part: attention is that of its heads."""
    given = {"scaling": scaling, "dropout": dropout, "softcap": softcap, **kwargs}
    if isinstance(query, DTensor):
        given |= {"module": module, "attention_mask": attention_mask}
        return attend_locally(cad_attention, query, key, value, s_aux, **given), None
    given["s_aux"] = s_aux = None if s_aux is None else to_local(s_aux)
    if isinstance(attention_mask, PieceMask):
        return attention_mask.attend(cad_attention, module, query, key, value, **given)
    if isinstance(attention_mask, Alone):
        return attention_mask.attend(module, query, key, value, **given), None
    if not isinstance(attention_mask, MaskDescriptor):
        if (scope := running.get()) is not None and scope.micro_batch is not None:
            raise CADUnsupportedError(
                f"{type(module).__name__} got no mask from the mask function: this model bypasses it, so CAD cannot "
                "know its documents"
            )
        if scope is None and module.training and torch.is_grad_enabled():
            session = current_session()
            if session is None or not any(one.comparing for one in session.bindings.values()):
                _warn_of_copy()
        name = scope.binding.original if scope is not None else default_attention(getattr(module, "config", None))
        return local_attention(module, name)(module, query, key, value, attention_mask, **given)
    if (session := current_session()) is not None and session.shares.count > 1:
        refuse_heads(module, query, key, s_aux)
    query = as_alone(module, query, attention_mask)
    check: Check | None = attention_mask.micro_batch.check
    run = attention_mask.attend if check is None else partial(check.attend, attention_mask)
    window = attention_mask.window
    return attend_layer(run, module, query, key, value, window, scaling, dropout, softcap, s_aux, kwargs), None


@functools.cache
def _warn_of_copy() -> None:
    logger.warning(
        "deepspeed_cad: a model trains without CAD that has CAD's attention: it is a copy of the one for which CAD was "
        "turned on, or a part of that is called by itself. Call deepspeed_cad.apply for the model that trains"
    )


def attend_layer(
    run: Callable[[LayerInput], torch.Tensor], module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor,
    value: torch.Tensor, window: int | None, scaling: float | None, dropout: float, softcap: float | None,
    sinks: torch.Tensor | None, others: Mapping[str, Any],
) -> torch.Tensor:  # fmt: skip
    """O [B, S, H, V] of a layer, from q [B, H, S, D], k and v [B, K, S, D or V]. `run`: see function.attend; `others`:
    all else that the attention function received. Raises CADUnsupportedError for what changes what attention computes,
    and CADError where there are more keys than queries. `is_causal` is not looked at: models set it to False wherever a
    mask is given."""
    if dropout:
        raise CADUnsupportedError(
            f"attention dropout is {dropout}; CAD needs 0 (set attention_dropout=0.0 in the model's config)"
        )
    label = name_layer(module)
    for name in (name for name in others if others[name] is not None and _CHANGES.search(name)):
        raise CADUnsupportedError(f"{label} passes {name} to its attention, which CAD cannot reproduce")
    if key.shape[2] != query.shape[2]:
        raise CADError(
            f"{label} got {key.shape[2]} keys for {query.shape[2]} queries: a KV cache is in use during training; "
            "pass use_cache=False"
        )
    if not (query.dtype == key.dtype == value.dtype or torch.is_autocast_enabled(query.device.type)):
        raise CADDataError(f"{label}: q, k and v are {query.dtype}, {key.dtype}, {value.dtype}; expected one dtype")
    o_THV = attend(
        run, flat(query), flat(key), flat(value), layer=module, label=label,
        softmax_scale=scaling, window=window, softcap=softcap, sinks=sinks,
    )  # fmt: skip
    return o_THV.unflatten(0, (query.shape[0], query.shape[2]))


def flat(x_BHSD: torch.Tensor) -> torch.Tensor:
    """[T, H, D] of [B, H, S, D]."""
    return x_BHSD.transpose(1, 2).flatten(0, 1)


# Chunked attention (Llama 4): a token sees those of its own chunk, counted from the begin of its document. transformers
# counts chunks, and the temperature of layers without rotary positions, from the begin of a packed row.


def chunk_of(given: Mapping[str, Any]) -> int | None:
    """The size of the chunks of a mask, in tokens; None where it has a window, or all keys. `given`: what a mask
    function got. No model has both."""
    config: Any = given.get("config")
    size: int | None = given.get("local_size")
    return size if size is not None and has_chunks(config) and size == config.attention_chunk_size else None


def as_alone(module: Any, query: torch.Tensor, descriptor: MaskDescriptor) -> torch.Tensor:
    """Queries [B, H, S, D] scaled by their positions in documents, where a layer scaled them by those in rows."""
    if not getattr(module, "attn_temperature_tuning", False) or getattr(module, "use_rope", True):
        return query
    position = descriptor.micro_batch.local(descriptor.nano_batch).positions()
    batch, _, width, _ = query.shape
    if len(position) != batch * width or max(width, int(position.max(initial=0)) + 1) < module.floor_scale:
        return query
    in_row = np.arange(width)
    position = np.where(position < 0, np.tile(in_row, batch), position).reshape(batch, width)

    def temperature(at: np.ndarray) -> torch.Tensor:
        steps = torch.floor((torch.from_numpy(at).to(query.device).float() + 1.0) / module.floor_scale)
        return (torch.log1p(steps) * module.attn_scale + 1.0).to(torch.promote_types(query.dtype, torch.float32))

    return (query * (temperature(position) / temperature(in_row))[:, None, :, None]).to(query.dtype)
