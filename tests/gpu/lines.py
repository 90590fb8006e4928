"""What one rank finds: a `Line` for every case, written to a file as soon as the case is over.

A line that says only that a case began is what is left where a rank hung or died in it.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from deepspeed_cad.errors import CADUnsupportedError

PASSED, FAILED, REFUSED, BEGUN = "passed", "failed", "refused", "begun"
"""Of a line. Refused: the kernel or transport says that it cannot do this, and why."""

Result = TypeVar("Result")

Found = tuple[bool | None, str]
"""Whether a case is right, None where it is refused; and what there is to say about it."""


class Refused(Exception):
    """Some rank refuses what a case asks for, and why."""


@dataclass(frozen=True)
class Place:
    rank: int
    ranks: int
    device: torch.device
    hosts: tuple[int, ...] | None = None
    """The host that each rank pretends to be on; None: all are where they are."""
    kernel: str = "auto"
    """The attention kernel to check."""

    @property
    def on_gpu(self) -> bool:
        """False in a rehearsal on CPU processes."""
        return self.device.type == "cuda"

    @property
    def own_gpu(self) -> bool:
        """False where ranks share the only GPU of the machine."""
        return self.on_gpu and torch.cuda.device_count() >= self.ranks

    @property
    def dtype(self) -> torch.dtype:
        """What models compute in: bf16, or fp32 on a CPU, whose only kernel is exact."""
        return torch.bfloat16 if self.on_gpu else torch.float32

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)

    def gather(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * self.ranks
        dist.all_gather_object(found, value)
        return found

    def together(self, run: Callable[[], Result]) -> Result:
        """What `run` gives; raises Refused on every rank where some rank has a CADUnsupportedError. Which rank sees a
        refusal first is a matter of time: the others may lose it in the middle of an exchange or a collective, and have
        another error."""
        refused, failed, result = "", None, None
        try:
            result = run()
        except CADUnsupportedError as error:
            refused = str(error)
        except Exception as error:  # told after the meeting: all ranks come to it
            failed = error
        reasons = [one for one in self.gather(refused) if one]
        if reasons:
            raise Refused(reasons[0])
        if failed is not None:
            raise failed
        return result  # type: ignore[return-value]


class Lines:
    def __init__(self, place: Place, path: Path) -> None:
        self.place, self.path = place, path

    def check(self, what: str, case: str, run: Callable[[], Found]) -> str:
        """Run one case and write what came of it; an exception is a failure, or a refusal. Gives the state."""
        self._write(what, case, BEGUN, "", 0.0)
        begun = time.perf_counter()
        try:
            right, detail = run()
            self.place.synchronize()
            state = REFUSED if right is None else PASSED if right else FAILED
        except Refused as error:
            state, detail = REFUSED, str(error)
        except Exception as error:  # whatever it is, the table says so and the other cases go on
            state, detail = FAILED, f"{type(error).__name__}: {str(error)[:1500]}"
        self._write(what, case, state, detail, time.perf_counter() - begun)
        return state

    def _write(self, what: str, case: str, state: str, detail: str, seconds: float) -> None:
        line = {"what": what, "case": case, "state": state, "detail": detail, "seconds": round(seconds, 1)}
        line["rank"] = self.place.rank
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if state != BEGUN:
            sys.stdout.write(f"[{self.place.rank}] {state:8}{what:26}{case:34}{seconds:6.1f} s  {detail}\n")
            sys.stdout.flush()
