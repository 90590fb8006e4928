"""The part of `deepspeed-cad plan` that foresees training steps: lengths and options become a table and pictures.

In: the parsed arguments of `plan.py`. Out: settings and steps; lines of text; pictures.
"""

import argparse
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from deepspeed_cad.cli.data.checkpoint import read_model_shape
from deepspeed_cad.cli.data.documents import list_files, read_lengths
from deepspeed_cad.cli.picture import draw_curves, draw_step
from deepspeed_cad.cli.progress import progress, say, write
from deepspeed_cad.config import CADConfig
from deepspeed_cad.errors import CADConfigError, CADDataError, CADError
from deepspeed_cad.forecast import Cluster, Machine, Setting, seat_shape
from deepspeed_cad.forecast.attention import find_travel, of_documents
from deepspeed_cad.forecast.bytes_held import activation_bytes, loss_bytes, state_bytes
from deepspeed_cad.forecast.compare import MODES, Comparison, compare, label, recommend, say_need
from deepspeed_cad.forecast.packing import DEALT, NAMED, SPANNING, Rows, make_steps, say_cut
from deepspeed_cad.forecast.setting import ModelShape, check_split
from deepspeed_cad.forecast.step import MEMORY, OUTSIDE, RUNS, Foreseen, needed_bytes
from deepspeed_cad.layout import Layout
from deepspeed_cad.planner.question import hosts_of_nodes, read_cost

HOST = 8
"""GPUs of a host where nothing is said and there are more."""
AS_GIVEN = ("tensor", "sequence", "pipeline", "recompute_attention", "keep", "tolerance", "offload_optimizer")
"""Options that are fields of a setting as they are."""
SWEEP_STEPS = 4
"""Steps at every point of a curve."""


def foresee_steps(args: argparse.Namespace) -> int:
    """Read the data, foresee every mode, say what was found; returns the exit code."""
    check_options(args)
    if args.input[1:] or args.input[0] not in NAMED:
        list_files(args.input)
    modes, servers = wanted_modes(args)
    with progress("reading the model") as tell:
        setting = read_setting(args, read_model_shape(args.model))
        tell("reading the data")
        of_rank = args.batch if args.packing in DEALT else 1.3 * args.micro_batches
        needed = int(of_rank * setting.seats * args.context * (args.steps + 1))
        skipped: list[str] = []
        rows = Rows(args.context, args.packing, args.micro_batches, args.batch)
        while True:
            lengths = read_lengths(args.input, needed, args.tokenizer, args.field, args.limit, skipped, tell)
            steps = make_steps(lengths, setting, rows, args.steps)
            # A distribution has no end. Rows take only the begin of long documents, or many documents each.
            if len(steps) >= args.steps or args.input[0] not in NAMED or sum(lengths) < needed:
                break
            needed *= 2
        if not steps:
            raise CADDataError(
                f"{len(lengths)} documents with {sum(lengths)} tokens do not fill one step of {setting.seats} ranks "
                f"with {args.context} tokens: give more data, fewer --ranks or a smaller --context"
            )
        tell("planning")
        fewer = partial(make_steps, lengths, setting, rows, len(steps))
        comparison = compare(setting, steps, modes, servers, tell, fewer)
        full = float(np.mean([layout.tokens.mean() for step in steps for layout in step])) / args.context
        rival, cad = comparison.best_rival, comparison.of("cad")
        gains = [before / after for before, after in zip(rival.steps, cad.steps)] if rival and cad else []
        evenness = _evenness(setting, steps, cad, gains) if cad else []
        state = _about_state(setting, steps, cad)
        lines = [
            *assumptions(args, setting, full),
            f"{len(lengths)} documents, {sum(lengths)} tokens, median {int(np.median(lengths))}, longest "
            f"{max(lengths)}: {say_cut(lengths, args.context, args.packing)}",
            *([say_evenness(evenness)] if evenness else []),
            *([state["says"]] if state else []),
            *([f"{len(skipped)} files skipped, the first: {skipped[0]}"] if skipped else []),
            "",
            *table(comparison, setting),
        ]
        say("\n".join(lines), args)
        summary = {
            "documents": len(lengths),
            "tokens": sum(lengths),
            "longest": max(lengths),
            "skipped": skipped,
            **{name: getattr(args, name) for name in ("ranks", "context", "packing")},
            "full": full,
            "gain": float(np.mean(gains)) if gains else None,
            "state_layers": state,
            "steps": evenness,
            **comparison.to_json(),
        }
        write(summary, args)
        if args.pictures:
            for name in draw(comparison, setting, lengths, args, modes, tell):
                say(f"drew {name}", args)
    return 0


