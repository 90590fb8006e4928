"""A machine: what one GPU and its links reach in training, each figure with where it comes from; and a cluster of them.

In: a JSON file of machines/, by name, or one of your own. Out: `Machine`. Attention is not in it: that is a
`CostModel`, made from a profile. A `Cluster` says how long collectives take. Members of a group lie `stride` ranks
apart: as far as tensor parallelism takes the ranks between.

A file has all figures, or is `like` another and has published ones and what was measured. Where nothing was, a machine
is taken to reach the same share of what is published as the other. Published figures are those of NVIDIA's data sheets
of A100 80GB SXM, H100 SXM, H200 SXM and DGX B200; attention by the papers of FlashAttention 2 (arXiv 2307.08691: A100,
230 TFLOP/s), 3 (2407.08608: H100, 740) and 4 (B200, 1613).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from deepspeed_cad.config import is_number, read_json
from deepspeed_cad.errors import CADConfigError
from deepspeed_cad.layout import Ints
from deepspeed_cad.planner.question import hosts_of_nodes

Size = TypeVar("Size", float, npt.NDArray[np.float64])
"""Bytes, or seconds; of arrays each element for itself."""
SHIPPED = Path(__file__).parent / "machines"
PUBLISHED = ("flops", "attention", "bandwidth", "memory", "nvlink", "port")
"""Names of published figures; `flops` and `attention` are dense operations a second in bf16, the last two one way."""


@dataclass(frozen=True)
class Machine:
    """Rates of one GPU; bytes per second are per GPU, with all GPUs busy."""

    name: str
    profile: str
    """File of deepspeed_cad/profiles with the attention of this machine."""
    matrix_flops: float
    """Floating-point operations a second of the matrix products of a decoder layer, in training."""
    memory_rate: float
    """Bytes a second of elementwise kernels, read and written."""
    memory: float
    """Bytes that a process can allocate."""
    in_training: float
    """Attention seconds in training over those that the profile predicts."""
    copies: float
    """Bytes a second that a rank gets from ranks of its host by peer copies: CAD's exchanges."""
    all_to_all: float
    """Bytes a second that leave a rank in an all-to-all inside a host, packing included: Ulysses' exchanges. NCCL moves
    them at `collective`; what is left of the time is packing, which no link changes."""
    collective: float
    """Bytes a second of all-gather and reduce-scatter inside a host."""
    between: float
    """Bytes a second that a rank gets from other hosts."""
    latency: float
    """Seconds of an exchange of nothing."""
    published: Mapping[str, float]
    """What is published of one GPU: `PUBLISHED`, in operations and bytes a second, and bytes."""
    sources: Mapping[str, str]
    """By field: where it was measured, or that it is assumed."""
    attention: float = 1.0
    """Attention seconds over those of `profile`, which is of another machine where this one was not measured."""
    like: str = ""
    """The machine that this one is taken to be like, where it was not measured: in all that `sources` does not name."""

    @property
    def packing(self) -> float:
        """Seconds per byte that leaves a rank in an all-to-all, beside the transfer."""
        return max(0.0, 1.0 / self.all_to_all - 1.0 / self.collective)

    def to_be_like(self, name: str, published: Mapping[str, float], sources: Mapping[str, str]) -> Machine:
        """A machine of which only published figures are known."""
        times = {key: published[key] / self.published[key] for key in PUBLISHED}
        collective, packing = self.collective * times["nvlink"], self.packing / times["bandwidth"]
        return dataclasses.replace(
            self, name=name, like=self.name, published=published, sources=sources, collective=collective,
            matrix_flops=self.matrix_flops * times["flops"], memory_rate=self.memory_rate * times["bandwidth"],
            memory=self.memory * times["memory"], copies=self.copies * times["nvlink"],
            all_to_all=1.0 / (1.0 / collective + packing), between=self.between * times["port"],
            attention=self.attention / times["attention"],
        )  # fmt: skip

    def with_links(self, inside: float | None, between: float | None) -> Machine:
        """The same GPUs on other links, bytes a second; None: as measured.

        `inside` is what peer copies reach. Collectives keep the share of it that they have on this machine."""
        own = self if between is None else dataclasses.replace(self, between=between)
        if inside is None:
            return own
        collective = self.collective * inside / self.copies
        all_to_all = 1.0 / (1.0 / collective + self.packing)
        return dataclasses.replace(own, copies=inside, all_to_all=all_to_all, collective=collective)

    @staticmethod
    def load(name: str) -> Machine:
        """By the name of a file in machines/ without its ending, or by path; raises CADConfigError."""
        path = Path(name)
        if not path.suffix:
            path = SHIPPED / f"{name}.json"
            if not path.is_file():
                names = ", ".join(sorted(one.stem for one in SHIPPED.glob("*.json")))
                raise CADConfigError(f"--machine: there is no machine {name!r}; there are {names}, or give a JSON file")
        content = read_json(path, f"--machine: {path}")
        is_like = isinstance(content, dict) and "like" in content
        fields = {field.name for field in dataclasses.fields(Machine)} - {"attention", "like"}
        _check_keys(path, content, {"name", "like", "published", "sources"} if is_like else fields, fields | {"like"})
        _check_keys(path, content["published"], set(PUBLISHED), set(PUBLISHED), "published: ")
        words = {"name", "profile", "like", "published", "sources"}
        for key, value in [*content["published"].items(), *((key, content[key]) for key in content.keys() - words)]:
            if not is_number(value) or value <= 0:
                raise CADConfigError(f"--machine: {path} has {key} {value!r}; expected a number above 0")
        if not is_like:
            return Machine(**content)
        like = Machine.load(content.pop("like")).to_be_like(
            *(content.pop(key) for key in ("name", "published", "sources"))
        )
        return dataclasses.replace(like, **content, attention=1.0 if "profile" in content else like.attention)


