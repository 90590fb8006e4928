"""`deepspeed-cad doctor`: what is installed, what works here (each tried), and how to get what is missing.

In: this machine. Out: a report for people, or JSON; exit code 0 where the core works: torch and numpy, the compiled
library, one kernel and one transport. What fails is a finding with the reason, and never ends the command.
"""

import argparse
import json
import logging
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from importlib import import_module, metadata
from pathlib import Path

from deepspeed_cad.cli.progress import progress
from deepspeed_cad.errors import in_one_line
from deepspeed_cad.version import OLDEST, __version__, is_too_old

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
TRANSPORTS = ("c10d", "nccl", "mixed", "nvlink")

_TIMEOUT_S = 120

# Libraries of the accelerator may abort while the interpreter closes down.
_EXCHANGE = """
import os, sys
from deepspeed_cad.cli.doctor import exchange
exchange(sys.argv[1], int(sys.argv[2]), sys.argv[3])
sys.stdout.flush()
os._exit(0)
"""

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


Report = dict[str, list[Finding]]
"""By section."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def main(args: argparse.Namespace) -> int:
    report = examine()
    works, summary = core_works(report), summarise(report)
    if args.json:
        about = {
            "deepspeed_cad": __version__, "python": platform.python_version(), "platform": platform.platform(),
            "core_works": works, "summary": summary,
        }  # fmt: skip
        print(json.dumps(about | {name: list(map(asdict, found)) for name, found in report.items()}, indent=2))
    else:
        lines = [f"deepspeed_cad {__version__}, Python {platform.python_version()} ({sys.executable})"]
        for name, findings in report.items():
            lines += ["", name + (", each tried" if name in ("kernels", "transports") else "")]
            lines += [f"  {'ok' if one.ok else '--'}  {one.name:16} {one.detail}" for one in findings]
        print("\n".join([*lines, "", summary]))
    return 0 if works else 1


def examine() -> Report:
    """Tries everything; takes some seconds, most of them for importing torch. What it is at stands on stderr."""
    logger = logging.getLogger("deepspeed_cad")
    level = logger.level
    logger.setLevel(logging.ERROR)  # the report says what the warnings would say
    report = {}
    with progress() as tell:
        for name, probe in PROBES.items():
            tell(f"trying {name}")
            report[name] = _findings(name, probe)
    logger.setLevel(level)
    return report


def core_works(report: Report) -> bool:
    """Whether CAD can train here at all."""
    core = [one.ok for one in report["packages"] if one.name in ("torch", "numpy", "native library")]
    return all(core) and bool(_working(report["kernels"]) and _working(report["transports"]))


def summarise(report: Report) -> str:
    kernels, transports = (", ".join(_working(report[name])) or "none" for name in ("kernels", "transports"))
    line = (
        f"deepspeed_cad {__version__} {'works' if core_works(report) else 'DOES NOT WORK'} here: kernels {kernels}; "
        f"transports {transports}; autoload {'active' if _working(report['autoload']) else 'not active'}"
    )
    if missing := [one for findings in report.values() for one in findings if not one.ok and one.remedy]:
        line += "; to get what is missing: " + "; ".join(f"{one.name}: {one.remedy}" for one in missing)
    return line


def _working(findings: list[Finding]) -> list[str]:
    return [one.name for one in findings if one.ok]


def _findings(name: str, probe: Callable[[], list[Finding]]) -> list[Finding]:
    try:
        return probe()
    except Exception as error:
        return [Finding(name, False, f"{type(error).__name__}: {in_one_line(error)}")]


def try_packages() -> list[Finding]:
    """Imports nothing but torch, numpy and greenlet: the others are only looked up, because importing them is slow.
    And the compiled library."""
    from deepspeed_cad import native

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
            findings.append(Finding(name, False, f"cannot be imported: {error}", remedy))
    if reason := native.why_missing():
        return [*findings, Finding("native library", False, reason.split(". To get it")[0], native.REBUILD)]
    return [*findings, Finding("native library", True, f"{native.LIBRARY.name}, ABI {native.ABI_VERSION}")]


def try_kernels() -> list[Finding]:
    """Forward and backward of every backend on a tiny problem; how to get the fastest for the GPU of this machine."""
    import torch

    from deepspeed_cad.kernels.registry import try_all

    on_gpu = torch.cuda.is_available()
    major = torch.cuda.get_device_capability()[0] if on_gpu else 0
    remedies = {
        "flash_attn_4": "pip install --pre flash-attn-4" if major >= 9 else "",
        "flash_attn_2": "pip install --no-build-isolation flash-attn" if major == 8 else "",
    }
    tried = try_all(torch.device("cuda" if on_gpu else "cpu"))
    return [Finding(name, ok, detail, "" if ok else remedies.get(name, "")) for name, ok, detail in tried]


def try_transports() -> list[Finding]:
    """Every transport between two processes of this machine, each with a GPU of its own where there are two."""
    return [one for name in TRANSPORTS for one in _findings(name, partial(_try_transport, name))]


def _try_transport(name: str) -> list[Finding]:
    from deepspeed_cad.exchange.probe import probe

    ok, detail = probe(name)
    gpus = import_module("torch").cuda.device_count()
    if not ok or (name != "c10d" and gpus < 2):
        return [Finding(name, ok, f"{detail}; not tried, because this process sees one GPU" if ok else detail)]
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", _EXCHANGE, name, str(rank), str(Path(folder, "store"))],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            with ThreadPoolExecutor() as threads:  # one that writes much waits until it is read
                said = list(threads.map(lambda one: one.communicate(timeout=_TIMEOUT_S), processes))
        except subprocess.TimeoutExpired:
            late = f"two processes on this machine did not exchange anything within {_TIMEOUT_S} s"
            return [Finding(name, False, late)]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    for rank, process in enumerate(processes):
        if process.returncode:
            return [Finding(name, False, f"rank {rank} of two processes failed: {_last_line(said[rank][1])}")]
    speed = _last_line(said[0][0])
    return [Finding(name, True, f"two processes exchanged slices on {'GPUs' if gpus > 1 else 'the CPU'} at {speed}")]


def exchange(name: str, rank: int, store: str) -> None:
    """One of the two processes of a trial: they time their link, and the first says how fast it is."""
    import torch
    import torch.distributed as dist

    from deepspeed_cad.exchange.group import numbers_of
    from deepspeed_cad.exchange.links import measure_links, peer_schedule
    from deepspeed_cad.exchange.probe import choose_transport
    from deepspeed_cad.exchange.transport import Outgoing, Returning
    from deepspeed_cad.schedule import QUERY

    on_gpus = torch.cuda.device_count() > 1
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    backend, limit = "cpu:gloo,cuda:nccl" if on_gpus else "gloo", timedelta(seconds=60)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=2, timeout=limit)
    group = dist.group.WORLD
    assert group is not None
    # "mixed" is for several hosts: there the two processes pass for one on each.
    hosts = [0, 1] if name == "mixed" else [0, 0]
    transport = choose_transport(name, group, device, timeout_s=60, host=rank if name == "mixed" else None)
    links = measure_links(transport, device, rank, hosts, partial(numbers_of, group, None))
    schedule = peer_schedule([[1], [0]], rank, 2, 64)
    given_TGW = torch.randn(schedule.query_tokens, 2, 64, device=device)
    (arrived,) = transport.dispatch(schedule, [Outgoing(QUERY, given_TGW)], 0).wait()
    home_TGW = torch.zeros_like(given_TGW)
    transport.give_back(schedule, [Returning(QUERY, arrived.clone(), home_TGW)], 0).wait()
    if not torch.equal(home_TGW, given_TGW):
        raise RuntimeError("what came back of the exchange differs from what was sent")
    transport.close()
    dist.barrier()
    print(f"{(links.inside or links.between or 0.0) / 1e9:.3g} GB/s")


def try_devices() -> list[Finding]:
    """Every GPU that torch sees, and which of them reach each other's memory."""
    import torch

    if not (count := torch.cuda.device_count()):
        return [Finding("GPUs", False, "torch sees no GPU: attention runs on the CPU")]
    found = [Finding("GPUs", True, f"{count} × CUDA {torch.version.cuda}")]
    for index in range(count):
        torch.zeros(1, device=f"cuda:{index}").add_(1).item()
        about = torch.cuda.get_device_properties(index)
        detail = f"{about.name}, {about.major}.{about.minor}, {about.total_memory / 2**30:.0f} GiB"
        found.append(Finding(f"GPU {index}", True, detail))
    reached = [[a == b or torch.cuda.can_device_access_peer(a, b) for b in range(count)] for a in range(count)]
    if count > 1:
        rows = "  ".join("".join("x" if one else "." for one in row) for row in reached)
        found.append(Finding("peer access", all(map(all, reached)), rows))
    return found