def _evenness(
    setting: Setting, steps: Sequence[Sequence[Layout]], cad: Foreseen, gains: Sequence[float]
) -> list[dict[str, Any]]:
    """How even attention is in the first micro-batch of each step, without CAD and with it, and what moves for that in
    one layer's forward; and seconds of the best rival over those of CAD."""
    loads = [of_documents(step[0], setting.cost).sum(0) for step in steps]
    return [
        {
            "imbalance_before": float(load.max() / load.mean()),
            "imbalance": plan.imbalance,
            "moved_bytes": int(plan.sent_bytes.sum()) * setting.sharing,
            "between_bytes": plan.between_bytes * setting.sharing,
            "planning_ms": plan.planning_ms,
            "gain": gain,
        }
        for load, plan, gain in zip_longest(loads, cad.plans, gains)
    ]


def say_evenness(evenness: list[dict[str, Any]]) -> str:
    before, after, took = ([one[key] for one in evenness] for key in ("imbalance_before", "imbalance", "planning_ms"))
    return (
        f"{len(evenness)} steps: attention max/mean {np.mean(before):.3f} without CAD, at worst {max(before):.3f}; "
        f"with it {np.mean(after):.3f}, at worst {max(after):.3f}; planned in {np.mean(took):.0f} ms"
    )


def _about_state(setting: Setting, steps: Sequence[Sequence[Layout]], cad: Foreseen | None) -> dict[str, Any] | None:
    """How layers that carry state fare in the mean step of CAD in place, where documents span GPUs."""
    found = [find_travel(setting, layout) for step in steps for layout in step]
    travels, layers = [one for one in found if one is not None], setting.model.state
    if cad is None or layers is None or not travels:
        return None
    late, own = (sum(getattr(one, name) for one in travels) / len(steps) for name in ("late", "own"))
    says = (
        f"{layers.count} layers carry state, which goes from GPU to GPU: without MLPs they take {1 + late / own:.2f} "
        f"times what a GPU's own rows do, {late:.2f} s more of a step of CAD of {cad.seconds.total:.2f} s"
    )
    return {"layers": layers.count, "late_seconds": late, "over_own_rows": 1 + late / own, "says": says}


def assumptions(args: argparse.Namespace, setting: Setting, full: float) -> list[str]:
    """Lines on what a prediction stands on; `full`: of a row the share that has tokens."""
    machine, cluster = setting.machine, setting.cluster
    logits = f"{loss_bytes(replace(setting, loss='whole')) * args.context / setting.sharing / 2**30:.0f} GiB for logits"
    loss = f"transformers' own loss ({logits})"
    if setting.pipeline > 1:
        loss = f"all logits at once in the last stage ({logits})"
    elif setting.loss == "chunked":
        loss = f"loss in chunks, as of Liger (transformers' own takes {logits})"
    split = f", tensor {setting.tensor}" * (setting.tensor > 1)
    split += f", Ulysses {setting.sequence} inside all modes" * (setting.sequence > 1)
    split += f", {setting.pipeline} stages" * (setting.pipeline > 1)
    rows = f"{args.context} tokens packed {args.packing} are {full:.1%} full, {args.micro_batches} to a step"
    if args.packing in DEALT:
        rows = (
            f"at most {args.context} tokens, {full:.1%} full, of {args.batch} documents a GPU and step dealt out "
            f"{args.packing}; passes: {args.passes}"
        )
    elif args.packing == "none":
        rows = f"{args.batch} documents of at most {args.context} tokens, {args.micro_batches} to a step"
    lines = [
        f"assumed: {args.model or 'llama-8b'}, {setting.sharding}{split}, {'' if setting.checkpointing else 'no '}"
        f"checkpointing, optimizer on the {'host' if setting.offload_optimizer else 'GPU'}, {loss}",
        f"{cluster.ranks} {machine.name} of {machine.memory / 2**30:.0f} GiB, hosts of "
        f"{', '.join(map(str, cluster.sizes)) or cluster.per_host}, {machine.copies / 1e9:.0f} GB/s inside and "
        f"{machine.between / 1e9:.3g} between; tolerance {setting.tolerance:g}",
        f"rows of {rows}",
        "CAD deals documents out to all GPUs before a step where that gains (docs/steps.md)"
        if setting.deals and setting.pipeline == setting.sharing == 1
        else "CAD leaves documents on the GPUs that have them, and balances every pass"
        + f" (its RoPE is {setting.model.batch_rope})" * bool(setting.model.batch_rope),
    ]
    if setting.model.not_counted:
        lines.append(
            f"{setting.model.not_counted} of this model are counted as full attention and one MLP: where they take "
            "less, there is less to gain, and where they hold more, more memory is needed"
        )
    if machine.like:
        measured = ", ".join(key for key in machine.sources if key != "published")
        lines.append(
            f"{machine.name} was not measured{f' but for {measured}' if measured else ''}: "
            f"it is taken to reach as much of its published figures as {machine.like}"
        )
    return lines


