"""The picture of docs/servers.md: who does what when beside reserved servers, drawn from a timeline.

    python docs/servers_picture.py TIMELINE.json docs/servers.svg

TIMELINE.json is what the config key "trace" writes; the last micro-batch in it is drawn. Every rank has a row, a server
a lane in it for each part of the tokens.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NamedTuple

WIDTH, HEIGHT, GAP, LEFT, TOP = 980, 34, 12, 84, 40
TICKS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)
COLOURS = {
    "A": ("#9fc3e8", "rest of the model, part A"),
    "B": ("#c9b3e6", "part B"),
    "": ("#d5d9de", "both"),
    "attention A": ("#2f6fb0", "attention of A"),
    "attention B": ("#7445b0", "of B"),
    "waiting": ("#f3d9c4", "exchange or waiting"),
}
MOVES = ("dispatch", "return", "wait")
ATTENTION = ("local", "served")


class Bar(NamedTuple):
    """What a rank does for a while, in milliseconds from the left edge."""

    row: int
    lane: int
    lanes: int
    begin: float
    end: float
    kind: str


def read_bars(path: Path) -> tuple[list[str], list[Bar], float]:
    """Names of the rows, what is in them, and how long the last micro-batch took in milliseconds."""
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    if not any(name.startswith("server") for name in names.values()):
        raise SystemExit(f"{path} is a timeline without reserved servers")
    first = min(pid for pid, name in names.items() if not name.startswith("server"))
    steps = [e for e in events if e["ph"] == "X" and e["pid"] == first and e["name"].startswith("micro-batch")]
    last = max(steps, key=lambda e: e["ts"])
    begin, length = last["ts"], last["dur"]
    bars = []
    for event in (e for e in events if e["ph"] == "X"):
        lane = lanes[event["pid"], event["tid"]]
        serving = lane.startswith("serving ") and lane[-1] in "AB"
        kind = _kind(event["name"], lane[-1] if serving else None)
        if (lane != "training stream" and not serving) or kind is None:
            continue
        left, right = (min(max(t - begin, 0.0), length) / 1e3 for t in (event["ts"], event["ts"] + event["dur"]))
        if right > left:
            row = sorted(names).index(event["pid"])
            bars.append(Bar(row, "AB".index(lane[-1]) if serving else 0, 1 + serving, left, right, kind))
    return [names[pid].replace("rank", "trainer") for pid in sorted(names)], bars, length / 1e3


def _kind(name: str, part: str | None) -> str | None:
    """Colour of an event; `part`: of the lane on a server, whose waits stay white."""
    word, _, letter = name.rpartition(" ") if name[-2:] in (" A", " B") else (name, "", "")
    if part is not None:
        return f"attention {part}" if name in ATTENTION else None
    if word in MOVES:
        return "waiting"
    return f"attention {letter}" if word in ATTENTION else letter


def label(at_ms: int, step_ms: int) -> str:
    """A moment on an axis whose ticks are so far apart."""
    return f"{at_ms // 1000} s" if step_ms % 1000 == 0 else f"{at_ms} ms"


def draw(rows: list[str], bars: list[Bar], length: float) -> str:
    """The picture as SVG."""
    bottom = TOP + len(rows) * (HEIGHT + GAP)
    height = bottom + 58
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 16}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{LEFT + WIDTH + 16}" height="{height}" fill="white"/>',
    ]
    for row, name in enumerate(rows):
        y = TOP + row * (HEIGHT + GAP)
        parts.append(f'<text x="{LEFT - 10}" y="{y + HEIGHT / 2 + 4}" text-anchor="end">{name}</text>')
        parts.append(f'<rect x="{LEFT}" y="{y}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#ddd"/>')
    for bar in bars:
        each = HEIGHT / bar.lanes
        x, width = LEFT + bar.begin / length * WIDTH, (bar.end - bar.begin) / length * WIDTH
        y = TOP + bar.row * (HEIGHT + GAP) + bar.lane * each
        parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.3):.1f}" height="{each:.1f}" '
            f'fill="{COLOURS[bar.kind][0]}"/>'
        )
    step = next((one for one in TICKS_MS if length / one <= 12), TICKS_MS[-1])
    for i in range(int(length / step) + 1):
        x = LEFT + i * step / length * WIDTH
        parts.append(f'<line x1="{x:.1f}" y1="{TOP - 6}" x2="{x:.1f}" y2="{bottom - GAP}" stroke="#0002"/>')
        said = label(i * step, step)
        parts.append(f'<text x="{x:.1f}" y="{TOP - 12}" fill="#555" text-anchor="middle">{said}</text>')
    x = float(LEFT)
    for colour, said in COLOURS.values():
        parts.append(f'<rect x="{x:.0f}" y="{bottom + 16}" width="14" height="14" fill="{colour}"/>')
        parts.append(f'<text x="{x + 20:.0f}" y="{bottom + 28}" fill="#333">{said}</text>')
        x += 44 + 6.6 * len(said)
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    timeline, target = sys.argv[1:3]
    Path(target).write_text(draw(*read_bars(Path(timeline))))
