"""Everything that a release must pass on GPUs: `python tests/gpu/gpu_check.py` (or `make test-gpu`).

Runs on all GPUs of this machine, 4 at most. Where it has one, two ranks share it: peer copies then go between two
processes on one GPU, and NCCL takes them for two hosts. That checks what is computed and who waits for whom; it says
nothing about speed. Groups of checks run one after the other, each in processes of its own with a time limit of its
own, so that a hang is one failed line and not the end. Ends with one table and one line as pytest has it; the exit code
is 0 where nothing failed. "Refused" is what a kernel says that it cannot do, and counts as skipped.

    --only kernels,models     some groups           --kernel flash_attn_2    another attention kernel
    --ranks 2                 how many processes    --output FILE            all lines of all ranks as JSON
    --hosts 0,0,0,1           for `mixed`           --device cpu             a rehearsal on 2 CPU processes
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]

from lines import BEGUN, FAILED, PASSED, REFUSED  # noqa: E402
from loops import CASES, RIGHT, TIME_OUT, WHILE_GROWING, names  # noqa: E402

from deepspeed_cad.exchange.failure.watchdog import EXIT_CODE  # noqa: E402

BUDGET_S = 480.0
SKIPPED = "skipped"
GRACE_S = 60.0
"""How long the other processes of a launch may go on when the first has ended."""

PRETENDED = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
"""Between pretended hosts NCCL talks over sockets of this machine; NCCL_HOSTID says which host a process is on."""
SHARED = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
"""Where ranks share a GPU, torch's symmetric memory may lie on one device; NCCL refuses two ranks of a host on it."""


@dataclass(frozen=True)
class Launch:
    group: str
    case: str = ""
    limit_s: float = 120.0
    hosts: tuple[int, ...] | None = None
    may_end: bool = False
    """Whether the watchdog may end a rank's process: an error is what is looked for, and a kernel that is launched for
    the first time while its GPU waits for a dead rank keeps the driver from freeing it."""
    dies: int | None = None
    """The exit code with which the last rank may end, where it dies on purpose; the others must name it."""
    allocator: str = ""
    """PYTORCH_CUDA_ALLOC_CONF of its processes."""

    @property
    def label(self) -> str:
        return f"{self.group} {self.case} {self.allocator}".strip()


@dataclass
class Ended:
    launch: Launch
    lines: list[dict[str, Any]] = field(default_factory=list)
    log: str = ""
    """The ends of the outputs of ranks that failed."""
    seconds: float = 0.0
    """From its start to its end, processes included."""


def launches(group: str, ranks: int, cuda: bool, hosts: list[tuple[int, ...]], shared: bool) -> list[Launch] | str:
    """What a group starts; those of one group run at the same time if they are cases that end in an error. Or why it
    cannot run here."""
    if group in ("kernels", "bits") and cuda:
        return [Launch(group, f"part {part} of 2", limit_s=270) for part in (1, 2)]
    if group in ("kernels", "bits", "models", "wrappers"):
        return [Launch(group, limit_s=270)]
    if group == "growth" and shared:
        return "needs a GPU for every rank: it fills their memory"
    if group in ("transports", "exactness", "pipelines"):
        return [Launch(group, limit_s=150)]
    if group == "identity":
        cases = (
            ("nvlink,nccl,c10d", "nvlink: other sizes", "nccl: other sizes") if cuda else ("c10d", "c10d: other sizes")
        )
        return [Launch(group, case, limit_s=100) for case in cases]
    if group == "servers":
        transports, passes = ("nvlink", "nccl") if cuda else ("c10d",), ("forward", "backward")
        deaths = [f"{transport}: dies in the {one}" for transport in transports for one in passes]
        return [Launch(group, limit_s=150), *(Launch(group, case, limit_s=240) for case in deaths)]
    if group == "lifetimes":
        between = [Launch(group, "mixed", limit_s=100, hosts=one) for one in hosts] if cuda else []
        return [Launch(group, "nvlink,nccl" if cuda else "c10d", limit_s=100), *between]
    if group == "streams":
        # NCCL takes seconds to open among many ranks: there one case each, and every case on two.
        nccl = "nccl,nccl/4" if ranks == 2 else "nccl/1,nccl/4"
        return [Launch(group, case, limit_s=200) for case in (("nvlink", nccl) if cuda else ("c10d,c10d/4",))]
    if group == "loaders":
        return [Launch(group, case, limit_s=100, may_end=case not in RIGHT) for case in CASES]
    if group == "failures":
        in_exchange = [f"{how} in the exchange" for how in ("dies", "hangs")]
        before = [f"{how} before its lengths" for how in ("dies", "hangs")]
        states = [f"{how} between layers" for how in ("dies", "hangs")]
        cases = [f"nvlink: {how}" for how in (*before, *in_exchange, *states)]
        cases += [f"nccl: {how}" for how in (*in_exchange, states[0])]
        cases = cases if cuda else [f"c10d: {how}" for how in (before[1], in_exchange[0], states[0])]
        return [Launch(group, case, limit_s=100, dies=7, may_end="before" not in case) for case in cases]
    if group == "growth":
        kinds = ("", "expandable_segments:True") if cuda else ("",)
        return [Launch(group, "nvlink" if cuda else "c10d", limit_s=120, allocator=kind) for kind in kinds]
    if not cuda:
        return "needs GPUs"
    if group == "timeouts":
        left_out = (f"nvlink: {TIME_OUT}", f"nvlink: {WHILE_GROWING}", f"nccl: {TIME_OUT}")
        return [Launch("transports", case, limit_s=90) for case in left_out]
    parts = (
        ("transports", ""), ("models", "llama,gpt_oss"), ("exactness", ""), ("transports", f"mixed: {TIME_OUT}"),
        ("transports", f"mixed: {WHILE_GROWING}"),
    )  # fmt: skip
    return [Launch(part, case, limit_s=180, hosts=one) for one in hosts for part, case in parts]


