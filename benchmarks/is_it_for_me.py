"""What CAD is worth for which documents, context and network: the tables and charts of docs/is-it-for-me.md.

    python benchmarks/is_it_for_me.py            # fills the tables of the page and writes docs/is-it-for-me-*.svg

In: log-normal document lengths, packed as `deepspeed-cad plan` packs them. Out: tokens/s of CAD in place over those of
plain data parallelism, as most run it and with attention kept through checkpointing (the charts), and of the best other
mode, by the simulator: an 8B Llama, weights sharded (ZeRO-3), activation checkpointing, hosts of 8 H200. Nothing is
timed; docs/foreseen.md says how near such figures were to measured ones.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Sequence
from functools import cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

sys.path[:0] = [str(Path(__file__).parents[1])]

from deepspeed_cad.forecast import Cluster, Machine, Setting, seat_shape  # noqa: E402
from deepspeed_cad.forecast.compare import MODES, compare  # noqa: E402
from deepspeed_cad.forecast.packing import pack  # noqa: E402
from deepspeed_cad.forecast.setting import ModelShape  # noqa: E402
from deepspeed_cad.profiles import Profile  # noqa: E402
from deepspeed_cad.profiles.profile import SHIPPED  # noqa: E402

DOCS = Path(__file__).resolve().parent.parent / "docs"
MEDIAN = 2048
SIGMAS = {"alike": 0.3, "mixed": 1.0, "long tail": 1.5, "very long tail": 2.2}
"""Kinds of document lengths by sigma of the log-normal distribution."""
CONTEXTS = (16384, 65536)
GPUS = (2, 4, 8, 16, 32)
WIDE = (8192, 16384, 32768, 65536, 131072, 262144)
"""Contexts of the second question, on 16 GPUs."""
LINKS = (3.0, 6.0, 12.5, 25.0, 50.0, 100.0)
"""GB/s of the third question, on 32 GPUs of 64K tokens."""
STEPS = 8
HOST = 8
OTHERS = tuple(f"{name}{kept}" for name in ("plain", "ulysses", "gathered") for kept in ("", " kept"))
"""What exists. The ideal packing by length does not."""
KEPT = "attention kept"
"""What modes that keep attention are called, and in tables the line over plain training that keeps attention."""
COLOURS = {"alike": "#6b7482", "mixed": "#0f9d8a", "long tail": "#2f6fde", "very long tail": "#9b5bd6"}


class Gain(NamedTuple):
    """CAD in place over others, in tokens/s."""

    plain: float
    kept: float
    """Over plain whose checkpointing does not repeat attention."""
    best: float
    """The best of plain, Ulysses and all-gather context parallelism, attention kept, each at its best degree."""
    other: str
    fits: bool

    def cell(self) -> str:
        """Over plain, for a table."""
        return f"{self.plain:.2f}" + ("" if self.fits else " †")

    def by_balance(self) -> str:
        """Over plain with attention kept, likewise."""
        return f"{self.kept:.2f}" + ("" if self.fits else " †")


def draw_documents(sigma: float, tokens: int, context: int) -> list[int]:
    """Documents of at least so many tokens, none longer than a row."""
    lengths, documents = random.Random(0), []
    while tokens > 0:
        documents.append(min(max(1, round(MEDIAN * lengths.lognormvariate(0.0, sigma))), context))
        tokens -= documents[-1]
    return documents


@cache
def find_gain(sigma: float, ranks: int, context: int, link: float = 50.0) -> Gain:
    """Mean over some steps of random documents."""
    machine, model = Machine.load("h200").with_links(None, link * 1e9), ModelShape()
    cost = Profile.load(SHIPPED / machine.profile).cost_for(seat_shape(model, 1))
    setting = Setting(model, Cluster(ranks, min(ranks, HOST), machine), cost, sharding="zero3", deals=True)
    documents = draw_documents(sigma, int(1.3 * (STEPS + 1) * ranks * context), context)
    steps = [[layout] for layout in islice(pack(documents, ranks, context, False), STEPS)]
    found = compare(setting, steps, (*OTHERS, "cad"))
    plain, kept, cad = (found.of(mode) for mode in ("plain", "plain kept", "cad"))
    assert plain is not None and kept is not None and cad is not None
    others = [one for one in found.found if one.mode in OTHERS]
    best = max([one for one in others if one.fits] or others, key=lambda one: one.tokens_per_second)
    return Gain(
        cad.tokens_per_second / plain.tokens_per_second,
        cad.tokens_per_second / kept.tokens_per_second,
        cad.tokens_per_second / best.tokens_per_second,
        best.mode,
        cad.fits,
    )


def tables() -> dict[str, list[str]]:
    """The tables of the page by their names."""
    first = ["| documents | context | " + " | ".join(f"{ranks} GPUs" for ranks in GPUS) + " |", _rule(2 + len(GPUS))]
    for name, sigma in SIGMAS.items():
        for context in CONTEXTS:
            row = [find_gain(sigma, ranks, context) for ranks in GPUS]
            first.append(f"| {name} | {context // 1024}K | {' | '.join(one.cell() for one in row)} |")
            first.append(f"| | {KEPT} | {' | '.join(one.by_balance() for one in row)} |")
            sys.stderr.write("\n".join(first[-2:]) + "\n")
    second = ["| documents | over | " + " | ".join(f"{one // 1024}K" for one in WIDE) + " |", _rule(2 + len(WIDE))]
    third = ["| documents | " + " | ".join(f"{one:g} GB/s" for one in LINKS) + " |", _rule(1 + len(LINKS))]
    for name, sigma in SIGMAS.items():
        row = [find_gain(sigma, 16, context) for context in WIDE]
        second.append(f"| {name} | plain | {' | '.join(one.cell() for one in row)} |")
        second.append(f"| | {KEPT} | {' | '.join(one.by_balance() for one in row)} |")
        second.append(f"| | best other | {' | '.join(f'{one.best:.2f} {_short(one.other)}' for one in row)} |")
        row = [find_gain(sigma, 32, 65536, link) for link in LINKS]
        third.append(f"| {name} | {' | '.join(one.cell() for one in row)} |")
        third.append(f"| {KEPT} | {' | '.join(one.by_balance() for one in row)} |")
        sys.stderr.write("\n".join([*second[-3:], *third[-2:]]) + "\n")
    return {"documents": first, "context": second, "links": third}


def _short(mode: str) -> str:
    return MODES[mode].removesuffix(f", {KEPT}")


def _rule(columns: int) -> str:
    return "|" + "---|" * columns


def draw(name: str, label: str, values: Sequence[float], rows: dict[str, list[float]], ticks: list[str]) -> None:
    """One chart: a line for each kind of documents."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "cad"
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 3.2), layout="constrained")
    for kind, row in rows.items():
        axis.plot(values, row, marker="o", color=COLOURS[kind], label=kind)
    axis.axhline(1.0, color="black", linewidth=0.8)
    axis.set_xscale("log", base=2)
    axis.set_xticks(values, ticks)
    axis.minorticks_off()
    axis.set(
        xlabel=label, ylabel="tokens/s, CAD over plain", title="Simulated: CAD over plain training, attention kept"
    )
    axis.grid(alpha=0.3)
    axis.legend(title="documents", frameon=False)
    figure.savefig(DOCS / f"is-it-for-me-{name}.svg", metadata={"Date": None})
    pyplot.close(figure)


