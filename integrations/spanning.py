"""Layers that carry state, run on documents that span ranks.

Projections, gates and norms run on the rank's own rows as they are. Two functions of the layer's module are others
while it runs: the convolution gets the rows before each piece. The recurrent kernel runs piece by piece, each from the
state behind the one before it, or whole documents, of some heads on each rank. `B` is 1 here, `T` rows, `H` heads or
channels, `G` head groups, `x` any size.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from deepspeed_cad.integrations.structure import name_layer, replaced
from torch import nn

from deepspeed_cad.attention.spanning import Share, Spanning
from deepspeed_cad.errors import CADUnsupportedError
from deepspeed_cad.session import Session
from deepspeed_cad.shares import MOST_PIECES, choose_groups

CONVOLUTION = "causal_conv1d_fn"
KERNELS: dict[str, dict[str, str]] = {
    "torch_chunk_gated_delta_rule": {"query": "BTHx", "key": "BTHx", "value": "BTHx", "g": "BTH", "beta": "BTH"},
    "chunk_kimi_delta_attention": {"query": "BTHx", "key": "BTHx", "value": "BTHx", "g": "BTHx", "beta": "BTH"},
    "mamba2_chunk_scan": {
        "hidden_states": "BTHx", "dt": "BTH", "A": "H", "B": "BTHx", "C": "BTHx", "D": "H", "dt_bias": "H",
    },
    "mamba_selective_scan": {
        "hidden_states": "BHT", "dt": "BHT", "A": "H", "B": "BxT", "C": "BxT", "D": "H", "z": "BHT", "delta_bias": "H",
    },
}  # fmt: skip
"""Recurrent kernels by their names in transformers, with the axes of their tensors. The output is like the first one.
H alone: a parameter of each head. Tensors may have fewer heads than others; each then serves as many."""
STATES = {
    "torch_chunk_gated_delta_rule": ("initial_state", "output_final_state", "key", "value"),
    "chunk_kimi_delta_attention": ("initial_state", "output_final_state", "key", "value"),
    "mamba2_chunk_scan": ("initial_states", "return_final_states", "hidden_states", "B"),
}
"""How kernels call the state that they begin with and the wish for the one that they end with, both [1, H, x, x'], and
the tensors that have x and x'. Kernels of the first wish give two things in any case."""
FUSED = ("mamba2_split_conv1d_scan_combined", "mamba_inner_fn")
"""Convolution and kernel in one: they give None where they cannot run, and the layer takes the two instead."""


def why_not(session: Session, layers: Mapping[str, nn.Module]) -> str:
    """Why documents must not span ranks in a model with these layers that carry state; empty where they may."""
    module = next(iter(layers.values()))
    if session.servers.at_start:
        return f'state of {name_layer(module)} does not travel beside reserved servers ("servers")'
    if session.shares.count > 1:
        return f"state of {name_layer(module)} does not travel where ranks divide heads (tensor parallelism)"
    for module in layers.values():
        found = vars(sys.modules[type(module).__module__])
        if CONVOLUTION not in found or (hasattr(module, "A_log") and not KERNELS.keys() & found.keys()):
            return f"{name_layer(module)} has no kernel that CAD knows, so its state cannot travel"
    return ""


@torch.compiler.disable
def run_over_ranks(
    module: nn.Module, run: Callable[[torch.Tensor], torch.Tensor], hidden_1TD: torch.Tensor, spanning: Spanning
) -> torch.Tensor:
    """A layer's output [1, T, D] for this rank's rows of documents that span ranks, or for one row that stands in
    where it has none. Collective: every rank runs the same layers."""
    home = vars(sys.modules[type(module).__module__])
    called = set()

    def other(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        own = home[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            called.add(name)
            return function(own, spanning, module, *args, **kwargs)

        return call

    others = {name: other(name, functools.partial(_run_kernel, name)) for name in KERNELS if name in home}
    others[CONVOLUTION] = other(CONVOLUTION, _convolve)
    expected = set(others)
    others |= {name: lambda *args, **kwargs: None for name in FUSED if name in home}
    with replaced(home, others):
        output = run(hidden_1TD)
    if called != expected:
        raise CADUnsupportedError(
            f"{name_layer(module)} did not call {', '.join(sorted(expected - called))}, so its state did not travel "
            "with documents that span ranks. Give every rank whole documents"
        )
    return output


def _convolve(
    own: Callable[..., Any], spanning: Spanning, layer: nn.Module, x_1CT: torch.Tensor, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """A causal convolution whose pieces have the rows before them in front."""
    count, rows_TC = (args[0] if args else kwargs["weight"]).shape[-1] - 1, x_1CT[0].T
    before = spanning.before(count)
    blank = rows_TC.new_zeros(count, rows_TC.shape[1])
    came = spanning.bring(before.exchange, layer, CONVOLUTION, rows_TC.index_select(0, before.sent))
    gots, sizes = before.gots, [piece.size for piece in spanning.pieces]
    parts = zip(gots, came.split(gots), rows_TC.split(sizes))
    joined = torch.cat([one for got, ahead, piece in parts for one in (blank[got:], ahead, piece)])
    output: torch.Tensor = own(joined.T[None].contiguous(), *args, **kwargs)
    if len(sizes) == 1:  # cut off at once: gradients of parts are joined slowly along the innermost dimension
        return output[:, :, count:]
    return torch.cat(output.split([part for size in sizes for part in (count, size)], dim=2)[1::2], dim=2)


def _run_kernel(
    name: str, own: Callable[..., Any], spanning: Spanning, layer: nn.Module, *args: Any, **kwargs: Any
) -> Any:
    """A recurrent kernel on this rank's rows with the state of others, or on whole documents, some heads of each."""
    axes = KERNELS[name]
    # Packages name what comes by position otherwise, and order what comes by keyword otherwise: both stay as they are.
    placed = list(axes)[: len(args)]
    given = {**dict(zip(placed, args)), **kwargs}
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    unknown = (tensors.keys() - axes.keys()) | {name for name in placed if name not in tensors}
    if unknown or len(placed) < len(args):
        raise CADUnsupportedError(
            f"{name_layer(layer)} called its kernel in a way that CAD does not know ({len(args)} arguments by "
            f"position, {', '.join(sorted(unknown))}), so its state cannot travel. Give every rank whole documents"
        )
    if name in STATES and spanning.longest <= MOST_PIECES:
        return _hand_on(name, own, spanning, layer, placed, given)
    return _part_heads(axes, own, spanning, layer, placed, given)


def _hand_on(
    name: str, own: Callable[..., Any], spanning: Spanning, layer: nn.Module, placed: list[str], given: dict[str, Any]
) -> Any:
    """The kernel piece by piece, each from the state behind the one before it: first all ranks run the first pieces of
    documents, then the second ones. While a rank waits for a state, the one before it may run the next layer."""
    begins_with, wishes, *of_state = STATES[name]
    tensors = {one: x for one, x in given.items() if isinstance(x, torch.Tensor)}
    rows = [one for one in tensors if KERNELS[name][one].startswith("BT")]
    state = 1, max(given[one].shape[2] for one in rows), *(given[one].shape[3] for one in of_state)
    like, dtype = given[of_state[0]], torch.promote_types(given[of_state[0]].dtype, torch.float32)
    pieces, sizes = spanning.pieces, [piece.size for piece in spanning.pieces]
    parts = {one: given[one].split(sizes, dim=1) if len(sizes) > 1 else [given[one]] for one in rows}
    came, outputs = like.new_empty(0, math.prod(state), dtype=dtype), list[Any]([None] * len(pieces))
    for place in range(spanning.longest):
        behind, initials = [came[:0]], iter(came)
        for at in [at for at, piece in enumerate(pieces) if piece.place == place]:
            call = {**given, **{one: parts[one][at] for one in rows}, wishes: not pieces[at].is_last}
            call[begins_with] = next(initials).view(state) if place else None
            output = own(*[call.pop(one) for one in placed], **call)
            outputs[at], final = output if isinstance(output, tuple) else (output, None)
            behind += [] if pieces[at].is_last else [final.to(dtype).reshape(1, -1)]
        if place + 1 < spanning.longest:
            # Every rank has a backward of each exchange, and in this order, whatever requires gradients: all tensors go
            # along with what is sent first, and nothing of what came last with what is sent next and with the output.
            tied = () if place else tensors.values()
            came = spanning.bring(spanning.hops[place], layer, place, torch.cat(behind), *tied)
    whole = torch.cat([*outputs, came[:0].reshape(1, 0, *outputs[0].shape[2:]).to(outputs[0].dtype)], dim=1)
    return (whole, None) if wishes == "output_final_state" else whole


def _part_heads(
    axes: Mapping[str, str], own: Callable[..., Any], spanning: Spanning, layer: nn.Module, placed: list[str],
    given: dict[str, Any],
) -> Any:  # fmt: skip
    """The kernel on whole documents, some heads of each on each of its ranks."""
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    of_heads = {name for name in tensors if axes[name] == "H"}
    of_rows = {name: _Grouped.of(tensors[name], axes[name]) for name in axes if name in tensors.keys() - of_heads}
    first = next(iter(of_rows))
    groups = choose_groups([one.heads for one in of_rows.values()], spanning.widest)
    most = max(one.heads for one in of_rows.values())
    home = [one.by_group(groups)[: len(spanning.rows)] for one in of_rows.values()]
    size = sum(one.shape[2] * one.element_size() for one in home)
    each = most // groups

    def run(share: Share, landed: list[torch.Tensor]) -> Any:
        call = dict(given)
        for (name, one), part in zip(of_rows.items(), landed):
            heads_first = part.unflatten(0, (share.end - share.begin, share.tokens))
            # A copy: landing memory is used again.
            call[name] = one.ungroup(heads_first.transpose(0, 1), groups).clone(memory_format=torch.contiguous_format)
        for name in of_heads:
            call[name] = tensors[name][share.begin * each : share.end * each]
        return own(*[call.pop(name) for name in placed], **call)

    rows_nGw: torch.Tensor | None = None
    for wave in spanning.heads(groups, size, name_layer(layer)):
        landed, home = spanning.gather(wave.schedule, layer, home)
        if not wave.shares:
            # Who runs no heads learns from one row what an output is like; what landed, nothing, stays in the graph.
            landed = [torch.cat([one, x.by_group(groups)[:1, 0]]) for one, x in zip(landed, of_rows.values())]
        runs = wave.shares or [Share(1, 0, 1)]
        parts = zip(*(one.split([(end - begin) * tokens for tokens, begin, end in runs]) for one in landed))
        found: list[torch.Tensor] = []
        for share, part in zip(runs, parts):
            output = run(share, list(part))
            like = _Grouped.of(output[0] if isinstance(output, tuple) else output, axes[first])
            found.append(like.by_group(share.end - share.begin).transpose(0, 1).flatten(0, 1))
        served = torch.cat(found) if wave.shares else found[0][:0]
        if rows_nGw is None:
            shape = max(len(spanning.rows), 1), groups, served.shape[1]
            rows_nGw = served.new_empty(shape) if len(spanning.rows) else served.new_zeros(shape)
        rows_nGw = spanning.scatter(wave.schedule, layer, rows_nGw, served)
    assert rows_nGw is not None
    whole = _Grouped(rows_nGw, most, axes[first]).ungroup(rows_nGw, groups).contiguous()
    return (whole, *[None] * (len(output) - 1)) if isinstance(output, tuple) else whole


class _Grouped:
    """A tensor with rows and heads, and its form between ranks: [T, groups, heads of a group · x]."""

    def __init__(self, rows: torch.Tensor, heads: int, axes: str) -> None:
        self.rows, self.heads, self.axes = rows, heads, axes

    @classmethod
    def of(cls, tensor: torch.Tensor, axes: str) -> _Grouped:
        """`rows` [T, H] or [T, H, x] of a tensor with such axes."""
        rows = tensor.squeeze(0).mT if axes in ("BHT", "BxT") else tensor.squeeze(0)
        rows = rows.unsqueeze(1) if axes == "BxT" else rows
        return cls(rows, rows.shape[1], axes)

    def by_group(self, groups: int) -> torch.Tensor:
        """[T, groups, …]; a head that several groups need comes with each."""
        rows = self.rows
        if self.heads < groups:
            rows = rows.repeat_interleave(groups // self.heads, dim=1)
        return rows.unflatten(1, (groups, -1)).flatten(2)

    def ungroup(self, part: torch.Tensor, groups: int) -> torch.Tensor:
        """Some of so many groups, [T, some, …], with the tensor's own axes."""
        if self.axes == "BxT":
            return part[:, 0].T[None]
        rows = part.unflatten(2, (max(self.heads // groups, 1), -1)).flatten(1, 2)
        rows = rows if self.axes == "BTHx" else rows.squeeze(-1)
        return (rows.T if self.axes == "BHT" else rows)[None]