def table(comparison: Comparison, setting: Setting) -> list[str]:
    """Lines: what every mode would do, why modes are left out, what does not fit, what to take."""
    plain, rival = comparison.of("plain"), comparison.best_rival
    width = max([len(label(one)) for one in comparison.found] + [20]) + 2

    def cells(one: Foreseen) -> dict[tuple[str, str, int], str]:
        """By two lines of a header and the width."""
        speed, balance = one.tokens_per_second, comparison.balance(one)
        ratio = plain and speed / plain.tokens_per_second
        return {
            ("tokens/s", "/GPU", 9): f"{speed:,.0f}",
            ("MFU", "%", 6): f"{100 * one.mfu:.1f}",
            ("", "÷ plain", 9): f"{ratio:.2f}" if ratio else "",
            ("= not", "repeated", 10): f"{ratio / balance:.2f}" if ratio and balance else "",
            ("×", "balance", 9): f"{balance:.2f}" if balance else "",
            ("÷ best", "rival", 8): f"{speed / rival.tokens_per_second:.2f}" if rival else "",
            ("idle", "%", 6): f"{100 * one.idle:.1f}",
            ("GB sent a", "inside", 10): f"{one.inside / 1e9:.2f}",
            ("GPU and step", "between", 13): f"{one.between / 1e9:.2f}",
            ("GiB", "needed", 8): f"{one.needed / 2**30:.1f}",
            ("exposed", "exch. %", 9): f"{100 * one.seconds.exchange / one.seconds.total:.2f}",
        }

    rows = [(label(one), cells(one)) for one in comparison.found]
    lines = [" " * width + "".join(f"{head[line]:>{head[2]}}" for head in rows[0][1]) for line in (0, 1)]
    lines += [f"{name:{width}}" + "".join(f"{cell:>{head[2]}}" for head, cell in row.items()) for name, row in rows]
    lines.append(
        f"GiB: what torch holds, {MEMORY:.1%} as the farthest that a prediction was off, and {OUTSIDE / 2**30:.0f} for "
        "CUDA and NCCL"
    )
    if not all(one.measured for one in comparison.found):
        sizes, machines, shardings = (
            ", ".join(sorted({str(getattr(run, field)) for run in RUNS})) for field in ("ranks", "machine", "sharding")
        )
        lines.append(
            f"* no run of this mode on {setting.cluster.ranks} {setting.machine.name} with {setting.sharding} was "
            f"compared with its prediction; runs had {sizes} GPUs ({machines}; {shardings})"
        )
    lines += [f"{MODES[mode]}: left out, {reason}" for mode, reason in comparison.left_out.items()]
    lines += [f"{label(one)} does not fit: it needs {say_need(one)}" for one in comparison.found if not one.fits]
    return [*lines, "", recommend(comparison), "Three questions and a chart for each: docs/is-it-for-me.md"]


