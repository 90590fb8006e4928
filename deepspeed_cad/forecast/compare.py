"""All modes beside each other on the same documents, and which one to take.

In: a setting and steps (layouts of their micro-batches). Out: `Comparison`: what each mode would do, why a mode is left
out, and one sentence. Where a mode has a degree (ranks that share a row, servers) the first steps choose it.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from deepspeed_cad.cost import count_pairs
from deepspeed_cad.errors import CADConfigError
from deepspeed_cad.forecast import modes, modes_cad
from deepspeed_cad.forecast.setting import Setting
from deepspeed_cad.forecast.step import MEMORY, OUTSIDE, RATIO, SERVERS, Foreseen, Seconds, mean
from deepspeed_cad.layout import Layout

MODES = {
    "plain": "plain",
    "plain kept": "plain, attention kept",
    "ulysses": "Ulysses",
    "ulysses kept": "Ulysses, attention kept",
    "gathered": "all-gather CP",
    "gathered kept": "all-gather CP, attention kept",
    "cad": "CAD in place",
    "cad reserved": "CAD, reserved servers",
}
"""All modes by name, with what tables call them; in the order in which they are shown."""

NEAR = 1.02
"""Times faster. A simpler mode that is as near to the fastest is recommended: predictions are off by as much."""

THREADS = 2
"""Steps that are foreseen at a time: most of the work is the planner's, which runs beside other threads."""
TRIED_STEPS, ENOUGH_ROWS = 4, 4096
"""Steps by which a degree is chosen, and rows in them, at most: one step has other rows for each number of servers, and
one long document may decide it; a step of so many rows has documents of all lengths."""

Run = partial[Foreseen]
"""A mode with its setting first, without the step."""


@dataclass(frozen=True)
class Comparison:
    found: tuple[Foreseen, ...]
    left_out: dict[str, str]
    """By mode: why it cannot run here."""

    def of(self, mode: str) -> Foreseen | None:
        return next((one for one in self.found if one.mode == mode), None)

    @property
    def best_rival(self) -> Foreseen | None:
        """The fastest without CAD that fits."""
        return _fastest(one for one in self.found if not one.mode.startswith("cad") and one.fits)

    def balance(self, found: Foreseen) -> float | None:
        """Times faster than plain training whose recompute repeats attention where that of the mode does: what is
        gained by balance. None where that was not foreseen."""
        plain = self.of("plain")
        like = plain if plain is None or plain.repeats == found.repeats else self.of("plain kept")
        return found.tokens_per_second / like.tokens_per_second if like else None

    def to_json(self) -> dict[str, Any]:
        taken = choose(self)
        return {
            "modes": [one.to_json() | {"balance": self.balance(one)} for one in self.found],
            "left_out": self.left_out,
            "recommendation": recommend(self),
            "reserve": taken.degree if taken and taken.mode == "cad reserved" else 0,
        }


def label(found: Foreseen) -> str:
    """What tables call a mode with its degree; a star where no run of that mode and size was compared."""
    return name_of(found) + ("" if found.measured else " *")


def name_of(found: Foreseen) -> str:
    """A mode with its degree, for sentences."""
    name = MODES.get(found.mode, found.mode)
    if found.mode == "cad reserved":
        name = f"CAD, {found.degree} reserved"
    elif found.degree > 1:
        name += f" ×{found.degree}"
    return f"{name}, {found.variant}" if found.variant else name


