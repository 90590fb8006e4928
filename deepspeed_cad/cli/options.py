"""Options of `deepspeed-cad plan` on a data set: checked before anything is read, and made a setting.

In: the parsed arguments of `plan.py`. Out: a `Setting`, modes; CADConfigError that names the option.
"""

import argparse
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from deepspeed_cad.config import CADConfig
from deepspeed_cad.errors import CADConfigError
from deepspeed_cad.forecast import Cluster, Machine, Setting, seat_shape
from deepspeed_cad.forecast.bytes_held import activation_bytes, state_bytes
from deepspeed_cad.forecast.compare import MODES
from deepspeed_cad.forecast.packing import DEALT
from deepspeed_cad.forecast.setting import ModelShape, check_split
from deepspeed_cad.forecast.step import needed_bytes
from deepspeed_cad.planner.question import hosts_of_nodes, read_cost

HOST = 8
"""GPUs of a host where nothing is said and there are more."""


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
    for name in ("output", "plot"):
        target = getattr(args, name)
        if target and target != "-" and not Path(target).parent.is_dir():
            raise CADConfigError(f"--{name}: {target} cannot be written: there is no folder {Path(target).parent}")
    if (args.plot or args.pictures) and find_spec("matplotlib") is None:
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
        tensor=args.tensor,
        sequence=args.sequence,
        pipeline=args.pipeline,
        sharding="zero1" if args.pipeline > 1 else args.sharding,
        checkpointing=not args.no_checkpointing,
        recompute_attention=args.recompute_attention,
        keep=args.keep,
        tolerance=args.tolerance,
        offload_optimizer=args.offload_optimizer,
        loss="chunked" if args.loss == "chunked" else "whole",
        deals=args.packing not in DEALT,
        forwards=args.passes.count(","),
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
    unknown = [name for name in names if name not in MODES]
    if unknown:
        raise CADConfigError(f"--modes: there is no mode {unknown[0]!r}; there are {', '.join(MODES)}")
    if {"plain", "cad"} <= set(names) and "plain kept" not in names and not args.no_checkpointing:
        # By it what balance gains is told from what is gained as attention is not repeated.
        names.insert(names.index("plain") + 1, "plain kept")
    if args.reserve in ("none", "auto"):
        return [name for name in names if name != "cad reserved" or args.reserve == "auto"], None
    if not args.reserve.isdigit():
        raise CADConfigError(f'--reserve is {args.reserve!r}; expected "auto", "none" or a number of GPUs')
    return names, int(args.reserve)
