"""The "cad" block of a DeepSpeed JSON as a frozen dataclass.

In: the block as a dict, or a JSON file. Out: `CADConfig`, checked; or one `CADConfigError` that names the key, the bad
value and what is allowed. Needs nothing but the standard library. Whether a kernel or a transport works on this machine
is checked where it is chosen, not here.
"""

import dataclasses
import difflib
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed_cad.errors import CADConfigError


@dataclass(frozen=True)
class CADConfig:
    """Every key of the "cad" block. All have defaults, so `"cad": {}` turns CAD on.

    A key that is left out has its default; so has one that is "auto", where that is allowed. docs/config.md says more.
    """

    enabled: bool = True
    """`false` keeps the block in the JSON (its keys are still checked) and trains without CAD."""
    servers: str | dict[str, Any] = "all"
    """Which ranks run attention. "all": every rank, beside its training work. {"reserved": 2}, {"ranks": [6, 7]},
    {"reserved_per_node": 1} or, from `deepspeed-cad serve`, {"joined": 2}: ranks that hold no model and only serve."""
    on_server_failure: str = "stop"
    """When a reserved server is lost. "stop": training ends with an error. "continue": trainers go on without it."""
    tolerance: float = 0.05
    """How far any rank's predicted attention time may lie from the mean, above and below, as a share of the mean."""
    granularity: int = 128
    """Query rows: tasks are cut at multiples of this. Below 128 the backward of most kernels loses speed."""
    overlap: str = "auto"
    """What hides the exchange. "local_first": own tasks run while data travels; "interleave": besides, two nano-batches
    alternate over the decoder; "none". "auto": see `overlap_used`."""
    transport: str = "auto"
    """What carries an exchange: "nvlink", "mixed" (that inside nodes, messages between them), "nccl", "c10d"."""
    kernel: str = "auto"
    """The varlen attention kernel, as `deepspeed-cad doctor` lists it; "auto": the first that supports the model."""
    recompute_attention: bool = False
    """Under activation checkpointing: run attention and its exchange again instead of keeping O and LSE."""
    keep: str = "device"
    """Where what attention keeps for backward waits. "host": in pinned host memory."""
    cost: str = "auto"
    """Costs: "auto" (a profile that fits this machine, else counted pairs), "pairs", or a profile's path (.json)."""
    links: str | Mapping[str, float] = "measure"
    """How fast ranks exchange data. "measure": timed at start and corrected while training; or GB/s that one rank
    receives from its host and from other hosts while all ranks do: `{"inside": 350, "between": 25}`."""
    speeds: str | None = None
    """With reserved servers: how fast ranks attend. "measure": timed at the start, all at once. null: all are equal."""
    waves: str | int = "auto"
    """In how many parts at least what a layer moves goes out, is served and comes back. "auto": as the plan finds."""
    memory: str | float = "auto"
    """GiB on each GPU for what arrives of other ranks' attention; where a tick would bring more, it goes in more waves.
    "auto": a thirty-second of the GPU's memory, and no more than training leaves free."""
    documents: str = "auto"
    """Before a step documents are dealt out to ranks ("deal"), stay there ("keep"), or in their order too ("in_order").
    "auto": "deal" where that changes no loss (docs/steps.md), "keep" or "in_order" elsewhere."""
    forward_only: str = "auto"
    """Forwards without backward: each rank attends its own documents ("local"), or all together ("balanced"). "auto":
    together where all ranks are known to run as many."""
    look_ahead: int = 1
    """How many steps ahead plans are made, in a background thread. 0: at the forward pass."""
    timeout_s: float = 300.0
    """Seconds to wait for a peer before the run ends in an error that names the rank and what it was waited for."""
    trace: str = ""
    """A file for a timeline of three micro-batches over all ranks (Perfetto); "": none."""
    check: str = "sampled"
    """Compares samples of the model's own mask function with the plan ("sampled"), and stops where they differ."""
    verify: int = 0
    """The first N micro-batches also run without CAD; a difference beyond what the data type allows stops the run."""

    def __post_init__(self) -> None:
        for key, (allowed, fits) in _ALLOWED.items():
            if not fits(getattr(self, key)):
                raise _bad(key, getattr(self, key), allowed)
        for key in ("tolerance", "timeout_s", "memory"):
            if getattr(self, key) != "auto":
                object.__setattr__(self, key, float(getattr(self, key)))
        if isinstance(self.links, Mapping):
            object.__setattr__(self, "links", {key: float(value) for key, value in self.links.items()})
        for wrong, key, allowed, reason in _combinations(self):
            if wrong:
                raise _bad(key, getattr(self, key), allowed, reason)

    @classmethod
    def from_dict(cls, block: Any) -> "CADConfig":
        """Reads the "cad" block. Raises CADConfigError on anything that is not allowed."""
        if not isinstance(block, Mapping):
            raise CADConfigError(
                f'"cad" is {_show(block)}; expected an object, such as {{"cad": {{"tolerance": 0.05}}}}. '
                'An empty object turns CAD on with defaults; leave "cad" out to train without it.'
            )
        known = [field.name for field in dataclasses.fields(cls)]
        for key in block:
            if key not in known:
                close = difflib.get_close_matches(str(key), known, n=1)
                hint = f'did you mean "{close[0]}"? ' if close else ""
                raise CADConfigError(f'"cad": unknown key {_show(key)}; {hint}Known keys: {", ".join(known)}.')
        return cls(**block)

    @classmethod
    def load(cls, path: "str | os.PathLike[str]") -> "CADConfig":
        """Reads a JSON file that holds the block itself, or a DeepSpeed JSON with a "cad" block in it."""
        content = read_json(path, f"the CAD config {os.fspath(path)!r}")
        return cls.from_dict(content["cad"] if isinstance(content, dict) and "cad" in content else content)

    @property
    def overlap_used(self) -> str:
        """`overlap`, with "auto" decided."""
        if self.overlap != "auto":
            return self.overlap
        return "local_first" if self.servers == "all" else "interleave"

    def to_dict(self) -> dict[str, Any]:
        """The block with every key; `from_dict` of it gives an equal config."""
        return dataclasses.asdict(self)

    def fingerprint(self) -> str:
        """Sixteen hex digits that are equal exactly where the configs are; ranks compare them before the first step."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def is_number(value: Any) -> bool:
    """Whether a value of a JSON file is a finite number; JSON's true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_count(value: Any, least: int) -> bool:
    return type(value) is int and value >= least


