"""Options of `deepspeed-cad plan` on a data set: checked before anything is read, and made a setting.

In: the parsed arguments of `plan.py`. Out: a `Setting`, modes; CADConfigError that names the option.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from deepspeed_cad.config import CADConfig
from deepspeed_cad.cost import CostModel
from deepspeed_cad.errors import CADConfigError
from deepspeed_cad.forecast import Cluster, Machine, Setting, seat_shape
from deepspeed_cad.forecast.bytes_held import activation_bytes, state_bytes
from deepspeed_cad.forecast.compare import MODES
from deepspeed_cad.forecast.model_shape import ModelShape
from deepspeed_cad.forecast.packing import DEALT
from deepspeed_cad.forecast.setting import check_split
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
    if args.offload_optimizer and args.sharding == "fsdp":
        raise CADConfigError("--offload-optimizer with fsdp, which offloads weights too, is not foreseen")
    count_forwards(args)
    if args.packing in DEALT and args.micro_batches > 1:
        raise CADConfigError(
            f"--micro-batches with --packing {args.packing}, which says how many there are; leave it out"
        )
    if args.recompute_attention and args.pipeline > 1:
        raise CADConfigError("--recompute-attention with --pipeline: CAD refuses that; leave one out")
    if args.cost != "pairs" and not Path(args.cost).is_file():
        raise CADConfigError(f"--cost: there is no file {args.cost}")
    wanted_modes(args)
    make_cluster(args.ranks_per_node, args.ranks, read_machine(args))
    # What cannot be written is said before the work, not behind it.
    if args.pictures:
        make_folder(args.pictures)
    for name in ("output", "plot"):
        target = getattr(args, name)
        if target and target != "-" and not Path(target).parent.is_dir():
            raise CADConfigError(f"--{name}: {target} cannot be written: there is no folder {Path(target).parent}")
    if (args.plot or args.pictures) and find_spec("matplotlib") is None:
        raise CADConfigError('a picture needs matplotlib: pip install "deepspeed_cad[plot]"')


def count_forwards(args: argparse.Namespace) -> int:
    """Passes of a step without backward. Raises CADConfigError where --passes says something else."""
    passes = [name.strip() for name in args.passes.split(",")]
    if passes.count("train") != 1 or not set(passes) <= {"train", "forward"}:
        raise CADConfigError(f"--passes is {args.passes!r}; expected train once, and forward as often as there is one")
    if len(passes) > 1 and args.pipeline > 1:
        raise CADConfigError("--passes with --pipeline: forwards through stages are not foreseen; leave one out")
    return len(passes) - 1


def read_machine(args: argparse.Namespace) -> Machine:
    machine = Machine.load(args.machine)
    machine = machine.with_links(_speed(args.link_inside, "inside"), _speed(args.link_between, "between"))
    if args.memory is None:
        return machine
    if not 0 < args.memory < float("inf"):
        raise CADConfigError(f"--memory is {args.memory}; expected GiB above 0")
    return replace(machine, memory=args.memory * 2**30)


def read_setting(args: argparse.Namespace, model: ModelShape) -> Setting:
    """The setting that the options describe; raises CADConfigError that names the option."""
    check_split(model, args.ranks, args.tensor, args.pipeline, args.sequence)
    machine = read_machine(args)
    setting = Setting(
        model=model,
        cluster=make_cluster(args.ranks_per_node, args.ranks, machine),
        cost=_cost(args.cost, machine, model, args.tensor * args.sequence),
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
        forwards=count_forwards(args),
    )
    if args.loss == "auto":
        kept = replace(setting, keep="device", recompute_attention=False)
        peak = state_bytes(kept, kept.seats) + activation_bytes(kept, args.context, kept=True)
        if needed_bytes(peak) > machine.memory:
            return replace(setting, loss="chunked")
    return setting


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
    names = list(MODES) if args.modes is None else [name.strip() for name in args.modes.split(",")]
    unknown = [name for name in names if name not in MODES]
    if unknown:
        raise CADConfigError(f"--modes: there is no mode {unknown[0]!r}; there are {', '.join(MODES)}")
    if {"plain", "cad"} <= set(names) and "plain kept" not in names and not args.no_checkpointing:
        # By it what balance gains is told from what is gained as attention is not repeated.
        names.insert(names.index("plain") + 1, "plain kept")
    if args.reserve == "none":
        return [name for name in names if name != "cad reserved"], None
    if args.reserve == "auto":
        return names, None
    if not args.reserve.isdigit():
        raise CADConfigError(f'--reserve is {args.reserve!r}; expected "auto", "none" or a number of GPUs')
    return names, int(args.reserve)


def make_folder(given: str) -> Path:
    """The folder of --pictures; raises CADConfigError where it cannot be made."""
    folder = Path(given)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CADConfigError(f"--pictures: {folder} cannot be made: {error.strerror}") from error
    return folder


def _speed(given: float | None, where: str) -> float | None:
    if given is None:
        return None
    if not 0 < given < float("inf"):
        raise CADConfigError(f"--link-{where} is {given}; expected GB/s above 0")
    return given * 1e9


def _cost(given: str, machine: Machine, model: ModelShape, tensor: int) -> CostModel:
    """The attention cost of one head group: of the profile that is given, or the machine's own."""
    from deepspeed_cad.profiles.profile import SHIPPED  # brings torch

    path = str(SHIPPED / machine.profile) if given == "pairs" else given
    cost = read_cost(path, seat_shape(model, tensor))
    if cost.unit != "seconds":
        raise CADConfigError(f"--cost: {given} counts {cost.unit}; steps are foreseen from a profile in seconds")
    times = machine.attention if given == "pairs" else 1.0
    return replace(cost, **{name: times * getattr(cost, name) for name in ("pair", "row", "key", "task")})
