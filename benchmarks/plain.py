"""Runs a script with attention of each rank's own documents on the kernel that CAD takes: what CAD is compared with.

    torchrun --nproc-per-node 4 benchmarks/plain.py examples/trainer.py --attention varlen --layers 4 --synthetic 8192

In: a script that loads its model with `attn_implementation="varlen"`, and its arguments. Out: the script, run as if it
had been started by itself. Documents are read from `position_ids`; one packed row per micro-batch.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from train_attention import VarlenAttention, make_sequences  # noqa: E402
from transformers import AttentionInterface, AttentionMaskInterface  # noqa: E402

from deepspeed_cad.kernels.interface import KernelNeed, MaskRule, Sequences  # noqa: E402
from deepspeed_cad.kernels.registry import choose  # noqa: E402


class Varlen:
    """The attention function; all layers of a micro-batch share its sequences."""

    def __init__(self) -> None:
        self._positions: torch.Tensor | None = None
        self._sequences: Sequences | None = None

    def __call__(
        self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any,
        scaling: float | None = None, position_ids: torch.Tensor | None = None, **_: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        """As transformers calls it: [1, heads, T, head size]."""
        if position_ids is None or query.shape[0] != 1:
            raise ValueError(f"expected one packed row with position_ids, found {query.shape[0]} rows")
        if position_ids is not self._positions:
            starts = (position_ids[0] == 0).nonzero().flatten().tolist()
            lengths = [end - begin for begin, end in zip(starts, [*starts[1:], position_ids.shape[-1]])]
            self._positions, self._sequences = position_ids, make_sequences(lengths, lengths, query.device)
        q, k, v = (x.transpose(1, 2)[0] for x in (query, key, value))
        need = KernelNeed(q.device, q.dtype, q.shape[-1], v.shape[-1], q.shape[1] // k.shape[1])
        rule = MaskRule(q.shape[-1] ** -0.5 if scaling is None else scaling)
        return VarlenAttention.apply(q, k, v, choose("auto", need), self._sequences, rule)[None], None


def main() -> None:
    """Register the attention and run the script."""
    if len(sys.argv) < 2:
        raise SystemExit("usage: benchmarks/plain.py SCRIPT args…")
    AttentionInterface.register("varlen", Varlen())
    AttentionMaskInterface.register("varlen", lambda *args, **kwargs: None)
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