def try_autoload() -> list[Finding]:
    """Starts a Python as a training script would be started and imports a stand-in for deepspeed there."""
    remedy = "pip install deepspeed_cad (without --target), or call deepspeed_cad.install() in the script"
    if os.environ.get("DEEPSPEED_CAD_AUTOLOAD", "1").lower() in ("0", "false", "off", "no"):
        return [Finding("autoload", False, "turned off by DEEPSPEED_CAD_AUTOLOAD", "unset DEEPSPEED_CAD_AUTOLOAD")]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "deepspeed").mkdir()
        Path(folder, "deepspeed", "__init__.py").write_text("def initialize(args=None, config=None): pass\n")
        path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
        done = subprocess.run(
            [sys.executable, "-c", _AUTOLOAD], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
            timeout=_TIMEOUT_S,
        )  # fmt: skip
    if done.returncode:
        return [Finding("autoload", False, f"importing deepspeed fails: {_last_line(done.stderr)}", remedy)]
    if done.stdout.strip() != "True":
        return [Finding("autoload", False, "not active: nothing waits for the import of deepspeed", remedy)]
    return [Finding("autoload", True, 'active: a "cad" block in the DeepSpeed JSON is enough')]


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no message"])[-1]


PROBES: dict[str, Callable[[], list[Finding]]] = {
    "packages": try_packages,
    "kernels": try_kernels,
    "transports": try_transports,
    "devices": try_devices,
    "autoload": try_autoload,
}
