"""The two pictures of the README's first screen, drawn from figures: nothing in them is placed by hand and eye alone.

    python docs/pictures.py      # writes docs/how-it-works.svg and docs/gain.svg

In: documents of four ranks; the table of docs/is-it-for-me.md. Out: two SVG files. Needs nothing but Python.
"""

from __future__ import annotations

from math import log
from pathlib import Path
from statistics import NormalDist
from xml.sax.saxutils import escape

DOCS = Path(__file__).resolve().parent

RANKS = ([16], [6, 4, 3, 2, 1], [2, 1, 1, 2, 1, 2, 1, 1, 1, 2, 1, 1], [8, 5, 3])
"""Documents of each rank in units of 4096 tokens: 64K tokens a rank."""
COLOURS = ("#2f6fde", "#0f9d8a", "#e09b22", "#9b5bd6")
"""Of the tokens of each rank."""
MEDIAN, SIGMAS = 2048, {"alike": 0.3, "mixed": 1.0, "long tail": 1.5, "very long tail": 2.2}
"""Lengths of the documents of the second picture: log-normal, as in benchmarks/is_it_for_me.py."""
INK, GREY, PALE, PAPER = "#1d2430", "#6b7482", "#e8ebf0", "#ffffff"
LINEAR = "#cfd5de"
LINES = {"very long tail": "#9b5bd6", "long tail": "#2f6fde", "mixed": "#0f9d8a", "alike": "#6b7482"}
FONT = "-apple-system, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif"


class Canvas:
    """SVG elements, one after the other."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self._head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" font-family="{FONT}">\n<title>{escape(title)}</title>'
        )
        self._parts = [f'<rect width="{width}" height="{height}" rx="10" fill="{PAPER}"/>']

    def box(self, x: float, y: float, width: float, height: float, fill: str, more: str = "") -> None:
        """A rectangle."""
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="2" fill="{fill}" {more}/>'
        )

    def text(self, x: float, y: float, words: str, size: int = 13, fill: str = INK, more: str = "") -> None:
        """A line of text, its baseline at y."""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}" {more}>{escape(words)}</text>'
        )

    def path(self, points: str, stroke: str, width: float = 1.5, more: str = "") -> None:
        """A line."""
        self._parts.append(f'<path d="{points}" fill="none" stroke="{stroke}" stroke-width="{width}" {more}/>')

    def arrow(self, points: str, at: tuple[float, float], stroke: str, width: float = 1.8, down: int = 0) -> None:
        """A line that ends in a head at `at`, which looks right (0), down (1) or up (-1)."""
        x, y = at
        self.path(points, stroke, width)
        tips = {0: ((-7, -4), (-7, 4)), 1: ((-4, -7), (4, -7)), -1: ((-4, 7), (4, 7))}[down]
        corners = " ".join(f"{x + a:.1f},{y + b:.1f}" for a, b in ((0, 0), *tips))
        self._parts.append(f'<polygon points="{corners}" fill="{stroke}"/>')

    def save(self, path: Path) -> None:
        """Write the file."""
        path.write_text(self.text_of_file(), encoding="utf-8")

    def text_of_file(self) -> str:
        """The file."""
        return "\n".join([self._head, *self._parts, "</svg>\n"])


def work() -> tuple[list[float], list[list[float]]]:
    """Attention of each rank's own tokens; and of it, how much each server runs: [server][home], equal sums."""
    own = [float(sum(length**2 for length in rank)) for rank in RANKS]
    mean = sum(own) / len(own)
    shares = [[min(own[home], mean) if home == server else 0.0 for home in range(4)] for server in range(4)]
    for home, total in enumerate(own):
        left = total - mean
        for server in range(4):
            given = min(max(0.0, left), mean - sum(shares[server]))
            if server != home and given > 0:
                shares[server][home] += given
                left -= given
    return own, shares


