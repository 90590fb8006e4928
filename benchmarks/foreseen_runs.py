"""What files of results/ hold, in one form: steps of documents, what they ran on, and what each mode took.

In: JSON of train_step.py, fsdp2_step.py, pipeline.py and servers_step.py. Out: `Run`, which foreseen.py foresees. What
a prediction needs and a file does not say is said in words; nothing is fitted to a file.

Documents come from workloads/, from the result itself, or from results/workloads.json. The last two know, of each row,
only how many documents it has and how many query-key pairs; documents of geometric lengths with the same figures take
their place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from deepspeed_cad.forecast import Cluster, Foreseen, Machine, Setting, modes, modes_cad, seat_shape
from deepspeed_cad.forecast.setting import ModelShape
from deepspeed_cad.layout import Layout
from deepspeed_cad.profiles import Profile
from deepspeed_cad.profiles.profile import SHIPPED

HERE = Path(__file__).resolve().parent
RESULTS, WORKLOADS = HERE / "results", HERE / "workloads"
SUMMARIES = RESULTS / "workloads.json"
KINDS = (
    "train_*.json",
    "fsdp2_*.json",
    "hosts_*.json",
    "pipeline_*.json",
    "shares_*.json",
    "servers_*.json",
    "reserved_*.json",
    "in-place_*.json",
)
"""Names of files that are read; the last two are what `two_gpus servers` calls them."""
MACHINES = {"NVIDIA H200": "h200", "NVIDIA H100 80GB HBM3": "h100"}
"""Machines of the simulator by the name that torch gives their GPU."""
USUAL = {"layers": 8, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 32000}
"""Sizes that the benchmarks take where nothing is said; older files do not name all of them."""
USUAL_KERNEL = "flash_attn_4"
"""The kernel that "auto" takes on an H200; older files do not name it."""
PIPELINE_HELD = (10.0, 0.0)
"""Bytes of a parameter in pipeline.py: bf16, and DeepSpeed's fp32 copy and fp32 gradient; SGD has no state."""
FSDP_HELD = (0.0, 4.0)
"""The same in fsdp2_step.py: weight and gradient in bf16, in shards; it has no optimizer."""
SERVERS_HELD = 2.0
"""The same in servers_step.py: the weight in bf16. Its gradients are made anew in every step: where most is held, when
the first backward begins, there are those of the head and of one layer. From the second micro-batch on all are there.
"""


@dataclass(frozen=True)
class Mode:
    """One mode of a run."""

    name: str
    run: Callable[[Sequence[Layout]], Foreseen] | str
    """Foresees a step; or why nothing does."""
    steps: Sequence[Sequence[Layout]] = ()
    """Micro-batches of each step."""
    seconds: float = 0.0
    """Measured, the sum over the steps."""
    peak_GiB: float | None = None


@dataclass(frozen=True)
class Run:
    """One file."""

    file: str
    modes: Sequence[Mode]
    first: Mode | None = None
    """What ratios are to, where it is in another file; else the first of `modes`."""
    why_not: str = ""
    """Why nothing of it can be foreseen."""
    commit: str = ""


def stand_in(documents: int, pairs: float, tokens: int) -> list[int]:
    """Lengths in geometric progression, so many, with that sum and that many query-key pairs."""
    low, high = 0.0, 1.0
    steps = np.arange(documents)
    lengths = np.full(documents, tokens / documents)
    for _ in range(60):
        factor = 0.5 * (low + high)
        powers = factor**steps
        lengths = tokens * powers / powers.sum()
        # The smaller the factor, the more of the tokens are in the first document.
        low, high = (low, factor) if (lengths * (lengths + 1) / 2).sum() < pairs else (factor, high)
    ends = np.maximum.accumulate(np.round(np.cumsum(lengths)).astype(np.int64))
    ends[-1] = tokens
    return [int(n) for n in np.diff(ends, prepend=0) if n > 0]


