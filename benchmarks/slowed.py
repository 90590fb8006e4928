"""A GPU that something else uses too: the step of one long document beside what measured speeds allow.

    benchmarks/gpus slowed FOLDER
    python benchmarks/slowed.py --table FOLDER
    python benchmarks/slowed.py --beside 0          matrix products on GPU 0 for as long as its parent lives

`servers_step.py --slowed GPU` runs such products beside one GPU. What is allowed comes from two things that each rank
then measures alone, without CAD: its step without attention, and attention of the whole document in one layer. If
attention could be shared out at will and moved at no cost, all ranks would end at the time T at which what they
attended since they could begin is all there is:

    sum over ranks of (T - begin) / attention = 1      with begin = 0 for a reserved server, which has no linear layers

A rank begins after its linear layers. In place its rows may read keys of a slower rank: then it begins when those are
there. T also has the sum of gradients in it, as fast
as the rank that came last measured it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path[:0] = [str(Path(__file__).parents[1])]

from transformers import AttentionInterface, AttentionMaskInterface  # noqa: E402

from deepspeed_cad.kernels.registry import KERNELS  # noqa: E402
from deepspeed_cad.planner.finish import common_finish  # noqa: E402
from deepspeed_cad.planner.plan import HeadShape  # noqa: E402
from deepspeed_cad.profiles.measure import Call, time_call  # noqa: E402
from deepspeed_cad.profiles.profile import expected_kernel  # noqa: E402

READY = "runs beside"
REPEATS = 3
COLUMNS = ("run", "slowed GPU", "speeds as measured", "step s", "allowed s", "allowed ÷ step")


def beside(gpu: int) -> None:
    """Matrix products until the process that started this one is gone."""
    parent, cuda = os.getppid(), torch.cuda.is_available()
    torch.set_num_threads(1)
    device = torch.device("cuda", gpu) if cuda else torch.device("cpu")
    size, dtype = (8192, torch.bfloat16) if cuda else (256, torch.float32)
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    said = False
    while os.getppid() == parent:
        for _ in range(8):
            a @ b
        if cuda:
            torch.cuda.synchronize(device)
        if not said:
            said = True
            sys.stdout.write(f"{READY}\n")
            sys.stdout.flush()


@contextmanager
def slowed(gpu: int | None) -> Iterator[None]:
    """Matrix products run beside a GPU, from here on until the end; None: beside none."""
    if gpu is None:
        yield
        return
    command = [sys.executable, __file__, "--beside", str(gpu)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            if READY not in process.stdout.readline():
                raise SystemExit(f"nothing runs beside GPU {gpu}")
            yield
        finally:
            process.kill()


def nothing(
    module: torch.nn.Module, q_BHSD: torch.Tensor, k_BKSD: torch.Tensor, v_BKSV: torch.Tensor, *args: Any, **more: Any
) -> tuple[torch.Tensor, None]:
    """In place of attention: hardly any time, and gradients for all three."""
    grouped = q_BHSD.unflatten(1, (k_BKSD.shape[1], -1)) + (k_BKSD + v_BKSV).unsqueeze(2)
    return grouped.flatten(1, 2).transpose(1, 2), None


def measure_alone(
    model: Any, step: Callable[[], object], longest: int, meet: Callable[[], object], kernel: str = "auto"
) -> dict[str, float]:
    """Seconds of a step without attention, and of attention of one document in one layer; all ranks at once.

    Args:
        model: of transformers, without CAD.
        step: runs a forward and backward of this rank's part.
        longest: tokens of the document.
        meet: waits for the other ranks.
        kernel: the one to time.
    """
    config, device = model.config, next(model.parameters()).device
    before = config._attn_implementation
    AttentionInterface.register("cad_benchmark_nothing", nothing)
    AttentionMaskInterface.register("cad_benchmark_nothing", lambda *args, **more: None)
    model.set_attn_implementation("cad_benchmark_nothing")
    seconds = []
    for _ in range(1 + REPEATS):
        meet()
        begin = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
        model.zero_grad()
    model.set_attn_implementation(before)
    groups = config.num_key_value_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    element = next(model.parameters()).element_size()
    shape = HeadShape(config.num_attention_heads, groups, size, size, element)
    backend = next(one for one in KERNELS if one.name == expected_kernel(kernel, device))
    meet()
    call = Call("one document", np.array([0]), np.array([longest]), groups)
    attention = time_call(backend, device, shape, call, REPEATS, 10.0).seconds
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return {"linear_s": float(np.median(seconds[1:])), "attention_s": attention}


def allowed(linear: list[float], attention: list[float], in_place: bool) -> float:
    """Seconds in which all is done if all attention is shared out as `linear` and speeds want it.

    Args:
        linear: seconds of each rank besides.
        attention: seconds in which each would attend everything.
        in_place: ranks have equal parts of the document in order, and read each other's keys.
    """
    speeds, begin = 1.0 / np.array(attention), np.array(linear)
    if in_place:
        # Each rank's rows read keys of all ranks before it.
        begin = np.maximum.accumulate(begin)
    return max(float(common_finish(np.ones(1), begin, speeds)[0]), *begin.tolist())


def table(folder: Path) -> str:
    """Markdown of all runs in a folder; one of them, in place with GPU 0 slowed, measured ranks alone."""
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    # Other benchmarks may have written there too.
    runs = [run for run in found if "trainers" in run]
    measured = [run for run in runs if run.get("slowed") == 0 and run["ranks"][0].get("alone")]
    if not measured:
        raise SystemExit(f"{folder} has no run in place with --slowed 0 --alone")
    slow, fast = (one["alone"] for one in measured[0]["ranks"][:2])
    lines = [" | ".join(COLUMNS), " | ".join("---" for _ in COLUMNS)]
    for run in runs:
        # GPUs are alike but for what runs beside them: what one was slowed to, another would be too.
        ranks = range(run["trainers"] + run["servers"])
        each = [slow if rank == run.get("slowed") else fast for rank in ranks]
        parts = len(measured[0]["ranks"]) / run["trainers"]
        linear = [one["linear_s"] * parts if rank < run["trainers"] else 0.0 for rank, one in zip(ranks, each)]
        summing = min(float(np.median(one["summing"])) for one in run["ranks"]) if run["trainers"] > 1 else 0.0
        best = allowed(linear, [one["attention_s"] * run["layers"] for one in each], not run["servers"]) + summing
        speeds = run["ranks"][0].get("speeds")
        cells = (
            run["run"], "none" if run.get("slowed") is None else str(run["slowed"]),
            "not used" if speeds is None else " ".join(f"{one:.2f}" for one in speeds),
            f"{run['step_s']:.3f}", f"{best:.3f}", f"{best / run['step_s']:.3f}",
        )  # fmt: skip
        lines.append(" | ".join(cells))
    return "\n".join(f"| {line} |" for line in lines) + "\n"


def meet_all(device: torch.device) -> Callable[[], None]:
    """A barrier of all trainers."""
    here = torch.zeros(1, device=device)

    def meet() -> None:
        dist.all_reduce(here)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return meet


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--beside", type=int, metavar="GPU", help="run matrix products on this GPU")
    parser.add_argument("--table", type=Path, metavar="FOLDER", help="print a table of the runs in this folder")
    options = parser.parse_args()
    if options.table:
        sys.stdout.write(table(options.table))
    elif options.beside is not None:
        beside(options.beside)
    else:
        parser.error("give --table or --beside")
