"""The picture of docs/pipeline.md: the ticks of one step on every rank, drawn from a timeline.

    python docs/pipeline_picture.py TIMELINE.json TICKS docs/pipeline.svg

TIMELINE.json is what the config key "trace" writes for a pipeline, TICKS how many ticks of it to draw, the last ones:
of one step that is 2 (M + P − 1). Every tick gets the same width, because that is what a schedule is about: which rank
runs what beside which.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, LEFT, TOP = 44, 30, 74, 34
COLOURS = {"forward": "#4f86c6", "backward": "#e0904f", "serving": "#e6e6e6"}


def read_ticks(path: Path, count: int) -> list[list[dict[str, Any]]]:
    """By rank: the last ticks, in order."""
    events = json.loads(path.read_text())["traceEvents"]
    ticks = [event for event in events if event["ph"] == "X" and event["name"].startswith("round ")]
    ranks = sorted({event["pid"] for event in ticks})
    of_rank = [sorted((e for e in ticks if e["pid"] == rank), key=lambda e: e["ts"])[-count:] for rank in ranks]
    if not of_rank or any(len(own) < count for own in of_rank):
        raise SystemExit(f"{path} has {min(map(len, of_rank), default=0)} ticks, expected {count} or more")
    return of_rank


def draw(ticks: list[list[dict[str, Any]]]) -> str:
    """The picture as SVG."""
    columns = len(ticks[0])
    width, height = LEFT + columns * WIDTH + 10, TOP + len(ticks) * (HEIGHT + 6) + 34
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        'font-size="12" text-anchor="middle">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for column, one in enumerate(ticks[0]):
        label = "F" if one["cat"] == "forward" else "B"
        parts.append(f'<text x="{LEFT + (column + 0.5) * WIDTH}" y="{TOP - 10}" fill="#555">{label}</text>')
    for row, own in enumerate(ticks):
        y = TOP + row * (HEIGHT + 6)
        parts.append(f'<text x="{LEFT - 12}" y="{y + 20}" text-anchor="end">rank {row}</text>')
        for column, one in enumerate(own):
            runs = one["name"].split(", ")[1]
            colour = COLOURS["serving" if runs == "serving" else one["cat"]]
            text = "" if runs == "serving" else runs.split()[1]
            x = LEFT + column * WIDTH
            parts.append(f'<rect x="{x + 1}" y="{y}" width="{WIDTH - 2}" height="{HEIGHT}" rx="3" fill="{colour}"/>')
            parts.append(f'<text x="{x + WIDTH / 2}" y="{y + 20}" fill="white">{text}</text>')
    y = height - 12
    for i, (name, colour) in enumerate(COLOURS.items()):
        x = LEFT + i * 190
        parts.append(f'<rect x="{x}" y="{y - 11}" width="14" height="14" rx="3" fill="{colour}"/>')
        said = {"serving": "serves attention only"}.get(name, f"{name} of a micro-batch, and serves")
        parts.append(f'<text x="{x + 20}" y="{y}" text-anchor="start" fill="#333">{said}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    timeline, wanted, target = sys.argv[1:4]
    Path(target).write_text(draw(read_ticks(Path(timeline), int(wanted))))
