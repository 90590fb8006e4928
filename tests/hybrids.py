"""Kernels that keep documents apart, as packages for GPUs have them, in plain torch: they check what they are given."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest
import torch
import training


class Kernels:
    """Stand for flash-linear-attention, causal-conv1d or mamba-ssm in the code of one model of transformers."""

    def __init__(self, patch: pytest.MonkeyPatch, module: str) -> None:
        self.patch = patch
        self.home = importlib.import_module(module)
        self.calls: list[str] = []
        """Names of the kernels that were given borders."""
        self.borders: dict[int, torch.Tensor] = {}
        """The tensors of cumulative lengths that they were given."""

    def convolution(self) -> Kernels:
        """causal_conv1d_fn(x [B, D, T], weight, bias, seq_idx int32 [B, T], …)."""
        own = self.home.causal_conv1d_fn.__wrapped__

        def causal_conv1d_fn(x: Any, weight: Any, bias: Any = None, activation: Any = None, **kwargs: Any) -> Any:
            cuts = self._sequence("causal_conv1d_fn", kwargs.get("seq_idx"), x.shape[0], x.shape[2])
            return torch.cat([own(part, weight, bias, activation=activation) for part in x.split(cuts, dim=2)], dim=2)

        self.patch.setattr(self.home, "causal_conv1d_fn", causal_conv1d_fn)
        return self

    def delta_rule(self) -> Kernels:
        """chunk_gated_delta_rule(q [B, T, H, K], k, v, g, beta, cu_seqlens [N + 1], …)."""
        own = self.home.torch_chunk_gated_delta_rule.__wrapped__

        def chunk_gated_delta_rule(q: Any, k: Any, v: Any, g: Any, beta: Any, **kwargs: Any) -> Any:
            cumulative = kwargs.pop("cu_seqlens", None)
            kwargs = {key: kwargs[key] for key in ("initial_state", "output_final_state", "use_qk_l2norm_in_kernel")}
            cuts = self._cumulative("chunk_gated_delta_rule", cumulative, q.shape[0], q.shape[1])
            parts = zip(*(x.split(cuts, dim=1) for x in (q, k, v, g, beta)))
            out, states = zip(*(own(*part[:3], g=part[3], beta=part[4], **kwargs) for part in parts))
            return torch.cat(out, dim=1), states[-1]

        self.patch.setattr(self.home, "torch_chunk_gated_delta_rule", chunk_gated_delta_rule)
        return self

    def scan(self) -> Kernels:
        """mamba_chunk_scan_combined(x [B, T, H, P], dt, A, B, C, seq_idx int32 [B, T], …)."""
        own = self.home.mamba2_chunk_scan.__wrapped__

        def mamba_chunk_scan_combined(x: Any, dt: Any, A: Any, B: Any, C: Any, **kwargs: Any) -> Any:
            cuts = self._sequence("mamba_chunk_scan_combined", kwargs.pop("seq_idx", None), x.shape[0], x.shape[1])
            kwargs = {name: value for name, value in kwargs.items() if not name.startswith(("cu_seq", "max_length"))}
            parts = zip(*(part.split(cuts, dim=1) for part in (x, dt, B, C)))
            out = [own(x, dt, A, b, c, **kwargs) for x, dt, b, c in parts]
            return out[0] if kwargs["return_final_states"] else torch.cat(out, dim=1)

        self.patch.setattr(self.home, "mamba2_chunk_scan", mamba_chunk_scan_combined)
        # The fused one of training, which is both in one: left out, as where a layer's shape rules it out.
        self.patch.setattr(self.home, "mamba2_split_conv1d_scan_combined", lambda *args, **kwargs: None)
        return self

    def _cumulative(self, name: str, given: torch.Tensor | None, batch: int, tokens: int) -> list[int]:
        if given is None:
            return [tokens]
        assert batch == 1, "FLA wants a batch of one row with cu_seqlens"
        assert given.dtype == torch.int32 and given.ndim == 1 and given[0] == 0 and given[-1] == tokens
        self.calls.append(name)
        self.borders[id(given)] = given
        return given.diff().tolist()

    def _sequence(self, name: str, given: torch.Tensor | None, batch: int, tokens: int) -> list[int]:
        if given is None:
            return [tokens]
        assert given.dtype == torch.int32 and given.shape == (batch, tokens) and given.is_contiguous() and batch == 1
        assert given[0, 0] == 0 and set(given[0].diff().tolist()) <= {0, 1}
        self.calls.append(name)
        return given[0].unique_consecutive(return_counts=True)[1].tolist()


def difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest, as a share of the largest value."""
    got, expected = got.detach(), expected.detach()
    return float((got - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def packed(lengths: list[list[int]]) -> dict[str, torch.Tensor]:
    """Batch rows of documents, all equally long; where they are not, padded on the right with a mask."""
    generator, width = torch.Generator().manual_seed(sum(map(sum, lengths))), max(map(sum, lengths))
    ids, positions, mask = (torch.zeros(len(lengths), width, dtype=torch.long) for _ in range(3))
    for row, documents in enumerate(lengths):
        tokens = sum(documents)
        ids[row, :tokens] = torch.randint(3, 96, (tokens,), generator=generator)
        positions[row, :tokens] = torch.cat([torch.arange(length) for length in documents])
        mask[row, :tokens] = 1
    batch = {"input_ids": ids, "position_ids": positions}
    return batch if mask.all() else {**batch, "attention_mask": mask}


def run(model: Any, batch: dict[str, torch.Tensor], lengths: list[list[int]]) -> tuple[torch.Tensor, dict[str, Any]]:
    """Logits of all tokens, one document after the other, and the gradients of a loss in which every logit counts."""
    model.zero_grad()
    logits = model(**batch).logits
    rows = [(row, sum(of[:i]), length) for row, of in enumerate(lengths) for i, length in enumerate(of)]
    found = torch.cat([logits[row, begin : begin + length] for row, begin, length in rows])
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    if found.requires_grad:
        (found * weights.to(found.dtype)).sum().backward()
    return found.detach(), training.gradients(model)


def alone(model: Any, batch: dict[str, torch.Tensor], lengths: list[list[int]]) -> tuple[torch.Tensor, dict[str, Any]]:
    """The same, each document run by itself."""
    model.zero_grad()
    places = [(row, sum(of[:i]), length) for row, of in enumerate(lengths) for i, length in enumerate(of)]
    documents = [{"input_ids": batch["input_ids"][row : row + 1, at : at + n]} for row, at, n in places]
    return training.weighted(model, documents)[0], training.gradients(model)


def assert_same(got: tuple[torch.Tensor, dict[str, Any]], expected: tuple[torch.Tensor, Any], within: float) -> None:
    """Logits and every gradient."""
    assert difference(got[0], expected[0]) < within
    largest = max(float(gradient.abs().max()) for gradient in expected[1].values())
    worst = max((float((got[1][name] - value).abs().max()), name) for name, value in expected[1].items())
    assert worst[0] < within * largest, worst


class _Torch:
    """torch, whose float32 is float64."""

    float32 = float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def in_fp64(patch: pytest.MonkeyPatch, model: Any) -> None:
    """What the code of a model computes in fp32 whatever its dtype, it computes in fp64."""
    own = torch.Tensor.float
    patch.setattr(torch.Tensor, "float", lambda x: x.double() if x.dtype in (torch.float64, torch.int64) else own(x))
    for name in {type(module).__module__ for module in model.modules()}:
        if name.startswith("transformers.models."):
            patch.setattr(sys.modules[name], "torch", _Torch())
