"""The console script `deepspeed-cad`: one subcommand per file of this folder.

Each file has `add_arguments(parser)` and `main(args) -> int`. Only the file of the subcommand in use is imported.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

from deepspeed_cad.errors import CADError
from deepspeed_cad.version import __version__

SUBCOMMANDS = {
    "doctor": "try every kernel, transport and device here, and say how to get what is missing",
    "plan": "plan one micro-batch, or say what CAD would gain on a data set",
    "profile": "measure this machine's attention and links into a profile for the planner",
    "serve": "serve the attention of a training of another launch",
    "trace": "record a few steps of a run as one timeline over all ranks",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand; returns its exit code. An error of this package is one line on stderr and exit code 2."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = _parser(next((word for word in words if not word.startswith("-")), None)).parse_args(words)
    try:
        code: int = _module(args.subcommand).main(args)
        sys.stdout.flush()
        return code
    except CADError as error:
        print(f"deepspeed-cad {args.subcommand}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of a pipe, such as head, has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is written at exit
        return 1


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="deepspeed-cad", description="Core attention disaggregation for DeepSpeed and Hugging Face training."
    )
    parser.add_argument("--version", action="version", version=f"deepspeed_cad {__version__}")
    subparsers = parser.add_subparsers(dest="subcommand", required=True, metavar="SUBCOMMAND")
    for name, purpose in SUBCOMMANDS.items():
        sub = subparsers.add_parser(name, help=purpose, description=f"{purpose[0].upper()}{purpose[1:]}.")
        if name == chosen:
            _module(name).add_arguments(sub)
    return parser


def _module(name: str) -> ModuleType:
    return import_module(f"deepspeed_cad.cli.{name}")
