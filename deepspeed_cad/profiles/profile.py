"""A machine profile: what one kernel costs on one machine, for the head shapes that were measured.

In: JSON. Out: `Profile`, which gives the cost model for any head shape, scaled from the nearest that was measured.
`choose_profile` says which one this machine uses.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from deepspeed_cad.config import is_number, read_json, write_json
from deepspeed_cad.cost import CostModel
from deepspeed_cad.errors import CADConfigError
from deepspeed_cad.kernels.interface import KernelNeed
from deepspeed_cad.planner.constants import TRAVELS
from deepspeed_cad.planner.plan import HeadShape

logger = logging.getLogger("deepspeed_cad")

REMEDY = 'write one with "deepspeed-cad profile"'


@dataclass(frozen=True)
class ShapeCost:
    """Cost of a CA task of one head group of one head shape, forward and backward together."""

    shape: HeadShape
    pair: float
    """Per query-key pair."""
    row: float = 0.0
    """Per query row."""
    key: float = 0.0
    """Per KV row that a task reads."""
    task: float = 0.0
    """Per task."""
    error: float = 0.0
    """Mean relative error of the fit, over everything that was measured."""
    worst: float = 0.0
    """Largest relative error of the fit."""


@dataclass(frozen=True)
class Profile:
    machine: str
    """Name of the GPU as torch gives it, or of the CPU."""
    kernel: str
    """Name of the backend, as `deepspeed-cad doctor` lists it."""
    entries: tuple[ShapeCost, ...]
    """At least one."""
    unit: str = "seconds"
    """"seconds", or "pairs" where only ratios are known."""
    inside: float | None = None
    """Bytes per second that a rank receives from ranks of its node, all ranks at once; None: not measured."""
    between: float | None = None
    """The same from other nodes."""
    date: str = ""
    """Of the measurement, YYYY-MM-DD."""
    commit: str = ""
    """Of this package."""
    source: str = ""
    """What the figures come from, for people."""

    @property
    def name(self) -> str:
        """For logs: "pairs", or machine and kernel."""
        return f"{self.machine}, {self.kernel}" if self.unit == "seconds" else self.machine

    @property
    def figures(self) -> str:
        """Everything that plans depend on, as text."""
        return repr((self.unit, self.entries, self.inside, self.between))

    def cost_for(self, shape: HeadShape) -> CostModel:
        """The cost model for layers of this head shape.

        Work per pair is proportional to heads per group × (head_dim + value_dim). So is what kernels do per query row
        and per KV row; there the size of an element counts too."""
        entry = min(self.entries, key=lambda one: _distance(one.shape, shape))
        work = moved = 1.0
        if self.unit == "seconds":
            sizes = (one.heads_per_group * (one.head_dim + one.value_dim) for one in (shape, entry.shape))
            work = next(sizes) / next(sizes)
            moved = work * shape.bytes_per_element / entry.shape.bytes_per_element
        inside, between = (TRAVELS / speed if speed else 0.0 for speed in (self.inside, self.between))
        costs = entry.pair * work, entry.row * moved, entry.key * moved, entry.task * work
        return CostModel(self.name, self.unit, *costs, inside, between)

    def with_links(self, inside: float | None, between: float | None) -> Profile:
        """This profile with other figures for links, bytes per second; None: not known."""
        return dataclasses.replace(self, inside=inside, between=between)

    def with_entries_of(self, earlier: Profile) -> Profile:
        """This profile with the other head shapes of an earlier one of the same machine and kernel, and its links where
        this one has none."""
        if (earlier.machine, earlier.kernel, earlier.unit) != (self.machine, self.kernel, self.unit):
            return self
        mine = {entry.shape for entry in self.entries}
        return dataclasses.replace(
            self,
            entries=self.entries + tuple(entry for entry in earlier.entries if entry.shape not in mine),
            inside=self.inside or earlier.inside,
            between=self.between or earlier.between,
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write JSON; makes the folder. Raises CADConfigError where that is not possible."""
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            write_json(Path(path), dataclasses.asdict(self), indent=1)
        except OSError as error:
            raise CADConfigError(f"the profile {os.fspath(path)!r} cannot be written: {error.strerror}") from error

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Profile:
        """Read JSON. Raises CADConfigError that names the file and the key where something is missing or impossible."""
        where = f'"cost": the profile {os.fspath(path)!r}'
        content = read_json(path, where, f"; {REMEDY}")
        try:
            return _parse(content)
        except ValueError as error:
            raise CADConfigError(f"{where} {error}; {REMEDY}") from error


def _distance(measured: HeadShape, wanted: HeadShape) -> tuple[float, ...]:
    """Kernels differ by element size, then by head size, then by heads per group."""
    return (
        float(measured.bytes_per_element != wanted.bytes_per_element),
        abs(math.log(measured.head_dim / wanted.head_dim)) + abs(math.log(measured.value_dim / wanted.value_dim)),
        abs(math.log(measured.heads_per_group / wanted.heads_per_group)),
    )


