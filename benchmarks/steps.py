"""What arranging a step saves: imbalance before attention moves, and the bytes that the planner then still moves.

    python benchmarks/steps.py

Packed rows of documents with lognormal lengths (median `median`, σ 1.5, at most a row). "loader": micro-batches as they
come; "order": the heaviest of all ranks at the same time; "exchange": documents change ranks as well. Attention bytes
are those of one layer's forward, 32 heads of 8 groups, head size 128, bf16, as planned at tolerance 0.05, over all
ranks and micro-batches. One core, native planner.
"""

from __future__ import annotations

import time

import numpy as np

from deepspeed_cad.ahead.assign import StepDocuments, assign_documents, order_rows
from deepspeed_cad.cost import PAIRS
from deepspeed_cad.layout import Layout
from deepspeed_cad.planner import HeadShape, PlanInput, make_plan

SHAPE = HeadShape(32, 8, 128, 128, 2)
TOLERANCE = 0.05


def draw(ranks: int, micro_batches: int, tokens: int, median: int, seed: int) -> StepDocuments:
    """A step of full rows."""
    rng = np.random.default_rng(seed)
    flat = []
    for rank in range(ranks):
        for micro_batch in range(micro_batches):
            left = tokens
            while left:
                length = min(left, max(1, int(rng.lognormal(np.log(median), 1.5))))
                flat.append((rank, micro_batch, length))
                left -= length
    columns = np.array(flat)
    shape = (ranks, micro_batches)
    return StepDocuments(
        columns[:, 0], columns[:, 1], columns[:, 0] * 0, columns[:, 2], np.full(shape, tokens), np.zeros(shape, bool)
    )


def measure(step: StepDocuments, rank: np.ndarray, micro_batch: np.ndarray) -> tuple[float, float]:
    """Work of the slowest rank over the mean, summed over micro-batches, and GiB that move in one layer's forward."""
    slowest = mean = moved = 0.0
    for one in range(step.micro_batches):
        lengths = [step.length[(rank == r) & (micro_batch == one)].tolist() for r in range(step.ranks)]
        plan = make_plan(PlanInput(Layout.from_rank_lengths(lengths).tick(), SHAPE, PAIRS, tolerance=TOLERANCE))
        slowest += float(plan.load_before.max())
        mean += float(plan.load_before.mean())
        moved += float(plan.sent_bytes.sum())
    return slowest / mean, moved / 2**30


def main() -> None:
    """Print one line per size."""
    print(
        "| ranks × micro-batches × tokens, median | max/mean | GiB per layer | tokens that change rank | ms to assign |"
    )
    print("|---|---|---|---|---|")
    for ranks, micro_batches, tokens, median in (
        (4, 4, 65536, 2000), (8, 1, 65536, 2000), (8, 8, 65536, 4000), (64, 4, 131072, 3000), (512, 1, 131072, 3000),
    ):  # fmt: skip
        step = draw(ranks, micro_batches, tokens, median, seed=0)
        work = step.work()
        begin = time.perf_counter()
        assigned = assign_documents(step, work, TOLERANCE)
        took = time.perf_counter() - begin
        place = np.argsort(order_rows(step, work), axis=1)
        found = [
            measure(step, step.rank, step.micro_batch),
            measure(step, step.rank, place[step.rank, step.micro_batch]),
            measure(step, assigned.rank, assigned.micro_batch),
        ]
        print(
            f"| {ranks} × {micro_batches} × {tokens // 1024}K, {median} | "
            f"{' → '.join(f'{one[0]:.2f}' for one in found)} | {' → '.join(f'{one[1]:.2f}' for one in found)} | "
            f"{assigned.tokens_moved / step.tokens.sum():.0%} | {took * 1e3:.0f} |"
        )


if __name__ == "__main__":
    main()