GROUPS = (
    "kernels", "bits", "failures", "identity", "transports", "loaders", "mixed", "models", "streams", "growth",
    "exactness", "pipelines", "servers", "timeouts", "lifetimes", "wrappers",
)  # fmt: skip
WAVES = (
    ("growth",), ("kernels", "bits", "failures"), ("pipelines", "servers", "identity", "timeouts"),
    ("transports", "loaders", "models", "mixed"), ("streams", "exactness", "lifetimes", "wrappers"),
)  # fmt: skip
"""Groups that run at the same time. FlashAttention-4 compiles its kernels in every process, for most of the time that
models take, and what fails mostly waits; checks that fill the memory of GPUs are alone. The last ones
have the most cases: where time runs out, some of these are left, and no group as a whole."""
AT_ONCE = ("kernels", "bits", "failures", "loaders", "timeouts", "servers", "mixed", "streams", "lifetimes")
"""Groups whose launches run at the same time."""


def threads(ranks: int) -> int:
    """For the CPU's work of one process: up to about eight launches run at a time, and more threads would only wait."""
    return max(1, (os.cpu_count() or 1) // (4 * ranks))


def lanes(group: str, wanted: list[Launch], cuda: bool) -> list[list[Launch]]:
    """Launches of a group that run one after the other; what is in different lists runs at the same time."""
    return [[launch] for launch in wanted] if cuda and group in AT_ONCE else [wanted]


def start(launch: Launch, options: argparse.Namespace, folder: Path, seconds: float) -> Ended:
    """Run a launch to its end; what does not end in time is killed and named."""
    ended = Ended(launch)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    stem = folder / "".join(c if c.isalnum() else "_" for c in f"{launch.label} {launch.hosts or ''}")
    processes: list[subprocess.Popen[bytes]] = []
    for rank in range(options.ranks):
        environment = {
            **os.environ, "RANK": str(rank), "WORLD_SIZE": str(options.ranks),
            "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(options.ranks),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port),
            # The store lives here, as with torchrun, so that it outlives a rank that dies.
            "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0",
            # FlashAttention-4 compiles its kernels in each process, for longer than most checks take.
            "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": os.environ.get("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1"),
            "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
            "OMP_NUM_THREADS": str(threads(options.ranks) if options.device == "cuda" else 1),
            **({} if options.device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}),
            **({"PYTORCH_CUDA_ALLOC_CONF": launch.allocator} if launch.allocator else {}),
            **({**PRETENDED, "NCCL_HOSTID": f"pretended-{launch.hosts[rank]}"} if launch.hosts else {}),
            **({**PRETENDED, **SHARED, "NCCL_HOSTID": f"shared-{rank}"} if options.shared else {}),
        }  # fmt: skip
        command = [sys.executable, str(HERE / "group.py"), launch.group, launch.case]
        command += ["--lines", f"{stem}.{rank}.jsonl", "--device", options.device, "--kernel", options.kernel]
        command += ["--hosts", ",".join(map(str, launch.hosts))] if launch.hosts else []
        command += ["--stall", str(max(20.0, seconds - 15.0))]
        with open(f"{stem}.{rank}.log", "wb") as log:
            processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    killed = _wait(processes, seconds)
    for rank, process in enumerate(processes):
        path = Path(f"{stem}.{rank}.jsonl")
        written = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        open_cases = [line for line in written if line["state"] == BEGUN]
        done = [line for line in written if line["state"] != BEGUN]
        ended.lines += done
        expected = {0} if launch.dies is None or rank < options.ranks - 1 else {0, launch.dies}
        if rank not in killed and process.returncode in expected and (done or process.returncode):
            continue
        said = _last_words(Path(f"{stem}.{rank}.log")) if process.returncode == EXIT_CODE else ""
        if explained(launch, said, options.ranks):
            # Its GPU could not be freed from a wait: then the watchdog says why and ends the process.
            ended.lines.append(_line(launch, PASSED, f"the process ended: {said}", rank))
            continue
        how = f"did not end within {seconds:.0f} s" if rank in killed else f"ended with {process.returncode}"
        line = _line(launch, FAILED, f"the process of rank {rank} {how}", rank)
        last = open_cases[-1] if len(open_cases) > len(done) else line
        ended.lines.append({**line, "what": last["what"], "case": last["case"]})
    if any(line["state"] == FAILED for line in ended.lines):
        tails = [(rank, Path(f"{stem}.{rank}.log").read_text(errors="replace")) for rank in range(options.ranks)]
        ended.log = "\n".join(f"--- {launch.label}, rank {rank}\n{text[-20000:]}" for rank, text in tails)
    del store
    return ended


