"""`deepspeed-cad profile`: measure this machine's attention, and its links under torchrun, into a profile.

In: the heads of a model. Out: a JSON file that `"cost": "auto"` finds, and a table of measured and predicted seconds.
"""

import argparse
import os
import subprocess
from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from deepspeed_cad.cli.progress import progress
from deepspeed_cad.config import CADConfig
from deepspeed_cad.errors import CADConfigError, CADError
from deepspeed_cad.exchange.group import numbers_of
from deepspeed_cad.exchange.links import measure_links
from deepspeed_cad.exchange.probe import choose_transport, host_number
from deepspeed_cad.kernels.interface import KernelNeed
from deepspeed_cad.kernels.registry import choose
from deepspeed_cad.notice import counted
from deepspeed_cad.planner.plan import HeadShape
from deepspeed_cad.profiles import Fit, Profile, ShapeCost, user_path
from deepspeed_cad.profiles.measure import Measured, fit_measured, least, measure_calls, sizes_for
from deepspeed_cad.profiles.profile import expected_kernel, machine_name
from deepspeed_cad.version import __version__

Tell = Callable[[str], None]

NOISY = 0.15
"""Mean relative error of the fit that only noise explains; kernels alone leave 3 to 6 %."""
ATTEMPTS = 3
"""How often everything is measured where the times do not fit; the least of each call counts."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, help="the file to write (default: one in ~/.cache/deepspeed_cad)")
    parser.add_argument("--kernel", default="auto", help='as in the cad block (default: "auto")')
    parser.add_argument("--transport", default="auto", help='as in the cad block (default: "auto")')
    parser.add_argument("--heads", type=int, default=32, help="query heads of a layer (default: 32)")
    parser.add_argument("--kv-heads", type=int, default=8, help="KV heads (default: 8)")
    parser.add_argument("--head-dim", type=int, default=128, help="size of a query and key head (default: 128)")
    parser.add_argument("--value-dim", type=int, help="size of a value head (default: --head-dim)")
    parser.add_argument("--quick", action="store_true", help="measure less: half a minute at most")


def main(args: argparse.Namespace) -> int:
    """Measure, print and write. Raises CADError, and writes nothing, where the heads or the kernel are impossible here
    or the measured times do not fit together."""
    sizes = _checked(args)
    with progress("looking at this machine", loud=int(os.environ.get("RANK", 0)) == 0) as tell:
        device = torch.device("cpu")
        if torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
            torch.cuda.set_device(device)
        shape = HeadShape(*sizes, bytes_per_element=2 if device.type == "cuda" else 4)
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:
            profile = _measure_all(args, shape, device, tell)
        else:
            profile = _measure_kernel(args, shape, device, tell)
            print("links are not measured by one process: torchrun --nproc-per-node GPUS -m deepspeed_cad.cli profile")
    if profile is None:  # a rank that only helped
        return 0
    path = args.output or user_path(profile.machine, profile.kernel)
    if path.is_file():
        try:
            profile = profile.with_entries_of(Profile.load(path))
        except CADConfigError as error:
            print(f"replaced: {error}")
    profile.save(path)
    if profile.kernel != (usual := expected_kernel(args.kernel, device)):
        print(f'"cost": "auto" takes what was measured of {usual}; name this file there instead')
    print(f"{path}: {counted(len(profile.entries), 'head shape')} of {profile.name}")
    return 0


def _checked(args: argparse.Namespace) -> tuple[int, int, int, int]:
    CADConfig(kernel=args.kernel, transport=args.transport)
    if args.output is not None and (args.output.suffix != ".json" or args.output.is_dir()):
        raise CADConfigError(f'--output is {str(args.output)!r}; expected a .json file, as "cost" names it')
    value_dim = args.head_dim if args.value_dim is None else args.value_dim
    sizes = {"heads": args.heads, "kv-heads": args.kv_heads, "head-dim": args.head_dim, "value-dim": value_dim}
    for name, value in sizes.items():
        if value < 1:
            raise CADConfigError(f"--{name} is {value}; expected at least 1")
    if args.heads % args.kv_heads:
        raise CADConfigError(f"--heads is {args.heads} and --kv-heads is {args.kv_heads}; expected a multiple")
    return args.heads, args.kv_heads, args.head_dim, value_dim


def _measure_kernel(args: argparse.Namespace, shape: HeadShape, device: torch.device, tell: Tell) -> Profile:
    """Time attention on this process's device, and print the table. Raises CADError where the times do not fit."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    kernel = choose(args.kernel, KernelNeed(device, dtype, shape.head_dim, shape.value_dim, shape.heads_per_group))
    machine = machine_name(device)
    print(f"{machine}, {kernel.name}: {shape}", flush=True)
    sizes = sizes_for(device, args.quick)
    measured = measure_calls(kernel, device, shape, sizes, tell)
    for attempt in range(1, ATTEMPTS + 1):
        fit = fit_measured(measured)
        print(_table(measured, fit), flush=True)
        fitted = np.abs([error for one, error in zip(measured, fit.errors) if one.call.fitted])
        if fitted.mean() <= NOISY:
            break
        if attempt == ATTEMPTS:
            raise CADError(
                f"measured {ATTEMPTS} times, the times do not fit together: the mean error is {fitted.mean():.0%}, "
                f"above {NOISY:.0%}. Nothing was written; measure again while nothing else runs on this machine"
            )
        print(
            f"the mean error is {fitted.mean():.0%}, above {NOISY:.0%}: something disturbs; measuring once more",
            flush=True,
        )
        measured = least(measured, measure_calls(kernel, device, shape, sizes, tell))
    error = round(float(fitted.mean()), 4), round(float(fitted.max()), 4)
    return Profile(
        machine=machine,
        kernel=kernel.name,
        entries=(ShapeCost(shape, fit.pair, fit.row, fit.key, fit.task, *error),),
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        commit=_commit(),
        source=f"deepspeed-cad {__version__} profile{' --quick' * args.quick}, torch {torch.__version__}",
    )


