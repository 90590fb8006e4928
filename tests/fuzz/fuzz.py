"""Random training loops until a budget of seconds is spent: each step is right, or every rank says what is wrong.

    python tests/fuzz/fuzz.py --seed 0 --seconds 60 --ranks 2-4
    python tests/fuzz/fuzz.py --replay '{"seed": 17, ...}'

A case that fails is made simpler while it still fails, and printed as a line to replay. Ends with 1 if any failed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

# As a script, this file's folder is in front: `fuzz` must be the package, not this file.
sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from pool import WorkerPool

from fuzz.case import Case, draw, simpler
from fuzz.judge import judge, may
from fuzz.play import TIMEOUT_S, Played, play


@dataclass
class Tally:
    """Figures of a run."""

    cases: int = 0
    steps: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    """How ranks ended."""
    failures: list[tuple[str, Case]] = field(default_factory=list)
    slowest: tuple[float, str] = (0.0, "")
    """Seconds of the slowest case, and its line."""

    def __str__(self) -> str:
        ends = ", ".join(f"{count} {name}" for name, count in self.ends.most_common())
        return (
            f"{self.cases} cases, {self.steps} micro-batches compared, "
            f"{len(self.failures)} failures\nranks ended: {ends or 'none'}\n"
            f"slowest case {self.slowest[0]:.1f} s: {self.slowest[1]}"
        )


def run_case(workers: WorkerPool, case: Case) -> tuple[str, list[Played | None]]:
    """Why a case failed (empty: it did not), and what each rank says."""
    # A rank that is done, or stopped, ends its process: that is what the others notice.
    once = any("right" not in ends or len(ends) > 1 for ends in may(case))
    errors, played = workers.try_run(
        play, case.world, case.to_line(), timeout=TIMEOUT_S, grace=TIMEOUT_S, once=once
    )  # fmt: skip
    found = [one if error is None else None for one, error in zip(played, errors)]
    died = [f"rank {rank}: {error[0]} {error[1]}" for rank, error in enumerate(errors) if error and error[0] != "Hung"]
    return (f"died: {'; '.join(died)}" if died else judge(case, found)), found


def run(workers: WorkerPool, seed: int, seconds: float, ranks: tuple[int, int], say: bool = False) -> Tally:
    """Cases of seeds `seed`, `seed` + 1, … until the budget is spent."""
    tally, begin = Tally(), time.monotonic()
    while time.monotonic() - begin < seconds:
        case = draw(seed + tally.cases, ranks)
        tally.cases += 1
        started = time.monotonic()
        failure, played = run_case(workers, case)
        tally.slowest = max(tally.slowest, (time.monotonic() - started, case.to_line()))
        for one in played:
            if one is not None:
                tally.steps += one.trained
                tally.ends["right" if one.error is None else one.error[0]] += 1
        if failure:
            tally.failures.append((failure, case))
            if say:
                print(f"{failure}\n  --replay '{case.to_line()}'", flush=True)
    return tally


def shrink(workers: WorkerPool, case: Case, failure: str, seconds: float) -> tuple[str, Case]:
    """A simpler case that fails in the same kind of way."""
    begin, found = time.monotonic(), True
    while found and time.monotonic() - begin < seconds:
        found = False
        for simple in simpler(case):
            if time.monotonic() - begin > seconds:
                break
            now, _ = run_case(workers, simple)
            if now.split(":")[0] == failure.split(":")[0]:
                case, failure, found = simple, now, True
                break
    return failure, case


def _ranks(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    return int(low), int(high or low)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the next ones count up from it")
    parser.add_argument("--seconds", type=float, default=60.0, help="no case begins after this")
    parser.add_argument("--ranks", type=_ranks, default=(1, 4), help="such as 2-4")
    parser.add_argument("--replay", help="run this one case, given as its line")
    parser.add_argument("--shrink", type=float, default=60.0, help="seconds to make each of the first failures simpler")
    given = parser.parse_args()
    workers = WorkerPool()
    try:
        if given.replay:
            failure, played = run_case(workers, Case.from_line(given.replay))
            for one in played:
                print(one if one is None or one.error is None else f"rank {one.rank}: {one.error[3]}")
            print(failure or "passed")
            return int(bool(failure))
        tally = run(workers, given.seed, given.seconds, given.ranks, say=True)
        for failure, case in tally.failures[:3]:
            failure, case = shrink(workers, case, failure, given.shrink)
            print(f"made simpler: {failure}\n  --replay '{case.to_line()}'", flush=True)
        print(tally)
        return int(bool(tally.failures))
    finally:
        workers.close()


if __name__ == "__main__":
    sys.exit(main())
