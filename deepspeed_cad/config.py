"""The "cad" block of a DeepSpeed JSON as a frozen dataclass.

In: the block as a dict, or a JSON file. Out: `CADConfig`, checked; or one `CADConfigError` that names the key, the bad
value and what is allowed. Needs nothing but the standard library. Whether a kernel or a transport works on this machine
is checked where it is chosen, not here.
"""

import dataclasses
import difflib
import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed_cad.errors import CADConfigError

_CHOICES: dict[str, tuple] = {
    "overlap": ("auto", "local_first", "interleave", "pingpong", "none"),
    "transport": ("auto", "c10d", "mixed", "nccl", "nvlink"),
    "keep": ("device", "host"),
    "documents": ("auto", "deal", "keep", "in_order"),
    "forward_only": ("local", "balanced"),
    "look_ahead": (0, 1),
    "check": ("sampled", "off"),
    "on_server_failure": ("stop", "continue"),
}
LINK_KEYS = ("inside", "between")
_KERNEL_NAME = re.compile(r"[a-z][a-z0-9_.-]*")


@dataclass(frozen=True)
class CADConfig:
    """Every key of the "cad" block. All have defaults, so `"cad": {}` turns CAD on.

    A key that is left out has its default; so has one that is "auto", where that is allowed. docs/config.md says more.
    """

    enabled: bool = True
    """Whether CAD is on. `false` keeps the block in the JSON (its keys are still checked) and changes nothing else."""

    servers: str | dict[str, Any] = "all"
    """Which ranks execute core attention. "all": every rank, beside its training work. An object reserves ranks that
    hold no model and only serve: {"reserved": 2} the last 2 of the launch, {"ranks": [6, 7]} these,
    {"reserved_per_node": 1} the last one of each host, {"joined": 2} as many from `deepspeed-cad serve`."""

    trainers_serve: bool = True
    """With reserved servers: whether trainers serve too; `false` leaves all attention to the servers."""

    on_server_failure: str = "stop"
    """When a reserved server dies, fails or hangs. "stop": the training ends with an error that names it. "continue":
    trainers drop it, repeat what was under way and go on with the servers that are left, or alone."""

    tolerance: float = 0.05
    """How far any rank's predicted attention time may lie from the mean, above and below, as a share of the mean."""

    granularity: int = 128
    """Query rows: tasks are cut at multiples of this from the start of their document or segment. Small values balance
    better; below 128 the backward of most kernels loses speed."""

    overlap: str = "auto"
    """What hides the exchange. "local_first": a rank's own tasks run while data travels; "interleave": besides, two
    nano-batches alternate over the whole decoder; "pingpong": they alternate inside each layer; "none": one after the
    other. "auto": "interleave" where ranks are reserved as servers, else "local_first", because inside a node
    nano-batches of both kinds cost more than they hide."""

    transport: str = "auto"
    """What carries an exchange: "nvlink" (peer copies inside a node), "mixed" (several nodes: peer copies inside each,
    messages between them), "nccl", "c10d" (torch.distributed; works everywhere). "auto": the first that works."""

    kernel: str = "auto"
    """The varlen attention kernel, as `deepspeed-cad doctor` lists it; "auto": the first that supports the model."""

    recompute_attention: bool = False
    """Under activation checkpointing: run core attention and its exchange again in the recompute, instead of keeping
    O and LSE from the forward pass. Saves memory, costs time."""

    keep: str = "device"
    """Where what attention keeps until backward waits for it: O and LSE, and at a server those of what it served.
    "host": in pinned host memory; copy engines bring it there behind each layer and back ahead of its backward."""

    cost: str = "auto"
    """Where the planner's seconds come from. "auto": a profile that fits this machine, else counted pairs; "pairs":
    query-key pairs; or the path of a profile written by `deepspeed-cad profile` (ends in .json)."""

    links: str | Mapping[str, float] = "measure"
    """How fast ranks exchange data. "measure": timed at start and corrected while training; or GB/s that one rank
    receives from its host and from other hosts while all ranks do: `{"inside": 350, "between": 25}`."""

    speeds: str | None = None
    """How fast ranks run attention. "measure": every rank times one attention call at the start, all at once, and
    slower ranks get less. null: all are taken for equal."""

    waves: str | int = "auto"
    """In how many parts what a layer's attention moves goes out, is served and comes back, so that one part travels
    while another is computed. "auto": the number with which the plan says that a step ends first. A number is the
    least: memory may ask for more (see "memory")."""

    memory: str | float = "auto"
    """GiB on each GPU for what arrives of other ranks' attention. Where a tick would bring more, it goes in more waves:
    head groups one after the other and, where one is too much, blocks of its rows. "auto": a thirty-second of the GPU's
    memory, and no more than training leaves free after the first step, on the rank that has least; beside reserved
    servers only what training leaves free; on CPUs no limit."""

    documents: str = "auto"
    """What may happen to the documents of an optimizer step before its first forward. "deal": documents are dealt out
    to ranks so that all have as much to do, and those longer than a rank's share are cut. "keep": they stay on the rank
    that loaded them; with gradient accumulation ranks but 0 train their micro-batches in another order, so that heavy
    ones meet. "in_order": every rank keeps its loader's order, too. "auto": "deal" where that changes no loss
    (docs/steps.md), elsewhere "keep"."""

    forward_only: str = "local"
    """How forwards without backward attend: evaluation, log-probabilities of an old policy or a reference. "local":
    each rank attends its own documents, so a rank may evaluate alone; the Trainer's evaluation, forwards in its steps
    and prepared loaders of Accelerate are balanced where every rank is known to run as many. "balanced": all ranks run
    all such forwards together, and documents may span ranks. Generation is local either way. See
    docs/forward-only.md."""

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
        for key in ("enabled", "trainers_serve", "recompute_attention"):
            if not isinstance(getattr(self, key), bool):
                raise _bad(key, getattr(self, key), "true or false")
        for key, allowed in _CHOICES.items():
            value = getattr(self, key)
            if type(value) is not type(allowed[0]) or value not in allowed:
                raise _bad(key, value, " or ".join(map(json.dumps, allowed)))
        _check_number(self, "tolerance", float, "a number between 0 and 1, both excluded", lambda x: 0 < x < 1)
        if self.waves != "auto":
            _check_number(self, "waves", int, '"auto" or a whole number from 1 to 8', lambda x: 1 <= x <= 8)
        if self.memory != "auto":
            _check_number(self, "memory", float, '"auto" or a number of GiB above 0', lambda x: x > 0)
            object.__setattr__(self, "memory", float(self.memory))
        _check_number(self, "granularity", int, "a whole number of query rows, 1 or more", lambda x: x >= 1)
        _check_number(self, "timeout_s", float, "a number of seconds above 0", lambda x: x > 0)
        object.__setattr__(self, "tolerance", float(self.tolerance))
        object.__setattr__(self, "timeout_s", float(self.timeout_s))
        _check_number(self, "verify", int, "a whole number of micro-batches, 0 or more", lambda x: x >= 0)
        if self.speeds is not None and self.speeds != "measure":
            raise _bad("speeds", self.speeds, 'null or "measure"')
        if not isinstance(self.trace, str):
            raise _bad("trace", self.trace, 'the path of a file to write, or "" for none')
        if not isinstance(self.kernel, str) or not _KERNEL_NAME.fullmatch(self.kernel):
            raise _bad("kernel", self.kernel, '"auto" or the name of a backend as "deepspeed-cad doctor" lists it')
        if not isinstance(self.cost, str) or not (self.cost in ("auto", "pairs") or self.cost.endswith(".json")):
            raise _bad("cost", self.cost, '"auto", "pairs" or the path of a profile that ends in .json')
        _check_servers(self.servers)
        _check_links(self)
        _refuse_combinations(self)

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
        if isinstance(content, dict) and "cad" in content:
            content = content["cad"]
        return cls.from_dict(content)

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


