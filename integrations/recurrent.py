"""Layers that carry state from token to token, in models that mix them with attention.

Where the kernels of delta nets, state spaces (Mamba) and short convolutions take borders of documents they get them;
where only a convolution ignores them, blank rows part the documents; else documents run one by one, which is exact
whatever the layer does. `borders.py` finds out which, on the layer itself. The borders come to a decoder layer as
an argument, so that every kind of checkpointing repeats them, and from there to the layers inside. `B` batch rows, `S`
tokens of each, `T` = B · S, `D` hidden size.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed_cad.integrations.borders import NAME, Borders, Way, find_way, take
from deepspeed_cad.integrations.spanning import run_over_ranks
from deepspeed_cad.integrations.structure import has_cache, inside_wrappers, mix_in, name_layer
from torch import nn

from deepspeed_cad.errors import CADError, CADUnsupportedError

logger = logging.getLogger("deepspeed_cad")

CARRYING = {"linear_attention", "mamba", "conv", "hybrid"}
"""Kinds of decoder layers, as configs name them, that hold such a layer."""

_OF_BORDERS = ("cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "max_length_q", "max_length_k", "seq_idx")
"""Arguments that say where documents begin. CAD knows that from the plan and gives its own."""
_WHOLE = (
    "Have its decoder layer gathered as a whole (FSDP: wrap decoder layers only; ZeRO-3: turn CAD on by the DeepSpeed "
    "JSON, or before deepspeed.initialize)"
)
_UNUSED = ("cache_position", "labels", "shift_labels")
"""Tensors that such layers only read with a cache, or never: what a loss reads is handed on to layers too."""


def find_recurrent(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that carry state, by name: their state begins with a causal depthwise convolution of their own."""
    return {name: module for name, module in model.named_modules() if _is_recurrent(module)}


def _is_recurrent(module: nn.Module) -> bool:
    """Whether its one convolution is per channel, over tokens, and causal where its surplus is cut off."""
    if isinstance(module, _Recurrent):  # from here already
        return True
    convolutions = [child for child in module.children() if isinstance(child, nn.modules.conv._ConvNd)]
    if len(convolutions) != 1 or not isinstance(one := convolutions[0], nn.Conv1d):
        return False
    return (
        one.groups == one.in_channels == one.out_channels
        and one.stride == one.dilation == (1,)
        and one.padding == (one.kernel_size[0] - 1,)
        and {"hidden_states", "attention_mask"} <= inspect.signature(type(module).forward).parameters.keys()
    )


def keep_whole(model: nn.Module) -> None:
    """Tell ZeRO-3 to gather each of these layers as a whole; before the engine puts its hooks on the model. Run
    document by document, a layer calls its projections once per document, and ZeRO-3 would gather them as often: a
    different number of times on each rank, which hangs."""
    for module in find_recurrent(model).values():
        hooks = module._forward_pre_hooks.values()
        if not any(getattr(hook, "__module__", "").startswith("deepspeed.") for hook in hooks):
            module._z3_leaf = True  # type: ignore[assignment] # what deepspeed.utils.set_z3_leaf_modules sets


class Ways:
    """How the layers of one model are run, by kind; found out at their first forward. Not a dataclass, as it travels
    with the borders among a layer's arguments."""

    def __init__(self, fail: Callable[[CADError], Any]) -> None:
        """`fail` stops all ranks with an error."""
        self.fail = fail
        self.found: dict[Any, Way] = {}


@dataclass(eq=False)
class _Inside:
    """A decoder layer that runs now."""

    borders: Borders
    ways: Ways
    seen: int = 0
    """Layers with state that ran in it."""


_inside: ContextVar[_Inside | None] = ContextVar("deepspeed_cad_decoder_layer", default=None)


