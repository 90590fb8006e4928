"""`deepspeed-cad trace --steps 3 --output trace.json -- torchrun … train.py`: a few steps of any run as one timeline.

In: the command that starts the run. Out: its exit code, the timeline of all ranks as a file for https://ui.perfetto.dev
or chrome://tracing, and a table of what every rank's training stream spent its time on. On several machines the config
key "trace" says the same, with a path in a folder that all ranks see.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from deepspeed_cad.errors import CADConfigError, CADError
from deepspeed_cad.server.idle import advise
from deepspeed_cad.trace.file import COMPUTE, SERVING
from deepspeed_cad.trace.idle import find_idle


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=3, help="micro-batches to record, after two that warm up")
    parser.add_argument("--output", type=Path, default=Path("trace.json"), help="the file to write")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and the command that starts the run")


def main(args: argparse.Namespace) -> int:
    """Runs the command with tracing on; gives its exit code. Raises CADError where it left no timeline."""
    from deepspeed_cad.trace.record import PATH_VARIABLE, STEPS_VARIABLE, WARM_UP

    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise CADConfigError("there is no command to run: deepspeed-cad trace --steps 3 -- torchrun … train.py")
    if args.steps < 1:
        raise CADConfigError(f"--steps is {args.steps}; expected 1 or more micro-batches")
    output = args.output.absolute()
    output.unlink(missing_ok=True)
    environment = {**os.environ, PATH_VARIABLE: str(output), STEPS_VARIABLE: str(args.steps)}
    try:
        code = subprocess.run(command, env=environment, check=False).returncode
    except OSError as error:
        raise CADConfigError(f"cannot run {command[0]!r}: {error.strerror}") from error
    if not output.exists():
        parts = sorted(part.name for part in output.parent.glob(f"{output.name}.rank*"))
        raise CADError(
            f"the run ended with exit code {code} and left no timeline of all ranks"
            + (f", only {', '.join(parts)}" if parts else "")
            + f". CAD must be on in it, and it must train more than {WARM_UP} micro-batches"
        )
    timeline = json.loads(output.read_text())
    lines = [summary(timeline), *say_idle(timeline), f"{output}: open it in https://ui.perfetto.dev"]
    sys.stdout.write("\n".join(lines) + "\n")
    return code


def say_idle(timeline: dict[str, Any]) -> list[str]:
    """How long ranks were idle, and what to change where it is too long; nothing where no server is reserved."""
    found = find_idle(timeline)
    if not found.servers or not found.trainers:
        return []
    each = [
        f"{name} {rank} {share:.0%}"
        for name, shares in (("trainer", found.trainers), ("server", found.servers))
        for rank, share in shares.items()
    ]
    trainers, servers = (sum(one.values()) / len(one) for one in (found.trainers, found.servers))
    where = "trainers waited for {} of these micro-batches"
    advice = advise(servers, trainers, len(found.servers), len(found.trainers), where)
    return [f"idle: {', '.join(each)}", *([advice] if advice else [])]


def summary(timeline: dict[str, Any]) -> str:
    """Milliseconds that each rank's training stream, or both streams of a server, spent on each thing, as a table."""
    spent: dict[str, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    compute = {
        (event["pid"], event["tid"])
        for event in timeline["traceEvents"]
        if event["name"] == "thread_name" and event["args"]["name"] in (COMPUTE, *SERVING)
    }
    named = {e["pid"]: e["args"]["name"] for e in timeline["traceEvents"] if e["name"] == "process_name"}
    for event in timeline["traceEvents"]:
        if event["ph"] == "X" and (event["pid"], event["tid"]) in compute:
            # Nano-batches A and B are one line.
            name = event["name"].removesuffix(" A").removesuffix(" B")
            direction = " backward" if event["cat"] == "backward" and name != "recompute" else ""
            spent[name + direction][event["pid"]] += event["dur"] / 1e3
    ranks = sorted({pid for pid, _ in compute})
    width = max([len(name) for name in spent] + [12])
    lines = ["ms per rank".ljust(width) + "".join(f"{named[rank]:>12}" for rank in ranks)]
    for name, by_rank in sorted(spent.items(), key=lambda item: -max(item[1].values())):
        lines.append(name.ljust(width) + "".join(f"{by_rank[rank]:12.3f}" for rank in ranks))
    return "\n".join(lines)