def _is_servers(value: Any) -> bool:
    if value == "all":
        return True
    if not isinstance(value, dict) or len(value) != 1:
        return False
    kind, of = next(iter(value.items()))
    if kind == "ranks":
        return isinstance(of, list) and of != [] and all(_is_count(one, 0) for one in of) and len(set(of)) == len(of)
    return kind in ("reserved", "reserved_per_node", "joined") and _is_count(of, 1)


def _are_rates(value: Any) -> bool:
    given = value if isinstance(value, Mapping) else {}
    return {*given} == {"inside", "between"} and all(is_number(one) and one > 0 for one in given.values())


_Check = tuple[str, Callable[[Any], bool]]


def _one_of(*values: Any) -> _Check:
    return " or ".join(map(json.dumps, values)), lambda x: type(x) is type(values[0]) and x in values


_FLAG: _Check = ("true or false", lambda x: isinstance(x, bool))
_ALLOWED: dict[str, _Check] = {
    "enabled": _FLAG,
    "servers": (
        '"all", {"reserved": n}, {"ranks": [r, …]}, {"reserved_per_node": n} or {"joined": n}, with n of 1 or more and '
        "ranks that differ",
        _is_servers,
    ),
    "on_server_failure": _one_of("stop", "continue"),
    "tolerance": ("a number between 0 and 1, both excluded", lambda x: is_number(x) and 0 < x < 1),
    "granularity": ("a whole number of query rows, 1 or more", lambda x: _is_count(x, 1)),
    "overlap": _one_of("auto", "local_first", "interleave", "none"),
    "transport": _one_of("auto", "c10d", "mixed", "nccl", "nvlink"),
    "kernel": (
        '"auto" or the name of a backend as "deepspeed-cad doctor" lists it',
        lambda x: isinstance(x, str) and re.fullmatch(r"[a-z][a-z0-9_.-]*", x) is not None,
    ),
    "recompute_attention": _FLAG,
    "keep": _one_of("device", "host"),
    "cost": (
        '"auto", "pairs" or the path of a profile that ends in .json',
        lambda x: isinstance(x, str) and (x in ("auto", "pairs") or x.endswith(".json")),
    ),
    "links": (
        '"measure", or an object with the keys "inside" and "between" in GB/s above 0',
        lambda x: x == "measure" or _are_rates(x),
    ),
    "speeds": ('null or "measure"', lambda x: x is None or x == "measure"),
    "waves": ('"auto" or a whole number from 1 to 8', lambda x: x == "auto" or (_is_count(x, 1) and x <= 8)),
    "memory": ('"auto" or a number of GiB above 0', lambda x: x == "auto" or (is_number(x) and x > 0)),
    "documents": _one_of("auto", "deal", "keep", "in_order"),
    "forward_only": _one_of("auto", "local", "balanced"),
    "look_ahead": _one_of(0, 1),
    "timeout_s": ("a number of seconds above 0, up to 1e7", lambda x: is_number(x) and 0 < x <= 1e7),
    "trace": ('the path of a file to write, or "" for none', lambda x: isinstance(x, str) and not os.path.isdir(x)),
    "check": _one_of("sampled", "off"),
    "verify": ("a whole number of micro-batches, 0 or more", lambda x: _is_count(x, 0)),
}
"""By key: what is allowed in words, and whether a value is."""


