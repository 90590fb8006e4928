"""A decoder of transformers that runs as two nano-batches which alternate over its layers: `"overlap": "interleave"`.

It gets a subclass of its own class, whose forward runs the original twice, in two greenlets, each with its share of the
arguments and a scope that says which nano-batch it is, and joins what both return (tensors, tuples, dicts, output
classes of transformers): see nano_batches.py for the order.
Where that cannot be, one line says why, and micro-batches are no longer cut: as with `"local_first"`. Nothing is looked
at but the model and what wraps its modules, so every rank finds the same.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import transformers
from deepspeed_cad.integrations.functions import Scope, running
from deepspeed_cad.integrations.models import LAYER_TYPES, is_reentrant
from deepspeed_cad.integrations.structure import decoder_layers, subclass_of
from torch import nn
from torch._C._dynamo.eval_frame import set_eval_frame

from deepspeed_cad.ahead.documents import batch_shape
from deepspeed_cad.ahead.step import EXPERTS, OF_EXPERTS, batch_rope, find_random
from deepspeed_cad.attention.microbatch import MicroBatch, NotInterleaved
from deepspeed_cad.attention.nano_batches import RandomStream, ThreadState, run_alternating
from deepspeed_cad.notice import notice

if TYPE_CHECKING:
    from deepspeed_cad.integrations.transformers import Binding

ONE_AT_A_TIME = not hasattr(transformers.utils, "output_capturing")
"""Before that file was there, a forward replaced the forwards of its layers to record what they return."""
_WHOLE = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "max_length_q", "max_length_k")
"""Arguments that both nano-batches get as they are: no row of them belongs to one token."""
_GOLDEN = 0x9E3779B97F4A7C15
"""An odd number whose multiples are far apart: 2^64 over the golden ratio."""


class _Interleaved:
    """Marks the subclasses that `interleave` gives to decoders."""


def interleave(decoder: nn.Module) -> None:
    """Give a decoder a subclass of its own class that can run as two nano-batches."""
    if not isinstance(decoder, _Interleaved):
        decoder.__class__ = _interleaved_class(type(decoder))  # type: ignore[arg-type]


@functools.cache
def _interleaved_class(cls: type[nn.Module]) -> type:
    @functools.wraps(cls.forward)  # its signature: transformers and CAD read arguments by it
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        whole = functools.partial(cls.forward, self)
        scope = running.get()
        if scope is None or scope.part is not None or scope.alone is not None or scope.micro_batch is None:
            return whole(*args, **kwargs)
        if scope.binding.decoder() is not self or len(scope.micro_batch.ticks) == 1 or records(self, kwargs):
            return whole(*args, **kwargs)
        if scope.binding.in_turn is None:  # its first forward, when every wrapper is on it
            _refuse(scope.binding, next(why_not_twice(self, scope.binding.session.config.overlap == "auto"), ""))
        if scope.binding.in_turn:
            return whole(*args, **kwargs)
        return _run_parts(whole, scope, scope.micro_batch, args, kwargs)

    return subclass_of(cls, _Interleaved, forward=forward)


def _refuse(binding: Binding, reason: str) -> None:
    """From now on the nano-batches of a model do not alternate, for a reason; none: they do."""
    binding.in_turn = reason
    if reason:
        binding.feed.stays_whole()
        if binding.session.rank == 0:
            wait = ", so reserved servers wait while its linear layers run" if binding.session.servers.at_start else ""
            notice(f'"overlap" is "local_first" for {type(binding.decoder()).__name__}{wait}: {reason}')


@functools.partial(torch.compiler.disable, recursive=False)
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
        with _dynamo_off() as seen:

            def run(part: int) -> Any:
                running.set(replace(scope, part=part))
                return seen(whole, {name: pair[part] for name, pair in pairs.items()})

            states = ThreadState(device, streams[0]), ThreadState(device, streams[1])
            first, second = run_alternating(lambda: run(0), lambda: run(1), states)
        return cut.join(first, second)
    except NotInterleaved as reason:
        _refuse(scope.binding, str(reason))
    except CannotJoin as reason:
        # Both ran, on every rank, and every rank found this: all of them run the whole micro-batch again.
        micro_batch.forget_calls()
        _refuse(scope.binding, f"it returns {reason}")
    finally:
        # The numbers after this forward are not those that a nano-batch drew.
        streams[0].put_on()
    return whole(*args, **kwargs)


@contextmanager
def _dynamo_off() -> Iterator[Callable[..., Any]]:
    """Keeps torch.compile's frame hook off inside, except in what is called by the function that it gives: Dynamo looks
    at both runs of a compiled decoder and not at what alternates them. It is off whenever nano-batches hand over."""
    hook = set_eval_frame(None)

    def call(function: Callable[..., Any], given: dict[str, Any]) -> Any:
        set_eval_frame(hook)
        try:
            return function(**given)
        finally:
            set_eval_frame(None)

    try:
        yield call
    finally:
        set_eval_frame(hook)


def why_not_twice(decoder: nn.Module, as_whole: bool) -> Iterator[str]:
    """Why the decoder cannot run twice at a time, each on a part of the tokens; `as_whole`: with the same dropout."""
    config = getattr(decoder, "config", None)
    # Each call of a layer gathers its parameters and gives them back, while the other nano-batch is inside.
    if any(hasattr(parameter, "ds_id") for parameter in decoder.parameters()):
        yield "ZeRO-3 shards the parameters, and a layer that ran gives them back"
    for module in decoder.modules():
        if type(module).__module__.startswith(EXPERTS):
            yield OF_EXPERTS
        if hasattr(module, "_get_fsdp_state") or hasattr(module, "_fsdp_wrapped_module"):
            yield "FSDP wraps its layers, and a layer that ran gives its parameters back or reduces their gradients"
        function = getattr(module, "_gradient_checkpointing_func", None)
        if getattr(module, "gradient_checkpointing", False) and function is not None and is_reentrant(function):
            yield (
                "reentrant checkpointing runs the backward of a layer in one piece; set use_reentrant to false "
                "(gradient_checkpointing_kwargs)"
            )
    if other := sorted(map(str, set(getattr(config, "layer_types", None) or ()) - LAYER_TYPES)):
        yield f"layers of type {', '.join(other)} look at earlier tokens by other ways than attention"
    for index, layer in enumerate(decoder_layers(decoder) or ()):
        if not any("Attention" in type(module).__name__ for module in layer.modules()):
            yield f"layer {index} has no attention, and nobody knows which tokens it looks at"
        if any(isinstance(module, nn.Conv1d) for module in layer.modules()):
            yield f"layer {index} has a convolution over tokens"
    if as_whole and (random := find_random(decoder)):
        yield f'{random} ("overlap": "interleave" lets it)'
    if kind := batch_rope(config):
        yield f'rope_type is "{kind}": its frequencies depend on the largest position in the batch'
    if getattr(config, "model_type", "") == "opt":
        yield "OPT counts positions by its padding mask"
    if "deepstack_visual_embeds" in inspect.signature(decoder.forward).parameters:
        yield "features of images are added between its layers"


def records(decoder: nn.Module, given: Mapping[str, Any]) -> bool:
    """Whether a forward with these arguments records outputs of layers in a way that two at a time would disturb."""
    if not ONE_AT_A_TIME:
        return False
    config = getattr(decoder, "config", None)
    names = ("output_hidden_states", "output_router_logits")
    return any(getattr(config, name, False) if given.get(name) is None else given[name] for name in names)


class CannotJoin(Exception):
    """What of an output has no rows, in words."""


@dataclass(frozen=True)
class RowCut:
    """Between the tokens of one row, or between batch rows. A nano-batch without rows runs on a stand-in, since models
    cannot run on none, and `join` drops it."""

    batch: int
    width: int
    at: int
    """Rows of the flattened [batch · width] buffer in the first nano-batch; a multiple of `width` if batch > 1."""

    def split(self, value: Any) -> tuple[Any, Any]:
        """An argument for both nano-batches; what has no rows to cut goes to both unchanged."""
        if isinstance(value, torch.Tensor):
            if (dim := self._dim(value)) is None:
                return value, value
            at, rows = self._at, value.shape[dim]
            # One split, not two slices: its backward is one concatenation instead of two zero-filled tensors and a sum.
            first, second = torch.split(value, [at, rows - at], dim=dim)
            return first if at else value.narrow(dim, 0, 1), second if at < rows else value.narrow(dim, 0, 1)
        if type(value) in (tuple, list):
            pairs = [self.split(item) for item in value]
            return type(value)(a for a, _ in pairs), type(value)(b for _, b in pairs)
        if type(value) is dict:
            pairs_of = {key: self.split(item) for key, item in value.items()}
            return {k: a for k, (a, _) in pairs_of.items()}, {k: b for k, (_, b) in pairs_of.items()}
        return value, value

    def _dim(self, value: torch.Tensor) -> int | None:
        """The dimension of an argument that has rows."""
        shape, rows = tuple(value.shape), (self.batch, self.width)
        # Of [X, batch, width, ...] X are axes of positions, and not batch rows.
        axes = self.batch == 1 or shape[:1] != (self.batch,) or not value.is_floating_point()
        if self.batch == 1:
            if shape[:2] == rows:
                return 1
            if shape == (self.width,):
                return 0
            if len(shape) == 4 and shape[0] == 1 and shape[2] == self.width:
                return 2  # heads before tokens
        if axes and shape[1:3] == rows:
            return 2 if self.batch == 1 else 1
        return 0 if self.batch > 1 and len(shape) >= 2 and shape[0] == self.batch else None

    @property
    def _at(self) -> int:
        return self.at if self.batch == 1 else self.at // self.width

    def join(self, first: Any, second: Any, name: str = "its output") -> Any:
        """What the decoder would have returned; `name` says in errors where in the output it is."""
        if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
            return self._join_rows(first, second, name)
        if first is second:
            return first
        if type(first) is not type(second):
            raise CannotJoin(f"{name}, a {type(first).__name__} and a {type(second).__name__}")
        if isinstance(first, dict) and first.keys() == second.keys():
            joined = type(first)()
            for key in first:  # one by one: recorded outputs have keys that an output class does not declare
                joined[key] = self.join(first[key], second[key], f'"{key}"')
            return joined
        if type(first) in (tuple, list) and len(first) == len(second):
            return type(first)(self.join(x, y, f"{name}[{i}]") for i, (x, y) in enumerate(zip(first, second)))
        if isinstance(first, (bool, int, str)) and first == second:
            return first
        raise CannotJoin(f"{name}, a {type(first).__name__}")

    def _join_rows(self, first: torch.Tensor, second: torch.Tensor, name: str) -> torch.Tensor:
        at, rows = self._at, self.width if self.batch == 1 else self.batch
        counts = max(at, 1), max(rows - at, 1)
        shapes = [list(x.shape) for x in (first, second)]
        dim = int(self.batch == 1 and all(len(one) >= 2 and one[0] == 1 for one in shapes))
        # Routers flatten batch rows.
        each = self.width if self.batch > 1 and shapes[0][:1] == [counts[0] * self.width] else 1
        if shapes != [[*shapes[0][:dim], n * each, *shapes[0][dim + 1 :]] for n in counts]:
            raise CannotJoin(f"{name} of shapes {shapes[0]} and {shapes[1]}")
        # A stand-in stays in the graph, so that the backward of both nano-batches runs on every rank.
        joined = torch.cat([first, second], dim)
        return joined if 0 < at < rows else joined.narrow(dim, each if at == 0 else 0, rows * each)
