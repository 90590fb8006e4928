"""CAD that was asked for reaches every process of a run: the one that a launcher starts, and those that it starts.

In: the request of the environment (request.py). Out: every Python process below it has CAD armed when torch, accelerate
or deepspeed is imported (the installed .pth hook sees to that), and one that trained without CAD does not end with exit
code 0. A process that only starts others is left alone. Imports neither torch nor a host framework by itself.
"""

import atexit
import functools
import logging
import os
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from _deepspeed_cad_waiter import ASKED, ASKED_FOR, wait_for
from deepspeed_cad.config import CADConfig
from deepspeed_cad.errors import CADError
from deepspeed_cad.request import Request, agree, read_environment
from deepspeed_cad.server.launch import published

if TYPE_CHECKING:
    from deepspeed_cad.integrations.active import ProcessCheck

logger = logging.getLogger("deepspeed_cad")

LEAVE_S = 2.0
"""For a trainer that ends without having met its servers to tell them."""
EXIT_CODE = 2
"""Of a process that trained without CAD although it was asked for."""


class Armed:
    """CAD armed in this process: for whatever trains here from now on, and for how the process ends."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.check: ProcessCheck | None = None  # from the import of torch on: nothing trains before
        self._settled = False
        atexit.register(self._at_exit)
        self._exit = os._exit
        # atexit is left out by os._exit, with which forked workers and some training scripts end.
        os._exit = self._exit_at_once

    def after_import(self, module: ModuleType) -> None:
        """Arm what was just imported: torch, accelerate or deepspeed."""
        if module.__name__ == "torch":
            from deepspeed_cad.integrations.active import ProcessCheck

            self.check = ProcessCheck(self.request.asked_by, self.request.config)
        elif module.__name__ == "accelerate":
            from deepspeed_cad.integrations.accelerate import CADPlugin, give_every_accelerator

            plugin = CADPlugin.of(self.request.config, self.request.asked_by)
            plugin.watched = True
            give_every_accelerator(plugin)
        else:
            self._arm_deepspeed(module)

    def settle(self) -> int:
        """The exit code of a script that ended well: 0, or EXIT_CODE and one line where it trained without CAD."""
        problem = "" if self.check is None or self._settled else self.check.problem()
        self._settled = True
        if not problem:
            return 0
        sys.stderr.write(f"deepspeed_cad: rank {os.environ.get('RANK', '0')}: {problem}\n")
        sys.stderr.flush()
        return EXIT_CODE

    def _at_exit(self) -> None:
        if code := self.settle():
            sys.stdout.flush()
            self._exit(code)

    def _exit_at_once(self, status: int) -> NoReturn:
        status = status or self.settle()
        farewell(f"exit code {status}" if status else "")
        self._exit(status)

    def _arm_deepspeed(self, module: Any) -> None:
        """A call of `deepspeed.initialize` without a "cad" block gets ours; one with another block is refused."""
        from deepspeed_cad.integrations.deepspeed.block import ABSENT, find_cad_block
        from deepspeed_cad.launch.deepspeed_hook import after_import

        after_import(module)
        original: Callable[..., Any] = module.initialize
        config, asked_by = self.request.config, self.request.asked_by

        @functools.wraps(original)
        def initialize(*args: Any, **kwargs: Any) -> Any:
            block = find_cad_block(original, args, kwargs)
            if block is ABSENT:
                with_cad = import_module("deepspeed_cad.integrations.deepspeed.initialize")
                return with_cad.initialize(original, config.to_dict(), args, kwargs)
            agree(config, asked_by, CADConfig.from_dict(block), 'the "cad" block of the DeepSpeed JSON')
            return original(*args, **kwargs)

        module.initialize = initialize


@functools.cache
def arm() -> Armed | None:
    """Arm this process, once, for the request of the environment; None where CAD is not asked for."""
    if (request := read_environment()) is None or not request.config.enabled:
        return None
    armed = Armed(request)
    wait_for(ASKED_FOR, after_import, ASKED)
    for name in ASKED_FOR:
        module = sys.modules.get(name)
        # A module that is being imported right now is the hook's to announce, when it is whole.
        if module is not None and not getattr(module.__spec__, "_initializing", False):
            armed.after_import(module)
    return armed


def after_import(module: ModuleType) -> None:
    """Called by the hook when torch, accelerate or deepspeed was imported in a process that was asked for CAD."""
    if (armed := arm()) is not None:
        armed.after_import(module)


def farewell(reason: str) -> None:
    """This process ends: tell whoever waits for it, if they were not told; `reason` is empty where it ends well."""
    module = sys.modules.get("deepspeed_cad.session")
    if module is not None and (session := module.current_session()) is not None:
        session.farewell(reason)
    elif (role := published()) is not None:
        from deepspeed_cad.server.meeting import Rendezvous

        try:
            Rendezvous(role, LEAVE_S).leave(reason)
        except (CADError, RuntimeError, OSError) as error:
            logger.debug("no server was told: %s", error)
