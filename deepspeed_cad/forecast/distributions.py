"""Named distributions of document lengths that ship with the project, generated from the quantiles that describe them.

In: a name, how many tokens, a seed. Out: document lengths. Between two quantiles the logarithm of the length is evenly
distributed. The figures are ours: round numbers of the kind that such data has, drawn from no data set.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Distribution:
    says: str
    quantiles: tuple[tuple[float, int], ...]
    """(share of documents, length that this share does not exceed), ascending, from 0.0 to 1.0."""

    def draw(self, tokens: int, seed: int = 0, longest: int | None = None) -> list[int]:
        """Documents of at least so many tokens together, none longer than `longest`."""
        random = np.random.default_rng(seed)
        shares, lengths = (np.array(column, float) for column in zip(*self.quantiles, strict=True))
        drawn: list[int] = []
        missing = tokens
        while missing > 0:
            found = np.exp(np.interp(random.random(4096), shares, np.log(lengths)))
            part = np.maximum(1, found.round()).astype(np.int64)
            if longest is not None:
                part = np.minimum(part, longest)
            needed = int(np.searchsorted(np.cumsum(part), missing)) + 1
            drawn += part[:needed].tolist()
            missing -= int(part[:needed].sum())
        return drawn


NAMED = {
    "alike": Distribution("documents of about 4K tokens", ((0.0, 3000), (0.5, 4096), (1.0, 5500))),
    "chat": Distribution(
        "conversations, a few of them long", ((0.0, 60), (0.5, 700), (0.9, 3000), (0.99, 12000), (1.0, 65536))
    ),
    "web": Distribution(
        "web pages as they come: many short, very few long",
        ((0.0, 80), (0.5, 900), (0.9, 5000), (0.99, 30000), (0.999, 150000), (1.0, 524288)),
    ),
    "rollouts": Distribution(
        "prompts with the answers of a model that reasons: a long tail, up to 64K tokens, 20 times the median",
        ((0.0, 200), (0.5, 3200), (0.9, 12000), (0.99, 40000), (1.0, 65536)),
    ),
    "long-mix": Distribution(
        "a mix for long-context training: long documents favoured",
        ((0.0, 300), (0.25, 2000), (0.5, 5000), (0.75, 14000), (0.9, 40000), (0.98, 180000), (1.0, 524288)),
    ),
    "books-and-code": Distribution(
        "whole books and repositories beside short texts",
        ((0.0, 500), (0.4, 4000), (0.7, 32000), (0.9, 160000), (1.0, 1048576)),
    ),
}
"""By name."""