_SERVERS = (
    '"all", {"reserved": n}, {"ranks": [r, …]}, {"reserved_per_node": n} or {"joined": n}, with n of 1 or more and '
    "ranks that differ"
)


def _check_servers(servers: Any) -> None:
    if servers == "all":
        return
    if not isinstance(servers, dict) or len(servers) != 1:
        raise _bad("servers", servers, _SERVERS)
    kind, value = next(iter(servers.items()))
    if kind == "ranks":
        fits = isinstance(value, list) and value and all(type(one) is int and one >= 0 for one in value)
        fits = fits and len(set(value)) == len(value)
    else:
        fits = kind in ("reserved", "reserved_per_node", "joined") and type(value) is int and value >= 1
    if not fits:
        raise _bad("servers", servers, _SERVERS)


def _refuse_combinations(config: CADConfig) -> None:
    if config.on_server_failure == "continue":
        if config.servers == "all":
            reason = 'With "servers": "all" every rank trains, and none can be done without.'
            raise _bad("on_server_failure", "continue", '"stop"', reason)
        if config.transport == "mixed":
            reason = 'With "on_server_failure": "continue" the "mixed" transport cannot go on without a rank.'
            raise _bad("transport", config.transport, '"auto", "nvlink", "nccl" or, on CPUs, "c10d"', reason)
        if config.recompute_attention:
            reason = (
                'With "on_server_failure": "continue" attention may run again with other servers, and activation '
                "checkpointing demands that what it recomputes has the same shapes."
            )
            raise _bad("recompute_attention", True, "false", reason)
        if config.keep == "host":
            reason = 'With "on_server_failure": "continue" attention may run again, and needs what it kept at hand.'
            raise _bad("keep", "host", '"device"', reason)
    if config.documents == "deal" and not config.look_ahead:
        raise _bad("look_ahead", 0, "1", 'With "documents": "deal" a step is arranged before its first forward.')
    if config.keep == "host" and config.recompute_attention:
        raise _bad("keep", "host", '"device"', 'With "recompute_attention": true attention keeps nothing.')