def _line(launch: Launch, state: str, detail: str, rank: int = 0) -> dict[str, Any]:
    found = {"state": state, "rank": rank, "seconds": 0.0, "detail": detail}
    return {"what": launch.group, "case": launch.case, **found}


def explained(launch: Launch, said: str, ranks: int) -> bool:
    """Whether a process that the watchdog ended may have ended so, by its last words ("": it did not end so)."""
    return launch.may_end and bool(said) and (launch.dies is None or names(said, ranks - 1))


def _last_words(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("deepspeed_cad: rank")]
    return lines[-1][:300] if lines else ""


def _wait(processes: list[subprocess.Popen[bytes]], seconds: float) -> list[int]:
    """Wait until all have ended; kills those that do not, and gives their ranks."""
    deadline = time.monotonic() + seconds
    first_end = None
    while any(process.poll() is None for process in processes):
        now = time.monotonic()
        if first_end is None and any(process.poll() is not None for process in processes):
            first_end = now
        if now > deadline or (first_end is not None and now > first_end + GRACE_S):
            break
        time.sleep(0.05)
    killed = [rank for rank, process in enumerate(processes) if process.poll() is None]
    for rank in killed:
        processes[rank].kill()
        processes[rank].wait()
    return killed


def run_group(group: str, options: argparse.Namespace, folder: Path, until: float) -> list[Ended]:
    cuda = options.device == "cuda"
    wanted = launches(group, options.ranks, cuda, options.hosts, options.shared)
    if isinstance(wanted, str):
        return [Ended(Launch(group), [_line(Launch(group), SKIPPED, wanted)])]

    def one(launch: Launch) -> Ended:
        left = until - time.monotonic()
        if left < 10:
            why = f"not run: the {options.budget:.0f} s for everything are over"
            return Ended(launch, [_line(launch, FAILED, why)])
        begun = time.monotonic()
        found = start(launch, options, folder, min(launch.limit_s * options.patience, left))
        found.seconds = time.monotonic() - begun
        _say(f"{launch.label}: {_summary(found.lines)}, {found.seconds:.0f} s")
        # Said now as well as in the table: whoever stops the rest has it.
        for row in merge([found]):
            if row["state"] == FAILED:
                _say(f"    FAILED {row['what']}, {row['case']}: rank {row['rank']}: {' '.join(row['detail'].split())}")
        return found

    each = lanes(group, wanted, cuda)
    with ThreadPoolExecutor(len(each)) as pool:
        return [ended for lane in pool.map(lambda lane: [one(launch) for launch in lane], each) for ended in lane]


def merge(ended: list[Ended]) -> list[dict[str, Any]]:
    """One row for every case: the worst of what its ranks found, with the words of the first rank that found it."""
    order = (FAILED, PASSED, REFUSED, SKIPPED)
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for one in ended:
        for line in one.lines:
            rows.setdefault((line["what"], line["case"]), []).append(line)
    merged = []
    for (what, case), found in rows.items():
        worst = min(found, key=lambda line: (order.index(line["state"]), line["rank"]))
        merged.append({**worst, "what": what, "case": case, "seconds": max(line["seconds"] for line in found)})
    return merged


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| check | case | | s | found |", "|---|---|---|---|---|"]
    for row in rows:
        detail = f"rank {row['rank']}: {row['detail']}" if row["state"] == FAILED else row["detail"]
        detail = " ".join(detail.split()).replace("|", "/")[:260]
        state = row["state"].upper() if row["state"] == FAILED else row["state"]
        lines.append(f"| {row['what']} | {row['case']} | {state} | {row['seconds']:.1f} | {detail} |")
    return "\n".join(lines)


