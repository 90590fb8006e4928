"""The console script `accelerate-cad launch`: `accelerate launch` with CAD in every process that it starts.

In: `--cad JSON` or `--cad_config FILE`, then the words of `accelerate launch`, which are passed on unread. Out: that in
place of this process, with the request in the environment. The block is checked before anything starts.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from deepspeed_cad.errors import CADConfigError, CADError
from deepspeed_cad.run import add_source, read_request, refuse_late_flags

_FLAGS = ("--cad", "--cad_config", "--cad-config", "-h", "--help")
_COMMAND = "accelerate-cad launch"


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog=_COMMAND,
        usage=f"{_COMMAND} [--cad JSON | --cad_config FILE] [flags of accelerate launch] train.py args...",
        description="accelerate launch, with CAD in every process that it starts. CAD's flags come first; everything "
        "after them is read by accelerate: accelerate launch --help.",
    )
    add_source(parser)
    if words[:1] in (["-h"], ["--help"]):
        parser.print_help()
        return 0
    if words[:1] != ["launch"]:
        parser.print_usage(sys.stderr)
        return 2
    end = 1  # of the flags of CAD, each with its value
    while end < len(words) and words[end].split("=")[0] in _FLAGS:
        end += 2 if "=" not in words[end] else 1
    args = parser.parse_args(words[1:end])
    try:
        _launch(args.cad, args.cad_config, words[end:])
    except CADError as error:
        sys.stderr.write(f"{_COMMAND}: {error}\n")
        return 2
    return 0


def _launch(block: str | None, path: str | None, words: list[str]) -> None:
    """Become `accelerate launch`. Raises CADConfigError where the processes that it starts would not have CAD."""
    if block is None and path is None:
        refuse_late_flags(words, f"must come first, because accelerate reads all that follows: {_COMMAND} --cad JSON …")
    request = read_request(block, path, _COMMAND)
    if "_deepspeed_cad_autoload" not in sys.modules:
        raise CADConfigError(
            "the installed hook is not active in this Python (the package is only on the path, or Python runs with "
            "-S): the processes that accelerate starts would train without CAD. Install deepspeed_cad with pip"
        )
    if request.config.servers != "all" and request.config.enabled:
        # Reserved ranks must not run the script, so what each process runs first is our launcher.
        words = insert_run(words)
    request.publish()
    os.execv(sys.executable, [sys.executable, "-m", "accelerate.commands.launch", *words])


def insert_run(words: list[str]) -> list[str]:
    """The words of `accelerate launch` with `-m deepspeed_cad.run` before the script. Raises CADConfigError."""
    from accelerate.commands.launch import launch_command_parser

    read = launch_command_parser().parse_args(words)
    if read.no_python:
        raise CADConfigError(
            '"servers" reserves ranks, and --no_python starts a program that CAD cannot keep from running there: start '
            "a Python script"
        )
    at = len(words) - len(read.training_script_args) - 1
    if words[at] == "--":  # behind the script, of which accelerate reads it off
        at -= 1
    # With --module accelerate takes ours for the module, and ours is told that the script is one.
    return [*words[:at], *(["deepspeed_cad.run", "-m"] if read.module else ["-m", "deepspeed_cad.run"]), *words[at:]]


if __name__ == "__main__":
    sys.exit(main())
