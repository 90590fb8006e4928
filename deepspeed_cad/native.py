"""Finds and loads the compiled library `_native.so` through ctypes, and calls those of its functions that plan.

In: the file that installing put beside this one. Out: a `ctypes.CDLL`, or one CADError that says why there is none and
what to do: nothing of CAD runs without it. The library has a plain C interface, so it depends on no Python and no torch
version.
"""

import ctypes
import functools
from pathlib import Path
from typing import Any

from deepspeed_cad.errors import CADError

ABI_VERSION = 9
"""Raised whenever an exported C function changes; must equal what `cad_abi_version()` in csrc/ returns."""

LIBRARY = Path(__file__).with_name("_native.so")

REBUILD = (
    "install deepspeed_cad again, or in a checkout: make native. pip compiles the library, with a compiler from PyPI "
    "where the machine has none; without a network install g++ first"
)


def load() -> ctypes.CDLL:
    """The library. Raises CADError where it is missing or does not fit this package."""
    library, reason = _load_once()
    if library is None:
        raise CADError(reason)
    return library


def why_missing() -> str:
    """Why `load()` raises CADError; empty where it gives the library."""
    return _load_once()[1]


def call(name: str, *arguments: Any) -> None:
    """Call a function that returns 0, or another number where it failed. Numpy arrays are passed by address.

    Raises CADError with the library's own message where it failed, and where there is no library.
    """
    library = load()
    passed = [ctypes.c_void_p(each.ctypes.data) if hasattr(each, "ctypes") else each for each in arguments]
    if getattr(library, name)(*passed):
        library.cad_last_error.restype = ctypes.c_char_p
        raise CADError(f"{name} failed: {library.cad_last_error().decode(errors='replace')}")


@functools.cache
def _load_once() -> tuple[ctypes.CDLL | None, str]:
    return _open(LIBRARY)


def _open(path: Path) -> tuple[ctypes.CDLL | None, str]:
    what = "deepspeed_cad does not run without its compiled library"
    if not path.exists():
        return None, f"{what}: {path} does not exist. To get it: {REBUILD}."
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        return None, f"{what}, which cannot be loaded: {error}. To get it: {REBUILD}."
    try:
        version = library.cad_abi_version()
    except AttributeError:
        return None, f"{what}: {path} exports no cad_abi_version(), so it is another one. To get it: {REBUILD}."
    if version != ABI_VERSION:
        return (
            None,
            f"{what}: {path} is stale: its ABI version is {version}, this package needs {ABI_VERSION}. To get it: "
            f"{REBUILD}.",
        )
    return library, ""