def summarise(workload: dict[str, Any]) -> dict[str, Any]:
    """What results/workloads.json keeps: documents and pairs of every row of every step."""

    def row(lengths: list[int]) -> list[int]:
        return [len(lengths), sum(n * (n + 1) // 2 for n in lengths)]

    stream = bool(workload.get("stream"))
    steps = [[row(step)] if stream else [row(one) for one in step] for step in workload["steps"]]
    kept = {key: workload[key] for key in ("tokens_per_rank", "ranks")}
    return {**kept, "stream": stream, "documents_and_pairs": steps}


@cache
def summaries() -> dict[str, Any]:
    """What is known of workloads that do not ship, by name."""
    return json.loads(SUMMARIES.read_text()) if SUMMARIES.is_file() else {}


def find_rows(result: dict[str, Any]) -> tuple[list[list[list[int]]], int, int, bool] | str:
    """Document lengths of every row of every step, ranks, tokens of a rank, and whether a row is a stream of all ranks;
    or why they are not known."""
    name = Path(result["workload"]).stem
    path = WORKLOADS / f"{name}.json"
    if path.is_file():
        found = json.loads(path.read_text())
        steps = [[step] for step in found["steps"]] if found.get("stream") else found["steps"]
        return steps, found["ranks"], found["tokens_per_rank"], bool(found.get("stream"))
    found = result if "documents_and_pairs" in result else summaries().get(name)
    if found is None:
        return f"the documents of {name} are not known: see --summarise"
    tokens = found["tokens_per_rank"] * (found["ranks"] if found["stream"] else 1)
    steps = [[stand_in(n, pairs, tokens) for n, pairs in step] for step in found["documents_and_pairs"]]
    return steps, found["ranks"], found["tokens_per_rank"], bool(found["stream"])


def find_layouts(result: dict[str, Any], count: int) -> tuple[list[Layout], int] | str:
    """Layouts of the first `count` steps of a run and its ranks, or why there are none."""
    found = find_rows(result)
    if isinstance(found, str):
        return found
    steps, ranks, tokens, stream = found
    if stream:
        return [Layout.from_stream(step[0], ranks, tokens) for step in steps[:count]], ranks
    return [Layout.from_rank_lengths(step) for step in steps[:count]], ranks


def block_of(name: str, block: dict[str, Any]) -> dict[str, Any]:
    """The "cad" block of a mode: what all start from, with the changes that its name has."""
    changes = name.partition("@")[2]
    return {**block, **(json.loads(changes) if changes else {})}


def without_attention(setting: Setting, step: modes.Step) -> Foreseen:
    """All but attention: mode bound_qkv of the training benchmark."""
    tokens = np.array([layout.tokens for layout in step], np.float64)
    return modes.foresee_rows(setting, "none", tokens, np.zeros((2, *tokens.shape)), False)


def how_to_run(name: str, block: dict[str, Any], ranks: int) -> Any:
    """What foresees a mode of the training benchmark, as a function of setting and step; or why nothing does.

    `block`: that of the mode.
    """
    kind = name.partition("@")[0]
    kind, kept = kind.removesuffix(":kept"), kind.endswith(":kept")
    if kind in ("dp", "plain"):
        return partial(modes.plain, kept=kept)
    if kind == "bound_qkv":
        return without_attention
    if kind.removesuffix("_joined") in ("ulysses", "allgather_cp"):
        run = partial(modes.ulysses, kept=kept) if kind.startswith("ulysses") else modes.gathered
        return partial(run, degree=ranks, joined=kind.endswith("_joined"))
    if kind in ("cad", "cad:recompute"):
        if block.get("overlap") in ("pingpong", "none"):
            return "no prediction for this kind of overlap"
        servers = block.get("servers", "all")
        if isinstance(servers, dict) and isinstance(servers.get("reserved"), int):
            return partial(modes_cad.reserved, servers=servers["reserved"])
        return modes_cad.in_place if servers == "all" else "no prediction for these servers"
    if kind == "bound":
        return "not a way to train: K and V get no gradient"
    return "no prediction for this mode"


def make_setting(device: str, ranks: int, sizes: dict[str, Any], result: dict[str, Any], **more: Any) -> Setting:
    """What a run was made on; raises ValueError where that is not known."""
    if device not in MACHINES:
        raise ValueError(f"no figures of {device}")
    figures, numbers = Machine.load(MACHINES[device]), (sizes.get("hosts") or "0").split(",")
    counts, collective = [ranks], None
    if len(set(numbers)) > 1:
        counts = [numbers.count(one) for one in dict.fromkeys(numbers)]
        links, weights = result.get("link_GBps"), result.get("collective_GBps") or {}
        if not links or not links.get("between"):
            raise ValueError("the file does not say what its links reach (link_GBps: {inside, between})")
        figures = figures.with_links(*(links[key] * 1e9 if links.get(key) else None for key in ("inside", "between")))
        collective = weights["between"] * 1e9 if weights.get("between") else None
    sizes = {**USUAL, **{key: value for key, value in sizes.items() if value is not None}}
    model = ModelShape(
        sizes["layers"], sizes["hidden"], sizes["ffn"], sizes["vocab"], sizes["heads"], sizes["kv_heads"],
        sizes["hidden"] // sizes["heads"],
    )  # fmt: skip
    kernel = result.get("kernel", USUAL_KERNEL)
    return Setting(
        model,
        Cluster(ranks, min(counts), figures, collective_between=collective, sizes=tuple(counts)),
        Profile.load(SHIPPED / f"{MACHINES[device]}_{kernel}.json").cost_for(
            seat_shape(model, more.get("tensor", 1) * more.get("sequence", 1))
        ),
        checkpointing=not sizes.get("no_checkpointing"),
        **more,
    )


def read_run(path: Path) -> Run:
    """A file of any kind."""
    result = json.loads(path.read_text())
    name = path.relative_to(path.parents[1]).as_posix()
    machine = result.get("machine")
    commit = result.get("commit") or (machine.get("commit") if isinstance(machine, dict) else "")
    try:
        if "divides" in result.get("settings", {}):
            return Run(name, _read_shares(result), commit=commit)
        if "stages" in result:
            return Run(name, _read_pipeline(result), commit=commit)
        if "trainers" in result:
            return Run(name, [_one_of_servers(result)], _in_place(path, result), commit=commit)
        return Run(name, _read_training(_as_training(result)), commit=commit)
    except (ValueError, KeyError) as error:
        said = f"the file lacks {error}" if isinstance(error, KeyError) else str(error)
        return Run(name, (), why_not=said)


def _read_shares(result: dict[str, Any]) -> list[Mode]:
    """shares_step.py: a row for each replica, and no optimizer."""
    sizes = {key: int(value) for key, value in result["settings"].items() if value.isdigit()}
    found = find_layouts(result, len(result["step_seconds"]["cad"]))
    if isinstance(found, str):
        raise ValueError(found)
    divides = {"tensor": "tensor", "ulysses": "sequence"}[result["settings"]["divides"]]
    ranks = result["machine"]["ranks"]
    setting = make_setting(
        result["machine"]["device"], ranks, sizes, result, optimizer=False, **{divides: sizes["shares"]}
    )
    ways = {"kept": partial(modes.plain, kept=True), "cad": modes_cad.in_place}
    steps = [[layout] for layout in found[0]]
    return [
        Mode(name, partial(ways[name], setting), steps, sum(seconds))
        for name, seconds in result["step_seconds"].items()
    ]


def _read_training(result: dict[str, Any]) -> list[Mode]:
    """train_step.py; the first steps of the workload, each one micro-batch."""
    count = max(_steps_of(result, mode) for mode in result["modes"].values())
    found = find_layouts(result, count)
    if isinstance(found, str):
        raise ValueError(found)
    layouts, ranks = found
    sizes = result["settings"]
    if sizes.get("model", "llama") != "llama" or sizes.get("tokens_per_rank") or sizes.get("full"):
        raise ValueError("no prediction of hybrids, sinks or MLA, or of rows that were cut")
    block = sizes.get("cad") or {}
    setting = make_setting(
        result["machine"]["device"],
        ranks,
        sizes,
        result,
        sharding=result.get("sharding", "zero1"),
        tolerance=block.get("tolerance", 0.05),
        optimizer=result.get("optimizer", True),
        held=result.get("held"),
    )
    tokens = float(sum(layout.tokens.sum() for layout in layouts)) / ranks
    modes_found = []
    for name, measured in result["modes"].items():
        if name == "bound":
            continue  # not a way to train: K and V get no gradient
        given = block_of(name, block)
        run = how_to_run(name, given, ranks)
        if not isinstance(run, str):
            again = ":recompute" in name or bool(given.get("recompute_attention"))
            own = replace(setting, recompute_attention=again, keep=given.get("keep", "device"))
            run = partial(run, own)
        if "step_seconds" in measured:
            seconds = sum(measured["step_seconds"])
        else:
            seconds = tokens / measured["tokens_per_s_per_gpu"]["median"]
        modes_found.append(Mode(name, run, [[one] for one in layouts], seconds, measured.get("peak_GiB")))
    return modes_found


def _steps_of(result: dict[str, Any], measured: dict[str, Any]) -> int:
    return len(measured["step_seconds"]) if "step_seconds" in measured else int(result["settings"]["steps"])


def _as_training(result: dict[str, Any]) -> dict[str, Any]:
    """A file of fsdp2_step.py in the form of those of train_step.py; the latter as they are."""
    if "gathers_per_step" not in result:
        return result
    steps = len(result["losses"]["plain"])
    peaks = result.get("peak_GiB", {})
    return {
        "machine": {"device": "NVIDIA H200"},
        "settings": {**USUAL, "steps": steps},
        "kernel": USUAL_KERNEL,
        **result,
        "sharding": "fsdp",
        "optimizer": False,
        "held": FSDP_HELD,
        "modes": {
            name: {"tokens_per_s_per_gpu": {"median": rate}, "peak_GiB": peaks.get(name)}
            for name, rate in result["tokens_per_s_per_gpu"].items()
        },
    }


def _read_pipeline(result: dict[str, Any]) -> list[Mode]:
    """pipeline.py; micro-batches are the rows of its workload in turn."""
    found = find_rows(result)
    if isinstance(found, str):
        raise ValueError(found)
    if result.get("tokens"):
        raise ValueError(f"rows were cut to {result['tokens']} tokens: no prediction")
    steps_of_rows, _, tokens, _ = found
    rows = [row for step in steps_of_rows for row in step]
    if result["documents"]:
        whole, rest = divmod(tokens, result["documents"])
        rows = [[result["documents"]] * whole + [rest] * (rest > 0)]
    ranks, stages, count = result["ranks"], result["stages"], result["micro_batches"]
    replicas = ranks // stages
    block = result["cad"]
    setting = make_setting(
        result["device"],
        ranks,
        _sizes(result),
        result,
        pipeline=stages,
        held=PIPELINE_HELD,
        optimizer=replicas > 1,
        tolerance=block.get("tolerance", 0.05),
    )
    # Older files hold the median alone, over two steps that were timed once: their mean.
    by_step = result.get("step_seconds") or {
        name: [result["seconds"][name]] * len(losses) for name, losses in result["losses"].items()
    }
    ways = {"1f1b": modes.plain, "cad": modes_cad.in_place, "none": without_attention}
    modes_found = []
    for name, seconds in by_step.items():
        steps = [
            [
                Layout.from_rank_lengths([rows[((s * count + m) * replicas + r) % len(rows)] for r in range(replicas)])
                for m in range(count)
            ]
            for s in range(len(seconds))
        ]
        run = partial(ways[name], setting) if name in ways else "no prediction with a limit of what is in flight"
        peak = max(one[name] for one in result["peak_GiB_by_rank"])
        modes_found.append(Mode(name, run, steps, sum(seconds), peak or None))
    return modes_found


def _sizes(result: dict[str, Any]) -> dict[str, Any]:
    """Of the model; older files of pipelines and servers name only layers and hidden size."""
    return {**result.get("settings", {}), "layers": result["layers"], "hidden": result["hidden"]}


def _in_place(path: Path, result: dict[str, Any]) -> Mode | None:
    """What a run with servers is compared with: CAD in place in a file beside it, of the same commit and sizes, over
    the same link if there is one."""
    if not result["servers"]:
        return None
    link, same = path.stem.rpartition("_")[2], ("commit", "layers", "hidden", "tokens", "workload", "slowed")
    others = {other.stem: json.loads(other.read_text()) for other in sorted(path.parent.glob("*in-place_*.json"))}
    in_place = [
        (stem.rpartition("_")[2] != link, stem)
        for stem, one in others.items()
        if one.get("servers") == 0 and all(one.get(key) == result.get(key) for key in same)
    ]
    return _one_of_servers(others[min(in_place)[1]]) if in_place else None


def _one_of_servers(result: dict[str, Any]) -> Mode:
    tokens, trainers, servers = result["tokens"], result["trainers"], result["servers"]
    label = f"cad, {servers} reserved" if servers else "cad"
    if result.get("slowed") is not None:
        return Mode(label, "no prediction beside a GPU that something else uses")
    ranks = trainers + servers
    # One trainer has nobody to sum gradients with.
    setting = make_setting(result["machine"], ranks, _sizes(result), result, optimizer=trainers > 1)
    model = setting.model
    gradients = 2.0 * (model.hidden * model.vocabulary + model.layer_parameters) / setting.stage_parameters
    if result.get("workload") is None:
        parts = [Layout.from_stream([tokens], trainers, -(-tokens // trainers))]
    else:
        found = find_rows(result)
        if isinstance(found, str):
            return Mode(label, found)
        rows = [row for step in found[0] for row in step][: trainers * result["ranks"][0]["micro_batches"]]
        if sum(map(sum, rows)) != tokens:
            return Mode(label, "its rows were scaled down: no prediction")
        parts = [Layout.from_rank_lengths(rows[at : at + trainers]) for at in range(0, len(rows), trainers)]
    setting = replace(setting, held=(SERVERS_HELD + (gradients if len(parts) == 1 else 2.0), 0.0))
    layouts = [
        Layout(ranks, layout.segments, np.append(layout.tokens, np.zeros(servers, np.int64))) for layout in parts
    ]
    run = partial(modes_cad.reserved, setting, servers=servers) if servers else partial(modes_cad.in_place, setting)
    peak = max(one["peak"] for one in result["ranks"]) / 2**30
    return Mode(label, run, [layouts], result["step_s"], peak or None)