def _parse(content: Any) -> Profile:
    fields = _object(content, Profile, "")
    entries = fields["entries"]
    if not isinstance(entries, list) or not entries:
        raise ValueError("has no entries; expected the cost of one head shape or more")
    parsed = []
    for number, one in enumerate(entries):
        place = f"entries[{number}]"
        entry = dict(_object(one, ShapeCost, place))
        shape = _object(entry.pop("shape"), HeadShape, f"{place}.shape")
        for key, value in shape.items():
            _expect(type(value) is int and value >= 1, value, f"{place}.shape.{key}", "a whole number above 0")
        if shape["query_heads"] % shape["groups"]:
            heads = f"{shape['query_heads']} query heads in {shape['groups']} groups"
            raise ValueError(f"has {heads} at {place}; expected a multiple")
        for key, value in entry.items():
            right = is_number(value) and value >= 0 and (key != "pair" or value > 0)
            _expect(right, value, f"{place}.{key}", "a number of seconds")
        parsed.append(ShapeCost(HeadShape(**shape), **{key: float(value) for key, value in entry.items()}))
    for key, value in fields.items():
        if key in ("inside", "between"):
            right = value is None or (is_number(value) and value > 0)
            _expect(right, value, key, "bytes per second, or null where not measured")
        elif key != "entries":
            _expect(isinstance(value, str), value, key, "a text")
    unit = fields.get("unit", "seconds")
    _expect(unit in ("seconds", "pairs"), unit, "unit", '"seconds" or "pairs"')
    return Profile(**{**fields, "entries": tuple(parsed)})


def _expect(right: bool, value: Any, place: str, expected: str) -> None:
    if not right:
        raise ValueError(f"has {value!r} at {place}; expected {expected}")


def _object(found: Any, kind: type, where: str) -> dict[str, Any]:
    """The keys of a dataclass: all that have no default, and no others."""
    place = f" at {where}" if where else ""
    if not isinstance(found, dict):
        raise ValueError(f"has {type(found).__name__} {str(found)[:40]!r}{place}; expected an object")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    wrong = [f"the unknown key {key!r}" for key in found if key not in fields]
    needed = [name for name, field in fields.items() if field.default is dataclasses.MISSING]
    wrong += [f"no key {name!r}" for name in needed if name not in found]
    if wrong:
        raise ValueError(f"has {wrong[0]}{place}; its keys are {', '.join(fields)}")
    return found


# Which profile the planner uses on this machine

USUAL_SHAPE = HeadShape(32, 8, 128, 128, 2)
"""Of an 8B Llama: what is measured unless one asks for another."""
PAIRS = Profile("pairs", "any", (ShapeCost(USUAL_SHAPE, pair=1.0),), unit="pairs")
"""One per query-key pair, whatever the heads."""
GENERIC_GPU = Profile("any GPU", "any", (ShapeCost(USUAL_SHAPE, pair=1.0, row=490.0, key=250.0),), unit="pairs")
"""Ratios measured on an H200 with FlashAttention-4: a query row costs as much as 490 pairs and a KV row that a task
reads as much as 250. Other kernels and GPUs lie near them, because both come from tiles and memory traffic that all of
them have."""

SHIPPED = Path(__file__).parent


def user_path(machine: str, kernel: str) -> Path:
    """Where `deepspeed-cad profile` writes, and "auto" looks first: a file for each machine and kernel."""
    name = re.sub(r"\W+", "-", f"{machine} {kernel}".lower())
    return Path(os.path.expanduser("~"), ".cache", "deepspeed_cad", f"{name}.json")


def machine_name(device: torch.device) -> str:
    """What profiles of this machine are filed under."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU {platform.processor() or platform.machine()}"


def expected_kernel(configured: str, device: torch.device) -> str:
    """The kernel that layers with ordinary heads will run on: the configured one, or the first that does not refuse."""
    from deepspeed_cad.kernels.registry import KERNELS

    dtype, shape = torch.bfloat16 if device.type == "cuda" else torch.float32, USUAL_SHAPE
    need = KernelNeed(device, dtype, shape.head_dim, shape.value_dim, shape.heads_per_group)
    found = [kernel for kernel in KERNELS if configured in ("auto", kernel.name)]
    willing = [kernel for kernel in found if kernel.refuse(need) is None]
    return next((kernel.name for kernel in [*willing, *found]), configured)


def choose_profile(configured: str, device: torch.device, kernel: str = "auto") -> Profile:
    """The profile for "auto", "pairs" or a file.

    "auto": the user's own if it is of this machine and kernel, else the one that ships for them, else on a GPU the
    ratios of another, else counted pairs. Raises CADConfigError for a file that cannot be read."""
    if configured == "pairs":
        return PAIRS
    if configured != "auto":
        return Profile.load(configured)
    wanted = (machine_name(device), expected_kernel(kernel, device))
    for path in filter(os.path.isfile, [user_path(*wanted), *sorted(SHIPPED.glob("*.json"))]):
        profile = Profile.load(path)
        if (profile.machine, profile.kernel) == wanted:
            logger.info("attention costs what %s says (%s)", path, profile.name)
            return profile
    return GENERIC_GPU if device.type == "cuda" else PAIRS
