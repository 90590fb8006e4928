"""`"verify": N`: the first N micro-batches also run without CAD, and what comes out is compared.

In: a bound model while it trains. Out: one line for each verified micro-batch, or an error that names the tensor, the
rank and both values. Three things are compared, so that it holds under every host framework:

1. The decoder runs a second time, before the first, on the same arguments and random numbers, without gradients: each
   document alone, by the attention function that the model had before CAD. Its output is compared, and the loss where
   the model computes it (the head runs a second time on that output).
2. O of every attention call is compared with plain softmax attention of the Q, K and V that the call got.
3. dQ, dK, dV of every call likewise, for the dO that arrives. The rest of the backward is the same code on the same
   tensors, so gradients of parameters differ exactly where these do. They are not compared themselves: under ZeRO and
   FSDP no rank ever holds them whole.

How far a row may lie off follows from the least precise data type that computes anything on the way: in 1 of all that
ran without CAD, because models compute parts of themselves in fp32, and autocast most of them in bf16; in 2 and 3 of O.

Documents that span ranks cannot be run on one: then 1 is left out, and 2 and 3 look at the others. Where nano-batches
alternate, only 1 is done. `B` batch rows, `S` tokens of each, `T` = B · S; heads and sizes as in attention/serve.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from deepspeed_cad.integrations.plain_attention import plain_attention, visible_blocks, wide
from deepspeed_cad.integrations.structure import masked_attention
from torch.overrides import TorchFunctionMode

from deepspeed_cad.attention.layer import LayerInput
from deepspeed_cad.attention.microbatch import MicroBatch
from deepspeed_cad.errors import CADError
from deepspeed_cad.kernels.interface import MaskRule
from deepspeed_cad.notice import notice

logger = logging.getLogger("deepspeed_cad")

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 0.03, torch.bfloat16: 0.1}
"""How far a row may lie from its reference, as a share of its own norm or of the mean norm of all, if that is more.
Two right kernels differ by a tenth of it; a key too many or too few in a short row is more than all of it."""
_TF32 = 1e-2


class Alone:
    """Stands where layers expect a mask while the decoder runs without CAD: each document attends on its own."""

    nano_batch = None

    def __init__(self, documents: list[slice], window: int | None, original: str, padding: Any) -> None:
        self.documents, self.window, self.original, self.padding = documents, window, original, padding

    def attend(
        self, module: torch.nn.Module, q_BHSD: torch.Tensor, k_BKSD: torch.Tensor, v_BKSV: torch.Tensor, **given: Any
    ) -> torch.Tensor:
        """O [B, S, H, V] by the attention that the model had; `given`: scaling, softcap, s_aux and what else it got."""
        batch, heads, width, _ = q_BHSD.shape
        own = masked_attention(module, self.original == "eager", **given)
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q_BHSD, k_BKSD, v_BKSV))
        o = q.new_zeros(batch * width, heads, v.shape[2])
        for document in self.documents:
            for rows, keys, visible in visible_blocks(document, self.window, heads, q.device):
                one = [x[part].transpose(0, 1)[None] for x, part in ((q, rows), (k, keys), (v, keys))]
                o[rows] = own(*one, visible[None, None])[0]
        o_BSHV = o.unflatten(0, (batch, width))
        if self.padding is None:
            return o_BSHV
        filled: torch.Tensor = self.padding.fill(id(module), self, q_BHSD, k_BKSD, v_BKSV, o_BSHV, own)
        return filled


@dataclass(eq=False)
class Check:
    """One verified micro-batch."""

    number: int
    of: int
    rank: int
    documents: list[slice]
    """Rows of the documents that lie on this rank alone."""
    left_out: int
    """Documents that lie on other ranks too."""
    cut: bool
    """Nano-batches alternate."""
    fail: Callable[[CADError], Any]
    output: Any = None
    """What the decoder gave without CAD; None where it was not run."""
    loss: tuple[float, float | None] | None = None
    """That the model computed, with CAD and without; None where it was not run without."""
    errors: dict[str, float] = field(default_factory=dict)
    """The largest error of each kind."""
    allowed: dict[str, float] = field(default_factory=dict)
    """What was allowed, likewise."""
    precision: float = 0.0
    """What the output of the decoder may differ by, and the loss."""
    _waiting: set[str] = field(default_factory=set)
    _forward_over: bool = False
    _said: bool = False

    def attend(self, run: Callable[[LayerInput], torch.Tensor], layer: LayerInput) -> torch.Tensor:
        """O [T, H, V] of `run`, compared; its gradients are compared when they arrive."""
        if self.cut:
            return run(layer)
        sinks, inputs = layer.sinks_H, (layer.q_THD, layer.k_TKD, layer.v_TKV)
        call = _Call(self, layer.rule, None if sinks is None else sinks.detach().clone(), layer.label)
        if not self._forward_over and (any(x.requires_grad for x in inputs) or not torch.is_grad_enabled()):
            self._waiting.add(layer.label)
        q, k, v = _Inputs.apply(call, *inputs)
        o: torch.Tensor = _Output.apply(call, run(layer._replace(q_THD=q, k_TKD=k, v_TKV=v)))
        if not self._forward_over:
            with torch.no_grad():
                call.compare_output(inputs, o.detach())
        return o

    def run_without(self, forward: Callable[[], Any], device: torch.device) -> Any:
        """What a model, or its decoder, gives without CAD: with the random numbers that the forward after it will draw,
        and without gradients."""
        devices = [torch.cuda.current_device()] if device.type == "cuda" else []
        with torch.random.fork_rng(devices), torch.no_grad(), _SeeDtypes() as seen:
            output = forward()
        # Autocast keeps weights that it cast without gradients, and the forward after this one would use them.
        torch.clear_autocast_cache()
        self.precision = max(self.precision, *(tolerance(dtype, device) for dtype in seen.dtypes))
        return output

    def end_forward(self, output: Any, mixture: bool) -> None:
        """Compare what the decoder gave with CAD."""
        self._forward_over = True
        theirs, ours = _hidden(self.output), _hidden(output)
        if theirs is None or ours is None or theirs.shape != ours.shape:
            return
        if not self.documents:
            return
        a, b = (torch.cat([x.detach().flatten(0, 1)[one] for one in self.documents]).double() for x in (ours, theirs))
        error = float((a - b).norm() / b.norm().clamp_min(1e-30))
        self.errors["output"], self.allowed["output"] = error, self.precision
        # In a mixture one rounding can send a token to another expert, and nothing is wrong.
        allowed = self.precision
        exact = allowed <= tolerance(torch.float32, ours.device)
        if error > allowed and (exact or not mixture) or not np.isfinite(error):
            worst = int((a - b).abs().argmax())
            self._differ("the output of the decoder", worst // a.shape[1], error, allowed, a, b, worst)

    def end_model(self, with_cad: torch.Tensor, without: torch.Tensor | None) -> None:
        """Compare the loss that the model computed; `without` is None where the decoder was not run without CAD."""
        ours, theirs = float(with_cad), None if without is None else float(without)
        self.loss = (ours, theirs)
        if theirs is None:
            return
        error = abs(ours - theirs) / max(1.0, abs(theirs))
        if not error <= self.precision and (np.isfinite(theirs) or np.isfinite(ours)):
            self._fail(f"the loss is {ours:.7g} with CAD and {theirs:.7g} without", error, self.precision)

    def compare(
        self, name: str, kind: str, ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype, size: float = 0.0
    ) -> None:
        """Rows [n, ...] of the documents that are compared; `dtype`: in which attention was computed; `size`: norm of
        a row of what is added up in them, which counts where all sums are exactly 0."""
        if not ours.numel():
            return
        allowed = max(tolerance(one, ours.device) for one in (ours.dtype, dtype))
        self.allowed[kind] = max(self.allowed.get(kind, 0.0), allowed)
        a, b = ours.detach().to(theirs.dtype), theirs
        each, own = (a - b).norm(dim=-1), b.norm(dim=-1)
        mean = float(own.square().mean().sqrt()) or size
        share = each / own.clamp_min(mean).clamp_min(1e-30)
        error = float(share.nan_to_num(float("inf")).max())
        self.errors[kind] = max(self.errors.get(kind, 0.0), error)
        if error > allowed:
            row = int(share.nan_to_num(float("inf")).flatten(1).max(dim=1).values.argmax())
            size = a[row].numel()
            worst = row * size + int((a[row] - b[row]).abs().nan_to_num(float("inf")).argmax())
            self._differ(name, row, error, allowed, a, b, worst)

    def gradients_done(self, label: str) -> None:
        """All gradients of a call were compared."""
        self._waiting.discard(label)
        self.say()

    def say(self) -> None:
        """The line of this micro-batch, once, when nothing more is to be compared."""
        if self._said or self._waiting or not self._forward_over:
            return
        self._said = True
        if self.rank:
            return
        loss = "its loss is computed outside of the model and was not compared"
        if self.loss is not None:
            without = "not computed" if self.loss[1] is None else f"{self.loss[1]:.6g}"
            loss = f"loss {self.loss[0]:.6g} with CAD, {without} without"
        said = ", ".join(f"{kind} {error:.1e}" for kind, error in self.errors.items())
        limits = list(dict.fromkeys(self.allowed.values()))
        allowed = ", ".join(
            f"{limit:.1e}{f' for {kinds}' if len(limits) > 1 else ''}"
            for limit in limits
            if (kinds := " ".join(kind for kind, one in self.allowed.items() if one == limit))
        )
        rest = f"; {self.left_out} documents span ranks and were not compared" if self.left_out else ""
        rest += "; gradients of nano-batches were not compared" if self.cut else ""
        notice(
            f"verify: micro-batch {self.number + 1} of {self.of} is the same without CAD: {loss}; differences of "
            f"{said or 'nothing'} (allowed: {allowed or 0}){rest}"
        )

    def _differ(
        self, what: str, row: int, error: float, allowed: float, ours: torch.Tensor, theirs: torch.Tensor, at: int
    ) -> None:
        a, b = float(ours.flatten()[at]), float(theirs.flatten()[at])
        ends = np.cumsum([one.stop - one.start for one in self.documents])
        document = int(np.searchsorted(ends, row, side="right"))
        base = int(ends[document - 1]) if document else 0
        place = f"position {row - base} of the document that starts at row {self.documents[document].start}"
        self._fail(f"{what} differs at {place}: {a:.7g} with CAD, {b:.7g} without", error, allowed)

    def _fail(self, what: str, error: float, allowed: float) -> None:
        self.fail(
            CADError(
                f"verify: rank {self.rank}, micro-batch {self.number} (counted from 0): {what}; relative error "
                f"{error:.2e}, allowed {allowed:.2e}. Do not train with this: please report it, with the output of "
                "`deepspeed-cad doctor`"
            )
        )


@dataclass(eq=False)
class _Call:
    """One attention call of a verified micro-batch."""

    check: Check
    rule: MaskRule
    sinks: torch.Tensor | None
    label: str
    do_THV: torch.Tensor | None = None
    dtype: torch.dtype = torch.float64
    """Of O."""

    def compare_output(self, inputs: tuple[torch.Tensor, ...], o_THV: torch.Tensor) -> None:
        """O against plain attention."""
        self.dtype = o_THV.dtype
        q_THD, k_TKD, v_TKV = (x.detach() for x in inputs)
        found, wanted = [], []
        for document in self.check.documents:
            for rows, keys, visible in visible_blocks(document, self.rule.window, q_THD.shape[1], q_THD.device):
                wanted.append(plain_attention(q_THD[rows], k_TKD[keys], v_TKV[keys], visible, self.rule, self.sinks))
                found.append(o_THV[rows])
        if found:
            self.check.compare(f"O of {self.label}", "O", torch.cat(found), torch.cat(wanted), self.dtype)

    def compare_gradients(self, inputs: tuple[torch.Tensor, ...], gradients: tuple[torch.Tensor | None, ...]) -> None:
        """dQ, dK, dV against those of plain attention for the same dO."""
        if self.do_THV is None:
            return
        rows_of = [x.detach() for x in inputs]
        found: list[list[torch.Tensor]] = [[], [], []]
        wanted: list[list[torch.Tensor]] = [[], [], []]
        for document in self.check.documents:
            sums = [torch.zeros_like(x[document], dtype=wide(x.dtype)) for x in rows_of]
            for rows, keys, visible in visible_blocks(
                document, self.rule.window, rows_of[0].shape[1], rows_of[0].device
            ):
                parts = (rows, keys, keys)
                leaves = [x[part].detach().to(wide(x.dtype)).requires_grad_() for x, part in zip(rows_of, parts)]
                with torch.enable_grad():
                    o = plain_attention(leaves[0], leaves[1], leaves[2], visible, self.rule, self.sinks)
                for i, one in enumerate(torch.autograd.grad(o, leaves, self.do_THV[rows].to(o.dtype))):
                    sums[i][parts[i].start - document.start : parts[i].stop - document.start] += one
            for i, gradient in enumerate(gradients):
                if gradient is not None:
                    found[i].append(gradient[document])
                    wanted[i].append(sums[i])
        q, k, v, do = (float(x.double().norm(dim=-1).square().mean().sqrt()) for x in (*rows_of, self.do_THV))
        sizes = (do * v * k * self.rule.scale, do * v * q * self.rule.scale, do)
        for name, ours, theirs, size in zip(("dQ", "dK", "dV"), found, wanted, sizes):
            if ours:
                what, a, b = f"{name} of {self.label}", torch.cat(ours), torch.cat(theirs)
                self.check.compare(what, name, a, b, self.dtype, size)
        self.do_THV = None
        self.check.gradients_done(self.label)


class _Inputs(torch.autograd.Function):
    """Q, K, V as they are; their gradients pass here last."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.save_for_backward(*inputs)
        return tuple(x.view_as(x) for x in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        needed = tuple(g if need else None for g, need in zip(gradients, ctx.needs_input_grad[1:]))
        ctx.call.compare_gradients(ctx.saved_tensors, needed)
        return None, *needed


class _Output(torch.autograd.Function):
    """O as it is; its gradient passes here first."""

    @staticmethod
    def forward(ctx: Any, call: _Call, o: torch.Tensor) -> torch.Tensor:
        ctx.call = call
        return o.view_as(o)

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor) -> tuple[None, torch.Tensor]:
        ctx.call.do_THV = do
        return None, do


