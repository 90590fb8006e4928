"""torchtitan: an override that lets CAD attend in its models.

    --override.imports 'deepspeed_cad.integrations.torchtitan.cad={"tolerance": 0.05}'

In: what torchtitan hands to the attention of a layer: q, k, v [B, L, N, H] and the cumulative lengths of documents,
from the positions that its loaders give. Out: O [B, L, N, V].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import spmd_types as spmd
import torch
from torch.utils.weak import WeakIdKeyDictionary
from torchtitan.config import derive, override
from torchtitan.models.common.attention import (
    BaseAttention,
    FlexAttention,
    GQAttention,
    VarlenAttention,
    VarlenMetadata,
)
from torchtitan.models.deepseek_v3.model import Attention as LatentAttention

from deepspeed_cad.errors import CADUnsupportedError
from deepspeed_cad.function import CAD, Step
from deepspeed_cad.function import open as open_cad
from deepspeed_cad.session import Session, current_session

_opened: WeakKeyDictionary[Session, CAD] = WeakKeyDictionary()
_steps: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""By the cumulative lengths of a micro-batch: one tensor for all layers, whoever copies what holds it."""


class Attention(VarlenAttention):
    @dataclass(kw_only=True, slots=True)
    class Config(VarlenAttention.Config):
        block: dict[str, Any] = field(default_factory=dict)
        """The "cad" block."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.block, self.mesh = config.block, None
        back, ahead = config.window_size
        if ahead != 0:
            raise CADUnsupportedError(f"window_size is {config.window_size}: CAD needs causal attention, (…, 0)")
        self.window = None if back < 0 else back + 1

    def parallelize(self, parallel_dims: Any) -> None:
        for axis, what in (("pp", "pipeline"), ("cp", "context")):
            if getattr(parallel_dims, axis) > 1:
                raise CADUnsupportedError(
                    f"{what}_parallel_degree is {getattr(parallel_dims, axis)}, and CAD goes with data and tensor "
                    "parallelism of torchtitan: set it to 1"
                )
        if parallel_dims.tp > 1:
            self.mesh = parallel_dims.get_optional_mesh(["batch", "tp"], include_singleton_axes=True)
        super().parallelize(parallel_dims)

    @torch.compiler.disable
    def forward(
        self,
        q_BLNH: torch.Tensor,
        k_BLNH: torch.Tensor,
        v_BLNH: torch.Tensor,
        *,
        attention_masks: VarlenMetadata,
        scale: float | None = None,
        out_transform: Callable[..., torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        if out_transform is not None:
            raise CADUnsupportedError("out_transform needs the logarithms of sums, which stay where attention ran")
        with spmd.no_typecheck():
            rows = [x.flatten(0, 1) for x in (q_BLNH, k_BLNH, v_BLNH)]
            if q_BLNH.is_cuda:
                rows = [x.to(torch.bfloat16) for x in rows]  # as VarlenAttention does
            step = self._find_step(attention_masks.cu_seq_q, q_BLNH.device)
            o_TNV = step.attend(*rows, layer=self, softmax_scale=scale, window=self.window)
            o_BLNV = o_TNV.unflatten(0, q_BLNH.shape[:2]).to(q_BLNH.dtype)
        if spmd.is_type_checking():
            spmd.assert_type(o_BLNV, spmd.get_local_type(q_BLNH), spmd.runtime.get_partition_spec(q_BLNH))
        return o_BLNV

    def _find_step(self, cu_seqlens: torch.Tensor, device: torch.device) -> Step:
        """The plan of a running micro-batch."""
        step: Step | None = _steps.get(cu_seqlens)
        if step is None:
            session = current_session()
            opened = None if session is None else _opened.get(session)
            if opened is None:
                opened = open_cad(self.block, device, self.mesh)
                _opened[opened.session] = opened
            step = _steps[cu_seqlens] = opened.plan(cu_seqlens)
        return step


@override(target=BaseAttention.Config, description="deepspeed_cad attends")
def cad(config: BaseAttention.Config, **block: Any) -> BaseAttention.Config:
    """The override; `block`: the "cad" block. Raises CADUnsupportedError for attention whose mask it cannot tell."""
    inner = config.inner_attention
    # FlexAttention is told its mask by the model; that of these is causal inside documents.
    plain = isinstance(inner, FlexAttention.Config) and type(config) in (GQAttention.Config, LatentAttention.Config)
    if not plain and not isinstance(inner, VarlenAttention.Config):
        raise CADUnsupportedError(
            f"{type(config).__qualname__} has {type(inner).__qualname__}, whose mask CAD cannot tell: build the model "
            'with attn_backend="varlen"'
        )
    return replace(config, inner_attention=derive(inner, Attention.Config, block=block))