def how_it_works() -> Canvas:
    """Loader, plan and layer, from left to right."""
    own, shares = work()
    canvas = Canvas(1000, 352, "Packed rows of unequal documents become a plan, and every layer runs equal attention")
    mean = sum(own) / 4
    top, rise, high = 112.0, 46.0, 30.0
    for x, number, name, line in (
        (28, "1", "Loader", "rows of equal tokens, unequal documents"),
        (352, "2", "Plan", "on the CPU, one micro-batch ahead"),
        (652, "3", "Layer", "on the GPUs, each one, both directions"),
    ):
        canvas.text(x, 40, f"{number}  {name}", 19, INK, 'font-weight="600"')
        canvas.text(x, 62, line, 13, GREY)

    # Loader: one row of documents for each rank.
    unit = 236 / 16
    for rank, documents in enumerate(RANKS):
        x, y = 72.0, top + rank * rise
        canvas.text(28, y + 20, f"GPU {rank}", 12, GREY)
        for length in documents:
            canvas.box(x, y, unit * length - 1.5, high, COLOURS[rank])
            x += unit * length
    canvas.text(72, 318, "64K tokens each, the longest on GPU 0", 12, GREY)

    # Plan: attention of each rank before and after, in units of the mean.
    base, scale, wide = 288.0, 68.0 / mean, 24.0
    for x, title, columns in (
        (352.0, "attention, before", [[own[s] if s == h else 0.0 for h in range(4)] for s in range(4)]),
        (496.0, "and after", shares),
    ):
        canvas.path(f"M{x} {base + 0.5}H{x + 116}", GREY, 1)
        for server, column in enumerate(columns):
            y = base
            for home in sorted(range(4), key=lambda home: home != server):
                height = column[home] * scale
                if height:
                    y -= height
                    canvas.box(x + 2 + server * 29, y, wide, height - 1, COLOURS[home])
        canvas.text(x, 318, title, 12, GREY)
    level = base - mean * scale
    canvas.path(f"M346 {level:.1f}H616", INK, 1, 'stroke-dasharray="3 4" opacity="0.55"')
    canvas.text(384, base - own[0] * scale + 12, f"{max(own) / mean:.1f} × the mean:", 12, INK)
    canvas.text(384, base - own[0] * scale + 28, "the others wait", 12, INK)
    canvas.text(496, level - 10, "1.0 × the mean", 12, INK)

    # Layer: a line of time for each rank; what it serves for another has that rank's colour.
    begin, pre, lane, span, post = 706.0, 40.0, 16.0, 148.0, 40.0
    left, right = begin + pre + lane / 2, begin + pre + lane * 1.5 + span
    for server in range(4):
        y = top + server * rise
        canvas.text(652, y + 20, f"GPU {server}", 12, GREY)
        canvas.box(begin, y, pre, high, LINEAR)
        canvas.box(right + lane / 2, y, post, high, LINEAR)
        x = begin + pre + lane
        for home in sorted(range(4), key=lambda home: home != server):
            width = span * shares[server][home] / mean
            if not width:
                continue
            canvas.box(x, y, width - 1.5 * (home == server), high, COLOURS[home])
            if home != server:
                at = x + min(10.0, width / 2)
                canvas.arrow(f"M{left} {y - 8}H{at:.1f}V{y - 4}", (at, y), COLOURS[home], 1.8, 1)
                canvas.path(f"M{x + width:.1f} {y + high / 2}H{right}", INK, 1.8)
            x += width
    last = top + 3 * rise
    canvas.path(f"M{begin + pre} {top + high / 2}H{left}V{last - 8}", COLOURS[0], 1.8)
    canvas.arrow(
        f"M{right} {last + high / 2}V{top + high / 2}H{right + lane / 2 - 4}", (right + lane / 2, top + high / 2), INK
    )
    canvas.text(left - 8, top - 12, "Q, K, V out", 12, COLOURS[0])
    canvas.text(right + 8, top - 12, "O back", 12, INK, 'text-anchor="end"')
    canvas.box(begin, 308, 12, 12, LINEAR)
    canvas.text(begin + 18, 318, "linear layers", 12, GREY)
    canvas.text(begin + 120, 318, "colour: whose tokens", 12, GREY)

    for x in (322, 628):
        canvas.arrow(f"M{x - 4} 36H{x + 14}", (x + 16, 36), GREY, 2)
    return canvas


