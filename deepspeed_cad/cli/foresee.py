"""The part of `deepspeed-cad plan` that foresees training steps: lengths and options become a table and pictures.

In: the parsed arguments of `plan.py`. Out: settings and steps; lines of text; pictures.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from deepspeed_cad.cost import CostModel
from deepspeed_cad.errors import CADConfigError, CADDataError
from deepspeed_cad.forecast import Cluster, Machine, Setting, seat_shape
from deepspeed_cad.forecast.compare import MODES, Comparison, compare, label, recommend, reserve, what_would_fit
from deepspeed_cad.forecast.model_shape import ModelShape
from deepspeed_cad.forecast.setting import check_split
from deepspeed_cad.forecast.steps import deal, make_steps
from deepspeed_cad.planner.question import hosts_of_nodes

HOST = 8
"""GPUs of a host where nothing is said and there are more."""
SWEEP_STEPS = 4
"""Steps at every point of a curve."""
QUIET = 2.0
"""Seconds between two lines about progress."""
PAGE = "docs/is-it-for-me.md"


def read_setting(args: argparse.Namespace, model: ModelShape) -> Setting:
    """The setting that the options describe; raises CADConfigError that names the option."""
    check_split(model, args.ranks, args.tensor, args.pipeline)
    machine = Machine.load(args.machine)
    speeds = [_speed(args.link_inside, "inside"), _speed(args.link_between, "between")]
    machine = machine.with_links(*speeds)
    if args.memory is not None:
        if not 0 < args.memory < float("inf"):
            raise CADConfigError(f"--memory is {args.memory}; expected GiB above 0")
        machine = replace(machine, memory=args.memory * 2**30)
    return Setting(
        model=model,
        cluster=make_cluster(args.ranks_per_node, args.ranks, machine),
        cost=_cost(args.cost, machine, model, args.tensor),
        tensor=args.tensor,
        pipeline=args.pipeline,
        sharding="zero1" if args.pipeline > 1 else args.sharding,
        checkpointing=not args.no_checkpointing,
        recompute_attention=args.recompute_attention,
        keep=args.keep,
        tolerance=args.tolerance,
    )


def make_cluster(given: str | None, ranks: int, machine: Machine) -> Cluster:
    """Hosts as --ranks-per-node says: so many GPUs each, or a list of them."""
    if given is None:
        return Cluster(ranks, min(ranks, HOST), machine)
    parts = [part.strip() for part in given.split(",")]
    if not all(part.isdigit() and int(part) for part in parts):
        raise CADConfigError(f"--ranks-per-node is {given!r}; expected a number of GPUs, or a list such as 8,8,4")
    sizes = tuple(map(int, parts))
    if len(sizes) == 1:
        return Cluster(ranks, min(ranks, sizes[0]), machine)
    hosts_of_nodes(list(sizes), ranks)
    return Cluster(ranks, min(sizes), machine, sizes)


def wanted_modes(args: argparse.Namespace) -> tuple[list[str], int | None]:
    """Modes to foresee, and how many servers to reserve (None: what is best)."""
    names = list(MODES) if args.modes is None else [name.strip() for name in args.modes.split(",")]
    unknown = [name for name in names if name not in MODES]
    if unknown:
        raise CADConfigError(f"--modes: there is no mode {unknown[0]!r}; there are {', '.join(MODES)}")
    if args.reserve == "none":
        return [name for name in names if name != "cad reserved"], None
    if args.reserve == "auto":
        return names, None
    if not args.reserve.isdigit():
        raise CADConfigError(f'--reserve is {args.reserve!r}; expected "auto", "none" or a number of GPUs')
    return names, int(args.reserve)


class Progress:
    """A line on stderr now and then, for work that takes long."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._last = say, time.monotonic()

    def __call__(self, mode: str, done: int, steps: int) -> None:
        """A step of a mode is done."""
        self.tell(f"{MODES.get(mode, mode)}: step {done} of {steps}")

    def tell(self, text: str) -> None:
        """Say it unless something was said a moment ago."""
        if time.monotonic() - self._last > QUIET:
            self._last = time.monotonic()
            self._say(f"… {text}")