class _Carrier:
    """Mixed into a decoder layer's class: takes the borders out of its arguments, for what is inside."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        carried = kwargs.pop(NAME, None)
        whole = super().forward  # type: ignore[misc]
        if carried is None:
            return whole(*args, **kwargs)
        inside = _Inside(*carried)
        before = _inside.set(inside)
        try:
            output = whole(*args, **kwargs)
        finally:
            _inside.reset(before)
        inside.borders.arrived = True
        expected = self._cad_recurrent  # type: ignore[attr-defined]
        if inside.seen != expected:
            raise CADUnsupportedError(
                f"{type(self).__name__} has {expected} layers that carry state, but {inside.seen} ran with the borders "
                "of its documents: something replaced their forward (use_kernels, a hub kernel, a hook). Turn that off"
            )
        return output


class _Recurrent:
    """Mixed into the class of a layer that carries state: runs it so that none crosses a border."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # By position: DeepSpeed tells by the gradients of such inputs when a module's backward is over. Where there are
        # none it takes the weights away before the backward has begun.
        if not args and "hidden_states" in kwargs:
            args = (kwargs.pop("hidden_states"),)
        return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        whole = super().forward  # type: ignore[misc]
        if (inside := _inside.get()) is None:
            return whole(*args, **kwargs)
        inside.seen += 1
        return _run(self, whole, inside, args, kwargs)


def watch_state(decoder: nn.Module, layers: nn.ModuleList) -> None:
    """Give decoder layers, and the layers with state inside, subclasses of their own classes. Idempotent."""
    parameters = inspect.signature(decoder.forward).parameters.values()
    if not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters):
        raise CADUnsupportedError(
            f"{type(decoder).__name__} hands no further arguments to its layers, so they cannot learn where documents "
            "begin. Use transformers 5 or newer, or train without CAD"
        )
    for module in find_recurrent(layers).values():
        if "forward" in vars(module):
            raise CADUnsupportedError(
                f"the forward of {type(module).__name__} was replaced on the module itself (use_kernels, a hook), so "
                "CAD cannot keep its state inside documents. Turn that off, or train without CAD"
            )
        mix_in(module, _Recurrent)
    for layer in layers:
        layer = mix_in(inside_wrappers(layer), _Carrier)
        layer._cad_recurrent = sum(isinstance(module, _Recurrent) for module in layer.modules())


