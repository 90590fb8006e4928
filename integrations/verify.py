"""`"verify": N`: the first N micro-batches also run without CAD, and what comes out is compared.

In: a bound model while it trains. Out: one line for each verified micro-batch, or an error that names the tensor, the
rank and both values. Three things are compared, so that it holds under every host framework: (1) the decoder's output,
and the loss where the model computes it, with those of a run before, without gradients: each document alone, by the
attention that the model had before CAD; (2) O of every attention call with plain softmax attention of its Q, K and V;
(3) dQ, dK, dV likewise. Gradients of parameters differ exactly where these do; under ZeRO and FSDP no rank holds them.

How far a row may lie off follows from the least precise data type that computes anything on the way: in 1 of all that
ran without CAD, in 2 and 3 of O. Documents that span ranks cannot be run on one: then 1 is left out, 2 and 3 look at
the others. Where nano-batches alternate, only 1 is done. `B` batch rows, `S` tokens of each, `T` = B · S, `R` rows that
read `U` keys; heads and sizes as in attention/serve.py.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from deepspeed_cad.integrations.structure import local_attention, replaced
from torch.overrides import TorchFunctionMode

from deepspeed_cad.attention.layer import LayerInput
from deepspeed_cad.attention.microbatch import MaskDescriptor, MicroBatch
from deepspeed_cad.errors import CADError
from deepspeed_cad.kernels.interface import MaskRule
from deepspeed_cad.notice import notice

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 0.03, torch.bfloat16: 0.1}
"""How far a row may lie from its reference, as a share of its own norm or of the mean norm of all, if that is more.
Two right kernels differ by a tenth of it; a key too many or too few in a short row is more than all of it."""
_TF32 = 1e-2
_SCORES = 2**27
"""How many scores of all heads a reference holds at a time."""


class Alone:
    """Stands where layers expect a mask while the decoder runs without CAD: each document attends on its own."""

    def __init__(self, documents: list[slice], window: int | None, original: str) -> None:
        self.documents, self.window, self.original = documents, window, original

    def attend(
        self, module: torch.nn.Module, q_BHSD: torch.Tensor, k_BKSD: torch.Tensor, v_BKSV: torch.Tensor, **given: Any
    ) -> torch.Tensor:
        """O [B, S, H, V] by the attention that the model had; `given`: scaling, softcap, s_aux and what else it got."""
        batch, heads, width, _ = q_BHSD.shape
        # Of caps and sinks no other attention knows.
        eager = self.original == "eager" or given.get("softcap") is not None or given.get("s_aux") is not None
        own = local_attention(module, "eager" if eager else "sdpa")
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q_BHSD, k_BKSD, v_BKSV))
        o = q.new_zeros(batch * width, heads, v.shape[2])
        for document in self.documents:
            for rows, keys, visible in visible_blocks(document, self.window, heads, q.device):
                one = [x[part].transpose(0, 1)[None] for x, part in ((q, rows), (k, keys), (v, keys))]
                if eager:
                    visible = torch.zeros_like(visible, dtype=q.dtype).masked_fill(~visible, torch.finfo(q.dtype).min)
                o[rows] = own(module, *one, visible[None, None], **given)[0][0]
        return o.unflatten(0, (batch, width))


class Check:
    def __init__(self, micro_batch: MicroBatch, number: int, of: int, fail: Callable[[CADError], Any]) -> None:
        """`number` of `of`; `fail` stops all ranks with an error."""
        seg = micro_batch.layout.segments
        mine = seg.select(seg.rank == micro_batch.rank)
        whole = mine.select(np.bincount(seg.document, minlength=1)[mine.document] == 1)
        self.number, self.of, self.rank, self.fail = number, of, micro_batch.rank, fail
        self.documents = [slice(int(o), int(o + e - b)) for _, b, e, _, o in whole.to_array()]
        """Rows of the documents that lie on this rank alone."""
        self.runs_alone = not seg.begin.any()
        """No document of any rank spans ranks; the same on every rank, because layers gather parameters."""
        self.output: Any = None
        """What the decoder gave without CAD; None where it was not run."""
        self.precision = 0.0
        """What the output of the decoder may differ by, and the loss."""
        self._left_out = len(mine) - len(whole)
        self._interleaved = self._forward_over = self._said = False
        self._loss = "its loss is computed outside of the model and was not compared"
        self._errors: dict[str, tuple[float, float]] = {}
        """The largest error of each kind, and what was allowed."""
        self.waiting: set[str] = set()
        """Calls whose gradients were not compared yet."""

    def attend(self, descriptor: MaskDescriptor, layer: LayerInput) -> torch.Tensor:
        """O [T, H, V] of a layer, compared; its gradients are compared when they arrive."""
        if descriptor.nano_batch is not None:
            self._interleaved = True
            return descriptor.attend(layer)
        sinks, inputs = layer.sinks_H, (layer.q_THD, layer.k_TKD, layer.v_TKV)
        call = _Call(self, layer.rule, None if sinks is None else sinks.detach().clone(), layer.label)
        if not self._forward_over and (any(x.requires_grad for x in inputs) or not torch.is_grad_enabled()):
            self.waiting.add(layer.label)
        q, k, v = _Inputs.apply(call, *inputs)
        o: torch.Tensor = _Output.apply(call, descriptor.attend(layer._replace(q_THD=q, k_TKD=k, v_TKV=v)))
        call.dtype = o.dtype
        if not self._forward_over:
            wanted = o.new_zeros(o.shape, dtype=wide(o.dtype))
            with torch.no_grad():
                for rows, _, _, found in call.blocks(inputs):
                    wanted[rows] = found
            self.compare(f"O of {layer.label}", "O", o, wanted, o.dtype)
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
        if theirs is None or ours is None or theirs.shape != ours.shape or not self.documents:
            return
        a, b = (self._pick(x.detach().flatten(0, 1)).double() for x in (ours, theirs))
        error, allowed = float((a - b).norm() / b.norm().clamp_min(1e-30)), self.precision
        self._errors["output"] = error, allowed
        # In a mixture one rounding can send a token to another expert, and nothing is wrong.
        exact = allowed <= tolerance(torch.float32, ours.device)
        if error > allowed and (exact or not mixture) or not np.isfinite(error):
            row = int((a - b).abs().argmax()) // a.shape[1]
            self._differ("the output of the decoder", row, error, allowed, a[row], b[row])

    def end_model(self, with_cad: torch.Tensor, without: torch.Tensor | None) -> None:
        """Compare the loss that the model computed; `without` is None where the decoder was not run without CAD."""
        ours = float(with_cad)
        if without is None:
            self._loss = f"loss {ours:.6g} with CAD, not computed without"
            return
        theirs = float(without)
        self._loss = f"loss {ours:.6g} with CAD, {theirs:.6g} without"
        error = abs(ours - theirs) / max(1.0, abs(theirs))
        if not error <= self.precision and (np.isfinite(theirs) or np.isfinite(ours)):
            self._fail(f"the loss is {ours:.7g} with CAD and {theirs:.7g} without", error, self.precision)

    def compare(
        self, name: str, kind: str, ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype, size: float = 0.0
    ) -> None:
        """Rows [T, ...] of the documents that are compared; `dtype`: in which attention was computed; `size`: norm of
        a row of what is added up in them, which counts where all sums are exactly 0."""
        if not self.documents:
            return
        allowed = max(tolerance(one, ours.device) for one in (ours.dtype, dtype))
        a, b = self._pick(ours.detach()).to(theirs.dtype), self._pick(theirs)
        norm = b.norm(dim=-1)
        mean = float(norm.square().mean().sqrt()) or size
        share = ((a - b).norm(dim=-1) / norm.clamp_min(mean).clamp_min(1e-30)).nan_to_num(float("inf"))
        error = float(share.max())
        self._errors[kind] = max((error, allowed), self._errors.get(kind, (0.0, 0.0)))
        if error > allowed:
            row = int(share.flatten(1).amax(dim=1).argmax())
            self._differ(name, row, error, allowed, a[row], b[row])

    def say(self) -> None:
        """The line of this micro-batch, once, when nothing more is to be compared."""
        if self._said or self.waiting or not self._forward_over:
            return
        self._said = True
        if self.rank:
            return
        found = ", ".join(f"{kind} {error:.1e} of {most:.0e}" for kind, (error, most) in self._errors.items())
        rest = f"; {self._left_out} documents span ranks and were not compared" if self._left_out else ""
        rest += "; gradients of nano-batches were not compared" if self._interleaved else ""
        notice(
            f"verify: micro-batch {self.number + 1} of {self.of} is the same without CAD: {self._loss}; differences, "
            f"of what is allowed: {found or 'none'}{rest}"
        )

    def _pick(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[one] for one in self.documents])

    def _differ(self, what: str, row: int, error: float, allowed: float, a: torch.Tensor, b: torch.Tensor) -> None:
        """Stop; `a` and `b` are that row with CAD and without."""
        at = int((a - b).abs().nan_to_num(float("inf")).argmax())
        ends = np.cumsum([one.stop - one.start for one in self.documents])
        document = int(np.searchsorted(ends, row, side="right"))
        position = row - (int(ends[document - 1]) if document else 0)
        place = f"position {position} of the document that starts at row {self.documents[document].start}"
        values = f"{float(a.flatten()[at]):.7g} with CAD, {float(b.flatten()[at]):.7g} without"
        self._fail(f"{what} differs at {place}: {values}", error, allowed)

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

    def blocks(
        self, inputs: tuple[torch.Tensor, ...]
    ) -> Iterator[tuple[slice, slice, list[torch.Tensor], torch.Tensor]]:
        """Rows, the keys that they read, Q, K and V of these as leaves, and plain attention of them."""
        for document in self.check.documents:
            for rows, keys, visible in visible_blocks(document, self.rule.window, inputs[0].shape[1], inputs[0].device):
                leaves = [x[part].detach().to(wide(x.dtype)) for x, part in zip(inputs, (rows, keys, keys))]
                with torch.set_grad_enabled(self.do_THV is not None):
                    leaves = [x.requires_grad_(self.do_THV is not None) for x in leaves]
                    o = plain_attention(leaves[0], leaves[1], leaves[2], visible, self.rule, self.sinks)
                yield rows, keys, leaves, o

    def compare_gradients(self, inputs: tuple[torch.Tensor, ...], gradients: tuple[torch.Tensor | None, ...]) -> None:
        """dQ, dK, dV against those of plain attention for the same dO."""
        if (do := self.do_THV) is None:
            return
        sums = [torch.zeros_like(x, dtype=wide(x.dtype)) for x in inputs]
        for rows, keys, leaves, o in self.blocks(inputs):
            found = torch.autograd.grad(o, leaves, do[rows].to(o.dtype))
            for total, part, one in zip(sums, (rows, keys, keys), found, strict=True):
                total[part] += one
        size_q, size_k, size_v, size_do = (float(x.double().norm(dim=-1).square().mean().sqrt()) for x in (*inputs, do))
        sizes = (size_do * size_v * size_k * self.rule.scale, size_do * size_v * size_q * self.rule.scale, size_do)
        for name, ours, theirs, size in zip(("dQ", "dK", "dV"), gradients, sums, sizes, strict=True):
            if ours is not None:
                self.check.compare(f"{name} of {self.label}", name, ours, theirs, self.dtype, size)
        self.do_THV = None
        self.check.waiting.discard(self.label)
        self.check.say()


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


def loss_without(check: Check, model: torch.nn.Module, decoder: torch.nn.Module, given: dict[str, Any]) -> Any:
    """What the whole model gives for the decoder's output without CAD."""
    with replaced(vars(decoder), {"forward": lambda *args, **kwargs: check.output}):
        return check.run_without(lambda: model.forward(**given), next(model.parameters()).device)


