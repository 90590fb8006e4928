"""All modes beside each other on the same documents, and which one to take.

In: a setting and steps (layouts of their micro-batches). Out: `Comparison`: what each mode would do, why a mode is left
out, and one sentence. Where a mode has a degree (ranks that share a row, servers) the first steps choose it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from deepspeed_cad.errors import CADConfigError
from deepspeed_cad.forecast import modes, modes_cad
from deepspeed_cad.forecast.attention_seconds import document_lengths, of_documents
from deepspeed_cad.forecast.setting import Setting
from deepspeed_cad.forecast.step import Foreseen, mean

MODES = {
    "plain": "plain",
    "plain kept": "plain, attention kept",
    "ulysses": "Ulysses",
    "ulysses kept": "Ulysses, attention kept",
    "gathered": "all-gather CP",
    "gathered kept": "all-gather CP, attention kept",
    "packed": "packing by length, ideal",
    "cad": "CAD in place",
    "cad reserved": "CAD, reserved servers",
}
"""All modes by name, with what tables call them; in the order in which they are shown."""

NEAR = 1.02
"""Times faster. A simpler mode that is as near to the fastest is recommended: predictions are off by as much."""

THREADS = 2
"""Steps that are foreseen at a time: most of the work is the planner's, which runs beside other threads."""

TRIED_STEPS = 4
"""Steps by which a degree is chosen: one step has other rows for each number of servers, and one long document may
decide it."""

ENOUGH_ROWS = 4096
"""Rows by which a degree is chosen, at most: a step of so many has documents of all lengths."""

Progress = Callable[[str, int, int], None]
"""Called with a mode and how many of how many of its steps are done."""

Deal = Callable[[int], Sequence[modes.Step]]
"""Gives the steps that trainers make of the same documents beside so many servers, which have none."""


@dataclass(frozen=True)
class Comparison:
    """What every mode would do."""

    found: tuple[Foreseen, ...]
    left_out: dict[str, str]
    """By mode: why it cannot run here."""

    def of(self, mode: str) -> Foreseen | None:
        """A mode, where it was foreseen."""
        return next((one for one in self.found if one.mode == mode), None)

    @property
    def best_other(self) -> Foreseen | None:
        """The fastest of the modes without CAD that fit; the ideal packing is among them."""
        return _fastest([one for one in self.found if not one.mode.startswith("cad") and one.fits])

    def to_json(self) -> dict[str, Any]:
        """Plain lists and numbers, with the recommendation."""
        return {
            "modes": [one.to_json() for one in self.found],
            "left_out": self.left_out,
            "recommendation": recommend(self),
            "reserve": reserve(self)[0],
        }


def label(found: Foreseen) -> str:
    """What tables call a mode with its degree; a star where no run was measured."""
    return _name(found) + ("" if found.measured else " *")


def _name(found: Foreseen) -> str:
    """A mode with its degree, for sentences."""
    name = MODES.get(found.mode, found.mode)
    if found.mode == "cad reserved":
        name = f"CAD, {found.degree} reserved"
    elif found.degree > 1:
        name += f" ×{found.degree}"
    if found.variant:
        name += f", {found.variant}"
    return name