def fill(page: str, found: dict[str, list[str]]) -> str:
    """The page with its tables anew."""
    for name, lines in found.items():
        begin, end = f"<!-- table: {name} -->\n", "<!-- end -->"
        text = "\n".join([*lines, ""])
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        page, count = pattern.subn((begin + text + end).replace("\\", r"\\"), page)
        if count != 1:
            raise SystemExit(f"docs/is-it-for-me.md has {count} places for the table {name}; expected one")
    return page


def main() -> None:
    """Fill the tables and draw the charts."""
    path, found = DOCS / "is-it-for-me.md", tables()
    path.write_text(fill(path.read_text(), found))

    def row(sigma: float, points: Sequence[tuple[int, int, float]]) -> list[float]:
        return [find_gain(sigma, *point).kept for point in points]

    charts = {
        "documents": ("GPUs, 64K tokens on each", GPUS, [(ranks, 65536, 50.0) for ranks in GPUS], map(str, GPUS)),
        "context": (
            "tokens on each of 16 GPUs", WIDE, [(16, one, 50.0) for one in WIDE], (f"{one // 1024}K" for one in WIDE),
        ),
        "links": (
            "GB/s per GPU between hosts of 8, 32 GPUs, 64K tokens on each", LINKS,
            [(32, 65536, one) for one in LINKS], (f"{one:g}" for one in LINKS),
        ),
    }  # fmt: skip
    for name, (label, values, points, ticks) in charts.items():
        draw(name, label, values, {kind: row(sigma, points) for kind, sigma in SIGMAS.items()}, list(ticks))


if __name__ == "__main__":
    main()
