"""`deepspeed-cad trace --steps 3 --output trace.json -- torchrun … train.py`: a few steps of any run as one timeline.

In: the command that starts the run. Out: its exit code, the timeline of all ranks as a file, and how long each rank was
idle. On several machines the config key "trace" says the same, with a path in a folder that all ranks see.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from deepspeed_cad.errors import CADConfigError, CADError
from deepspeed_cad.report.session_lines import advise


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=3, help="micro-batches to record, after two that warm up")
    parser.add_argument("--output", type=Path, default=Path("trace.json"), help="the file to write")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and the command that starts the run")


def main(args: argparse.Namespace) -> int:
    """Runs the command with tracing on; gives its exit code. Raises CADError where it left no timeline."""
    # It takes torch along.
    from deepspeed_cad.trace import PATH_VARIABLE, STEPS_VARIABLE, WARM_UP, find_idle

    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise CADConfigError("there is no command to run: deepspeed-cad trace --steps 3 -- torchrun … train.py")
    if args.steps < 1:
        raise CADConfigError(f"--steps is {args.steps}; expected 1 or more micro-batches")
    output = args.output.absolute()
    try:
        output.unlink(missing_ok=True)
    except OSError as error:
        raise CADConfigError(f"--output: {output} cannot be written: {error.strerror}") from error
    environment = {**os.environ, PATH_VARIABLE: str(output), STEPS_VARIABLE: str(args.steps)}
    try:
        code = subprocess.run(command, env=environment, check=False).returncode
    except OSError as error:
        raise CADConfigError(f"cannot run {command[0]!r}: {error.strerror}") from error
    if not output.exists():
        raise CADError(
            f"the run ended with exit code {code} and left no timeline of all ranks. CAD must be on in it, and it must "
            f"train more than {WARM_UP} micro-batches"
        )
    lines = [*say_idle(*find_idle(json.loads(output.read_text()))), f"{output}: open it in https://ui.perfetto.dev"]
    sys.stdout.write("\n".join(lines) + "\n")
    return code


def say_idle(trainers: dict[int, float], servers: dict[int, float]) -> list[str]:
    """How long ranks were idle (shares, by rank), and what to change where servers are reserved and it is too long."""
    if not trainers:
        return []
    each = [
        f"{name} {rank} {share:.0%}"
        for name, shares in (("trainer" if servers else "rank", trainers), ("server", servers))
        for rank, share in shares.items()
    ]
    lines = [f"idle: {', '.join(each)}"]
    if servers:
        waited, idle = (sum(shares.values()) / len(shares) for shares in (trainers, servers))
        where = "trainers waited for {} of these micro-batches"
        lines += filter(None, [advise(idle, waited, len(servers), len(trainers), where)])
    return lines
