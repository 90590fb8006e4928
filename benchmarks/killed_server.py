"""A reserved server whose process is killed in mid-step: who ends when, and with which words.

    python benchmarks/killed_server.py --ranks 4 --output results/killed.json -- --tokens 262144

Starts the ranks of servers_step.py itself, the last of them reserved, so that no launcher ends any when one fails. When
a few steps have run, the server gets SIGKILL half a step after one began. Each of the others must end by itself within
`--limit` seconds, with an error, and name the server; the exit code is 1 where one does not. What stands behind `--`
goes to servers_step.py.

With `--continue` the trainers are to go on ("on_server_failure": "continue"): how long the change took is measured by
when trainer 0 says that it went on, and by the step in which the server died against those before and after. The exit
code is 1 where one of the trainers ends, or no further step comes within `--limit` seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
COLUMNS = ("process", "ended after s", "exit code", "its words")
START_S = 300.0
"""Until the steps before the kill have run: kernels may have to be compiled."""


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="trainers and the server")
    parser.add_argument("--after", type=int, default=3, help="steps that run before it is killed")
    parser.add_argument("--limit", type=float, default=30.0, help="seconds in which all others must end")
    parser.add_argument("--continue", dest="goes_on", action="store_true", help="trainers go on without the server")
    parser.add_argument("--cad", type=json.loads, default={}, help='the "cad" block, beside its servers')
    parser.add_argument(
        "--commit", default="", help="where this is not a git checkout: what results name as the commit"
    )
    parser.add_argument("--output", type=Path, help="JSON file")
    parser.add_argument("script", nargs="*", help="options of servers_step.py")
    return parser.parse_args()


def start(options: argparse.Namespace, folder: Path) -> list[subprocess.Popen[bytes]]:
    """One process for each rank, as a launcher starts them; each writes to a file of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    policy = {"on_server_failure": "continue"} if options.goes_on else {}
    block = json.dumps({**options.cad, **policy, "servers": {"reserved": 1}})
    words = [sys.executable, "-m", "deepspeed_cad.run", "--cad", block, str(HERE / "servers_step.py")]
    path = os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    processes = []
    for rank in range(options.ranks):
        numbers = {
            "RANK": rank, "WORLD_SIZE": options.ranks, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": options.ranks,
            "MASTER_PORT": port,
        }  # fmt: skip
        environment = os.environ | {name: str(value) for name, value in numbers.items()}
        environment |= {"MASTER_ADDR": "127.0.0.1", "PYTHONPATH": path}
        environment.setdefault("OMP_NUM_THREADS", "1")
        with open(folder / str(rank), "wb") as out:
            run = [*words, *options.script, "--steps", "100000"]
            processes.append(subprocess.Popen(run, env=environment, stdout=out, stderr=out))
    return processes


def step_seconds(folder: Path, step: int) -> float | None:
    """How long a step took by what trainer 0 wrote; None until it has ended."""
    found = re.search(rf"^step {step}: ([\d.]+) s$", (folder / "0").read_text(errors="replace"), re.MULTILINE)
    return float(found[1]) if found else None


def wait_for_step(folder: Path, processes: list[subprocess.Popen[bytes]], step: int, limit: float = START_S) -> float:
    """Seconds that it took. Raises RuntimeError where a process ends before, or nothing comes."""
    end = time.monotonic() + limit
    while (seconds := step_seconds(folder, step)) is None:
        ended = [rank for rank, process in enumerate(processes) if process.poll() is not None]
        if ended or time.monotonic() > end:
            words = (folder / str(ended[0] if ended else 0)).read_text(errors="replace")[-3000:]
            raise RuntimeError(f"step {step} did not come; ended: {ended}\n{words}")
        time.sleep(0.005)
    return seconds


def watch(
    processes: list[subprocess.Popen[bytes]], server: int, folder: Path, killed: float, limit: float
) -> list[dict[str, Any]]:
    """How each trainer ended; what still runs at the limit has no seconds and no code."""
    trainers = {rank: process for rank, process in enumerate(processes) if rank != server}
    ended: dict[int, float] = {}
    while len(ended) < len(trainers) and time.monotonic() < killed + limit:
        for rank, process in trainers.items():
            if rank not in ended and process.poll() is not None:
                ended[rank] = time.monotonic() - killed
        time.sleep(0.005)
    found = []
    for rank, process in trainers.items():
        said = (folder / str(rank)).read_text(errors="replace")
        words = re.findall(rf"[^\n]*\bserver {server} ended[^\n]*", said)
        last = (said.strip().splitlines() or [""])[-1]
        found.append({
            "process": f"trainer {rank}", "seconds": ended.get(rank), "code": process.poll(),
            "names the server": bool(words), "words": (words[-1] if words else last).strip(),
        })  # fmt: skip
    return found