def _measure_all(args: argparse.Namespace, shape: HeadShape, device: torch.device, tell: Tell) -> Profile | None:
    """Under torchrun: attention on rank 0 while the others wait, then links between all; None on the other ranks.

    Raises CADError on rank 0 where attention cannot be measured; the others then end without a word."""
    on_gpu = device.type == "cuda"
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", device_id=device if on_gpu else None)
    try:
        cpu_group = dist.new_group(backend="gloo")
        profile, failure = None, None
        if dist.get_rank() == 0:
            try:
                profile = _measure_kernel(args, shape, device, tell)
            except CADError as error:
                failure = error
        # The others wait here for rank 0, and learn whether they are needed any more.
        failed = [failure is not None]
        dist.broadcast_object_list(failed, 0, group=cpu_group)
        if failure is not None:
            raise failure
        if failed[0]:
            return None
        world = dist.group.WORLD
        assert world is not None
        tell("measuring links")
        gather = partial(numbers_of, cpu_group, None)
        transport = choose_transport(args.transport, world, device, gather)
        links = measure_links(transport, device, dist.get_rank(), gather(host_number()), gather)
        transport.close()  # all ranks have gathered the last figure
    finally:
        dist.destroy_process_group()
    if profile is None:
        return None
    for where, speed in (("of its node", links.inside), ("of other nodes", links.between)):
        if speed is not None:
            print(f"a rank receives {speed / 1e9:.1f} GB/s from ranks {where}, by {transport.name}")
    return profile.with_links(links.inside, links.between)


def _table(measured: list[Measured], fit: Fit) -> str:
    lines = [f"{'':34}{'groups':>7}{'forward ms':>12}{'backward ms':>13}{'both ms':>10}{'predicted':>11}{'error':>8}"]
    for one, predicted, error in zip(measured, fit.predicted, fit.errors):
        lines.append(
            f"{one.call.label + ('' if one.call.fitted else ' *'):34}{one.call.groups:>7}{one.forward * 1e3:>12.3f}"
            f"{one.backward * 1e3:>13.3f}{one.seconds * 1e3:>10.3f}{predicted * 1e3:>11.3f}{error:>8.1%}"
        )
    fitted, checks = (
        np.abs([error for one, error in zip(measured, fit.errors) if one.call.fitted == is_fitted])
        for is_fitted in (True, False)
    )
    lines += [
        "",
        f"one head group: {fit.pair:.4g} s a pair, {fit.row:.4g} a query row, {fit.key:.4g} a KV row, "
        f"{fit.task:.4g} a task (rows as {fit.row / fit.pair:.0f} pairs, KV rows as {fit.key / fit.pair:.0f})",
        f"relative error: mean {fitted.mean():.1%}, worst {fitted.max():.1%}; * not fitted, only predicted: worst "
        f"{checks.max():.1%}",
    ]
    return "\n".join(lines)


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"
    except OSError:
        return "unknown"
