"""What the training benchmark measured, as figures: JSON, a Markdown table and a picture.

In: the `Measured` steps of all ranks. Out: a dictionary, the same on every rank. README.md defines every figure.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from train_modes import Mode
    from train_split import Setting


@dataclass(frozen=True)
class Measured:
    """One step of one mode on one rank."""

    mode: str
    step: int
    seconds: float
    waited: float
    """Seconds for which an exchange held up this rank."""
    loss: float
    norm: float
    """Norm of the gradient."""
    peak: int
    """Bytes of device memory."""
    spans: dict[str, tuple[float, int]]
    """Seconds and calls of attention forward and backward, and of exchanges that run beside nothing."""

    def attention(self, recompute: bool) -> float:
        """Attention seconds; without `recompute`, as many forwards as backwards count."""
        forward, forwards = self.spans.get("forward", (0.0, 0))
        backward, backwards = self.spans.get("backward", (0.0, 0))
        return backward + (forward if recompute or not forwards else forward * min(1.0, backwards / forwards))


def summarise(
    setting: Setting, modes: list[Mode], attention: list[Measured], timed: list[Measured],
    differences: dict[str, float], options: argparse.Namespace, flops: float,
) -> dict[str, Any]:  # fmt: skip
    """The figures of all modes, from the steps of all ranks; `flops`: what the model computes in a pass."""
    ranks = setting.ranks
    everyone: list[Any] = [None] * ranks
    dist.all_gather_object(everyone, (attention, timed))
    workload = setting.workload
    steps = range(len(workload.steps))
    tokens = workload.tokens
    found: dict[str, dict[str, Any]] = {}
    for mode in modes:
        rank_attention = [[one for one in who[0] if one.mode == mode.name] for who in everyone]
        rank_timed = [[one for one in who[1] if one.mode == mode.name] for who in everyone]
        # A step is as slow as its slowest rank.
        slowest = [max(column, key=lambda one: one.seconds) for column in zip(*rank_timed)]
        by_step = [[one.seconds for one in slowest if one.step == step] for step in steps]
        total = sum(median(times) for times in by_step)
        passes = [sum(column) for column in zip(*by_step)]
        rate = {
            "median": tokens / ranks / total,
            "low": tokens / ranks / max(passes),
            "high": tokens / ranks / min(passes),
        }
        # Of the pass in which spans were timed.
        timed_slowest = [max(column, key=lambda one: one.seconds) for column in zip(*rank_attention)]
        waits = [sum(one.waited for one in own) / sum(one.seconds for one in own) for own in rank_timed]
        losses = {one.step: one.loss for one in rank_timed[0]}
        norms = {one.step: one.norm for one in rank_timed[0]}
        found[mode.name] = {
            "tokens_per_s_per_gpu": rate,
            "seconds": total,
            "step_seconds": [median(times) for times in by_step],
            "mfu": flops / total / ranks / (options.peak_tflops * 1e12) if mode.attends else None,
            "exposed_exchange_s_per_step": [w * total / len(steps) for w in waits],
            "exposed_exchange_share": {"mean": sum(waits) / ranks, "max": max(waits)},
            "peak_GiB": max(one.peak for own in rank_timed for one in own) / 2**30,
            "loss": [losses[step] for step in steps],
            "gradient_norm": [norms[step] for step in steps],
            "gradient_difference": differences.get(mode.name),
            "exact": mode.exact,
            **(_attention(rank_attention) if mode.attends else {}),
        }
        state = [[one.spans[name][0] for name in one.spans if name.startswith("state")] for one in timed_slowest]
        if any(state):
            found[mode.name]["state_s"] = sum(map(sum, state))
        if not mode.exchanges:
            found[mode.name]["exposed_exchange_s_per_step"] = found[mode.name]["exposed_exchange_share"] = None
    results: dict[str, Any] = {
        "workload": workload.name,
        "stream": workload.stream,
        "tokens_per_rank": workload.tokens_per_rank,
        "ranks": workload.ranks,
        # What benchmarks/foreseen.py needs where the workload does not ship.
        "documents_and_pairs": [
            [[len(row), sum(n * (n + 1) // 2 for n in row)] for row in step] for step in workload.steps
        ],
        "machine": machine(setting) | ({"commit": options.commit} if options.commit else {}),
        "settings": {k: str(v) if isinstance(v, Path) else v for k, v in vars(options).items()},
        "kernel": setting.kernel.name,
        "modes": found,
    }
    results["bounds"] = _bounds(found, tokens / ranks, workload.evenness)
    return results


def _attention(rank_steps: list[list[Measured]]) -> dict[str, Any]:
    """Attention of the pass in which it was timed: by rank, and how evenly it was spread."""
    columns = list(zip(*rank_steps))
    slowest = sum(max(one.attention(True) for one in column) for column in columns)
    mean = sum(sum(one.attention(True) for one in column) / len(column) for column in columns)
    alone = sum(sum(one.attention(False) for one in column) / len(column) for column in columns)
    return {
        "attention_s_by_step_and_rank": [[one.attention(True) for one in column] for column in columns],
        "attention_s_mean": mean,
        "attention_s_mean_without_recompute": alone,
        "attention_max_over_mean": slowest / mean if mean else None,
        "attention_calls": {
            way: [sum(one.spans.get(way, (0.0, 0))[1] for one in own) for own in rank_steps]
            for way in ("forward", "backward")
        },
        "collectives_s_mean": sum(sum(one.spans.get("exchange", (0.0, 0))[0] for one in c) / len(c) for c in columns),
    }


def _bounds(found: dict[str, dict[str, Any]], tokens: float, evenness: float) -> dict[str, Any]:
    """Seconds without attention plus mean attention seconds, of the exact mode in which these are fewest.

    Where rows are not equally full, those without attention are the mean row's: all work split evenly.
    """
    exact = {
        name: mode["attention_s_mean_without_recompute"]
        for name, mode in found.items()
        if mode["exact"] and "attention_s_mean_without_recompute" in mode
    }
    bounds: dict[str, Any] = {}
    for name, mode in found.items():
        if name.startswith("bound") and exact:
            best = min(exact, key=lambda other: exact[other])
            seconds = mode["seconds"] * evenness + exact[best]
            bounds[name] = {"attention_of": best, "seconds": seconds, "tokens_per_s_per_gpu": tokens / seconds}
    return bounds


def machine(setting: Setting) -> dict[str, Any]:
    """What the numbers belong to."""
    here = Path(__file__).parent
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=here
    )
    cuda = setting.device.type == "cuda"
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip() or "unknown",
        "ranks": setting.ranks,
        "device": torch.cuda.get_device_name() if cuda else f"CPU, {platform.machine()}",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


BASELINES = {"dp": "plain", "dp:kept": "plain kept", "ulysses": "Ulysses", "ulysses:kept": "Ulysses kept"}
"""What tables call the modes that others are compared with; `kept`: attention is not run again by checkpointing."""

COLUMNS = (
    ("mode", lambda name, m: name),
    ("tokens/s/GPU", lambda name, m: f"{m['tokens_per_s_per_gpu']['median']:,.0f}"),
    ("spread", lambda name, m: "{low:,.0f}–{high:,.0f}".format(**m["tokens_per_s_per_gpu"])),
    ("MFU", lambda name, m: _number(m["mfu"], ".1%")),
    ("attention s, mean", lambda name, m: _number(m.get("attention_s_mean"), ".3f")),
    ("max/mean", lambda name, m: _number(m.get("attention_max_over_mean"), ".3f")),
    ("exposed exchange", lambda name, m: _exposed(m)),
    ("peak GiB", lambda name, m: f"{m['peak_GiB']:.1f}"),
    ("loss, step 0", lambda name, m: f"{m['loss'][0]:.5f}" + ("" if m["exact"] else " *")),
    ("gradient off by", lambda name, m: _number(m["gradient_difference"], ".1e")),
)


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _exposed(m: dict[str, Any]) -> str:
    share = m["exposed_exchange_share"]
    return "" if share is None else f"{share['mean']:.2%} (max {share['max']:.2%})"


def compared_with(results: dict[str, Any]) -> dict[str, float]:
    """Tokens/s of the baselines and bounds of a run, by what tables call them."""
    modes, bounds = results["modes"], results["bounds"]
    rates = {words: modes[name]["tokens_per_s_per_gpu"]["median"] for name, words in BASELINES.items() if name in modes}
    return rates | {name: bound["tokens_per_s_per_gpu"] for name, bound in bounds.items()}


def ratios(mode: dict[str, Any], others: dict[str, float]) -> list[str]:
    """A mode over each of these; empty for one that does not attend."""
    rate = mode["tokens_per_s_per_gpu"]["median"]
    return [f"{rate / other:.3f}" if mode["mfu"] is not None else "" for other in others.values()]


def table(results: dict[str, Any]) -> str:
    """The modes as a Markdown table, with the bounds below."""
    modes, others = results["modes"], compared_with(results)
    heads = [*(name for name, _ in COLUMNS), *(f"÷ {other}" for other in others)]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for name, mode in modes.items():
        cells = [*(cell(name, mode) for _, cell in COLUMNS), *ratios(mode, others)]
        lines.append("| " + " | ".join(cells) + " |")
    for name, one in results["bounds"].items():
        reached = ", ".join(
            f"{mode} {modes[mode]['tokens_per_s_per_gpu']['median'] / one['tokens_per_s_per_gpu']:.3f}"
            for mode in modes
            if modes[mode]["mfu"] is not None
        )
        lines.append(
            f"\n{name}: {one['tokens_per_s_per_gpu']:,.0f} tokens/s/GPU = the steps without attention "
            f"({modes[name]['seconds']:.3f} s) and the mean attention of {one['attention_of']} "
            f"({one['seconds'] - modes[name]['seconds']:.3f} s). Of it: {reached}."
        )
    if not all(mode["exact"] for mode in modes.values()):
        lines.append("\n\\* not the same computation: no attention, or documents cut at the borders of ranks.")
    return "\n".join(lines) + "\n"


def write_results(results: dict[str, Any], folder: Path | None) -> str:
    """Write JSON, Markdown and picture; gives the text to print."""
    on = results["machine"]
    text = f"{results['workload']}, {results['kernel']}, {on['ranks']} × {on['device']}\n\n{table(results)}"
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        label = re.sub(r"[^a-z0-9]+", "_", results["workload"].lower()).strip("_")
        if results["settings"].get("kernel") not in (None, "auto"):
            label += f"_{results['kernel']}"
        stem = folder / f"train_{label}_{results['machine']['date']}"
        Path(f"{stem}.json").write_text(json.dumps(results, indent=1, default=str) + "\n")
        settings = ", ".join(f"{k} {v}" for k, v in results["settings"].items() if v not in (None, {}, False))
        of = ", ".join(f"{k} {v}" for k, v in results["machine"].items())
        Path(f"{stem}.md").write_text(f"# Training step: {text}\n{of}\n\n{settings}\n")
        draw(results, Path(f"{stem}.png"))
        text += f"\nwritten: {stem}.json, .md, .png\n"
    return text


def draw(results: dict[str, Any], path: Path) -> None:
    """Tokens/s per mode with the bound as a line; attention seconds per rank of every step."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    modes = results["modes"]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5))
    rates = [mode["tokens_per_s_per_gpu"] for mode in modes.values()]
    middle = [rate["median"] for rate in rates]
    spread = [[m - r["low"] for m, r in zip(middle, rates)], [r["high"] - m for m, r in zip(middle, rates)]]
    spread = [[max(0.0, x) for x in side] for side in spread]
    left.bar(range(len(modes)), middle, yerr=spread, capsize=3, color="tab:blue")
    left.set_xticks(range(len(modes)), list(modes), rotation=20, ha="right")
    if "bound" in results["bounds"]:
        bound = results["bounds"]["bound"]["tokens_per_s_per_gpu"]
        left.axhline(bound, color="tab:red", linestyle="--", label="bound")
        left.legend()
    left.set_ylabel("tokens/s per rank")
    attending = {name: m["attention_s_by_step_and_rank"] for name, m in modes.items() if m["mfu"] is not None}
    for i, (name, steps) in enumerate(attending.items()):
        points = [(s + (i - len(attending) / 2) * 0.12, x) for s, row in enumerate(steps) for x in row]
        right.scatter(*zip(*points), s=14, label=name)
    right.set_xlabel("step")
    right.set_ylabel("attention seconds of each rank")
    right.legend()
    figure.suptitle(f"{results['workload']}, {results['machine']['ranks']} × {results['machine']['device']}")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
