"""Finds and loads the compiled library `_native.so` through ctypes.

In: the file that installing put beside this one (it may be missing). Out: a `ctypes.CDLL`, or None and the reason. The
library has a plain C interface, so it depends on no Python and no torch version. Each room that calls it declares the
argument types of its own functions.
"""

import ctypes
import functools
import logging
from pathlib import Path

logger = logging.getLogger(__name__)

ABI_VERSION = 7
"""Raised whenever an exported C function changes; must equal what `cad_abi_version()` in csrc/ returns."""

LIBRARY = Path(__file__).with_name("_native.so")

REBUILD = "install g++, then install deepspeed_cad again"


def load() -> ctypes.CDLL | None:
    """The library, or None where it is missing or does not fit this package (logged once)."""
    return _load_once()[0]


def why_missing() -> str:
    """One line that says why `load()` gave None; empty when it gave the library."""
    return _load_once()[1]


@functools.cache
def _load_once() -> tuple[ctypes.CDLL | None, str]:
    library, reason = _open(LIBRARY)
    if reason:
        logger.warning("deepspeed_cad uses its Python planner and the c10d transport: %s", reason)
    return library, reason


def _open(path: Path) -> tuple[ctypes.CDLL | None, str]:
    if not path.exists():
        return None, f"the native library was not built ({path} does not exist). To get it: {REBUILD}."
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return None, f"the native library cannot be loaded: {error}. To get it: {REBUILD}."
    try:
        version = library.cad_abi_version()
    except AttributeError:
        return None, f"{path} exports no cad_abi_version(), so it is not of this package. To get it: {REBUILD}."
    if version != ABI_VERSION:
        return (
            None,
            f"{path} is stale: its ABI version is {version}, this package needs {ABI_VERSION}. To get it: {REBUILD}.",
        )
    return library, ""
