"""What CAD is worth for which documents, GPUs and context: the chart and the table of docs/is-it-for-me.md.

    python benchmarks/is_it_for_me.py            # prints the table and writes docs/is-it-for-me.svg

In: log-normal document lengths, packed as trainers pack them. Out: time of the slowest rank without CAD over that with
it, from counted floating-point work of an 8B Llama and the plans of the real planner. Nothing is timed, so the figures
do not depend on the machine; transfers count as hidden.
"""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path

import numpy as np

from deepspeed_cad.cost import PAIRS
from deepspeed_cad.planner.outlook import ModelShape, foresee, pack

MEDIAN = 2048
SIGMAS = {"alike": 0.3, "mixed": 1.0, "long tail": 1.5, "very long tail": 2.2}
"""Kinds of document lengths by sigma of the log-normal distribution."""
CONTEXTS = (16384, 65536, 262144)
GPUS = (2, 4, 8, 16, 32)
STEPS = 16


def mean_gain(sigma: float, ranks: int, context: int) -> float:
    """Mean gain over some steps of random documents."""
    lengths = random.Random(0)
    need = (STEPS + 1) * ranks * context
    documents: list[int] = []
    while need > 0:
        documents.append(min(max(1, round(MEDIAN * lengths.lognormvariate(0.0, sigma))), context))
        need -= documents[-1]
    steps = islice(pack(documents, ranks, context, False), STEPS)
    return float(np.mean([foresee(layout, ModelShape(), PAIRS, 0.05).gain for layout in steps]))


def main() -> None:
    """Print the table and draw the chart."""
    gains = {
        (name, context): [mean_gain(sigma, ranks, context) for ranks in GPUS]
        for name, sigma in SIGMAS.items()
        for context in CONTEXTS
    }
    print("| documents | context | " + " | ".join(f"{ranks} GPUs" for ranks in GPUS) + " |")
    print("|---|---|" + "---|" * len(GPUS))
    for (name, context), row in gains.items():
        print(f"| {name} | {context // 1024}K | " + " | ".join(f"{gain:.2f}" for gain in row) + " |", flush=True)
    draw(gains)


def draw(gains: dict[tuple[str, int], list[float]]) -> None:
    """One panel per context, one line per kind of documents."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "cad"
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(CONTEXTS), figsize=(10, 3.2), sharey=True)
    for panel, context in zip(panels, CONTEXTS):
        for name in SIGMAS:
            panel.plot(GPUS, gains[name, context], marker="o", label=name)
        panel.set_xscale("log", base=2)
        panel.set_xticks(GPUS, [str(ranks) for ranks in GPUS])
        panel.set_title(f"{context // 1024}K tokens per GPU")
        panel.set_xlabel("GPUs")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("times faster")
    panels[0].legend(title="documents")
    figure.tight_layout()
    target = Path(__file__).resolve().parent.parent / "docs" / "is-it-for-me.svg"
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    main()
