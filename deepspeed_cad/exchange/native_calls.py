"""The C functions of csrc/ that transports call.

In: addresses, streams and int64 tables. Out: work queued on a CUDA stream, or NativeCallError with the library's own
message, also where the driver or NCCL is missing.
"""

import ctypes
import threading
from functools import partial
from importlib import import_module, util
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from deepspeed_cad import native
from deepspeed_cad.native import NativeCallError

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


class UnreachedError(NativeCallError):
    """Hosts do not reach each other through NCCL: nothing else that runs through NCCL would."""


def _library() -> ctypes.CDLL:
    library = native.load()
    for name, arguments in _SIGNATURES.items():
        getattr(library, name).argtypes = arguments
    return library


class CudaCalls:
    """Copies, flag writes and flag waits on CUDA streams, in the context of the thread that makes it."""

    def __init__(self, driver: str | None = None) -> None:
        """`driver` names another driver library than libcuda.so.1 (tests)."""
        context = _P()
        self._call = partial(native.call, library=_library())
        self._call("cad_cuda_open", None if driver is None else driver.encode())
        self._call("cad_cuda_context", ctypes.byref(context))
        self._context = context.value or 0

    def push(
        self, stream: int, peers: Table, begin: Table, slices: Table, fields: Table, flags: Table, value: int,
        names: Table | None = None, name: int = 0,
    ) -> None:  # fmt: skip
        """Queue one exchange: see cad_nvlink_push in csrc/nvlink.cpp for the tables, all contiguous int64."""
        self._call(
            "cad_nvlink_push", self._context, stream, len(flags), len(peers), peers, begin, slices, len(fields), fields,
            flags, value & 0xFFFFFFFF, names, name,
        )  # fmt: skip

    def wait(self, stream: int, flags: Table, value: int) -> None:
        """Make a stream wait until every flag (addresses) is at least `value`."""
        self._call("cad_nvlink_wait", self._context, stream, len(flags), flags, value & 0xFFFFFFFF)


class NcclCalls:
    def __init__(self, unique_id: bytes, ranks: int, rank: int) -> None:
        self._communicator, self._leaving = _P(), threading.Lock()
        native.call("cad_nccl_join", unique_id, ranks, rank, ctypes.byref(self._communicator))

    def exchange(self, stream: int, messages: Table) -> None:
        """Queue messages ([n, 4]: is_send, peer, address, bytes) as one group."""
        native.call("cad_nccl_exchange", self._communicator, stream, len(messages), messages)

    def leave(self) -> None:
        """Abort what is under way and leave the communicator; harmless when called again, by any thread."""
        with self._leaving:
            communicator, self._communicator = self._communicator, _P()
        if communicator.value:
            native.call("cad_nccl_leave", communicator, 1)


def open_nccl() -> int:
    """Find NCCL; gives its version number."""
    library, version = _library(), _I()
    # The library that torch's wheels bring along, where there is one.
    found = util.find_spec("nvidia")
    folders = list(found.submodule_search_locations or []) if found else []
    files = [file for folder in folders for file in Path(folder).glob("nccl/lib/libnccl.so.2")]
    native.call("cad_nccl_open", str(files[0]).encode() if files else None, library=library)
    native.call("cad_nccl_version", ctypes.byref(version), library=library)
    return version.value


def new_unique_id() -> bytes:
    """What all ranks of a new communicator must hand to NcclCalls. NCCL is open."""
    buffer = ctypes.create_string_buffer(128)
    native.call("cad_nccl_unique_id", buffer)
    return buffer.raw


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
