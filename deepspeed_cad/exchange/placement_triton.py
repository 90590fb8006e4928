"""Triton kernels that place landed rows at home: one launch per field, fp32 (or fp64) sums rounded once.

Imported by placement.py only where triton and a GPU are there. `T` targets, `W` width of a row in elements.
"""

from typing import Any

import torch
import triton
import triton.language as tl

ROWS_PER_PROGRAM = 8


@triton.jit(do_not_specialize=["targets", "depth"])
def _place(
    home, landed, served, target, begin, source, targets, groups, row_stride, group_stride, width, depth,
    ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = row < targets
    where = tl.load(target + row, mask=inside, other=0)
    first = tl.load(begin + row, mask=inside, other=0)
    last = tl.load(begin + row + 1, mask=inside, other=0)
    fits = (column < width)[None, :]
    at_home = ((where // groups) * row_stride + (where % groups) * group_stride)[:, None] + column[None, :]
    if ADD:
        total = tl.load(home + at_home, mask=inside[:, None] & fits, other=0).to(WIDE)
    else:
        total = tl.zeros((ROWS, BLOCK), dtype=WIDE)
    for step in range(depth):
        live = first + step < last
        taken = tl.load(source + first + step, mask=live, other=0)
        is_landed = live & (taken >= 0)
        is_own = live & (taken < 0)
        from_landed = tl.load(
            landed + (taken * width)[:, None] + column[None, :], mask=is_landed[:, None] & fits, other=0
        )
        from_own = tl.load(
            served + ((-1 - taken) * width)[:, None] + column[None, :], mask=is_own[:, None] & fits, other=0
        )
        total += from_landed.to(WIDE)
        total += from_own.to(WIDE)
    tl.store(home + at_home, total.to(home.dtype.element_ty), mask=inside[:, None] & fits)


def place(placement: Any, landed: torch.Tensor, served: torch.Tensor, home: torch.Tensor, add: bool) -> None:
    """See placement.place; all tensors on one GPU, those of the Placement int64."""
    targets, width = len(placement.target), home.shape[2]
    block = min(triton.next_power_of_2(width), 256)
    grid = (triton.cdiv(targets, ROWS_PER_PROGRAM), triton.cdiv(width, block))
    _place[grid](
        home, landed, served, placement.target, placement.begin, placement.source,
        targets, home.shape[1], home.stride(0), home.stride(1), width, placement.depth if add else 1,
        ADD=add, ROWS=ROWS_PER_PROGRAM, BLOCK=block,
        WIDE=tl.float64 if home.dtype == torch.float64 else tl.float32, num_warps=4,
    )  # fmt: skip
