"""Finds, loads and calls the compiled library `_native.so` through ctypes.

In: the file that installing put beside this one. Out: a `ctypes.CDLL`, or one CADError that says why there is none.
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


class NativeCallError(CADError):
    """A call into the native library, the CUDA driver or NCCL failed."""


def load() -> ctypes.CDLL:
    """The library. Raises CADError where it is missing or does not fit this package."""
    library, reason = _load_once()
    if library is None:
        raise CADError(reason)
    return library


def why_missing() -> str:
    """Why `load()` raises CADError; empty where it gives the library."""
    return _load_once()[1]


def call(name: str, *arguments: Any, library: ctypes.CDLL | None = None) -> None:
    """Call a function that returns 0, or another number where it failed. Numpy arrays are passed by address.

    Raises NativeCallError with the library's own message where it failed, and CADError where there is no library."""
    library = library or load()
    passed = [ctypes.c_void_p(each.ctypes.data) if hasattr(each, "ctypes") else each for each in arguments]
    if getattr(library, name)(*passed):
        library.cad_last_error.restype = ctypes.c_char_p
        raise NativeCallError(f"{name} failed: {library.cad_last_error().decode(errors='replace')}")


@functools.cache
def _load_once(path: Path = LIBRARY) -> tuple[ctypes.CDLL | None, str]:
    if not path.exists():
        reason = f": {path} does not exist"
    else:
        try:
            library = ctypes.CDLL(str(path))
            version = library.cad_abi_version()
            if version == ABI_VERSION:
                return library, ""
            reason = f": {path} is stale: its ABI version is {version}, this package needs {ABI_VERSION}"
        except OSError as error:
            reason = f", which cannot be loaded: {error}"
        except AttributeError:
            reason = f": {path} exports no cad_abi_version(), so it is another one"
    return None, f"deepspeed_cad does not run without its compiled library{reason}. To get it: {REBUILD}."
