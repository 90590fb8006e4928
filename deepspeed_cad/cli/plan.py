"""`deepspeed-cad plan`: plan one micro-batch, or foresee training steps on a data set in every mode.

In: a JSON file with document lengths and the heads of a layer, or a data set: texts, lengths, or a distribution's name.
Out: a plan as JSON and a picture, or a table of modes, a sentence that says which one to take, JSON and pictures.
"""

import argparse
import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from deepspeed_cad.cli.data.documents import FIELDS
from deepspeed_cad.cli.progress import say, write
from deepspeed_cad.config import CADConfig
from deepspeed_cad.errors import CADConfigError
from deepspeed_cad.forecast import Cluster, Machine, Setting, seat_shape
from deepspeed_cad.forecast.bytes_held import activation_bytes, state_bytes
from deepspeed_cad.forecast.compare import MODES
from deepspeed_cad.forecast.packing import DEALT, NAMED, PACKINGS
from deepspeed_cad.forecast.setting import ModelShape, check_split
from deepspeed_cad.forecast.step import needed_bytes
from deepspeed_cad.planner import make_plan
from deepspeed_cad.planner.question import KEYS, hosts_of_nodes, read_cost, read_question

HOST = 8
"""GPUs of a host where nothing is said and there are more."""
AS_GIVEN = ("tensor", "sequence", "pipeline", "recompute_attention", "keep", "tolerance", "offload_optimizer")
"""Options that are fields of a setting as they are."""
LARGEST = 1 << 26
"""Bytes: no question is larger, and a data set is not read as a whole."""
_EPILOG = "\n".join(
    [
        "Packing:",
        *(f"  {name:18} {text}" for name, text in PACKINGS.items()),
        "",
        "Distributions that ship (made from round quantiles, not drawn from data):",
        *(f"  {name:18} {one.says}" for name, one in NAMED.items()),
        "",
        "Keys of a question:",
        *(f"  {key:18} {text}" for key, text in KEYS.items()),
    ]
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    add = parser.add_argument
    add(
        "input",
        metavar="IN",
        nargs="+",
        help="a data set: files (JSON, JSON lines, Parquet, CSV, Arrow, text; compressed too), patterns, or a folder; "
        "lengths (a JSON list, or a line each: a number, or prompt and answer); the name of a distribution (below); "
        "or one .json file with a question: the documents of one micro-batch and the heads of a layer",
    )
    add("--output", metavar="OUT.json", help="where to write the plan (or the table); - for stdout")
    add("--json", action="store_true", help="the answer as JSON on stdout: --output -")
    add("--plot", metavar="OUT.png", help="where to draw it (needs matplotlib)")
    add = parser.add_argument_group("for a data set").add_argument
    add("--tokenizer", help="name or folder of the tokenizer; not needed where there are input_ids")
    add(
        "--field",
        help="the column with text, chat messages or token ids, or several, as in prompt,answer (default: the first of "
        f"{', '.join(FIELDS)})",
    )
    add("--context", type=int, default=65536, help="tokens packed on each GPU (default: 65536)")
    add("--packing", default="in_order", choices=tuple(PACKINGS), help="see below (default: in_order)")
    of_batch = "documents of a row with --packing none, of a GPU and step with by_length and by_work (default: 1)"
    add("--batch", type=int, default=1, help=of_batch)
    add(
        "--passes",
        default="train",
        metavar="PASS[,PASS...]",
        help="of a step over the same micro-batches: train, and forward for each without backward, such as "
        "log-probabilities of the old policy and of a reference: train,forward,forward (default: train)",
    )
    add("--limit", type=int, default=100_000, help="most documents to read (default: 100000)")
    add("--steps", type=int, default=20, help="most steps to foresee (default: 20)")
    of_pictures = "where to draw throughput over GPUs, context and reserved servers, and a step (needs matplotlib)"
    add("--pictures", metavar="FOLDER", help=of_pictures)
    add = parser.add_argument_group("the cluster").add_argument
    add("--ranks", type=int, default=8, help="GPUs (default: 8)")
    add("--ranks-per-node", metavar="N[,N...]", help="GPUs of every host, or of each, as in 8,8,4 (default: 8)")
    inside = "what a GPU gets from GPUs of its host (default: machine's)"
    add("--link-inside", type=float, metavar="GB/S", help=inside)
    add("--link-between", type=float, metavar="GB/S", help="what it gets from other hosts (default: machine's: 50)")
    machines = "h200, h100, a100, b200, or a JSON file like theirs (default: h200, measured)"
    add("--machine", default="h200", help=machines)
    add("--memory", type=float, metavar="GIB", help="of one GPU (default: the machine's)")
    add("--cost", default="pairs", help="the file of a profile (default, or pairs: the machine's own profile)")
    add = parser.add_argument_group("training").add_argument
    add(
        "--model",
        help="a checkpoint's name, folder or config.json, or a shape: llama-8b (default), llama-34b or -70b, "
        "qwen3.5-9b",
    )
    shardings = ("zero1", "zero2", "zero3", "fsdp")
    add("--sharding", default="zero3", choices=shardings, help="of weights (default: zero3)")
    add("--tensor", type=int, default=1, help="tensor-parallel GPUs, beside which CAD runs (default: 1)")
    add("--sequence", type=int, default=1, help="GPUs of Ulysses inside which CAD attends (default: 1)")
    add("--pipeline", type=int, default=1, help="pipeline stages; ZeRO-1 then (default: 1)")
    add("--micro-batches", type=int, default=1, help="of a step: gradient accumulation (default: 1)")
    add("--no-checkpointing", action="store_true", help="keep all activations (default: checkpointing)")
    on_host = "the optimizer in the host's memory (default: on the GPU)"
    add("--offload-optimizer", action="store_true", help=on_host)
    add(
        "--loss",
        default="auto",
        choices=("auto", "whole", "chunked"),
        help="whole: transformers' own, with all logits of a row in fp32; chunked: as Liger or TRL compute it; auto "
        "(default): whole where plain training fits so",
    )
    add("--recompute-attention", action="store_true", help="as in the cad block (default: no)")
    keep = "as in the cad block (default: device, and host where CAD fits only so)"
    add("--keep", choices=("device", "host"), default="device", help=keep)
    add("--tolerance", type=float, default=0.05, help="as in the cad block (default: 0.05)")
    add("--reserve", default="auto", help='GPUs that only serve attention: a number, "auto" (default) or "none"')
    add("--modes", help="which modes, comma-separated (default: all)")


def main(args: argparse.Namespace) -> int:
    path = Path(args.input[0])
    fields = _read_question(path) if len(args.input) == 1 and path.suffix == ".json" and not path.is_dir() else None
    if fields is not None:
        return _plan_one(fields, args)
    from deepspeed_cad.cli.foresee import foresee_steps

    return foresee_steps(args)


def _read_question(path: Path) -> dict[str, Any] | None:
    """The question that a .json file holds, or None where it is a data set: a list, records, or one on each line."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace") if path.stat().st_size <= LARGEST else "["
        fields = json.loads(text)
    except OSError as error:
        raise CADConfigError(f"{path} cannot be read: {error.strerror}") from error
    except json.JSONDecodeError as error:
        if not text.lstrip().startswith("{") or error.msg == "Extra data":
            return None
        raise CADConfigError(f"{path} is not JSON: {error}") from error
    return fields if isinstance(fields, dict) and not KEYS.keys().isdisjoint(fields) else None


def _plan_one(fields: Any, args: argparse.Namespace) -> int:
    question = read_question(fields)
    plan = make_plan(question.problem)
    answer = plan.to_json()
    answer["tasks"] = [[question.number[task[0]], *task[1:]] for task in answer["tasks"]]
    write(answer, args)
    if args.plot:
        from deepspeed_cad.cli.picture import draw_plan

        draw_plan(question.problem, plan, args.plot)
    least = plan.load.min() / plan.load.mean() if plan.load.any() else 1.0
    lines = [
        f"attention max/mean {plan.imbalance_before:.3f} -> {plan.imbalance:.3f}, min/mean {least:.3f}; moved "
        f"{plan.sent_bytes.sum() / 2**20:.1f} MiB in a layer's forward, {plan.received_bytes.max() / 2**20:.1f} MiB to "
        f"the hottest rank; {len(plan.tasks)} tasks in {plan.planning_ms:.2f} ms",
        *(f"note: {note}" for note in plan.notes),
    ]
    say("\n".join(lines), args)
    return 0


# Options on a data set: checked before anything is read, and made a setting.


def check_options(args: argparse.Namespace) -> None:
    """Raise CADConfigError for what is wrong with an option alone, before anything is read or imported."""
    for name in ("ranks", "context", "limit", "steps", "micro_batches", "batch", "tensor", "sequence", "pipeline"):
        if getattr(args, name) < 1:
            raise CADConfigError(f"--{name.replace('_', '-')} is {getattr(args, name)}; expected at least 1")
    CADConfig(tolerance=args.tolerance, keep=args.keep, recompute_attention=args.recompute_attention)
    passes = [name.strip() for name in args.passes.split(",")]
    for wrong, words in (
        (args.offload_optimizer and args.sharding == "fsdp", "offload-optimizer with fsdp, which offloads weights too"),
        (
            passes.count("train") != 1 or not set(passes) <= {"train", "forward"},
            f"passes is {args.passes!r}; expected train once, and forward as often as there is one",
        ),
        (len(passes) > 1 and args.pipeline > 1, "passes with --pipeline: forwards through stages are not foreseen"),
        (
            args.packing in DEALT and args.micro_batches > 1,
            f"micro-batches with --packing {args.packing}, which says how many there are; leave it out",
        ),
        (args.recompute_attention and args.pipeline > 1, "recompute-attention with --pipeline, which CAD refuses"),
        (args.cost != "pairs" and not Path(args.cost).is_file(), f"cost: there is no file {args.cost}"),
    ):
        if wrong:
            raise CADConfigError(f"--{words}")
    wanted_modes(args)
    make_cluster(args)
    # What cannot be written is said before the work, not behind it.
    if args.pictures:
        try:
            Path(args.pictures).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CADConfigError(f"--pictures: {args.pictures} cannot be made: {error.strerror}") from error
    for name in ("output", "plot"):
        target = getattr(args, name)
        if target and target != "-" and not Path(target).parent.is_dir():
            raise CADConfigError(f"--{name}: {target} cannot be written: there is no folder {Path(target).parent}")
    if (args.plot or args.pictures) and find_spec("matplotlib") is None:
        raise CADConfigError('a picture needs matplotlib: pip install "deepspeed_cad[plot]"')


def read_setting(args: argparse.Namespace, model: ModelShape) -> Setting:
    """The setting that the options describe; raises CADConfigError that names the option."""
    from deepspeed_cad.profiles.profile import SHIPPED  # brings torch

    check_split(model, args.ranks, args.tensor, args.pipeline, args.sequence)
    cluster = make_cluster(args)
    machine, own = cluster.machine, args.cost == "pairs"
    path, times = (SHIPPED / machine.profile, machine.attention) if own else (args.cost, 1.0)
    cost = read_cost(str(path), seat_shape(model, args.tensor * args.sequence))
    setting = Setting(
        model=model,
        cluster=cluster,
        cost=replace(cost, **{name: times * getattr(cost, name) for name in ("pair", "row", "key", "task")}),
        sharding="zero1" if args.pipeline > 1 else args.sharding,
        checkpointing=not args.no_checkpointing,
        loss="chunked" if args.loss == "chunked" else "whole",
        deals=args.packing not in DEALT,
        forwards=args.passes.count(","),
        **{name: getattr(args, name) for name in AS_GIVEN},
    )
    if args.loss == "auto":
        kept = replace(setting, keep="device", recompute_attention=False)
        peak = state_bytes(kept, kept.seats) + activation_bytes(kept, args.context, kept=True)
        if needed_bytes(peak) > machine.memory:
            return replace(setting, loss="chunked")
    return setting


def make_cluster(args: argparse.Namespace) -> Cluster:
    """Hosts as --ranks-per-node says: so many GPUs each, or a list of them; links and memory as given."""
    given = {"--link-inside": args.link_inside, "--link-between": args.link_between, "--memory": args.memory}
    for name, value in given.items():
        if value is not None and not 0 < value < float("inf"):
            raise CADConfigError(f"{name} is {value}; expected {'GiB' if name == '--memory' else 'GB/s'} above 0")
    speeds = (value and value * 1e9 for value in (args.link_inside, args.link_between))
    machine = Machine.load(args.machine).with_links(*speeds)
    if args.memory is not None:
        machine = replace(machine, memory=args.memory * 2**30)
    hosts, ranks = args.ranks_per_node or str(HOST), args.ranks
    parts = [part.strip() for part in hosts.split(",")]
    if not all(part.isdigit() and int(part) for part in parts):
        raise CADConfigError(f"--ranks-per-node is {hosts!r}; expected a number of GPUs, or a list such as 8,8,4")
    sizes = tuple(map(int, parts))
    if len(sizes) == 1:
        return Cluster(ranks, min(ranks, sizes[0]), machine)
    hosts_of_nodes(list(sizes), ranks)
    return Cluster(ranks, min(sizes), machine, sizes)


def wanted_modes(args: argparse.Namespace) -> tuple[list[str], int | None]:
    names = list(MODES) if args.modes is None else [name.strip() for name in args.modes.split(",")]
    unknown = [name for name in names if name not in MODES]
    if unknown:
        raise CADConfigError(f"--modes: there is no mode {unknown[0]!r}; there are {', '.join(MODES)}")
    if {"plain", "cad"} <= set(names) and "plain kept" not in names and not args.no_checkpointing:
        # By it what balance gains is told from what is gained as attention is not repeated.
        names.insert(names.index("plain") + 1, "plain kept")
    if args.reserve in ("none", "auto"):
        return [name for name in names if name != "cad reserved" or args.reserve == "auto"], None
    if not args.reserve.isdigit():
        raise CADConfigError(f'--reserve is {args.reserve!r}; expected "auto", "none" or a number of GPUs')
    return names, int(args.reserve)
