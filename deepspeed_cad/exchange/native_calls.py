"""The C functions of csrc/ that transports call, with Python types: addresses in, nothing out, errors raised.

In: addresses, streams and int64 tables. Out: work queued on a CUDA stream. Raises NativeCallError with the library's
own message; `cuda_calls` and `nccl_calls` raise it where the driver or NCCL is missing.
"""

from __future__ import annotations

import ctypes
import threading
from importlib import import_module, util
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from deepspeed_cad import native
from deepspeed_cad.errors import CADError

Table = npt.NDArray[np.int64]

_P, _I, _L, _U = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_uint32
_SIGNATURES: dict[str, tuple[object, ...]] = {
    "cad_cuda_open": (ctypes.c_char_p,),
    "cad_cuda_context": (ctypes.POINTER(_P),),
    "cad_nvlink_push": (_P, _P, _L, _L, _P, _P, _P, _L, _P, _P, _U, _P, ctypes.c_uint64),
    "cad_nvlink_wait": (_P, _P, _L, _P, _U),
    "cad_nccl_open": (ctypes.c_char_p,),
    "cad_nccl_version": (ctypes.POINTER(_I),),
    "cad_nccl_unique_id": (ctypes.c_char_p,),
    "cad_nccl_join": (ctypes.c_char_p, _I, _I, ctypes.POINTER(_P)),
    "cad_nccl_exchange": (_P, _P, _L, _P),
    "cad_nccl_leave": (_P, _I),
}


class NativeCallError(CADError):
    """A call into the native library, the CUDA driver or NCCL failed."""


class UnreachedError(NativeCallError):
    """Hosts do not reach each other through NCCL: nothing else that runs through NCCL would."""


class _Library:
    """The loaded library with argument types declared and error codes turned into exceptions."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.cad_last_error.restype = ctypes.c_char_p
        for name, arguments in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, _I

    def call(self, name: str, *arguments: object) -> None:
        if getattr(self._library, name)(*arguments):
            raise NativeCallError(self._library.cad_last_error().decode(errors="replace"))


def _library() -> _Library:
    library = native.load()
    try:
        return _Library(library)
    except AttributeError as error:
        raise NativeCallError(f"the native library is incomplete: {error}. To repair it: {native.REBUILD}") from error


def _at(table: Table) -> int:
    return table.ctypes.data


class CudaCalls:
    """Copies, flag writes and flag waits on CUDA streams, in one context."""

    def __init__(self, library: _Library, context: int) -> None:
        self._library, self._context = library, context

    def push(
        self,
        stream: int,
        peers: Table,
        begin: Table,
        slices: Table,
        fields: Table,
        flags: Table,
        value: int,
        names: Table | None = None,
        name: int = 0,
    ) -> None:
        """Queue one exchange: see cad_nvlink_push in csrc/nvlink.cpp for the tables, all contiguous int64."""
        self._library.call(
            "cad_nvlink_push", self._context, stream, len(flags), len(peers), _at(peers), _at(begin), _at(slices),
            len(fields), _at(fields), _at(flags), value & 0xFFFFFFFF, None if names is None else _at(names), name,
        )  # fmt: skip

    def wait(self, stream: int, flags: Table, value: int) -> None:
        """Make a stream wait until every flag (addresses) is at least `value`."""
        self._library.call("cad_nvlink_wait", self._context, stream, len(flags), _at(flags), value & 0xFFFFFFFF)


def cuda_calls(driver: str | None = None) -> CudaCalls:
    """Calls in the CUDA context of this thread. `driver` names another driver library than libcuda.so.1 (tests)."""
    library = _library()
    library.call("cad_cuda_open", None if driver is None else driver.encode())
    context = _P()
    library.call("cad_cuda_context", ctypes.byref(context))
    return CudaCalls(library, context.value or 0)


class NcclCalls:
    """One NCCL communicator."""

    def __init__(self, library: _Library, unique_id: bytes, ranks: int, rank: int) -> None:
        self._library, self._communicator, self._leaving = library, _P(), threading.Lock()
        library.call("cad_nccl_join", unique_id, ranks, rank, ctypes.byref(self._communicator))

    def exchange(self, stream: int, messages: Table) -> None:
        """Queue messages ([n, 4]: is_send, peer, address, bytes) as one group."""
        self._library.call("cad_nccl_exchange", self._communicator, stream, len(messages), _at(messages))

    def leave(self, abort: bool = False) -> None:
        """Leave the communicator; harmless when called again, by any thread."""
        with self._leaving:
            communicator, self._communicator = self._communicator, _P()
        if communicator.value:
            self._library.call("cad_nccl_leave", communicator, int(abort))


def open_nccl() -> tuple[_Library, int]:
    """The library with NCCL found, and NCCL's version number."""
    library = _library()
    path = nccl_file()
    library.call("cad_nccl_open", None if path is None else str(path).encode())
    version = _I()
    library.call("cad_nccl_version", ctypes.byref(version))
    return library, version.value


def new_unique_id(library: _Library) -> bytes:
    """What all ranks of a new communicator must hand to NcclCalls."""
    buffer = ctypes.create_string_buffer(128)
    library.call("cad_nccl_unique_id", buffer)
    return buffer.raw


def nccl_file() -> Path | None:
    """The NCCL library that torch's wheels bring along, where there is one."""
    found = util.find_spec("nvidia")
    folders = list(found.submodule_search_locations or []) if found else []
    files = [file for folder in folders for file in Path(folder).glob("nccl/lib/libnccl.so.2")]
    return files[0] if files else None


def peer_reach(device: torch.device) -> list[int]:
    """Indices of the GPUs visible to this process whose memory `device` can reach, itself included."""
    count = torch.cuda.device_count()
    return [i for i in range(count) if i == device.index or torch.cuda.can_device_access_peer(device.index, i)]


def symmetric_memory() -> object:
    """torch's symmetric memory module; raises NativeCallError where this torch has none."""
    try:
        module = import_module("torch.distributed._symmetric_memory")
        module.empty, module.rendezvous  # noqa: B018
    except (ImportError, AttributeError) as error:
        raise NativeCallError(f"torch {torch.__version__} has no symmetric memory: {error}") from error
    return module