def _check_keys(path: Path, content: Any, expected: set[str], allowed: set[str], where: str = "") -> None:
    if not isinstance(content, dict) or not expected <= set(content) <= allowed:
        found = ", ".join(content) if isinstance(content, dict) else type(content).__name__
        raise CADConfigError(f"--machine: {path} holds {where}{found}; expected the keys {', '.join(sorted(expected))}")


@dataclass(frozen=True)
class Cluster:
    ranks: int
    per_host: int
    """GPUs that share the fast links; of the smallest host where they differ."""
    machine: Machine
    sizes: tuple[int, ...] = ()
    """GPUs of each host, where they differ."""
    collective_between: float | None = None
    """Bytes a second of NCCL's collectives between hosts; None: what other transfers reach there."""

    @property
    def hosts(self) -> Ints:
        """[ranks]: number of each rank's host."""
        return hosts_of_nodes(list(self.sizes) or self.per_host, self.ranks)

    def gather(self, size: Size, group: int, stride: int = 1) -> Size:
        """Seconds of an all-gather after which every member has `size` bytes; a reduce-scatter of them takes as long.

        Hosts pass each part on once: what comes from other hosts is shared between the links of a host."""
        if group < 2:
            return 0.0 * size
        here = max(1, min(group, self.per_host // stride))
        hosts = -(-group // here)
        inside = (here - 1) / here / self.machine.collective
        between = (hosts - 1) / hosts / (here * (self.collective_between or self.machine.between))
        return size * max(inside, between) + self.machine.latency

    def all_to_all(self, size: Size, group: int, stride: int = 1) -> Size:
        """Seconds of an all-to-all of buffers of `size` bytes: packed, then moved; both kinds of links work at once."""
        if group < 2:
            return 0.0 * size
        inside, between = self.shares(group, stride)
        links = inside / self.machine.collective, between / (self.collective_between or self.machine.between)
        return size * (max(links) + (group - 1) / group * self.machine.packing) + self.machine.latency

    def shares(self, group: int, stride: int = 1) -> tuple[float, float]:
        """Of what a member of a group sends to all, the shares that stay on its host and that leave it."""
        here = max(1, min(group, self.per_host // stride))
        return (here - 1) / group, (group - here) / group
