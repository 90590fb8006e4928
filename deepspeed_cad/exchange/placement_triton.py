"""Triton kernels that place landed rows at home: one launch per field, fp32 (or fp64) sums rounded once.

Imported by placement.py only where triton and a GPU are there.
"""

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def _place(
    home, landed, served, pieces, sources, programs, row_stride, group_stride, width,
    ADD: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    piece = pieces + tl.load(programs + tl.program_id(0)) * COLUMNS
    first = tl.load(piece + 3)
    count = (tl.load(piece + 4) - first).to(tl.int32)
    row = (tl.program_id(0) - tl.load(piece + 5)) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < tl.load(piece + 2))[:, None] & (column < width)[None, :]
    group = tl.load(piece + 1)
    at_home = ((tl.load(piece) + row) * row_stride + group * group_stride)[:, None] + column[None, :]
    if ADD:
        total = tl.load(home + at_home, mask=inside, other=0).to(WIDE)
    else:
        total = tl.zeros((ROWS, BLOCK), dtype=WIDE)
    for number in range(count):
        source = tl.load(sources + first + number)
        own = source < 0
        at = ((tl.where(own, -1 - source, source) + row) * width)[:, None] + column[None, :]
        total += tl.load(landed + at, mask=inside & (source >= 0), other=0).to(WIDE)
        total += tl.load(served + at, mask=inside & own, other=0).to(WIDE)
    tl.store(home + at_home, total.to(home.dtype.element_ty), mask=inside)


def place(placement: Any, landed: torch.Tensor, served: torch.Tensor, home: torch.Tensor, add: bool) -> None:
    """See placement.place; all tensors on one GPU."""
    width = home.shape[2]
    block = min(triton.next_power_of_2(width), 256)
    grid = (len(placement.programs), triton.cdiv(width, block))
    _place[grid](
        home, landed, served, placement.pieces, placement.sources, placement.programs,
        home.stride(0), home.stride(1), width,
        ADD=add, COLUMNS=placement.pieces.shape[1], ROWS=placement.ROWS_PER_PROGRAM, BLOCK=block,
        WIDE=tl.float64 if home.dtype == torch.float64 else tl.float32, num_warps=4,
    )  # fmt: skip
