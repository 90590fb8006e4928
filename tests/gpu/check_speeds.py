"""A matrix product runs beside the last rank: it gets less attention, and a step takes what measured speeds allow.

One long document over all ranks, in place. What is allowed is told in benchmarks/slowed.py: each rank's step without
attention, and attention of the whole document, are measured while the product runs. In a rehearsal on CPUs times mean
nothing, so only what is planned is looked at.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch
from lines import Found, Lines, Place

sys.path[:0] = [str(Path(__file__).parents[2] / "benchmarks")]

from slowed import allowed, measure_alone, meet_all, slowed  # noqa: E402
from train_model import make_model  # noqa: E402

import deepspeed_cad  # noqa: E402
from deepspeed_cad.report.statistics import Statistics  # noqa: E402
from deepspeed_cad.session import close_session  # noqa: E402

MARGIN = 1.05
"""Of the time that measured speeds allow."""
USUAL = 0.85
"""The least that is allowed ÷ step where no rank is slowed."""
LAYERS = 2
LEARNING, TIMED = {"cuda": 10, "cpu": 2}, {"cuda": 5, "cpu": 1}
"""Steps in which kernels compile and lateness is learned, and steps that are timed."""


def run(place: Place, lines: Lines, case: str) -> None:
    """One case: the last rank is slowed."""
    lines.check("speeds", "a product beside the last rank", lambda: check(place))


class Measured(NamedTuple):
    """A few steps with CAD, beside what its ranks do alone."""

    step_s: float
    allowed_s: float
    speeds: list[float]
    words: str


def check(place: Place) -> Found:
    """Whether a slowed rank costs more than its speed says. What attention in parts, exchanges and a GPU that never
    idles cost besides is there without a slowed rank, too."""
    even = measure(place)
    with slowed(place.rank if place.rank == place.ranks - 1 else None):
        found = measure(place)
    usual = even.allowed_s / even.step_s
    right = (
        usual >= USUAL
        and found.step_s * min(usual, 1.0) <= MARGIN * found.allowed_s
        and found.speeds[-1] < 0.9 * max(found.speeds)
    )
    share = found.allowed_s / found.step_s
    text = f"allowed ÷ step {share:.3f} where it is {usual:.3f} without; {found.words}; without: {even.words}"
    return right or not place.on_gpu, text


def measure(place: Place) -> Measured:
    """A model that is mostly attention."""
    tokens, hidden = (65536, 2048) if place.on_gpu else (128, 64)
    longest = tokens * place.ranks
    dtype = torch.bfloat16 if place.on_gpu else torch.float32
    model = make_model(LAYERS, hidden, 16, 4, 2 * hidden, 256, longest, place.device, dtype)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    here = torch.arange(place.rank * tokens, (place.rank + 1) * tokens, device=place.device)

    def step() -> None:
        hidden_TE = model.model(input_ids=(here % 256)[None], position_ids=here[None], use_cache=False)[0]
        hidden_TE.float().pow(2).mean().backward()

    meet = meet_all(place.device)
    alone = place.gather(measure_alone(model, step, longest, meet, place.kernel))
    best = allowed([one["linear_s"] for one in alone], [one["attention_s"] * LAYERS for one in alone], True)
    block = {"speeds": "measure", "kernel": place.kernel, "granularity": 128 if place.on_gpu else 16}
    deepspeed_cad.apply(model, block)
    session = deepspeed_cad.current_session()
    assert session is not None and session.speeds is not None
    seconds = []
    learning, timed = LEARNING[place.device.type], TIMED[place.device.type]
    for number in range(learning + timed):
        if number == learning:
            session.take_statistics("check")
        meet()
        begin = time.perf_counter()
        step()
        meet()
        seconds.append(time.perf_counter() - begin)
        model.zero_grad()
    took = max(place.gather(median(seconds[learning:])))
    speeds = session.speeds.tolist()
    found = session.take_statistics("check")
    waited = place.gather(found.waited_s / timed)
    text = f"speeds {in_words(speeds)}, step {took * 1e3:.1f} ms, allowed {best * 1e3:.1f} ms, "
    text += f"waited {in_words(waited, 1e3)} ms a step, "
    text += f"planned {in_words(found.load / found.load.mean())} of the mean, before {in_words(as_they_lay(found))}, "
    text += f"alone {as_alone(alone)} s, "
    text += str(session.learned.links.links if session.learned.links else "no links")
    close_session()
    return Measured(took, best, speeds, text)


def as_they_lay(found: Statistics) -> list[float]:
    """Attention of each rank as its documents lay, over the mean."""
    return list(found.load_before / found.load_before.mean())


def in_words(numbers: Iterable[float], times: float = 1.0) -> str:
    """For the table."""
    return " ".join(f"{times * one:.2f}" for one in numbers)


def as_alone(alone: Iterable[dict[str, float]]) -> str:
    """Linear layers of all layers and attention of one, by ranks."""
    return " ".join(f"{one['linear_s']:.3f}+{one['attention_s']:.3f}" for one in alone)