def _check_links(config: CADConfig) -> None:
    links = config.links
    allowed = '"measure", or an object with the keys "inside" and "between" in GB/s'
    if links == "measure":
        return
    if not isinstance(links, Mapping):
        raise _bad("links", links, allowed)
    missing = [key for key in LINK_KEYS if key not in links]
    unknown = [key for key in links if key not in LINK_KEYS]
    if missing or unknown:
        what = f"{_show(unknown[0])} is not known" if unknown else f'"{missing[0]}" is missing'
        raise _bad("links", dict(links), allowed, f"Its key {what}.")
    for key in LINK_KEYS:
        if not is_number(links[key]) or links[key] <= 0:
            raise _bad("links", dict(links), allowed, f'Its key "{key}" is {_show(links[key])}; expected GB/s above 0.')
    object.__setattr__(config, "links", {key: float(links[key]) for key in LINK_KEYS})


def _check_number(config: CADConfig, key: str, kind: type, allowed: str, fits: Any) -> None:
    value = getattr(config, key)
    if not is_number(value) or (kind is int and not isinstance(value, int)) or not fits(value):
        raise _bad(key, value, allowed)


def read_json(path: "str | os.PathLike[str]", what: str, remedy: str = "") -> Any:
    """What a JSON file holds. Raises CADConfigError, which begins with `what` it is, where it cannot be read."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise CADConfigError(f"{what} cannot be read: {error.strerror}{remedy}") from error
    except ValueError as error:
        raise CADConfigError(f"{what} is not JSON: {error}{remedy}") from error


def is_number(value: Any) -> bool:
    """Whether a value of a JSON file is a finite number; JSON's true and false are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _bad(key: str, value: Any, allowed: str, reason: str = "") -> CADConfigError:
    default = next(field.default for field in dataclasses.fields(CADConfig) if field.name == key)
    message = f'"cad": key "{key}" is {_show(value)}; allowed: {allowed} (default {json.dumps(default)}).'
    if value == "auto":
        message += f' There is no "auto" for it: leave "{key}" out to get the default.'
    return CADConfigError(f"{message} {reason}".rstrip())


def _show(value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        return repr(value)
