"""`python -m deepspeed_cad.run [--cad JSON | --cad_config FILE] train.py args…`: an unmodified script, with CAD.

In: a training script and the "cad" block, under any launcher; or a command that starts the training processes itself,
such as `trl`. Out: the script, run as if it had been started by itself, with CAD turned on for the first model of
transformers that it trains, here or in a process that it starts: where Accelerate or DeepSpeed prepare it, else at its
first training forward. A process in which CAD does not become active stops at its first optimizer step.
"""

import argparse
import json
import logging
import os
import runpy
import sys
from collections.abc import Sequence

from deepspeed_cad.config import CADConfig
from deepspeed_cad.errors import CADConfigError, CADError, why_ended
from deepspeed_cad.launch.armed import arm, farewell
from deepspeed_cad.request import Request, agree, read_environment
from deepspeed_cad.server.launch import take_role

logger = logging.getLogger("deepspeed_cad")


def add_source(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--cad", metavar="JSON", help='the "cad" block, such as \'{"tolerance": 0.05}\'')
    source.add_argument("--cad_config", "--cad-config", metavar="FILE", help="a JSON file with the block in it")


def refuse_late_flags(words: Sequence[str], where: str) -> None:
    """Raise CADConfigError where a flag of CAD stands among words that another program reads; `where` it belongs.

    A flag of that name which the script has for something else, and a block that is no object, are left alone."""
    for flag, value in zip(words, [*words[1:], ""]):
        name, _, value = flag.partition("=") if "=" in flag else (flag, "", value)
        if (name == "--cad" and value.startswith("{")) or name in ("--cad_config", "--cad-config"):
            raise CADConfigError(f"{name} {where}")


def main(argv: Sequence[str] | None = None) -> int:
    """Read the command line and run the script. A mistake in it is one line and exit code 2."""
    parser = argparse.ArgumentParser(
        prog="python -m deepspeed_cad.run", description="Run a training script with CAD on.", allow_abbrev=False
    )
    add_source(parser)
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)  # given by DeepSpeed's launcher
    parser.add_argument("-m", "--module", action="store_true", help="the script is the name of a module")
    parser.add_argument("script", help="the training script, or the file of a command such as $(which trl)")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")
    args = parser.parse_args(argv)
    given = list(sys.argv[1:] if argv is None else argv)
    if (size := len(args.args)) < len(given) and given[len(given) - size - 1] == "--":
        args.args.insert(0, "--")  # behind the script it is the script's
    try:
        if args.cad is None and args.cad_config is None:
            where = f"stands behind {args.script}, which would read it: write it before the script"
            refuse_late_flags(args.args, where)
        request = read_request(args.cad, args.cad_config)
        if not args.module and not os.path.isfile(args.script):
            raise CADConfigError(f"the training script {args.script!r} is not there")
    except CADError as error:
        sys.stderr.write(f"deepspeed_cad.run: {error}\n")
        return 2
    words = args.args if args.local_rank is None else [f"--local_rank={args.local_rank}", *args.args]
    try:
        request, server = take_role(request)
        if server is not None:
            from deepspeed_cad.server.process import serve  # brings torch

            return serve(server, request.config)
        code = run_script(args.script, words, args.module, request)
        farewell(f"exit code {code}" if code else "")
        return code
    except CADError as error:
        logger.debug("where it happened", exc_info=True)
        farewell(str(error))
        sys.stderr.write(f"deepspeed_cad: rank {os.environ.get('RANK', '0')}: {error}\n")
        sys.stderr.flush()
        return 2
    except BaseException as error:
        farewell(why_ended(error))
        raise


def read_request(text: str | None, path: str | None, default: str = "-m deepspeed_cad.run") -> Request:
    """What is asked for by `--cad TEXT`, by `--cad_config PATH`, or by neither, and by the environment.

    `default`: who asks where neither flag is given. Raises CADConfigError where it is unreadable, or two disagree."""
    surrounding = read_environment()
    if path is not None:
        request = Request(CADConfig.load(path), f"--cad_config {path}")
    elif text is not None:
        try:
            request = Request(CADConfig.from_dict(json.loads(text)), "--cad")
        except json.JSONDecodeError as error:
            raise CADConfigError(
                f"--cad {text!r} is not JSON: {error}. Quote it for the shell: --cad '{{\"tolerance\": 0.05}}'"
            ) from error
    else:
        return surrounding or Request(CADConfig(), default)
    if surrounding is not None:
        agree(request.config, request.asked_by, surrounding.config, surrounding.asked_by)
    return request


def run_script(script: str, words: Sequence[str], is_module: bool, request: Request) -> int:
    """Run a script or module as `__main__` with CAD armed; gives the exit code, where the script leaves it to us."""
    # The .pth file of the installation has loaded the hook; processes that the script starts have CAD by it alone.
    hooked = "_deepspeed_cad_autoload" in sys.modules
    request.publish()
    if (armed := arm()) is None:
        logger.warning('deepspeed_cad: "enabled" is false: the script runs without CAD')
    elif not hooked:
        logger.warning(
            "deepspeed_cad: the installed hook is not active in this Python (the package is only on the path, or "
            "Python runs with -S): processes that the script starts would train without CAD. Install with pip"
        )
    sys.argv = [script, *words]
    if not getattr(sys.flags, "safe_path", False):  # else Python puts no folder there
        sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.abspath(script))
    try:
        if is_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code:  # 0 and None are success
            raise
    return 0 if armed is None else armed.settle()


if __name__ == "__main__":
    sys.exit(main())
