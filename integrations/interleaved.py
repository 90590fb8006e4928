"""A decoder of transformers that runs as two nano-batches which alternate over its layers: `"overlap": "interleave"`.

The decoder keeps its code and its parameters; it gets a subclass of its own class. Its forward runs the original twice,
in two greenlets, each with its share of the arguments and a scope that says which nano-batch it is, and joins what both
return. Layers then belong to one nano-batch per call, also for checkpointing. See pingpong.py for the order.

Where that cannot be, the decoder runs as it is and nano-batches alternate inside its layers (alternating.py).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from deepspeed_cad.integrations.alternating import DynamoOff, keep_hook
from deepspeed_cad.integrations.functions import Scope, running
from deepspeed_cad.integrations.interleavable import records, why_not_twice
from deepspeed_cad.integrations.joined import CannotJoin, Join
from deepspeed_cad.integrations.mixed_in import subclass_of

from deepspeed_cad.ahead.documents import batch_shape
from deepspeed_cad.attention.microbatch import MicroBatch, NotInterleaved
from deepspeed_cad.attention.pingpong import RowCut, run_alternating
from deepspeed_cad.notice import notice

try:
    from deepspeed_cad.attention.thread_state import RandomStream, ThreadState

    MISSING = ""
except ImportError as error:  # private names of another torch
    MISSING = f"this torch ({torch.__version__}) keeps its state elsewhere: {error}"

_WHOLE = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "max_length_q", "max_length_k")
"""Arguments that both nano-batches get as they are: no row of them belongs to one token."""

_GOLDEN = 0x9E3779B97F4A7C15
"""An odd number whose multiples are far apart: 2^64 over the golden ratio."""


class Interleaving:
    """Whether the nano-batches of one model alternate over its decoder; decided once, on every rank alike."""

    def __init__(self, speaks: bool) -> None:
        """`speaks`: this rank says why not."""
        self._speaks, self._asked = speaks, False
        self.reason = ""
        """Why not; empty where they do."""

    def ask(self, decoder: torch.nn.Module) -> bool:
        """Whether they do. Looks at the model at its first forward, when every wrapper is on it."""
        if not self._asked:
            self._asked = True
            self.refuse(MISSING or why_not_twice(decoder))
        return not self.reason

    def refuse(self, reason: str) -> None:
        """They do not from now on, for a reason; none: nothing changes."""
        if reason and not self.reason:
            self.reason = reason
            if self._speaks:
                notice(f"nano-batches alternate inside layers, not over the whole decoder: {reason}")


class _Interleaved:
    """Marks the subclasses that `interleave` gives to decoders."""


def interleave(decoder: torch.nn.Module) -> None:
    """Give a decoder a subclass of its own class that can run as two nano-batches."""
    if not isinstance(decoder, _Interleaved):
        decoder.__class__ = _interleaved_class(type(decoder))  # type: ignore[arg-type]


@functools.cache
def _interleaved_class(cls: type[torch.nn.Module]) -> type:
    @functools.wraps(cls.forward)  # its signature: transformers and CAD read arguments by it
    def forward(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        whole = functools.partial(cls.forward, self)
        scope = running.get()
        if scope is None or scope.part is not None or scope.alone is not None or scope.micro_batch is None:
            return whole(*args, **kwargs)
        if scope.binding.decoder() is not self or len(scope.micro_batch.ticks) == 1:
            return whole(*args, **kwargs)
        if records(self, kwargs) or not scope.binding.interleaving.ask(self):
            return whole(*args, **kwargs)
        return _run_parts(whole, scope, scope.micro_batch, args, kwargs)

    return subclass_of(cls, _Interleaved, forward=forward)


@functools.partial(torch.compiler.disable, recursive=keep_hook)
def _run_parts(
    whole: Callable[..., Any], scope: Scope, micro_batch: MicroBatch, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    given = dict(zip(inspect.signature(whole).parameters, args, strict=False)) | kwargs
    batch, width = batch_shape(given)
    cut = RowCut(batch, width, micro_batch.rows(0))
    device = scope.binding.session.device
    if batch == 1 and given.get("position_ids") is None:
        # The second nano-batch does not begin at position 0, and the model would number its rows from there.
        given["position_ids"] = torch.arange(width, device=device)[None]
    pairs = {name: (value, value) if name in _WHOLE else cut.split(value) for name, value in given.items()}
    # Another stream for each micro-batch, without drawing from one that the training script may use too.
    seed = (torch.initial_seed() + (micro_batch.turn + 1) * _GOLDEN) % 2**63
    streams = RandomStream(device), RandomStream(device, seed)
    try:
        with DynamoOff() as dynamo:

            def run(part: int) -> Any:
                running.set(replace(scope, part=part))
                return dynamo.run(whole, (), {name: pair[part] for name, pair in pairs.items()})

            states = ThreadState(device, streams[0]), ThreadState(device, streams[1])
            first, second = run_alternating(lambda: run(0), lambda: run(1), states)
        return Join(cut).join(first, second)
    except NotInterleaved as reason:
        scope.binding.interleaving.refuse(str(reason))
    except CannotJoin as reason:
        # Both ran, on every rank, and every rank found this: all of them run the whole micro-batch again.
        micro_batch.forget_calls()
        scope.binding.interleaving.refuse(f"{type(scope.binding.decoder()).__name__} returns {reason}")
    finally:
        # The numbers after this forward are not those that a nano-batch drew.
        streams[0].put_on()
    return whole(*args, **kwargs)