def draw(
    comparison: Comparison, setting: Setting, lengths: list[int], args: argparse.Namespace, names: Sequence[str],
    tell: Callable[[str], None],
) -> list[str]:  # fmt: skip
    """Write pictures into the folder --pictures; returns their names."""

    def at(
        modes: Sequence[str], ranks: int = args.ranks, context: int = args.context, servers: int | None = None
    ) -> Comparison:
        # Of hosts that differ, the smallest stands for all.
        size = setting.cluster.per_host if args.ranks_per_node else HOST
        other = replace(setting, cluster=Cluster(ranks, min(ranks, size), setting.machine))
        need = other.seats * context * args.batch * args.micro_batches * (SWEEP_STEPS + 1)
        # Where the data ends it begins again: the curve is about its lengths.
        data = lengths * (1 + need // sum(min(length, context) for length in lengths))
        rows = Rows(context, args.packing, args.micro_batches, args.batch)
        steps = make_steps(data, other, rows, SWEEP_STEPS)
        tell(f"pictures: {ranks} GPUs, {context} tokens" + f", {servers} reserved" * bool(servers))
        return compare(other, steps, modes, servers, fewer=partial(make_steps, data, other, rows, len(steps)))

    folder, replica = Path(args.pictures), setting.sharing * setting.pipeline
    ranks = {args.ranks * times // 8 for times in (1, 2, 4, 8, 16, 32) if args.ranks * times % 8 == 0}
    context = {args.context * times // 4 for times in (1, 2, 4, 8, 16) if args.context * times % 4 == 0}
    servers = {max(1, setting.seats * share // 16) for share in (1, 2, 3, 4, 6, 8)} - {setting.seats}
    curves = {
        "ranks": ("GPUs", [one for one in ranks if one >= 2 * replica], names),
        "context": ("tokens a GPU packs", [one for one in context if one >= 1024], names),
        "servers": ("reserved servers", list(servers), ["cad reserved", "cad"]),
    }
    drawn = [str(folder / "step.png")]
    draw_step(comparison, drawn[0])
    for name, (over, values, modes) in curves.items():
        points: dict[str, list[tuple[int, float]]] = {mode: [] for mode in modes}
        for value in sorted(values):
            with suppress(CADError):  # such as 12 ranks in groups of 8: a gap in the curve says it
                for one in at(modes, **{name: value}).found:
                    if one.fits:
                        points[one.mode].append((value, one.tokens_per_second))
        if name != "servers" or points["cad reserved"]:  # else nobody can serve here
            drawn.append(str(folder / f"{name.replace('servers', 'reserved')}.png"))
            draw_curves(over, points, drawn[-1])
    return drawn


# Options on a data set: checked before anything is read, and made a setting.


def check_options(args: argparse.Namespace) -> None:
    """Raise CADConfigError for what is wrong with an option alone, before anything is read or imported."""
    for name in ("ranks", "context", "limit", "steps", "micro_batches", "batch", "tensor", "sequence", "pipeline"):
        if getattr(args, name) < 1:
            raise CADConfigError(f"--{name.replace('_', '-')} is {getattr(args, name)}; expected at least 1")
    CADConfig(tolerance=args.tolerance, keep=args.keep, recompute_attention=args.recompute_attention)
    passes = [name.strip() for name in args.passes.split(",")]
    for wrong, words in (
        (args.offload_optimizer and args.sharding == "fsdp", "offload-optimizer with fsdp, which offloads weights too"),
        (
            passes.count("train") != 1 or not set(passes) <= {"train", "forward"},
            f"passes is {args.passes!r}; expected train once, and forward as often as there is one",
        ),
        (len(passes) > 1 and args.pipeline > 1, "passes with --pipeline: forwards through stages are not foreseen"),
        (
            args.packing in DEALT and args.micro_batches > 1,
            f"micro-batches with --packing {args.packing}, which says how many there are; leave it out",
        ),
        (args.batch > 1 and args.packing not in ("none", *DEALT), f"batch: --packing {args.packing} fills whole rows"),
        (args.recompute_attention and args.pipeline > 1, "recompute-attention with --pipeline, which CAD refuses"),
        (args.cost != "pairs" and not Path(args.cost).is_file(), f"cost: there is no file {args.cost}"),
    ):
        if wrong:
            raise CADConfigError(f"--{words}")
    wanted_modes(args)
    make_cluster(args)
    # What cannot be written is said before the work, not behind it.
    if args.pictures:
        try:
            Path(args.pictures).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CADConfigError(f"--pictures: {args.pictures} cannot be made: {error.strerror}") from error
    if args.output not in (None, "-") and not (folder := Path(args.output).parent).is_dir():
        raise CADConfigError(f"--output: {args.output} cannot be written: there is no folder {folder}")
    if args.pictures and find_spec("matplotlib") is None:
        raise CADConfigError('a picture needs matplotlib: pip install "deepspeed_cad[plot]"')


def read_setting(args: argparse.Namespace, model: ModelShape) -> Setting:
    """The setting that the options describe; raises CADConfigError that names the option."""
    from deepspeed_cad.profiles.profile import SHIPPED  # brings torch

    check_split(model, args.ranks, args.tensor, args.pipeline, args.sequence)
    cluster = make_cluster(args)
    machine, own = cluster.machine, args.cost == "pairs"
    path, times = (SHIPPED / machine.profile, machine.attention) if own else (args.cost, 1.0)
    cost = read_cost(str(path), seat_shape(model, args.tensor * args.sequence))
    setting = Setting(
        model=model,
        cluster=cluster,
        cost=replace(cost, **{name: times * getattr(cost, name) for name in ("pair", "row", "key", "task")}),
        sharding="zero1" if args.pipeline > 1 else args.sharding,
        checkpointing=not args.no_checkpointing,
        loss="chunked" if args.loss == "chunked" else "whole",
        deals=args.packing not in (*DEALT, *SPANNING) and not model.batch_rope,
        forwards=args.passes.count(","),
        **{name: getattr(args, name) for name in AS_GIVEN},
    )
    if args.loss == "auto":
        kept = replace(setting, keep="device", recompute_attention=False)
        peak = state_bytes(kept, kept.seats) + activation_bytes(kept, args.context, kept=True)
        if needed_bytes(peak) > machine.memory:
            return replace(setting, loss="chunked")
    return setting


def make_cluster(args: argparse.Namespace) -> Cluster:
    """Hosts as --ranks-per-node says: so many GPUs each, or a list of them; links and memory as given."""
    given = {"--link-inside": args.link_inside, "--link-between": args.link_between, "--memory": args.memory}
    for name, value in given.items():
        if value is not None and not 0 < value < float("inf"):
            raise CADConfigError(f"{name} is {value}; expected {'GiB' if name == '--memory' else 'GB/s'} above 0")
    speeds = (value and value * 1e9 for value in (args.link_inside, args.link_between))
    machine = Machine.load(args.machine).with_links(*speeds)
    if args.memory is not None:
        machine = replace(machine, memory=args.memory * 2**30)
    hosts, ranks = args.ranks_per_node or str(HOST), args.ranks
    parts = [part.strip() for part in hosts.split(",")]
    if not all(part.isdigit() and int(part) for part in parts):
        raise CADConfigError(f"--ranks-per-node is {hosts!r}; expected a number of GPUs, or a list such as 8,8,4")
    sizes = tuple(map(int, parts))
    if len(sizes) == 1:
        return Cluster(ranks, min(ranks, sizes[0]), machine)
    hosts_of_nodes(list(sizes), ranks)
    return Cluster(ranks, min(sizes), machine, sizes)


def wanted_modes(args: argparse.Namespace) -> tuple[list[str], int | None]:
    names = list(MODES) if args.modes is None else [name.strip() for name in args.modes.split(",")]
    if unknown := [name for name in names if name not in MODES]:
        raise CADConfigError(f"--modes: there is no mode {unknown[0]!r}; there are {', '.join(MODES)}")
    if {"plain", "cad"} <= set(names) and "plain kept" not in names and not args.no_checkpointing:
        # By it what balance gains is told from what is gained as attention is not repeated.
        names.insert(names.index("plain") + 1, "plain kept")
    if args.reserve == "none" and names == ["cad reserved"]:
        raise CADConfigError('--modes is "cad reserved", of which --reserve none leaves nothing')
    if args.reserve in ("none", "auto"):
        return [name for name in names if name != "cad reserved" or args.reserve == "auto"], None
    if not args.reserve.isdigit():
        raise CADConfigError(f'--reserve is {args.reserve!r}; expected "auto", "none" or a number of GPUs')
    return names, int(args.reserve)
