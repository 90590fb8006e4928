"""Timing attention on this machine: seconds forward and backward of one kernel over rows × prefix × head groups.

In: a kernel, a device, a head shape. Out: `Measured` calls, and the `Fit` of the cost model to them.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations

import numpy as np
import torch

from deepspeed_cad.cost import count_pairs
from deepspeed_cad.errors import CADError
from deepspeed_cad.kernels.interface import Kernel, MaskRule, Sequences
from deepspeed_cad.layout import Ints
from deepspeed_cad.planner.plan import Floats, HeadShape

DOCUMENT_WEIGHT = 2.0
"""Whole documents count this much more than shards: most tasks of a plan are such."""


@dataclass(frozen=True, eq=False)
class Call:
    """One varlen call of `groups` head groups: query rows [begin, end) of each sequence, with all keys before them."""

    label: str
    begin: Ints
    end: Ints
    groups: int
    fitted: bool = True
    """Whether the cost model is fitted to it; otherwise it only checks the prediction."""

    @property
    def counts(self) -> list[float]:
        """Pairs, query rows, KV rows and tasks, all head groups together."""
        pairs = int(count_pairs(self.begin, self.end).sum())
        each = (pairs, int((self.end - self.begin).sum()), int(self.end.sum()), len(self.end))
        return [float(self.groups * count) for count in each]


@dataclass(frozen=True, eq=False)
class Measured:
    call: Call
    forward: float
    backward: float

    @property
    def seconds(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True, eq=False)
class Fit:
    """The cost model of one head group; predictions and errors are of all calls, those that only check included."""

    pair: float
    row: float
    key: float
    task: float
    predicted: Floats
    """Seconds for each call."""
    errors: Floats
    """Predicted over measured, minus 1."""


@dataclass(frozen=True)
class Sizes:
    tokens: int
    """Query rows of a call with whole documents."""
    documents: tuple[int, ...]
    """Lengths."""
    shards: tuple[int, ...]
    """Query rows."""
    prefixes: tuple[int, ...]
    """Largest prefixes; each is measured with prefixes between 0 and it."""
    keys: int
    """Most KV rows of a call, times head groups."""
    repeats: int
    budget: float
    """Seconds for the repeats of one call, at most; two repeats at least."""
    mixes: int
    """Calls with documents of mixed lengths that only check the prediction."""
    rounds: int = 1
    """How often everything is measured, apart in time; the least counts."""


GPU = Sizes(
    65536, (1024, 2048, 4096, 8192, 16384, 32768, 65536), (64, 128, 256, 512, 1024, 4096), (4096, 32768), 4 << 20,
    repeats=7, budget=0.4, mixes=3,
)  # fmt: skip
GPU_QUICK = replace(GPU, documents=(1024, 4096, 16384, 65536), shards=(128, 512, 2048), repeats=3, budget=0.2, mixes=2)
CPU = Sizes(
    2048, (128, 256, 512, 1024, 2048), (32, 64, 128, 256), (512, 2048), 8192, repeats=3, budget=0.3, mixes=2,
    rounds=3,
)  # fmt: skip
CPU_QUICK = replace(
    CPU, tokens=1024, documents=(128, 256, 512, 1024), shards=(64, 128), keys=2048, budget=0.05, rounds=2, mixes=1
)


def sizes_for(device: torch.device, quick: bool) -> Sizes:
    return ((GPU, GPU_QUICK) if device.type == "cuda" else (CPU, CPU_QUICK))[quick]


def calls(sizes: Sizes, groups: int, most_keys: int) -> Iterator[Call]:
    """Calls to measure, for all head groups and for one; `most_keys` bounds KV rows × groups by memory."""
    random = np.random.default_rng(0)
    for share in dict.fromkeys((groups, 1)):
        limit = max(1, min(sizes.keys, most_keys) // share)
        tokens = min(sizes.tokens, limit)
        for length in sizes.documents:
            if length <= tokens:
                ends = np.full(tokens // length, length)
                yield Call(f"documents of {length}", 0 * ends, ends, share)
        for rows in sizes.shards:
            for prefix in sizes.prefixes:
                begin = random.integers(0, prefix - rows + 1, max(1, sizes.tokens // rows)) // rows * rows
                begin = begin[: max(1, int(np.searchsorted(np.cumsum(begin + rows), limit)))]
                yield Call(f"shards of {rows}, prefixes to {prefix}", begin, begin + rows, share)
        for number in range(sizes.mixes):
            ends = _mix(tokens, sizes.documents[0], random)
            yield Call(f"mixed lengths {number + 1}", 0 * ends, ends, share, fitted=False)


def _mix(tokens: int, typical: int, random: np.random.Generator) -> Ints:
    """Lengths as in long-document data: many short ones, few that fill most of the row."""
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        lengths.append(min(left, max(16, int(typical * random.lognormal(0.5, 1.5)))))
    return np.array(lengths, np.int64)


def most_keys(device: torch.device, shape: HeadShape) -> int:
    """KV rows × head groups whose forward and backward fit into half of the free memory."""
    if device.type != "cuda":
        return 1 << 40
    free = torch.cuda.mem_get_info(device)[0]
    # K, V, dK and dV, fp32 sums of dK and dV, and dK and dV for each query head, which some kernels make.
    elements = shape.bytes_per_element * (2 + shape.heads_per_group) + 4
    return max(1, int(free / 2) // ((shape.head_dim + shape.value_dim) * elements))


def measure_calls(
    kernel: Kernel, device: torch.device, shape: HeadShape, sizes: Sizes, tell: Callable[[str], None]
) -> list[Measured]:
    """Time every call; `tell` hears how many are done."""
    listed = list(calls(sizes, shape.groups, most_keys(device, shape)))
    found: list[Measured] = []
    for number, call in enumerate(listed * sizes.rounds, 1):
        tell(f"attention call {number} of {sizes.rounds * len(listed)}")
        found.append(time_call(kernel, device, shape, call, sizes.repeats, sizes.budget))
    return least(*(found[begin : begin + len(listed)] for begin in range(0, len(found), len(listed))))


def least(*rounds: list[Measured]) -> list[Measured]:
    """The least seconds of each call: whatever else runs on a machine only adds to them."""
    return [
        Measured(same[0].call, min(one.forward for one in same), min(one.backward for one in same))
        for same in zip(*rounds)
    ]


def fit_measured(measured: list[Measured]) -> Fit:
    """The cost model that lies nearest to what was measured. Raises CADError where there is nothing to fit."""
    counts, seconds = np.array([one.call.counts for one in measured]), np.array([one.seconds for one in measured])
    weights = np.array([one.call.fitted * (1.0 if one.call.begin.any() else DOCUMENT_WEIGHT) for one in measured])
    best = fit_cost(counts, seconds, weights)
    predicted = counts @ best
    pair, row, key, task = best.tolist()
    return Fit(pair, row, key, task, predicted, predicted / seconds - 1.0)


def fit_cost(counts: Floats, seconds: Floats, weights: Floats) -> Floats:
    """Least squares on relative errors, no coefficient below zero.

    `counts` [calls, 4]: pairs, rows, KV rows, tasks, all above zero. Every subset of the four is tried, always with the
    pairs, which alone fit somehow: exact for so few."""
    if (weights > 0).sum() < 4 or not (seconds > 0).all() or not np.isfinite(seconds).all():
        raise CADError(
            f"{len(seconds)} measured calls with {seconds.min(initial=np.inf):.3g} s at least cannot be fitted; "
            "expected 4 or more that take time"
        )
    root, relative = np.sqrt(weights), counts / seconds[:, None]
    best, least = np.zeros(4), np.inf
    for others in (chosen for size in range(4) for chosen in combinations((1, 2, 3), size)):
        columns = [0, *others]
        scale = relative[:, columns].max(axis=0)
        solved = np.linalg.lstsq(relative[:, columns] / scale * root[:, None], root, rcond=None)[0] / scale
        squares = float((((relative[:, columns] @ solved - 1.0) * root) ** 2).sum())
        # More terms have to be worth it: otherwise rounding decides.
        if (solved[1:] >= 0).all() and solved[0] > 0 and squares < least * (1.0 - 1e-9):
            best, least = np.zeros(4), squares
            best[columns] = solved
    return best


def time_call(
    kernel: Kernel, device: torch.device, shape: HeadShape, call: Call, repeats: int, budget: float
) -> Measured:
    """Seconds of one call, forward and backward; `budget`: seconds for the repeats, at most."""
    rows = call.end - call.begin
    host_q, host_k = (np.append(0, np.cumsum(one)).astype(np.int32) for one in (rows, call.end))
    cu_q, cu_k = (torch.from_numpy(edges).to(device) for edges in (host_q, host_k))
    sequences = Sequences(host_q, host_k, cu_q, cu_k, int(rows.max()), int(call.end.max()))
    dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[shape.bytes_per_element]
    heads, sizes = shape.heads_per_group * call.groups, (shape.head_dim, shape.value_dim)
    # Numbers of its own: what the training draws, dropout or completions, is as without CAD.
    draw = partial(torch.randn, generator=torch.Generator(device).manual_seed(0), device=device, dtype=dtype)
    q_QHD, do_QHV = (draw(int(host_q[-1]), heads, size) for size in sizes)
    k_KGD, v_KGV = (draw(int(host_k[-1]), call.groups, size) for size in sizes)
    rule = MaskRule(shape.head_dim**-0.5)
    forward = partial(kernel.forward, q_QHD, k_KGD, v_KGV, sequences, rule)
    backward = partial(kernel.backward, do_QHV, q_QHD, k_KGD, v_KGV, *forward(), sequences, rule)
    return Measured(call, *(_seconds(run, device, repeats, budget) for run in (forward, backward)))


def _seconds(run: Callable[[], object], device: torch.device, repeats: int, budget: float) -> float:
    """Median seconds of one call on a GPU; on a CPU the least, because other processes only ever slow it down."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        _once(run, device)  # compiles, allocates, warms up
    first = _once(run, device)
    repeats = int(min(repeats, max(2 * on_gpu, budget / max(first, 1e-9))))
    times = sorted([first, *(_once(run, device) for _ in range(repeats))])
    return times[len(times) // 2] if on_gpu else times[0]


def _once(run: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        begun = time.perf_counter()
        run()
        return time.perf_counter() - begun
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end) / 1e3