def compare(
    setting: Setting,
    steps: Sequence[modes.Step],
    wanted: Sequence[str] = tuple(MODES),
    servers: int | None = None,
    tell: Callable[[str], None] = lambda words: None,
    fewer: Callable[[int], Sequence[modes.Step]] | None = None,
) -> Comparison:
    """Foresee all steps in all modes that are wanted.

    `steps`: layouts of their micro-batches. `servers`: how many are reserved; None: what is best. `tell` hears how far
    it is. `fewer` gives the steps that trainers make of the same documents beside so many servers, which have none;
    None: rows that servers would have trained are left out. Raises CADConfigError where there is no step, or no mode
    that can run."""
    if not steps or not steps[0]:
        raise CADConfigError("there is no step to foresee")
    found: list[Foreseen] = []
    left_out: dict[str, str] = {}
    layouts = [layout for step in steps for layout in step]
    pairs = sum(float(count_pairs(one.segments.begin, one.segments.end).sum()) for one in layouts)
    pairs /= sum(float(one.tokens.sum()) for one in layouts)
    # Of the model's forward and backward, and of forwards alone; pairs above the diagonal left out.
    per_token = (3.0 + setting.forwards) * setting.model.flops(pairs)
    for mode in wanted:
        choices = _choices(setting, steps, mode, servers, fewer)
        if isinstance(choices, str):
            left_out[mode] = choices
        else:
            # CAD's variants are faster in no step and are there for what fits: one step tells.
            tried = 1 if mode == "cad" else max(1, min(TRIED_STEPS, ENOUGH_ROWS // setting.seats))
            best = _best(mode, [(partial(_all_passes, run), of) for run, of in choices], tried, tell)
            found.append(replace(best, mfu=best.tokens_per_second * per_token / setting.machine.published["flops"]))
    if not found:
        reasons = "; ".join(f"{MODES[mode]}: {reason}" for mode, reason in left_out.items())
        raise CADConfigError(f"no mode that is asked for can run on {setting.cluster.ranks} GPUs: {reasons}")
    return Comparison(tuple(found), left_out)


def choose(comparison: Comparison) -> Foreseen | None:
    """The mode to take: of those that fit the simplest that is about as fast as the fastest; None where there
    is none. Reserved servers only where CAD in place does not fit: in runs they were slower."""
    cad, best = comparison.of("cad"), None
    for one in (found for found in comparison.found if found.fits):
        if one.mode == "cad reserved" and cad is not None and cad.fits:
            continue
        # From the simplest to the least simple: whoever comes later must be clearly faster.
        if best is None or one.tokens_per_second > best.tokens_per_second * NEAR:
            best = one
    return best


def recommend(comparison: Comparison) -> str:
    """What to take, why, and how sure that is."""
    if (best := choose(comparison)) is None:
        modest = min(comparison.found, key=lambda one: one.needed)
        return f"Nothing fits: {name_of(modest)} needs least, {say_need(modest)}."
    others = [one for one in comparison.found if one.fits and one.mode != best.mode and not one.mode.startswith("cad")]
    others.sort(key=lambda one: -one.tokens_per_second)
    others = others[:1] + [one for one in others[1:] if one.mode == "plain"]
    ratios = [(best.tokens_per_second / one.tokens_per_second, name_of(one)) for one in others]
    told = " and ".join(f"{ratio:.2f} ± {ratio * RATIO:.2f} times {name}" for ratio, name in ratios)
    lines = [f"Take {name_of(best)}{': ' * bool(told)}{told}; {_reason(comparison, best)}."]
    if told:
        sure = best.mode != "cad reserved" and best.measured and all(one.measured for one in others)
        lines.append(
            f"±: how far ratios were off in runs in place that nothing was fitted to, {RATIO:.1%} at most"
            + ("." if sure else "; none of these had this mode and size, where it may be more.")
        )
    found, cad = comparison.of("cad reserved"), comparison.of("cad")
    if found and cad and found.fits and cad.fits and found.tokens_per_second > NEAR * cad.tokens_per_second:
        ratio, (least, most) = found.tokens_per_second / cad.tokens_per_second, SERVERS
        lines.append(
            f"Reserve no servers: {found.degree} are foreseen at {ratio:.2f} times the speed in place, and those that "
            f"ran were at {least:.2f} to {most:.2f}."
        )
    return "\n".join(lines)


def say_need(found: Foreseen) -> str:
    """Words for how much memory a mode needs, and what would bring it into what there is."""
    state = found.state * (1.0 + MEMORY) + OUTSIDE
    room, offload = found.capacity - state, found.offloadable * (1.0 + MEMORY)
    options = ["--offload-optimizer"] if 0 < found.needed - found.capacity <= offload else []
    if room > 0:
        options.append(f"rows of at most {math.floor(100 * room / (found.needed - state))}% of these tokens")
    words = " or ".join(options or ["more GPUs that share the weights"])
    return f"{found.needed / 2**30:.1f} GiB a GPU of {found.capacity / 2**30:.1f}; it would fit with {words}"


def _reason(comparison: Comparison, best: Foreseen) -> str:
    plain, cad = comparison.of("plain"), comparison.of("cad")
    if cad is None or best is cad:
        idle = f"its GPUs idle {best.idle:.0%} of a step ({_where(best)})"
        balance = comparison.balance(best)
        if cad is None or plain is None or balance is None:
            return idle
        if balance < NEAR:
            return f"not for balance, worth {balance:.2f}: attention that is not repeated fits so, and not without CAD"
        return (
            f"balance is worth {balance:.2f} of that, as GPUs of a plain step wait "
            f"{plain.seconds.waiting / plain.seconds.total:.0%} of it; {idle}"
        )
    if not cad.fits:
        return f"CAD in place needs {say_need(cad)}"
    if (balance := comparison.balance(cad)) is not None and balance < NEAR:
        words = f"do not take CAD for balance, which is worth {balance:.2f} times plain"
        if plain is not None and plain.repeats and not cad.repeats:
            words += "; what else it gives, attention that is not repeated, selective checkpointing gives without it"
        return words
    gain = cad.tokens_per_second / best.tokens_per_second
    return f"CAD in place would be {gain:.2f} times as fast, with GPUs idle {cad.idle:.0%} of a step ({_where(cad)})"


def _where(found: Foreseen) -> str:
    parts = ("waiting", "exchange", "collectives")
    return ", ".join(f"{part} {getattr(found.seconds, part) / found.seconds.total:.1%}" for part in parts)


def _choices(
    setting: Setting, steps: Sequence[modes.Step], mode: str, servers: int | None,
    fewer: Callable[[int], Sequence[modes.Step]] | None,
) -> list[tuple[Run, Sequence[modes.Step]]] | str:  # fmt: skip
    """Ways to run a mode, each with its steps; or why it cannot run."""
    kind, kept, step = mode.removesuffix(" kept"), mode.endswith(" kept"), steps[0]
    spans = any(layout.segments.begin.any() for one in steps for layout in one)
    state = setting.model.state is not None
    if mode not in MODES:
        raise CADConfigError(f"there is no mode {mode!r}; there are {', '.join(MODES)}")
    if kept and not setting.checkpointing:
        return "without checkpointing no mode repeats attention"
    if kind == "plain":
        if spans:
            return "documents go on on the next GPU, and it would cut them there: another computation"
        return [(partial(modes.plain, setting, kept=kept), steps)]
    if mode == "cad":
        if state and spans and setting.sharing > 1:
            return "documents go on on the next GPU, and state does not travel where GPUs divide heads"
        ways: dict[str, Setting] = {"": setting}
        if setting.checkpointing and not setting.recompute_attention:
            # No faster, and what is kept over the recompute may be what does not fit.
            if setting.keep == "device":
                ways['"keep": "host"'] = replace(setting, keep="host")
            if setting.pipeline == 1:
                ways["recompute_attention"] = replace(setting, keep="device", recompute_attention=True)
        return [(partial(modes_cad.in_place, way, variant=name), steps) for name, way in ways.items()]
    if mode == "cad reserved":
        counts = _count_servers(setting, step[0], servers, state and spans)
        if isinstance(counts, str):
            return counts
        return [(partial(modes_cad.reserved, setting, servers=one), fewer(one) if fewer else steps) for one in counts]
    if setting.sequence > 1:
        return "Ulysses divides the rows already"
    if state:
        return "state would have to travel in its other layers, which nothing does for models of transformers"
    degrees = modes.degrees(setting, kind)
    if not degrees and kind == "ulysses":
        return f"{setting.shape.query_heads} query heads and {setting.seats} seats have no common divisor"
    if not degrees:
        return f"{setting.seats} seats cannot be divided by 2"
    return [(partial(getattr(modes, kind), setting, degree=degree, kept=kept), steps) for degree in degrees]


def _count_servers(setting: Setting, layout: Layout, servers: int | None, state_spans: bool) -> list[int] | str:
    """Numbers of seats that may be reserved; or why none."""
    seats, sharding = setting.seats, setting.sharding
    carried = "documents go on on the next GPU, and state of layers that carry it does not travel beside servers"
    # Where weights are sharded nothing alternates (docs/interleave.md).
    sharded = f"servers wait while linear layers run under {sharding}, which no run measured: give --sharding zero1"
    for refused, why in (
        (state_spans, carried),
        (setting.sharing > 1, "servers know nothing of tensor parallelism or Ulysses, where CAD runs in place only"),
        (setting.forwards, "passes without backward beside reserved servers are not foreseen"),
        (setting.pipeline > 1, "reserved servers together with pipeline stages are not foreseen"),
        (seats < 2, "one seat cannot be split into trainers and servers"),
        (
            servers is not None and not 0 < servers < seats,
            f"{servers} servers of {seats} seats leave no server or no trainer",
        ),
        (sharding in ("zero3", "fsdp"), sharded),
    ):
        if refused:
            return why
    if servers is None:
        even = modes_cad.even_servers(setting, layout)
        # Where rows are not equally full the fullest trainer sets the pace, and fewer servers are enough.
        return sorted({max(1, even * share // 4) for share in (1, 2, 3, 4)})
    return [servers]


def _all_passes(run: Run, step: modes.Step) -> Foreseen:
    """A step with its passes without backward. Memory is that of the pass that trains."""
    found, (setting,) = run(step), run.args
    if not setting.forwards:
        return found
    more = run.func(setting.of_forward, step, **run.keywords)
    times = setting.forwards
    return replace(
        found,
        seconds=Seconds(*(one + times * other for one, other in zip(found.seconds, more.seconds))),
        inside=found.inside + times * more.inside,
        between=found.between + times * more.between,
    )


def _best(
    mode: str, choices: list[tuple[Run, Sequence[modes.Step]]], tried: int, tell: Callable[[str], None]
) -> Foreseen:
    """The fastest that fits, else the one that needs least memory; the first steps, so many, choose it."""
    tell(f"{MODES[mode]}: step 1 of {len(choices[0][1])}")
    with ThreadPoolExecutor(THREADS) as threads:
        first = [list(threads.map(run, steps[: tried if len(choices) > 1 else 1])) for run, steps in choices]
        means = list(map(mean, first))
        best = means.index(_fastest(one for one in means if one.fits) or min(means, key=lambda one: one.peak))
        (run, steps), done = choices[best], first[best]
        for one in threads.map(run, steps[len(done) :]):
            done.append(one)
            tell(f"{MODES[mode]}: step {len(done)} of {len(steps)}")
    return mean(done)


def _fastest(found: Iterable[Foreseen]) -> Foreseen | None:
    return max(found, key=lambda one: one.tokens_per_second, default=None)
