"""Waits for the real import of deepspeed and then lets deepspeed_cad.launch.deepspeed_hook wrap it.

Started by deepspeed_cad_autoload.pth in every Python process, so it imports nothing that is not loaded already but the
waiter, and lies beside the package. In: the imports of the process. Out: a call of `after_import` of that module once
one of `WAITED_FOR` has run, and, where DEEPSPEED_CAD_CONFIG asks for CAD, of that in deepspeed_cad.launch.armed for
`ASKED_FOR`. Without that request it must never make an import fail. Nothing imports it but the .pth file.
"""

import os
import sys

from _deepspeed_cad_waiter import ASKED, ASKED_FOR, AUTOLOAD, WAITED_FOR, find_waiter, only_warn, wait_for


def tell_autoload(module) -> None:
    """Wraps what was imported, for the "cad" block of a DeepSpeed JSON."""
    from deepspeed_cad.launch.deepspeed_hook import after_import

    after_import(module)


def tell_asked(module) -> None:
    """Arms CAD that was asked for; an error goes on to who imports, because the run must not go on without CAD."""
    from deepspeed_cad.launch.armed import after_import

    after_import(module)


def say_what_is_wrong() -> None:
    """One line where the request cannot be read: a process may run for long before the import that raises the error."""
    from deepspeed_cad.errors import CADConfigError
    from deepspeed_cad.request import read_environment

    try:
        read_environment()
    except CADConfigError as error:
        sys.stderr.write(f"deepspeed_cad: DEEPSPEED_CAD_CONFIG cannot be used, so nothing can train here: {error}\n")


def arm() -> None:
    """Starts waiting, once per process, unless DEEPSPEED_CAD_AUTOLOAD=0. Called by the .pth file.

    A request in DEEPSPEED_CAD_CONFIG is waited for in any case.
    """
    if os.environ.get("DEEPSPEED_CAD_AUTOLOAD", "1").lower() not in ("0", "false", "off", "no"):
        wait_for(WAITED_FOR, only_warn(tell_autoload), AUTOLOAD)
    if os.environ.get("DEEPSPEED_CAD_CONFIG") and find_waiter(ASKED) is None:
        wait_for(ASKED_FOR, tell_asked, ASKED)
        say_what_is_wrong()