def loss_of(output: Any) -> torch.Tensor | None:
    """The loss in what a model gave, if it computed one."""
    first = output[0] if isinstance(output, tuple) and output else None
    loss = output.get("loss") if isinstance(output, dict) else first
    return loss.detach() if isinstance(loss, torch.Tensor) and loss.ndim == 0 else None


def tolerance(dtype: torch.dtype, device: torch.device) -> float:
    """What a row may differ by."""
    if dtype == torch.float32 and device.type == "cuda" and torch.get_float32_matmul_precision() != "highest":
        return _TF32
    return TOLERANCE.get(dtype, TOLERANCE[torch.bfloat16])


def _hidden(output: Any) -> torch.Tensor | None:
    found = output[0] if isinstance(output, tuple) else output
    found = found.get("last_hidden_state") if isinstance(found, dict) else found
    return found if isinstance(found, torch.Tensor) and found.ndim == 3 else None


# Plain softmax attention of one document, some rows at a time


def visible_blocks(
    document: slice, window: int | None, heads: int, device: torch.device
) -> Iterator[tuple[slice, slice, torch.Tensor]]:
    """Rows, the keys that they may read, and which of these each row sees ([R, U])."""
    length = document.stop - document.start
    step = max(1, _SCORES // (heads * max(length, 1)))
    for begin in range(0, length, step):
        end = min(begin + step, length)
        first = 0 if window is None else max(0, begin - window + 1)
        row, key = torch.arange(begin, end, device=device)[:, None], torch.arange(first, end, device=device)[None]
        at = document.start
        yield (
            slice(at + begin, at + end), slice(at + first, at + end),
            (key <= row) & (row - key < (length if window is None else window)),
        )  # fmt: skip


def plain_attention(
    q_RHD: torch.Tensor,
    k_UKD: torch.Tensor,
    v_UKV: torch.Tensor,
    visible_RU: torch.Tensor,
    rule: MaskRule,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """O [R, H, V] of tensors in fp32 or wider: softmax of scores, nothing else."""
    q, k, v = q_RHD, k_UKD, v_UKV
    with torch.autocast(q.device.type, enabled=False):
        score = torch.einsum("rkgd,ukd->kgru", q.unflatten(1, (k.shape[1], -1)), k) * rule.scale
        if rule.softcap is not None:
            score = rule.softcap * torch.tanh(score / rule.softcap)
        score = score.masked_fill(~visible_RU, float("-inf"))
        if sinks_H is not None:
            column = sinks_H.to(score.dtype).view(k.shape[1], -1, 1, 1).expand(*score.shape[:3], 1)
            score = torch.cat([score, column], dim=3)
        return torch.einsum("kgru,ukv->rkgv", torch.softmax(score, dim=3)[..., : v.shape[0]], v).flatten(1, 2)


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
