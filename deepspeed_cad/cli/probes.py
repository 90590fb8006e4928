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

from deepspeed_cad.version import OLDEST, is_too_old

PACKAGES = {
    "torch": f"pip install 'torch>={OLDEST['torch']}'",
    "numpy": "pip install numpy",
    "greenlet": "pip install greenlet (needed to interleave)",
    "transformers": 'pip install "deepspeed_cad[transformers]"',
    "deepspeed": 'DS_BUILD_OPS=0 pip install --no-build-isolation "deepspeed_cad[deepspeed]"',
    "accelerate": 'pip install "deepspeed_cad[accelerate]"',
    "trl": "",
    "peft": "",
}
"""What is looked for, and how to get it where it is missing; "": only scripts that use it need it."""
CORE_PACKAGES = ("torch", "numpy")
TRANSPORTS = ("c10d", "nccl", "mixed", "nvlink")

_TIMEOUT_S = 120

# A stand-in for deepspeed shows whether the installed .pth file works, without the seconds that the real one takes.
_AUTOLOAD = """
import deepspeed
print(hasattr(deepspeed.initialize, "__wrapped__"))
"""


@dataclass(frozen=True)
class Finding:
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
            if name in OLDEST and is_too_old(name, version):
                upgrade = f"pip install --upgrade '{name}>={OLDEST[name]}'"
                findings.append(Finding(name, False, f"{version}, but {OLDEST[name]} or newer is needed", upgrade))
            else:
                findings.append(Finding(name, True, version))
        except metadata.PackageNotFoundError:
            findings.append(Finding(name, False, "not installed", remedy))
        except Exception as error:
            findings.append(Finding(name, False, f"cannot be imported: {_line(error)}", remedy))
    return findings


def try_native() -> Finding:
    from deepspeed_cad import native

    if reason := native.why_missing():
        return Finding("native library", False, reason.split(". To get it")[0], native.REBUILD)
    return Finding("native library", True, f"{native.LIBRARY.name}, ABI {native.ABI_VERSION}")


def try_transports() -> list[Finding]:
    """Every transport between two processes of this machine, each with a GPU of its own where there are two."""
    return [_try(name, partial(_try_transport, name)) for name in TRANSPORTS]


def try_kernels() -> list[Finding]:
    """Forward and backward of every backend on a tiny problem."""

    def look() -> tuple[bool, str]:
        torch = import_module("torch")
        registry = import_module("deepspeed_cad.kernels.registry")
        tried.extend(registry.try_all(torch.device("cuda" if torch.cuda.is_available() else "cpu")))
        return True, ""

    tried: list[tuple[str, bool, str]] = []
    overall = _try("kernels", look)
    if not overall.ok:
        return [overall]
    return [Finding(*one, remedy=_kernel_remedy(one[0]) if not one[1] else "") for one in tried]


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


def _kernel_remedy(name: str) -> str:
    """How to get the fastest kernel for the GPU of this machine."""
    cuda = import_module("torch").cuda
    major = cuda.get_device_capability()[0] if cuda.is_available() else 0
    if name == "flash_attn_4" and major >= 9:
        return "pip install --pre flash-attn-4"
    if name == "flash_attn_2" and major == 8:
        return "pip install --no-build-isolation flash-attn"
    return ""


def _try_transport(name: str) -> tuple[bool, str]:
    ok, detail = import_module("deepspeed_cad.exchange.probe").probe(name)
    if not ok:
        return False, detail
    gpus = import_module("torch").cuda.device_count()
    if name != "c10d" and gpus < 2:
        return True, f"{detail}; not tried, because this process sees one GPU"
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "deepspeed_cad.cli.exchange_trial", name, str(rank), str(Path(folder, "store"))],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            said, errors = zip(*(process.communicate(timeout=_TIMEOUT_S) for process in processes))
        except subprocess.TimeoutExpired:
            return False, f"two processes on this machine did not exchange anything within {_TIMEOUT_S} s"
        finally:
            for process in processes:
                process.kill()
                process.wait()
    for rank, process in enumerate(processes):
        if process.returncode:
            return False, f"rank {rank} of two processes failed: {_last_line(errors[rank])}"
    where, speed = "GPUs" if gpus > 1 else "the CPU", _last_line(said[0])
    return True, f"two processes exchanged slices there and back on {where}, at {speed} GB/s each"


def _line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]