def _summary(lines: list[dict[str, Any]]) -> str:
    rows = merge([Ended(Launch(""), lines)])
    counts = {state: sum(row["state"] == state for row in rows) for state in (PASSED, FAILED, REFUSED, SKIPPED)}
    return f"{counts[PASSED]} passed, {counts[FAILED]} failed, {(counts[REFUSED] + counts[SKIPPED])} skipped"


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--only", help=f"groups, comma-separated; there are {', '.join(GROUPS)}")
    add("--kernel", default=os.environ.get("KERNEL") or "auto", help="attention kernel (default: $KERNEL, else auto)")
    add("--ranks", type=int, help="processes (default: one on each GPU, 4 at most; 2 on one GPU, or on a CPU)")
    add("--hosts", help='for the group mixed: the host of every rank, "0,0,0,1" (default: all that matter)')
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal of these scripts")
    add("--budget", type=float, default=BUDGET_S, help="seconds for everything (default: %(default).0f)")
    add("--patience", type=float, default=1.0, help="multiplies the time limits of groups")
    add("--commit", default=os.environ.get("COMMIT"), help="for --output, where this is not a git checkout")
    add("--output", type=Path, help="write settings, table and all lines of all ranks as JSON")
    options = parser.parse_args(argv)
    options.only = options.only.split(",") if options.only else list(GROUPS)
    if unknown := [group for group in options.only if group not in GROUPS]:
        parser.error(f"there is no group {', '.join(unknown)}; there are {', '.join(GROUPS)}")
    gpus = torch.cuda.device_count() if options.device == "cuda" else 0
    options.ranks = options.ranks or max(2, min(gpus, 4))
    options.shared = 0 < gpus < options.ranks
    if options.shared and gpus > 1:
        parser.error(f"--ranks {options.ranks}: this machine has {gpus} GPUs; ranks share a GPU only where it is alone")
    options.hosts = [tuple(map(int, options.hosts.split(",")))] if options.hosts else pretended(options.ranks)
    if any(len(one) != options.ranks for one in options.hosts):
        parser.error(f"--hosts has {len(options.hosts[0])} numbers for {options.ranks} ranks")
    return options


def pretended(ranks: int) -> list[tuple[int, ...]]:
    if ranks == 4:
        return [(0, 0, 1, 1), (0, 0, 0, 1)]
    return [tuple(2 * rank // ranks for rank in range(ranks))]


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    begun = time.monotonic()
    if options.device == "cuda" and not torch.cuda.is_available():
        _say(f"gpu_check: torch {torch.__version__} sees no GPU on this machine, so nothing was checked")
        _say(f"0 passed, 0 failed, {len(options.only)} skipped")
        return 0
    ended: list[Ended] = []
    with tempfile.TemporaryDirectory(prefix="gpu_check_") as folder:
        for wave in WAVES:
            groups = [group for group in wave if group in options.only]
            with ThreadPoolExecutor(max(1, len(groups) if options.device == "cuda" else 1)) as pool:
                until = begun + options.budget
                jobs = [pool.submit(run_group, group, options, Path(folder), until) for group in groups]
                for job in jobs:
                    ended += job.result()
    rows = merge(ended)
    logs = [one.log for one in ended if one.log]
    _say("\n".join(["", *logs, "", table(rows), ""]))
    seconds = time.monotonic() - begun
    result = f"{_summary([line for one in ended for line in one.lines])} in {seconds:.0f} s"
    if options.output:
        write(options, rows, ended, result)
    _say(result)
    return 1 if any(row["state"] == FAILED for row in rows) else 0


def write(options: argparse.Namespace, rows: list[dict[str, Any]], ended: list[Ended], result: str) -> None:
    words = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(words, capture_output=True, text=True, check=False, cwd=HERE).stdout.strip()
    device = torch.cuda.get_device_name() if options.device == "cuda" else f"CPU, {platform.machine()}"
    everything = {
        "result": result, "device": device, "gpus": torch.cuda.device_count(), "ranks": options.ranks,
        "kernel": options.kernel, "torch": torch.__version__, "commit": options.commit or commit or "unknown",
        "date": time.strftime("%Y-%m-%d", time.gmtime()), "table": rows,
        "lines": [
            {"launch": one.launch.label, "hosts": one.launch.hosts, "seconds": round(one.seconds), "lines": one.lines}
            for one in ended
        ],
        "logs": [one.log for one in ended if one.log],
    }  # fmt: skip
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
