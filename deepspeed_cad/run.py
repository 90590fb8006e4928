"""`python -m deepspeed_cad.run [--cad JSON | --cad_config FILE] train.py args…`: an unmodified script, with CAD.

In: a training script and the "cad" block, under any launcher (`accelerate launch -m`, `torchrun -m`, `deepspeed
--module`). Out: the script, run as if it had been started by itself, with CAD turned on for the first model of
transformers that it trains: where Accelerate or DeepSpeed prepare it, else at its first training forward. A script in
which CAD does not become active stops at its first optimizer step.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from deepspeed_cad.config import CADConfig
from deepspeed_cad.errors import CADConfigError, CADError

if TYPE_CHECKING:
    from deepspeed_cad.integrations.active import ActivationCheck

logger = logging.getLogger("deepspeed_cad")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--cad", metavar="JSON", help='the "cad" block, such as \'{"tolerance": 0.05}\'')
    source.add_argument("--cad_config", "--cad-config", metavar="FILE", help="a JSON file with the block in it")
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)  # given by DeepSpeed's launcher
    parser.add_argument("-m", "--module", action="store_true", help="the script is the name of a module")
    parser.add_argument("script", help="the training script")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments")


def main(argv: Sequence[str] | None = None) -> int:
    """Read the command line and run the script. A mistake in it is one line and exit code 2."""
    parser = argparse.ArgumentParser(
        prog="python -m deepspeed_cad.run", description="Run a training script with CAD on.", allow_abbrev=False
    )
    add_arguments(parser)
    args = parser.parse_args(argv)
    try:
        config, asked_by = read_config(args)
        if not args.module and not os.path.isfile(args.script):
            raise CADConfigError(f"the training script {args.script!r} is not there")
    except CADError as error:
        sys.stderr.write(f"deepspeed_cad.run: {error}\n")
        return 2
    words = args.args if args.local_rank is None else [f"--local_rank={args.local_rank}", *args.args]
    try:
        run_script(args.script, words, args.module, config, asked_by)
    except CADError as error:
        logger.debug("where it happened", exc_info=True)
        sys.stderr.write(f"deepspeed_cad: rank {os.environ.get('RANK', '0')}: {error}\n")
        sys.stderr.flush()
        return 2
    return 0


def read_config(args: argparse.Namespace) -> tuple[CADConfig, str]:
    """The configuration asked for, and the words for where it came from."""
    if args.cad_config is not None:
        return CADConfig.load(args.cad_config), f"--cad_config {args.cad_config}"
    if args.cad is None:
        return CADConfig(), "-m deepspeed_cad.run"
    try:
        block = json.loads(args.cad)
    except ValueError as error:
        raise CADConfigError(
            f"--cad {args.cad!r} is not JSON: {error}. Quote it for the shell: --cad '{{\"tolerance\": 0.05}}'"
        ) from error
    return CADConfig.from_dict(block), "--cad"


def run_script(script: str, words: Sequence[str], is_module: bool, config: CADConfig, asked_by: str) -> None:
    """Run a script or module as `__main__` with CAD armed."""
    check = arm(config, asked_by) if config.enabled else None
    if check is None:
        logger.warning('deepspeed_cad: "enabled" is false: the script runs without CAD')
    sys.argv = [script, *words]
    if is_module:
        sys.path[0] = os.getcwd()
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(script))
        runpy.run_path(script, run_name="__main__")
    if check is not None and not check.was_active:
        logger.warning(
            "deepspeed_cad: CAD was asked for (%s), and the script ended without an optimizer step", asked_by
        )


def arm(config: CADConfig, asked_by: str) -> ActivationCheck:
    """Turn CAD on for whatever trains in this process from now on; gives the check that it did."""
    from deepspeed_cad.autoload import install, when_imported
    from deepspeed_cad.integrations.active import ActivationCheck, bind_at_first_forward

    install()
    when_imported("deepspeed", functools.partial(_arm_deepspeed, config=config, asked_by=asked_by))
    when_imported("accelerate", functools.partial(_arm_accelerate, config=config, asked_by=asked_by))
    bind_at_first_forward(config)
    return ActivationCheck(asked_by)


def _arm_accelerate(module: Any, config: CADConfig, asked_by: str) -> None:
    from deepspeed_cad.integrations.accelerate import CADPlugin, give_every_accelerator

    plugin = CADPlugin.of(config, asked_by)
    plugin.watched = True
    give_every_accelerator(plugin)


def _arm_deepspeed(module: Any, config: CADConfig, asked_by: str) -> None:
    """A call of `deepspeed.initialize` without a "cad" block gets ours; one with another block is refused."""
    from deepspeed_cad.autoload import ABSENT, find_cad_block
    from deepspeed_cad.integrations.active import agree

    original: Callable[..., Any] = module.initialize

    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        block = find_cad_block(original, args, kwargs)
        if block is ABSENT:
            from deepspeed_cad.engine.initialize import initialize as with_cad

            return with_cad(original, config.to_dict(), args, kwargs)
        agree(config, asked_by, CADConfig.from_dict(block), 'the "cad" block of the DeepSpeed JSON')
        return original(*args, **kwargs)

    module.initialize = initialize


if __name__ == "__main__":
    sys.exit(main())
