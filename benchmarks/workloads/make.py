"""Writes the workloads of this folder: document lengths with a heavy tail, drawn from a seeded generator.

    python benchmarks/workloads/make.py

Lengths are log-normal (median 3000 tokens, sigma 1.3), drawn with a probability that grows with their length, as
training mixes do that favour long documents. A rank's row is filled document by document and its last one is cut. In
the mild mix lengths vary less and none is favoured, so ranks are nearly even; in the mix where long documents meet, a
few that fill half a row come on half of the ranks, two on each.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

MEDIAN, SIGMA, SHORTEST = 3000.0, 1.3, 32
FAVOUR = 0.7
"""Documents are drawn in proportion to length ** FAVOUR."""


def draw_rows(
    ranks: int, tokens: int, generator: np.random.Generator, sigma: float = SIGMA, favour: float = FAVOUR
) -> list[list[int]]:
    """Rows of exactly `tokens` tokens."""
    pool = np.exp(generator.normal(np.log(MEDIAN), sigma, 20_000)).astype(np.int64)
    pool = pool[(pool >= SHORTEST) & (pool <= tokens)]
    weight = pool.astype(float) ** favour
    rows = []
    for _ in range(ranks):
        row: list[int] = []
        while (left := tokens - sum(row)) > 0:
            row.append(min(left, int(generator.choice(pool, p=weight / weight.sum()))))
        rows.append(row)
    return rows


def draw_meeting(ranks: int, first: int, tokens: int, generator: np.random.Generator) -> list[list[int]]:
    """A row for each rank; half of them, from `first` on and around, have two long documents each."""
    pairs = [[int(generator.integers(tokens * 2 // 5, tokens // 2)) for _ in range(2)] for _ in range(ranks // 2)]
    rows = [[*pair, tokens - sum(pair)] for pair in pairs]
    rows += draw_rows(ranks - len(rows), tokens, generator, sigma=0.8, favour=0.0)
    return [rows[(rank - first) % ranks] for rank in range(ranks)]


def spread(step: list[list[int]]) -> float:
    """Attention of the slowest rank over the mean, in query-key pairs."""
    pairs = [sum(n * (n + 1) / 2 for n in row) for row in step]
    return round(max(pairs) / (sum(pairs) / len(pairs)), 3)


def write(name: str, note: str, ranks: int, tokens: int, steps: list, **more: object) -> None:
    """One workload file."""
    found = {"name": name, "note": note, "tokens_per_rank": tokens, "ranks": ranks, **more, "steps": steps}
    (Path(__file__).parent / f"{name}.json").write_text(json.dumps(found) + "\n")


def main() -> None:
    for ranks, tokens, count, seed in ((2, 65536, 6, 0), (4, 65536, 6, 1), (8, 65536, 6, 2), (4, 131072, 4, 3)):
        generator = np.random.default_rng(seed)
        steps = [draw_rows(ranks, tokens, generator) for _ in range(count)]
        name = f"heavy_{tokens // 1024}k_{ranks}r"
        note = "document lengths per step and rank, log-normal with long documents favoured"
        write(name, note, ranks, tokens, steps, seed=seed, attention_max_over_mean=[spread(one) for one in steps])
    generator = np.random.default_rng(5)
    steps = [draw_rows(2, 65536, generator, sigma=0.6, favour=0.0) for _ in range(6)]
    note = "document lengths per step and rank, log-normal with no lengths favoured: ranks are nearly even"
    write("mild_64k_2r", note, 2, 65536, steps, seed=5, attention_max_over_mean=[spread(one) for one in steps])
    for ranks, seed in ((2, 6), (4, 7)):
        generator = np.random.default_rng(seed)
        steps = [draw_meeting(ranks, step % ranks, 65536, generator) for step in range(6)]
        some = {2: "one rank, the other has", 4: "each of two ranks, the others have"}[ranks]
        note = f"two documents of about half a row come on {some} short ones"
        spreads = [spread(one) for one in steps]
        write(f"meet_64k_{ranks}r", note, ranks, 65536, steps, seed=seed, attention_max_over_mean=spreads)
    even = [[[4096] * 16] * 4] * 2
    write("even_4k_4r", "every document 4096 tokens: nothing to gain, nothing may be lost", 4, 65536, even)
    total = 4 * 65536
    streams = [[150000, 60000, 40000, total - 250000], [total], draw_rows(1, total, np.random.default_rng(4))[0]]
    note = "one stream per step, cut into equal rank parts: documents lie across the borders of ranks"
    write("stream_64k_4r", note, 4, 65536, streams, stream=True)
    for ranks, count in ((2, "half a million"), (4, "a million")):
        note = f"one document over all ranks: {count} tokens"
        write(f"million_256k_{ranks}r", note, ranks, 262144, [[262144 * ranks]] * 2, stream=True)


if __name__ == "__main__":
    main()