def _combinations(config: CADConfig) -> list[tuple[bool, str, str, str]]:
    """What keys exclude in each other: whether it is so, the key that is wrong, what it may be, and why."""
    goes_on, host = config.on_server_failure == "continue", config.keep == "host"
    beside = 'With "on_server_failure": "continue"'
    return [
        (goes_on and config.servers == "all", "on_server_failure", '"stop"',
         'With "servers": "all" every rank trains, and none can be done without.'),
        (goes_on and config.transport == "mixed", "transport", '"auto", "nvlink", "nccl" or, on CPUs, "c10d"',
         f'{beside} the "mixed" transport cannot go on without a rank.'),
        (goes_on and config.recompute_attention, "recompute_attention", "false",
         f"{beside} attention may run again with other servers, and what is recomputed must have the same shapes."),
        (goes_on and host, "keep", '"device"', f"{beside} attention may run again, and needs what it kept at hand."),
        (config.documents == "deal" and not config.look_ahead, "look_ahead", "1",
         'With "documents": "deal" a step is arranged before its first forward.'),
        (host and config.recompute_attention, "keep", '"device"',
         'With "recompute_attention": true attention keeps nothing.'),
    ]  # fmt: skip


def read_json(path: "str | os.PathLike[str]", what: str, remedy: str = "") -> Any:
    """What a JSON file holds. Raises CADConfigError, which begins with `what` it is, where it cannot be read."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise CADConfigError(f"{what} cannot be read: {error.strerror}{remedy}") from error
    except ValueError as error:
        raise CADConfigError(f"{what} is not JSON: {error}{remedy}") from error


def write_json(path: Path, content: Any, indent: int | None = None) -> None:
    """Write at once, so that nobody reads half a file."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    unfinished.write_text(json.dumps(content, indent=indent))
    os.replace(unfinished, path)


def _bad(key: str, value: Any, allowed: str, reason: str = "") -> CADConfigError:
    default = next(field.default for field in dataclasses.fields(CADConfig) if field.name == key)
    message = f'"cad": key "{key}" is {_show(value)}; allowed: {allowed} (default {json.dumps(default)}).'
    if value == "auto":
        message += f' There is no "auto" for it: leave "{key}" out to get the default.'
    return CADConfigError(f"{message} {reason}".rstrip())


def _show(value: Any) -> str:
    return json.dumps(value, default=repr)
