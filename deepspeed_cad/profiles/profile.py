"""A machine profile: what one kernel costs on one machine, for the head shapes that were measured.

In: JSON. Out: `Profile`, which gives the cost model for any head shape, scaled from the nearest that was measured.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed_cad.config import is_number, read_json
from deepspeed_cad.cost import CostModel
from deepspeed_cad.errors import CADConfigError
from deepspeed_cad.planner.constants import TRAVELS
from deepspeed_cad.planner.plan import HeadShape

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

        Work per pair is proportional to heads per group × (head_dim + value_dim). So is what kernels do besides, per
        query row and per KV row: backward accumulates dK and dV of a KV row for each query head that reads it; there
        the size of an element counts too.
        """
        entry = min(self.entries, key=lambda one: _distance(one.shape, shape))
        work = bytes_ratio = 1.0
        if self.unit == "seconds":
            work = _work(shape) / _work(entry.shape)
            bytes_ratio = work * shape.bytes_per_element / entry.shape.bytes_per_element
        return CostModel(
            name=self.name,
            unit=self.unit,
            pair=entry.pair * work,
            row=entry.row * bytes_ratio,
            key=entry.key * bytes_ratio,
            task=entry.task * work,
            byte_inside=TRAVELS / self.inside if self.inside else 0.0,
            byte_between=TRAVELS / self.between if self.between else 0.0,
        )

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
            Path(path).write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n", encoding="utf-8")
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


def _work(shape: HeadShape) -> float:
    return float(shape.heads_per_group * (shape.head_dim + shape.value_dim))


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
        entry = _object(one, ShapeCost, f"entries[{number}]")
        shape = _object(entry["shape"], HeadShape, f"entries[{number}].shape")
        for key, value in shape.items():
            if type(value) is not int or value < 1:
                raise ValueError(f"has {value!r} at entries[{number}].shape.{key}; expected a whole number above 0")
        if shape["query_heads"] % shape["groups"]:
            raise ValueError(
                f"has {shape['query_heads']} query heads in {shape['groups']} groups at entries[{number}]; expected a "
                "multiple"
            )
        numbers = {key: value for key, value in entry.items() if key != "shape"}
        for key, value in numbers.items():
            if not is_number(value) or value < 0 or (key == "pair" and value == 0):
                raise ValueError(f"has {value!r} at entries[{number}].{key}; expected a number of seconds")
        parsed.append(ShapeCost(HeadShape(**shape), **{key: float(value) for key, value in numbers.items()}))
    for key in ("inside", "between"):
        value = fields.get(key)
        if value is not None and (not is_number(value) or value <= 0):
            raise ValueError(f"has {value!r} at {key}; expected bytes per second, or null where not measured")
    for key in ("machine", "kernel", "unit", "date", "commit", "source"):
        if not isinstance(fields.get(key, ""), str):
            raise ValueError(f"has {fields[key]!r} at {key}; expected a text")
    if fields.get("unit", "seconds") not in ("seconds", "pairs"):
        raise ValueError(f'has {fields["unit"]!r} at unit; expected "seconds" or "pairs"')
    return Profile(**{**fields, "entries": tuple(parsed)})


def _object(found: Any, kind: type, where: str) -> dict[str, Any]:
    """The keys of a dataclass: all that have no default, and no others."""
    place = f" at {where}" if where else ""
    if not isinstance(found, dict):
        raise ValueError(f"has {type(found).__name__} {str(found)[:40]!r}{place}; expected an object")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    unknown = [key for key in found if key not in fields]
    missing = [name for name, field in fields.items() if field.default is dataclasses.MISSING and name not in found]
    if unknown or missing:
        what = f"the unknown key {unknown[0]!r}" if unknown else f"no key {missing[0]!r}"
        raise ValueError(f"has {what}{place}; its keys are {', '.join(fields)}")
    return found