def table(comparison: Comparison) -> list[str]:
    """Lines: what every mode would do, why modes are left out, what does not fit."""
    others = comparison.of("plain"), comparison.of("plain kept"), comparison.best_other
    width = max([len(label(one)) for one in comparison.found] + [20]) + 2
    lines = [
        f"{'':{width}}{'tokens/s':>9}{'':>9}{'÷ plain,':>9}{'÷ best':>8}{'idle':>7}{'GB moved, a GPU':>18}{'peak':>8}"
        f"{'exposed':>9}",
        f"{'':{width}}{'/GPU':>9}{'÷ plain':>9}{'kept':>9}{'other':>8}{'%':>7}{'inside':>9}{'between':>9}{'GiB':>8}"
        f"{'exch. %':>9}",
    ]
    for one in comparison.found:
        speed = one.tokens_per_second
        ratios = [f"{speed / other.tokens_per_second:.2f}" if other else "" for other in others]
        exposed = one.seconds.exchange / one.seconds.total
        lines.append(
            f"{label(one):{width}}{speed:>9,.0f}{ratios[0]:>9}{ratios[1]:>9}{ratios[2]:>8}{100 * one.idle:>7.1f}"
            f"{one.inside / 1e9:>9.2f}{one.between / 1e9:>9.2f}{one.peak / 2**30:>8.1f}{100 * exposed:>9.2f}"
        )
    if not all(one.measured for one in comparison.found):
        lines.append("* described, not measured yet: its prediction was compared with no run")
    lines += [f"{MODES[mode]}: left out, {reason}" for mode, reason in comparison.left_out.items()]
    lines += [
        f"{label(one)} does not fit: {one.peak / 2**30:.0f} GiB of {one.capacity / 2**30:.0f}; it would fit "
        f"with {what_would_fit(one)}"
        for one in comparison.found
        if not one.fits
    ]
    answers = [one for one in (recommend(comparison), reserve(comparison)[1]) if one]
    return [*lines, "", *answers, f"Three questions and a chart for each: {PAGE}"]


def make_folder(given: str) -> Path:
    """The folder of --pictures; raises CADConfigError where it cannot be made."""
    folder = Path(given)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CADConfigError(f"--pictures: {folder} cannot be made: {error.strerror}") from error
    return folder


def draw(
    comparison: Comparison,
    setting: Setting,
    lengths: list[int],
    args: argparse.Namespace,
    names: Sequence[str],
    progress: Progress,
) -> list[str]:
    """Write four pictures into the folder --pictures; returns their names."""
    from deepspeed_cad.forecast.picture import around, draw_curve, draw_step, sweep

    folder = make_folder(args.pictures)

    def at(ranks: int, context: int, servers: int | None, modes: Sequence[str]) -> Comparison:
        # Of hosts that differ, the smallest stands for all.
        size = setting.cluster.per_host if args.ranks_per_node else HOST
        cluster = Cluster(ranks, min(ranks, size), setting.machine)
        other = replace(setting, cluster=cluster)
        need = other.seats * context * args.micro_batches * (SWEEP_STEPS + 1)
        # Where the data ends it begins again: the curve is about its lengths.
        data = lengths * (1 + need // sum(lengths))
        rows = (context, args.packing, args.micro_batches)
        steps = make_steps(data, other, *rows, SWEEP_STEPS)
        if not steps:
            raise CADDataError(f"no step of {ranks} ranks with {context} tokens")
        return compare(other, steps, modes, servers, deal=deal(data, other, *rows, len(steps)))

    ranks = around(args.ranks, 2 * setting.tensor * setting.pipeline, (1 / 8, 1 / 4, 1 / 2, 1, 2, 4))
    contexts = around(args.context, 1024, (1 / 4, 1 / 2, 1, 2, 4))
    curves: dict[str, tuple[str, list[int], Sequence[str], Callable[[int], Comparison]]] = {
        "ranks": ("GPUs", ranks, names, lambda one: at(one, args.context, None, names)),
        "context": ("tokens a GPU packs", contexts, names, lambda one: at(args.ranks, one, None, names)),
    }
    if setting.pipeline == 1 and setting.seats > 1:
        counts = sorted({max(1, setting.seats * share // 16) for share in (1, 2, 3, 4, 6, 8)} - {setting.seats})
        both = ["cad reserved", "cad"]
        curves["reserved"] = "reserved servers", counts, both, lambda one: at(args.ranks, args.context, one, both)
    draw_step(comparison, str(folder / "step.png"))
    for name, (over, values, modes, compared) in curves.items():
        draw_curve(sweep(over, values, compared, modes, progress.tell), str(folder / f"{name}.png"))
    return [str(folder / f"{name}.png") for name in ("step", *curves)]


def _speed(given: float | None, where: str) -> float | None:
    """Bytes a second of an option in GB/s."""
    if given is None:
        return None
    if not 0 < given < float("inf"):
        raise CADConfigError(f"--link-{where} is {given}; expected GB/s above 0")
    return given * 1e9


def _cost(given: str, machine: Machine, model: ModelShape, tensor: int) -> CostModel:
    """The attention cost of one head group: of the profile that is given, or the machine's own."""
    from deepspeed_cad.planner.question import read_cost
    from deepspeed_cad.profiles.choice import SHIPPED  # brings torch

    path = str(SHIPPED / machine.profile) if given == "pairs" else given
    cost = read_cost(path, seat_shape(model, tensor))
    if cost.unit != "seconds":
        raise CADConfigError(f"--cost: {given} counts {cost.unit}; steps are foreseen from a profile in seconds")
    return cost