class _SeeDtypes(TorchFunctionMode):
    """Remembers in which floating-point types anything was computed."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype.is_floating_point:
            self.dtypes.add(result.dtype)
        return result


def open_check(micro_batch: MicroBatch, number: int, of: int, fail: Callable[[CADError], Any]) -> Check:
    """The check of a micro-batch, from its layout."""
    seg = micro_batch.layout.segments
    parts = np.bincount(seg.document, minlength=1)
    mine = seg.select(seg.rank == micro_batch.rank)
    whole = mine.select(parts[mine.document] == 1)
    documents = [slice(int(o), int(o + e - b)) for _, b, e, _, o in whole.to_array()]
    left_out = len(mine) - len(whole)
    if left_out and number == 0:
        logger.warning(
            "deepspeed_cad: verify: documents that span ranks cannot be run on one: they are not compared, and the "
            "decoder is not run a second time"
        )
    return Check(number, of, micro_batch.rank, documents, left_out, len(micro_batch.ticks) > 1, fail)


def can_run_alone(micro_batch: MicroBatch) -> bool:
    """Whether no document of any rank spans ranks; the same on every rank, because layers gather parameters."""
    return not micro_batch.layout.segments.begin.any()


def loss_without(check: Check, model: torch.nn.Module, decoder: torch.nn.Module, given: dict[str, Any]) -> Any:
    """What the whole model gives for the decoder's output without CAD."""
    kept = decoder.__dict__.get("forward")
    decoder.__dict__["forward"] = lambda *args, **kwargs: check.output
    try:
        return check.run_without(lambda: model.forward(**given), next(model.parameters()).device)
    finally:
        if kept is None:
            del decoder.__dict__["forward"]
        else:
            decoder.__dict__["forward"] = kept


def loss_of(output: Any) -> torch.Tensor | None:
    """The loss in what a model gave, if it computed one."""
    loss = output.get("loss") if isinstance(output, dict) else None
    if loss is None and isinstance(output, tuple) and output and isinstance(output[0], torch.Tensor):
        loss = output[0] if output[0].ndim == 0 else None
    return loss.detach() if isinstance(loss, torch.Tensor) and loss.ndim == 0 else None


def tolerance(dtype: torch.dtype, device: torch.device) -> float:
    """What a row may differ by."""
    if dtype == torch.float32 and device.type == "cuda" and torch.get_float32_matmul_precision() != "highest":
        return _TF32
    return TOLERANCE.get(dtype, TOLERANCE[torch.bfloat16])


def _hidden(output: Any) -> torch.Tensor | None:
    found = output if isinstance(output, torch.Tensor) else None
    if found is None and output is not None:
        found = output[0] if isinstance(output, tuple) else output.get("last_hidden_state")
    return found if isinstance(found, torch.Tensor) and found.ndim == 3 else None
