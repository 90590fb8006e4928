"""Tries what CAD needs on this machine: packages, native library, kernels, transports, devices, autoload.

In: nothing but the machine. Out: `Finding`s, each with what was tried and what came of it. A probe never raises: what
fails is a finding with the reason.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module, metadata
from pathlib import Path

PACKAGES = {
    "torch": 'pip install "torch>=2.6"',
    "numpy": "pip install numpy",
    "greenlet": "pip install greenlet (needed for the overlap by ping-pong)",
    "transformers": 'pip install "deepspeed_cad[transformers]"',
    "deepspeed": 'DS_BUILD_OPS=0 pip install --no-build-isolation "deepspeed_cad[deepspeed]"',
    "accelerate": 'pip install "deepspeed_cad[accelerate]"',
}
CORE_PACKAGES = ("torch", "numpy")

_TIMEOUT_S = 120

# Uneven splits, as every exchange has: rank 0 sends 1 and 2 rows, rank 1 sends 3 and none.
_C10D = """
import sys, datetime, torch, torch.distributed as dist
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2,
                        timeout=datetime.timedelta(seconds=60))
sent = ([1, 2], [3, 0])
received = [sent[0][rank], sent[1][rank]]
taken = torch.empty(sum(received))
dist.all_to_all_single(taken, torch.arange(3.0) + 10 * rank, received, list(sent[rank]))
expected = ([0.0, 10.0, 11.0, 12.0], [1.0, 2.0])[rank]
dist.barrier()
dist.destroy_process_group()
sys.exit(0 if taken.tolist() == expected else "all_to_all gave %s, expected %s" % (taken.tolist(), expected))
"""

# A stand-in for deepspeed shows whether the installed .pth file works, without the seconds that the real one takes.
_AUTOLOAD = """
import deepspeed
print(hasattr(deepspeed.initialize, "__wrapped__"))
"""


@dataclass(frozen=True)
class Finding:
    """One thing that was tried."""

    name: str
    ok: bool
    detail: str
    """What was found where it works, the reason where it does not."""
    remedy: str = ""
    """How to get it; empty where nothing is missing or nothing can be done on this machine."""


def try_packages() -> list[Finding]:
    """Imports nothing but torch, numpy and greenlet: the others are only looked up, because importing them is slow."""
    findings = []
    for name, remedy in PACKAGES.items():
        try:
            version = metadata.version(name)
            if name in ("torch", "numpy", "greenlet"):
                version = import_module(name).__version__
            findings.append(Finding(name, True, version))
        except metadata.PackageNotFoundError:
            findings.append(Finding(name, False, "not installed", remedy))
        except Exception as error:
            findings.append(Finding(name, False, f"cannot be imported: {_line(error)}", remedy))
    return findings


def try_native() -> Finding:
    """Loads the compiled library."""
    from deepspeed_cad import native

    library = native.load()
    if library is None:
        return Finding("native library", False, native.why_missing().split(". To get it")[0], native.REBUILD)
    return Finding("native library", True, f"{native.LIBRARY.name}, ABI {native.ABI_VERSION}")


def try_transports() -> list[Finding]:
    """c10d by two processes of its own; the others by their own probe."""
    return [try_c10d(), *(_try(name, partial(_probe_transport, name)) for name in ("nccl", "nvlink"))]


def try_c10d() -> Finding:
    """Two gloo processes on this machine exchange slices of uneven length."""
    return _try("c10d", _exchange_between_two_processes)


def try_kernels() -> list[Finding]:
    """Forward and backward of every backend on a tiny problem, against plain torch in fp64."""
    try:
        trial = import_module("deepspeed_cad.cli.trial")
        backends = import_module("deepspeed_cad.kernels.registry").KERNELS
    except Exception as error:
        return [Finding("kernels", False, _line(error))]
    return [_try(kernel.name, partial(trial.try_kernel, kernel)) for kernel in backends]


def try_devices() -> list[Finding]:
    """Every GPU that torch sees, and which of them reach each other's memory."""

    def look() -> tuple[bool, str]:
        import torch

        count = torch.cuda.device_count()
        if not count:
            return False, "torch sees no GPU: attention runs on the CPU"
        for index in range(count):
            torch.zeros(1, device=f"cuda:{index}").add_(1).item()
            properties = torch.cuda.get_device_properties(index)
            capability = f"{properties.major}.{properties.minor}"
            memory = properties.total_memory / 2**30
            listed.append(Finding(f"GPU {index}", True, f"{properties.name}, {capability}, {memory:.0f} GiB"))
        reached = [[a == b or torch.cuda.can_device_access_peer(a, b) for b in range(count)] for a in range(count)]
        if count > 1:
            rows = "  ".join("".join("x" if one else "." for one in row) for row in reached)
            listed.append(Finding("peer access", all(map(all, reached)), rows))
        return True, f"{count} × CUDA {torch.version.cuda}"

    listed: list[Finding] = []
    first = _try("GPUs", look)
    return [first, *listed]


def try_autoload() -> Finding:
    """Starts a Python as a training script would be started and imports a stand-in for deepspeed there."""
    remedy = "pip install deepspeed_cad (without --target), or call deepspeed_cad.install() in the script"
    if os.environ.get("DEEPSPEED_CAD_AUTOLOAD", "1").lower() in ("0", "false", "off", "no"):
        return Finding("autoload", False, "turned off by DEEPSPEED_CAD_AUTOLOAD", "unset DEEPSPEED_CAD_AUTOLOAD")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "deepspeed").mkdir()
        Path(folder, "deepspeed", "__init__.py").write_text("def initialize(args=None, config=None): pass\n")
        path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        done = subprocess.run(
            [sys.executable, "-c", _AUTOLOAD],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
        )
    if done.returncode:
        return Finding("autoload", False, f"importing deepspeed fails: {_last_line(done.stderr)}", remedy)
    if done.stdout.strip() != "True":
        return Finding("autoload", False, "not active: nothing waits for the import of deepspeed", remedy)
    return Finding("autoload", True, 'active: a "cad" block in the DeepSpeed JSON is enough')


def _try(name: str, probe: Callable[[], tuple[bool, str]]) -> Finding:
    try:
        return Finding(name, *probe())
    except Exception as error:
        return Finding(name, False, _line(error))


def _probe_transport(name: str) -> tuple[bool, str]:
    exchange = import_module("deepspeed_cad.exchange")
    probe = getattr(exchange, "probe", None)
    if probe is None:
        return False, "not part of this release"
    return probe(name)


def _exchange_between_two_processes() -> tuple[bool, str]:
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", _C10D, str(rank), str(Path(folder, "store"))],
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            errors = [process.communicate(timeout=_TIMEOUT_S)[1] for process in processes]
        except subprocess.TimeoutExpired:
            return False, f"two gloo processes on this machine did not exchange anything within {_TIMEOUT_S} s"
        finally:
            for process in processes:
                process.kill()
    for rank, process in enumerate(processes):
        if process.returncode:
            return False, f"rank {rank} of two gloo processes failed: {_last_line(errors[rank])}"
    return True, "two gloo processes exchanged slices of uneven length"


def _line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]
