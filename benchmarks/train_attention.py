"""Attention functions for Hugging Face models that the training benchmark compares CAD with.

Each has the signature that transformers calls and gets its documents as the keyword `documents`, made once per
micro-batch. All of them run the kernel that CAD runs. Shapes: `T` rows, `H` query heads, `K` KV heads, `D` head size.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from train_kept import KeptOutput, KeptOutputs
from transformers import AttentionInterface

from deepspeed_cad.attention.serve import fold_sinks
from deepspeed_cad.kernels.interface import Kernel, MaskRule, Sequences
from deepspeed_cad.trace import covered


class Stopwatch:
    """Sums named spans: CUDA events on a GPU, wall time on a CPU; costs nothing while it is off."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.on = device, False
        self._spans: list[tuple[str, Any, Any]] = []

    @contextmanager
    def span(self, name: str) -> Any:
        """Time the body: on a GPU, that of the current stream."""
        end = self.begin(name)
        yield
        end()

    def begin(self, name: str) -> Callable[[], None]:
        """Begin a span; what is given ends it."""
        if not self.on:
            return lambda: None
        begun = self._now()
        return lambda: self._spans.append((name, begun, self._now()))

    def _now(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def take(self) -> dict[str, tuple[float, int]]:
        """Seconds and number of spans by name since the last call; the device must have finished.

        Spans of two streams that run at the same time count once.
        """
        spans: dict[str, list[tuple[float, float]]] = {}
        for name, begin, end in self._spans:
            first = self._spans[0][1]
            if isinstance(begin, float):
                spans.setdefault(name, []).append((begin, end))
            else:
                spans.setdefault(name, []).append((first.elapsed_time(begin) / 1e3, first.elapsed_time(end) / 1e3))
        self._spans.clear()
        return {name: (covered(own), len(own)) for name, own in spans.items()}


class TimedKernel:
    """A kernel with a stopwatch around each call."""

    def __init__(self, kernel: Kernel, watch: Stopwatch) -> None:
        self.kernel, self.watch, self.name = kernel, watch, kernel.name

    def refuse(self, need: Any) -> str | None:
        """See Kernel.refuse."""
        return self.kernel.refuse(need)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """See Kernel.forward."""
        with self.watch.span("forward"):
            return self.kernel.forward(*args, **kwargs)

    def backward(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See Kernel.backward."""
        with self.watch.span("backward"):
            return self.kernel.backward(*args, **kwargs)


def make_sequences(q_lengths: Any, k_lengths: Any, device: torch.device) -> Sequences:
    """Sequences of a varlen call from their lengths."""
    q, k = np.asarray(q_lengths, np.int64), np.asarray(k_lengths, np.int64)
    host_q, host_k = (np.concatenate([[0], np.cumsum(x)]).astype(np.int32) for x in (q, k))
    cu_q, cu_k = (torch.from_numpy(x).to(device) for x in (host_q, host_k))
    return Sequences(host_q, host_k, cu_q, cu_k, int(q.max()), int(k.max()))


class VarlenAttention(torch.autograd.Function):
    """A kernel as autograd sees it: [T, H, D], [T, K, D], [T, K, V] to [T, H, V].

    Sinks [H] are folded into O and LSE behind the kernel, and their gradient is taken from these, as CAD does it.
    `kept`: where O and LSE wait for the recompute, which then does not attend.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kernel: Kernel,
        sequences: Sequences,
        rule: MaskRule,
        sinks: torch.Tensor | None = None,
        kept: KeptOutput | None = None,
    ) -> torch.Tensor:
        found = None if kept is None else kept.take()
        if found is None:
            o, lse = kernel.forward(q, k, v, sequences, rule)
            if sinks is not None:
                o, lse = fold_sinks(o, lse, sinks)
            if kept is not None:
                kept.put(o, lse)
        else:
            o, lse = found
        ctx.save_for_backward(q, k, v, o, lse, sinks)
        ctx.run, ctx.kept = (kernel, sequences, rule), kept
        return o

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor) -> tuple[Any, ...]:
        kernel, sequences, rule = ctx.run
        q, k, v, o, lse, sinks = ctx.saved_tensors
        if ctx.kept is not None:
            ctx.kept.fetch_before()
        do, dsinks = do.contiguous(), None
        if sinks is not None:
            weight = torch.exp(sinks.to(lse.dtype) - lse)
            dsinks = -(weight * (do.to(lse.dtype) * o.to(lse.dtype)).sum(-1)).sum(0).to(sinks.dtype)
        return *kernel.backward(do, q, k, v, o, lse, sequences, rule), None, None, None, dsinks, None


