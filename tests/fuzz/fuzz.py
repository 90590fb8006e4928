"""Random training loops until there were enough: each step is right, or every rank says what is wrong.

    python tests/fuzz/fuzz.py --seed 0 --seconds 60 --ranks 2-4
    python tests/fuzz/fuzz.py --seed 0 --seconds 3600
    python tests/fuzz/fuzz.py --replay '{"seed": 17, ...}'

A case that fails is printed as a line to replay: leave out one key after the other to see what it needs. Ends with 1
if any failed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta

# As a script, this file's folder is in front: `fuzz` must be the package, not this file.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # warnings of DDP's

import torch.distributed as dist
from pool import WorkerPool

from fuzz.case import Case, draw
from fuzz.judge import judge, may, mortal
from fuzz.play import TIMEOUT_S, Played, play
from fuzz.roles import play_role

PRELOAD = (
    "deepspeed_cad.session", "deepspeed_cad.integrations.transformers", "deepspeed_cad.integrations.pipeline_model",
    "deepspeed_cad.pipeline.step",
)  # fmt: skip
"""What each fresh worker would import again."""


@dataclass
class Tally:
    cases: int = 0
    steps: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    """How ranks ended."""
    failures: list[tuple[str, Case]] = field(default_factory=list)

    def __str__(self) -> str:
        ends = ", ".join(f"{count} {name}" for name, count in self.ends.most_common())
        return (
            f"{self.cases} cases, {self.steps} micro-batches compared, {len(self.failures)} failures\n"
            f"ranks ended: {ends or 'none'}"
        )

    def add(self, case: Case, failure: str, played: list[Played | None]) -> None:
        self.cases += 1
        for rank, one in enumerate(played):
            self.steps += 0 if one is None else one.trained
            if rank < case.world:
                self.ends["no answer" if one is None else one.error[0] if one.error else "right"] += 1
            else:
                self.ends["server lost" if one is None else "server failed" if one.exit_code else "served"] += 1
        if failure:
            self.failures.append((failure, case))


def run_case(workers: WorkerPool, case: Case) -> tuple[str, list[Played | None]]:
    """Why a case failed (empty: it did not), and what each rank says; None: it gave no answer."""
    # A rank that is done, or stopped, ends its process: that is what the others notice. DeepSpeed leaves state behind.
    once = any("right" not in ends or len(ends) > 1 for ends in may(case)) or bool(case.stages or case.fates)
    settings = {"timeout": TIMEOUT_S, "grace": TIMEOUT_S, "once": once}
    if case.servers:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        errors, played = workers.try_run(
            play_role, case.processes, store.port, case.to_line(), joined=False, mortal=mortal(case), **settings
        )  # fmt: skip
    else:
        errors, played = workers.try_run(play, case.world, case.to_line(), **settings)
    found = [one if error is None else None for one, error in zip(played, errors)]
    died = [
        f"rank {rank}: {error[0]} {error[1]}"
        for rank, error in enumerate(errors)
        if error and error[0] != "Hung" and rank not in mortal(case)
    ]
    return (f"died: {'; '.join(died)}" if died else judge(case, found)), found


def run(workers: WorkerPool, seed: int, seconds: float, ranks: tuple[int, int], cases: int = sys.maxsize) -> Tally:
    """Cases of seeds `seed`, `seed` + 1, … until there were as many as wanted, or the budget of seconds is spent."""
    tally, begin = Tally(), time.monotonic()
    while tally.cases < cases and time.monotonic() - begin < seconds:
        case = draw(seed + tally.cases, ranks)
        failure, played = run_case(workers, case)
        tally.add(case, failure, played)
        if failure:
            print(f"seed {seed + tally.cases - 1}: {failure}\n  --replay '{case.to_line()}'", flush=True)
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the next ones count up from it")
    parser.add_argument("--seconds", type=float, default=60.0, help="no case begins after this")
    parser.add_argument("--ranks", default="1-4", help="that train, such as 2-4")
    parser.add_argument("--replay", help="run this one case, given as its line")
    given = parser.parse_args()
    workers = WorkerPool(PRELOAD)
    try:
        if given.replay:
            failure, played = run_case(workers, Case.from_line(given.replay))
            for one in played:
                print(one if one is None or one.error is None else f"rank {one.rank}: {one.error[3]}")
            print(failure or "passed")
            return int(bool(failure))
        low, _, high = given.ranks.partition("-")
        tally = run(workers, given.seed, given.seconds, (int(low), int(high or low)))
        print(tally)
        return int(bool(tally.failures))
    finally:
        workers.close()


if __name__ == "__main__":
    sys.exit(main())