def compare(
    setting: Setting,
    steps: Sequence[modes.Step],
    wanted: Sequence[str] = tuple(MODES),
    servers: int | None = None,
    progress: Progress | None = None,
    deal: Deal | None = None,
) -> Comparison:
    """Foresee all steps in all modes that are wanted.

    Raises CADConfigError where there is no step, or no mode that can run.

    Args:
        setting: model, cluster, how it is trained.
        steps: layouts of their micro-batches.
        wanted: modes.
        servers: how many are reserved; None: what is best.
        progress: hears how far it is.
        deal: the same documents for fewer trainers; None: rows that servers would have trained are left out, and what
            is reserved trains other documents than the other modes.
    """
    if not steps or not steps[0]:
        raise CADConfigError("there is no step to foresee")
    found: list[Foreseen] = []
    left_out: dict[str, str] = {}
    for mode in wanted:
        if mode == "cad reserved":
            choices = _with_servers(setting, steps, servers, deal)
        else:
            runs = _runs(setting, steps[0], mode)
            choices = runs if isinstance(runs, str) else [(run, steps) for run in runs]
        if isinstance(choices, str):
            left_out[mode] = choices
        else:
            # CAD's variants are faster in no step and are there for what fits: one step tells.
            tried = 1 if mode == "cad" else max(1, min(TRIED_STEPS, ENOUGH_ROWS // setting.seats))
            found.append(_best(choices, tried, partial(progress, mode) if progress else _silent))
    if not found:
        reasons = "; ".join(f"{MODES[mode]}: {reason}" for mode, reason in left_out.items())
        raise CADConfigError(f"no mode that is asked for can run on {setting.cluster.ranks} GPUs: {reasons}")
    return Comparison(tuple(found), left_out)


def recommend(comparison: Comparison) -> str:
    """One sentence: what to take and why."""
    real = [one for one in comparison.found if one.mode != "packed"]
    fitting = [one for one in real if one.fits]
    if not real:
        return "Packing by length is a bound, and no way to reach it is known: ask for other modes beside it."
    if not fitting:
        least = min(real, key=lambda one: one.peak)
        return (
            f"Nothing fits: {label(least)} needs least, {least.peak / 2**30:.0f} GiB a GPU of "
            f"{least.capacity / 2**30:.0f}; it would fit with {what_would_fit(least)}."
        )
    # Of reserved servers only one trainer and one server were measured: named beside what to take, and taken where
    # nothing else is asked.
    tried = [one for one in fitting if one.mode != "cad reserved"] or fitting
    best = tried[0]
    for one in tried[1:]:
        # From the simplest to the least simple: whoever comes later must be clearly faster.
        if one.tokens_per_second > best.tokens_per_second * NEAR:
            best = one
    # Of CAD beside another mode the reason speaks. Plain is what most have, the fastest what one would take instead.
    others = [one for one in fitting if one.mode != best.mode and not one.mode.startswith("cad")]
    others.sort(key=lambda one: (one.mode != "plain", -one.tokens_per_second))
    ratios = " and ".join(
        f"{best.tokens_per_second / one.tokens_per_second:.2f} times {_name(one)}" for one in others[:2]
    )
    sentence = f"Take {label(best)}{': ' + ratios if ratios else ''}; {_reason(comparison, best)}."
    ahead = [one for one in fitting if one not in tried and one.tokens_per_second > best.tokens_per_second * NEAR]
    for one in ahead:
        sentence += f" {label(one)} would be {one.tokens_per_second / best.tokens_per_second:.2f} times as fast."
    return sentence


def reserve(comparison: Comparison) -> tuple[int, str]:
    """How many servers to reserve, and one sentence; "" where that was not foreseen beside CAD in place."""
    found, cad = comparison.of("cad reserved"), comparison.of("cad")
    if found is None or cad is None:
        return 0, ""
    block = f'{found.degree}, "servers": {{"reserved": {found.degree}}}'
    if not found.fits:
        return 0, f"Reserve none: with {found.degree} it does not fit."
    if not cad.fits:
        return found.degree, f"Reserve {block}: in place it does not fit."
    ratio = found.tokens_per_second / cad.tokens_per_second
    if ratio <= NEAR:
        return 0, f"Reserve none: with {found.degree} it is {ratio:.2f} times as fast as in place."
    return found.degree, f"Reserve {block}: it is {ratio:.2f} times as fast as in place."


def what_would_fit(found: Foreseen) -> str:
    """Words for what would bring a mode into memory."""
    room = found.capacity - found.state
    if room <= 0:
        return "more GPUs that share the weights, or more tensor parallelism"
    share = room / (found.peak - found.state)
    return f"rows of at most {share:.0%} of these tokens, or tensor parallelism"


def _reason(comparison: Comparison, best: Foreseen) -> str:
    plain, cad = comparison.of("plain"), comparison.of("cad")
    if best.mode.startswith("cad"):
        if plain is None or not plain.fits:
            return f"its GPUs idle {best.idle:.0%} of a step"
        waits = plain.seconds.waiting / plain.seconds.total
        if waits < 0.02:
            return "documents are nearly even, and what is gained is that the recompute does not repeat attention"
        return (
            f"in a plain step GPUs wait {waits:.0%} of the time for the one with most attention, here they idle "
            f"{best.idle:.0%}, of which exchanges {best.seconds.exchange / best.seconds.total:.1%}"
        )
    if cad is None:
        return f"its GPUs idle {best.idle:.0%} of a step"
    if not cad.fits:
        return (
            f"CAD in place needs {cad.peak / 2**30:.0f} GiB a GPU of {cad.capacity / 2**30:.0f}: "
            f"it would fit with {what_would_fit(cad)}"
        )
    exposed = cad.seconds.exchange / cad.seconds.total
    if exposed > 0.1:
        return f"CAD in place would spend {exposed:.0%} of a step on exchanges that nothing hides"
    share = best.seconds.attention / best.seconds.total
    gain = cad.tokens_per_second / best.tokens_per_second
    return f"CAD in place would be {gain:.2f} times as fast, as attention is {share:.0%} of the step"


Run = Callable[[modes.Step], Foreseen]
Choice = tuple[Run, Sequence[modes.Step]]


def _runs(setting: Setting, step: modes.Step, mode: str) -> list[Run] | str:
    """Ways to run a mode, or why it cannot run."""
    kind, kept = mode.removesuffix(" kept"), mode.endswith(" kept")
    if kept and not setting.checkpointing:
        return "without checkpointing no mode repeats attention"
    if kind == "plain":
        if any(layout.segments.begin.any() for layout in step):
            return "documents go on on the next GPU, and it would cut them there: another computation"
        return [partial(modes.plain, setting, kept=kept)]
    if mode == "cad":
        runs: list[Run] = [partial(modes_cad.in_place, setting)]
        if setting.checkpointing and not setting.recompute_attention:
            # No faster, and what is kept over the recompute may be what does not fit.
            if setting.keep == "device":
                runs.append(partial(_variant, replace(setting, keep="host"), '"keep": "host"'))
            again = replace(setting, keep="device", recompute_attention=True)
            runs.append(partial(_variant, again, "recompute_attention"))
        return runs
    if kind == "ulysses":
        degrees = modes.ulysses_degrees(setting)
        if not degrees:
            return f"{setting.shape.query_heads} query heads and {setting.seats} seats have no common divisor"
        return [partial(modes.ulysses, setting, degree=degree, kept=kept) for degree in degrees]
    if kind == "gathered":
        degrees = modes.gathered_degrees(setting)
        if not degrees:
            return f"{setting.seats} seats cannot be divided by 2"
        return [partial(modes.gathered, setting, degree=degree, kept=kept) for degree in degrees]
    if mode == "packed":
        longest = max(int(document_lengths(layout).max(initial=1)) for layout in step)
        degrees = modes.packed_degrees(setting, longest, int(step[0].tokens.max()))
        return [partial(modes.packed, setting, degree=degree) for degree in degrees]
    raise CADConfigError(f"there is no mode {mode!r}; there are {', '.join(MODES)}")


def _with_servers(
    setting: Setting, steps: Sequence[modes.Step], servers: int | None, deal: Deal | None
) -> list[Choice] | str:
    """Numbers of seats that may be reserved, each with its steps; or why none."""
    seats, layout = setting.seats, steps[0][0]
    if setting.pipeline > 1:
        return "reserved servers together with pipeline stages are not foreseen"
    if seats < 2:
        return "one seat cannot be split into trainers and servers"
    if servers is not None and not 0 < servers < seats:
        return f"{servers} servers of {seats} seats leave no server or no trainer"
    if servers is not None:
        counts = [servers]
    else:
        attention = float(of_documents(layout, setting.cost).total.mean()) * setting.shape.groups * setting.layers
        attention *= setting.machine.in_training
        even = modes_cad.even_servers(setting, float(layout.tokens.mean()), attention)
        # Where rows are not equally full the fullest trainer sets the pace, and fewer servers are enough.
        counts = sorted({max(1, even * share // 4) for share in (1, 2, 3, 4)})
    return [(partial(modes_cad.reserved, setting, servers=one), deal(one) if deal else steps) for one in counts]


def _variant(setting: Setting, name: str, step: modes.Step) -> Foreseen:
    return replace(modes_cad.in_place(setting, step), variant=name)


def _best(choices: list[Choice], tried: int, tell: Callable[[int, int], None]) -> Foreseen:
    """The fastest that fits, else the one that needs least memory; the first steps, so many, choose it."""
    with ThreadPoolExecutor(THREADS) as threads:
        first = [list(threads.map(run, steps[: tried if len(choices) > 1 else 1])) for run, steps in choices]
        means = list(map(mean, first))
        best = means.index(_fastest([one for one in means if one.fits]) or min(means, key=lambda one: one.peak))
        (run, steps), done = choices[best], first[best]
        for number in range(len(done)):
            tell(number + 1, len(steps))
        for one in threads.map(run, steps[len(done) :]):
            done.append(one)
            tell(len(done), len(steps))
    return mean(done)


def _silent(done: int, steps: int) -> None:
    """No progress."""


def _fastest(found: list[Foreseen]) -> Foreseen | None:
    return max(found, key=lambda one: one.tokens_per_second, default=None)