@dataclass(frozen=True, eq=False)
class Gathered:
    """Documents of which every rank holds a head piece and a tail piece, as one rank sees them.

    Its query rows are all head pieces, then all tail pieces, then padding. Keys of every piece are rows of what all
    ranks gather, rank by rank: from the start of the document to the end of the piece.
    """

    sequences: Sequences
    """Pieces with their keys, one behind the other."""
    keys: tuple[torch.Tensor, ...]
    """Rows of the gathered keys that each run of pieces reads; no row twice in a run."""


class GatheredAttention(torch.autograd.Function):
    """Gather K and V of all ranks, run the pieces of this rank, and reduce-scatter their gradients."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kernel: Kernel, gathered: Gathered, rule: MaskRule,
        watch: Stopwatch,
    ) -> torch.Tensor:  # fmt: skip
        own = torch.stack([k, v], 1)
        with watch.span("exchange"):
            everyone = own.new_empty(dist.get_world_size() * own.shape[0], *own.shape[1:])
            dist.all_gather_into_tensor(everyone, own)
        read = torch.cat([everyone[rows] for rows in gathered.keys])
        del everyone
        o, lse = kernel.forward(q, read[:, 0], read[:, 1], gathered.sequences, rule)
        ctx.save_for_backward(q, read, o, lse)
        ctx.run = kernel, gathered, rule, watch
        return o

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor) -> tuple[Any, ...]:
        kernel, gathered, rule, watch = ctx.run
        q, read, o, lse = ctx.saved_tensors
        dq, dk, dv = kernel.backward(do.contiguous(), q, read[:, 0], read[:, 1], o, lse, gathered.sequences, rule)
        ranks, rows = dist.get_world_size(), q.shape[0]
        everyone = read.new_zeros(ranks * rows, *read.shape[1:])
        for side, grad in ((0, dk), (1, dv)):
            for keys, part in zip(gathered.keys, grad.split([len(keys) for keys in gathered.keys])):
                everyone[keys, side] += part
        with watch.span("exchange"):
            if q.is_cuda:
                own = everyone.new_empty(rows, *everyone.shape[1:])
                dist.reduce_scatter_tensor(own, everyone)
            else:
                dist.all_reduce(everyone)
                own = everyone.view(ranks, rows, *everyone.shape[1:])[dist.get_rank()]
        return dq, own[:, 0], own[:, 1], None, None, None, None


class OwnQuery(torch.autograd.Function):
    """In place of attention: the query, as much of it as a value has; the gradient also flows to K and V, so that no
    product is saved."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ctx.heads, ctx.more = k.shape[1], q.shape[-1] - v.shape[-1]
        return q[..., : v.shape[-1]].clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, do: torch.Tensor) -> tuple[torch.Tensor, ...]:
        dq = torch.nn.functional.pad(do, (0, ctx.more)) if ctx.more else do
        return dq, dq[:, : ctx.heads], do[:, : ctx.heads]


AttentionFunction = Callable[..., tuple[torch.Tensor, None]]


def use_attention(model: Any, name: str, attend: AttentionFunction) -> None:
    """Let a model of transformers attend by this function."""
    AttentionInterface.register(name, attend)
    model.set_attn_implementation(name)


def local_attention(kernel: Kernel, outputs: KeptOutputs | None = None) -> AttentionFunction:
    """Documents of this rank's own rows; `documents` are Sequences. `outputs`: kept through checkpointing."""

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
        scaling: float | None = None, documents: Any = None, sliding_window: int | None = None,
        s_aux: torch.Tensor | None = None, **_: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        q, k, v = (x.transpose(1, 2)[0] for x in (query, key, value))
        rule = MaskRule(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window)
        kept = outputs.of(module) if outputs is not None and torch.is_grad_enabled() else None
        return VarlenAttention.apply(q, k, v, kernel, documents, rule, s_aux, kept)[None], None

    return attend


def gathered_attention(kernel: Kernel, watch: Stopwatch) -> AttentionFunction:
    """Pieces of documents that are spread over all ranks; `documents` is a Gathered."""

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
        scaling: float | None = None, documents: Any = None, **_: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        q, k, v = (x.transpose(1, 2)[0] for x in (query, key, value))
        rule = MaskRule(query.shape[-1] ** -0.5 if scaling is None else scaling)
        return GatheredAttention.apply(q, k, v, kernel, documents, rule, watch)[None], None

    return attend


def query_attention(gradients: str) -> AttentionFunction:
    """No attention: its own query. `gradients`: "query", or "all" for gradients of K and V as well."""

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any, **_: Any
    ) -> tuple[torch.Tensor, None]:
        q, k, v = (x.transpose(1, 2)[0] for x in (query, key, value))
        return (OwnQuery.apply(q, k, v) if gradients == "all" else q[..., : v.shape[-1]])[None], None

    return attend