@torch.compiler.disable(recursive=False)
def _run(
    module: nn.Module, whole: Callable[..., Any], inside: _Inside, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> torch.Tensor:
    borders = inside.borders
    parameters = inspect.signature(whole).parameters
    given = dict(zip(parameters, args, strict=False)) | kwargs
    hidden_BSD, mask = given.pop("hidden_states"), given.pop("attention_mask", None)
    if not isinstance(mask, torch.Tensor) or mask.ndim != 2:
        # Older versions of transformers hand the mask of attention to all layers, which is a plan here.
        mask = None
    label = name_layer(module)
    given = {name: value for name, value in given.items() if name not in _OF_BORDERS}
    if hidden_BSD.shape[:2] != (borders.batch, borders.width):
        raise CADError(
            f"{label} got {list(hidden_BSD.shape[:2])} tokens where its micro-batch has "
            f"[{borders.batch}, {borders.width}]"
        )
    if has_cache(given):
        if not borders.are_batch_rows:
            raise CADUnsupportedError(f"{label} got a cache for packed documents; pass use_cache=False")
        return whole(hidden_states=hidden_BSD, attention_mask=mask, **given)
    given = {name: value for name, value in given.items() if name not in _UNUSED}
    for name, value in given.items():
        if _has_tokens(value, borders.width):
            inside.ways.fail(CADUnsupportedError(f"{label} gets {name}, which CAD cannot cut at borders of documents"))
    call = _Call(module, functools.partial(whole, **given), parameters)
    # Always, so that every rank runs the same: a rank may have one document now and many later.
    way = _choose(call, inside, hidden_BSD, label)
    if borders.are_batch_rows and borders.spanning is None:
        return call.whole(hidden_BSD, mask)
    flat_1TD, mask_1T = hidden_BSD.flatten(0, 1)[None], None if mask is None else mask.flatten()[None]
    if mask_1T is not None:
        # Layers blank padding themselves, but not all of them in a batch of one row.
        flat_1TD = flat_1TD * mask_1T[..., None].to(flat_1TD.dtype)
    if borders.spanning is None:
        output = call.run(way, borders, flat_1TD, mask_1T)
    else:
        output = _run_spanning(call, way, inside, flat_1TD, mask_1T)
    return output[0].unflatten(0, (borders.batch, borders.width))


def _run_spanning(
    call: _Call, way: Way, inside: _Inside, flat_1TD: torch.Tensor, mask_1T: torch.Tensor | None
) -> torch.Tensor:
    """The layer on packed rows of which some are in documents that span ranks."""
    borders = inside.borders
    assert borders.spanning is not None
    if call.parted:
        inside.ways.fail(
            CADUnsupportedError(
                f"{name_layer(call.module)} would run once more for documents that span ranks, but {call.parted}. "
                f"{_WHOLE}"
            )
        )
    if borders.all_span:
        return run_over_ranks(call.module, call.whole, flat_1TD, borders.spanning)
    whole, spanning, place = borders.order(flat_1TD.device)
    parts = []
    if len(whole):
        mask = None if mask_1T is None else mask_1T.index_select(1, whole)
        parts.append(call.run(way, borders.whole, take(flat_1TD, 1, whole), mask))
    rows = run_over_ranks(call.module, call.whole, take(flat_1TD, 1, spanning), borders.spanning)
    parts.append(rows[:, : len(borders.spanning.rows)])
    return take(torch.cat(parts, dim=1), 1, place)


def _choose(call: _Call, inside: _Inside, hidden_BSD: torch.Tensor, label: str) -> Way:
    """The way for a layer, probed where its kind is new or the sampled check is due."""
    module, ways, borders = call.module, inside.ways, inside.borders
    if borders.apart and not call.parted:
        return Way.DOCUMENTS
    # In training other kernels may run than in evaluation, and in another dtype others again.
    kind = (type(module), module.training, hidden_BSD.dtype, torch.is_autocast_enabled(hidden_BSD.device.type))
    known = ways.found.get(kind)
    if known is not None and (not borders.due or kind in borders.checked):
        return known
    borders.checked.add(kind)
    possible = [way for way in Way if call.can(way)] if known is None else [known]
    way, reasons, certain = find_way(call.run, call.whole, hidden_BSD, possible)
    if way is None:
        ways.fail(
            CADUnsupportedError(
                f"{label} lets state cross from one document to the next ({'; '.join(reasons)}), so CAD cannot "
                "reproduce this model"
            )
        )
    assert way is not None
    if way is Way.DOCUMENTS and call.parted:
        ways.fail(
            CADUnsupportedError(
                f"{label} would run document by document, but {call.parted}. {_package(module)}. Or: {_WHOLE}"
            )
        )
    if certain:
        if not any(kind[0] is one for one, *_ in ways.found):
            _say(module, way, reasons)
        ways.found[kind] = way
    return way


class _Call:
    """One call of a layer, to be run one way or another."""

    def __init__(self, module: nn.Module, whole: Callable[..., Any], parameters: Any) -> None:
        self.module, self._whole = module, whole
        free = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
        self.takes = {name for name in _OF_BORDERS if free or name in parameters}
        self.gap = next(c.kernel_size[0] - 1 for c in module.children() if isinstance(c, nn.Conv1d))

    def whole(self, hidden_BSD: torch.Tensor, mask_BS: torch.Tensor | None = None) -> torch.Tensor:
        """The layer's own forward, each batch row one document."""
        output = self._whole(hidden_states=hidden_BSD, attention_mask=mask_BS)
        if not isinstance(output, torch.Tensor):
            raise CADUnsupportedError(
                f"{type(self.module).__name__} gives a {type(output).__name__}, which CAD cannot join over documents"
            )
        return output

    def can(self, way: Way) -> bool:
        """Whether a way is worth a try."""
        if way is Way.GAPS:
            # Blank rows stay blank up to the convolution only where no projection adds a bias. Biases often begin at
            # zero, so the probe would not see this.
            return all(getattr(m, "bias", None) is None for m in self.module.modules() if isinstance(m, nn.Linear))
        return way is not Way.BORDERS or bool(self.takes & {"cu_seq_lens_q", "seq_idx"})

    @property
    def parted(self) -> str:
        """Why the layer cannot be run a different number of times on each rank; empty where it can."""
        for name, part in self.module.named_modules():
            if name and any(cls.__name__ in ("FSDPModule", "FullyShardedDataParallel") for cls in type(part).__mro__):
                return f"its {name} is sharded on its own (FSDP)"
            own = part.parameters(recurse=False)
            if name and any(hasattr(one, "ds_id") and not hasattr(one, "ds_z3_leaf_module") for one in own):
                return f"its {name} is gathered on its own (ZeRO-3)"
        return ""

    def run(
        self, way: Way, borders: Borders, hidden_1TD: torch.Tensor, mask_1T: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The layer on packed rows."""
        device = hidden_1TD.device
        if way is Way.DOCUMENTS:
            lengths = borders.lengths
            masks = [None] * len(lengths) if mask_1T is None else mask_1T.split(lengths, dim=1)
            pieces = [self.whole(*one) for one in zip(hidden_1TD.split(lengths, dim=1), masks, strict=True)]
            return torch.cat(pieces, dim=1)
        if way is Way.BORDERS:
            told = {"seq_idx": borders.sequence(device)} if "seq_idx" in self.takes else {}
            return self._varlen(borders, hidden_1TD, attention_mask=mask_1T, **told)
        wide, rows = borders.gapped(self.gap, device)
        blank = hidden_1TD.new_zeros(1, wide.width, hidden_1TD.shape[-1])
        return take(self._varlen(wide, blank.index_copy(1, rows, hidden_1TD), attention_mask=None), 1, rows)

    def _varlen(self, borders: Borders, hidden_1TD: torch.Tensor, **told: Any) -> torch.Tensor:
        cumulative, longest = borders.cumulative(hidden_1TD.device), max(borders.lengths)
        for name in self.takes & {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}:
            told[name] = cumulative if name.startswith("cu_") else longest
        output: torch.Tensor = self._whole(hidden_states=hidden_1TD, **told)
        return output


def _has_tokens(value: Any, width: int) -> bool:
    """Whether an argument has a row for each token, as far as its shape tells."""
    if isinstance(value, (list, tuple)):
        return any(_has_tokens(item, width) for item in value)
    return isinstance(value, torch.Tensor) and width > 1 and width in value.shape


def _package(module: nn.Module) -> str:
    """What makes a layer fast."""
    name = type(module).__name__
    if "Delta" in name:
        return "Install flash-linear-attention (and causal-conv1d)"
    if "Conv" in name:
        return "Install causal-conv1d"
    rows = getattr(module, "A_log", None)
    if isinstance(rows, torch.Tensor) and rows.ndim == 2:
        return "The kernels of this first kind of Mamba take no borders, so no package makes it faster"
    return "Install mamba-ssm and causal-conv1d"


def _say(module: nn.Module, way: Way, reasons: list[str]) -> None:
    if way is Way.DOCUMENTS:
        logger.warning(
            "deepspeed_cad: %s runs document by document, which is exact but slow: the kernels in use would let state "
            "cross documents (%s). %s",
            type(module).__name__, "; ".join(reasons) or "they take no borders", _package(module),
        )  # fmt: skip
    else:
        logger.info("deepspeed_cad: %s keeps documents apart: %s", type(module).__name__, way.value)