def watch_change(
    processes: list[subprocess.Popen[bytes]], server: int, folder: Path, killed: float, options: argparse.Namespace
) -> dict[str, Any]:
    """How trainers went on: seconds until trainer 0 said so, those of the step of the kill, and of as many behind it as
    there were before."""
    said: tuple[float, str] | None = None
    trainers = processes[:server]
    while said is None and time.monotonic() < killed + options.limit and all(one.poll() is None for one in trainers):
        words = re.findall(rf"[^\n]*\bserver {server} ended[^\n]*", (folder / "0").read_text(errors="replace"))
        if words and "Training goes on" in words[0]:
            said = time.monotonic() - killed, words[0].strip()
        time.sleep(0.005)
    steps: list[float] = []
    problem = ""
    try:
        for step in range(options.after, 2 * options.after + 1):
            steps.append(wait_for_step(folder, trainers, step, max(killed + options.limit - time.monotonic(), 0.1)))
    except RuntimeError as error:
        problem = str(error)
    return {
        "seconds": None if said is None else said[0], "words": "" if said is None else said[1], "steps": steps,
        "problem": problem,
    }  # fmt: skip


def report_change(result: dict[str, Any]) -> str:
    """In words."""
    change = result["change"]
    lines = [
        f"server {result['server']} killed {result['killed_after_s']:.2f} s into a step of {result['step_s']:.2f} s: "
        f"{'trainers went on' if result['passed'] else 'NOT as it should be'} (limit {result['limit_s']:.0f} s)"
    ]
    if change["seconds"] is not None:
        lines.append(f"trainer 0 went on {change['seconds']:.2f} s after the kill: {change['words'][:200]}")
    if change["steps"]:
        first, *others = change["steps"]
        behind = ", ".join(f"{one:.2f}" for one in others)
        lines.append(f"the step in which it died took {first:.2f} s, those behind it {behind} s")
    return "\n".join([*lines, change["problem"]]).strip() + "\n"


def table(result: dict[str, Any]) -> str:
    """Markdown."""
    if "change" in result:
        return report_change(result)
    lines = [" | ".join(COLUMNS), " | ".join("---" for _ in COLUMNS)]
    for one in result["killed"]:
        seconds = "still runs" if one["seconds"] is None else f"{one['seconds']:.2f}"
        lines.append(f"{one['process']} | {seconds} | {one['code']} | {one['words'][:160]}")
    head = (
        f"server {result['server']} killed {result['killed_after_s']:.2f} s into a step of {result['step_s']:.2f} s: "
        f"{'all ended well in time' if result['passed'] else 'NOT as it should be'} (limit {result['limit_s']:.0f} s)"
    )
    return head + "\n\n" + "\n".join(f"| {line} |" for line in lines) + "\n"


def main() -> None:
    options = parse()
    server = options.ranks - 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = start(options, folder)
        try:
            step = wait_for_step(folder, processes, options.after - 1)
            began = time.monotonic()
            time.sleep(step / 2)
            processes[server].kill()
            killed = time.monotonic()
            found: dict[str, Any]
            if options.goes_on:
                change = watch_change(processes, server, folder, killed, options)
                found = {"change": change, "passed": change["seconds"] is not None and not change["problem"]}
            else:
                trainers = watch(processes, server, folder, killed, options.limit)
                ended = (
                    one["seconds"] is not None and one["code"] != 0 and one["names the server"] for one in trainers
                )
                found = {"killed": trainers, "passed": all(ended)}
        finally:
            for process in processes:
                process.kill()
                process.wait()
    result = {
        "server": server, "step_s": step, "killed_after_s": killed - began, "limit_s": options.limit,
        **found, "script": options.script,
        "commit": options.commit, "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }  # fmt: skip
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    sys.stdout.write(table(result))
    sys.exit(0 if result["passed"] else 1)


if __name__ == "__main__":
    main()