def gain(context: str = "64K") -> Canvas:
    """Times faster than plain training that keeps attention, against GPUs, a line for each kind of documents: from the
    table of docs/is-it-for-me.md."""
    gpus, kinds = read_gains((DOCS / "is-it-for-me.md").read_text(encoding="utf-8"), context)
    canvas = Canvas(1000, 312, f"Simulated: how many times faster a step is with CAD, against GPUs, {context} each")
    left, right, top, base = 62.0, 700.0, 92.0, 262.0
    most = 1.5

    def place(value: float) -> float:
        return base - (value - 1.0) / (most - 1.0) * (base - top)

    step = (right - left) / (len(gpus) - 1)
    canvas.text(28, 38, "Simulated: how much faster is a step?", 19, INK, 'font-weight="600"')
    canvas.text(
        28,
        58,
        f"than plain training with attention kept: 8B Llama, {context} tokens on each GPU, median document 2K",
        13,
        GREY,
    )
    for value in (1.0, 1.2, 1.4):
        canvas.path(f"M{left} {place(value):.1f}H{right}", PALE if value > 1 else GREY, 1)
        canvas.text(left - 10, place(value) + 4, f"{value:.1f}×", 12, GREY, 'text-anchor="end"')
    for number, count in enumerate(gpus):
        canvas.text(left + number * step, base + 26, f"{count} GPUs", 12, GREY, 'text-anchor="middle"')
    ends: list[float] = []
    for name, values in sorted(kinds.items(), key=lambda item: -item[1][-1]):
        colour, words = LINES[name], say_longest(SIGMAS[name], int(context[:-1]) * 1024)
        points = [(left + number * step, place(value)) for number, value in enumerate(values)]
        canvas.path("M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points), colour, 2.6, 'stroke-linejoin="round"')
        for x, y in points:
            canvas.path(f"M{x:.1f} {y:.1f}h0", colour, 8, 'stroke-linecap="round"')
        end = max([points[-1][1] - 2, *(one + 38 for one in ends)])
        ends.append(end)
        canvas.text(right + 20, end, f"{name}: {values[-1]:.2f}×", 14, colour, 'font-weight="600"')
        canvas.text(right + 20, end + 16, words, 12, GREY)
    return canvas


def say_longest(sigma: float, context: int) -> str:
    """How many documents of a kind are as long as a row."""
    share = 1.0 - NormalDist().cdf(log(context / MEDIAN) / sigma)
    return (
        f"one document in {float(f'{1 / share:.2g}'):,.0f} fills a row"
        if share > 1e-6
        else "all near 2K: nothing to gain"
    )


def read_gains(page: str, context: str) -> tuple[list[int], dict[str, list[float]]]:
    """GPUs, and the gains over attention kept for each kind of documents, from the table of the page."""
    rows = [[cell.strip() for cell in line.strip("|\n ").split("|")] for line in page.splitlines() if line[:1] == "|"]
    gpus = next([int(cell.split()[0]) for cell in row[2:]] for row in rows if row[0] == "documents")
    kept = zip(rows, rows[1:])
    # The line of attention kept has an empty first cell, which is stripped.
    return gpus, {
        row[0]: [float(cell) for cell in below[1:]]
        for row, below in kept
        if row[1:2] == [context] and below[0] == "attention kept"
    }


PICTURES = {"how-it-works.svg": how_it_works, "gain.svg": gain}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        draw().save(DOCS / name)
