"""`deepspeed-cad plan`: plan one micro-batch, or foresee training steps on a data set in every mode.

In: a JSON file with document lengths and the heads of a layer, or a data set: texts, lengths, or the name of a
distribution; what a .json file holds says which. Out: a plan as JSON and a picture, or a table of modes, a sentence
that says which one to take, JSON and pictures.
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from deepspeed_cad.cli.data.documents import FIELDS
from deepspeed_cad.errors import CADConfigError, CADDataError
from deepspeed_cad.forecast.distributions import NAMED
from deepspeed_cad.forecast.outlook import StepOutlook, foresee
from deepspeed_cad.forecast.packing import PACKINGS, say_cut
from deepspeed_cad.planner import make_plan
from deepspeed_cad.planner.question import KEYS, read_question

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
    """Declare the arguments."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument(
        "input",
        metavar="IN",
        nargs="+",
        help="a data set: files (JSON, JSON lines, Parquet, CSV, Arrow, text; compressed too), patterns, or a folder; "
        "lengths (a JSON list, or one number a line); the name of a distribution (below); "
        "or one .json file with a question: the documents of one micro-batch and the heads of a layer",
    )
    parser.add_argument("--output", metavar="OUT.json", help="where to write the plan (or the table); - for stdout")
    parser.add_argument("--json", action="store_true", help="the answer as JSON on stdout: --output -")
    parser.add_argument("--plot", metavar="OUT.png", help="where to draw it (needs matplotlib)")
    data = parser.add_argument_group("for a data set")
    data.add_argument("--tokenizer", help="name or folder of the tokenizer; not needed where there are input_ids")
    data.add_argument(
        "--field", help=f"the column with text, chat messages or token ids (default: the first of {', '.join(FIELDS)})"
    )
    data.add_argument("--context", type=int, default=65536, help="tokens packed on each GPU (default: 65536)")
    data.add_argument("--packing", default="in_order", choices=tuple(PACKINGS), help="see below (default: in_order)")
    data.add_argument("--batch", type=int, default=1, help="with --packing none: documents a row (default: 1)")
    data.add_argument("--limit", type=int, default=100_000, help="most documents to read (default: 100000)")
    data.add_argument("--steps", type=int, default=20, help="most steps to foresee (default: 20)")
    data.add_argument(
        "--pictures",
        metavar="FOLDER",
        help="where to draw throughput over GPUs, context and reserved servers, and a step (needs matplotlib)",
    )
    cluster = parser.add_argument_group("the cluster")
    cluster.add_argument("--ranks", type=int, default=8, help="GPUs (default: 8)")
    cluster.add_argument(
        "--ranks-per-node", metavar="N[,N...]", help="GPUs of every host, or of each, as in 8,8,4 (default: 8)"
    )
    cluster.add_argument(
        "--link-inside", type=float, metavar="GB/S", help="what a GPU gets from GPUs of its host (default: machine's)"
    )
    cluster.add_argument(
        "--link-between", type=float, metavar="GB/S", help="what it gets from other hosts (default: machine's: 50)"
    )
    cluster.add_argument(
        "--machine", default="h200", help="h200, h100, a100, b200, or a JSON file like theirs (default: h200, measured)"
    )
    cluster.add_argument("--memory", type=float, metavar="GIB", help="of one GPU (default: the machine's)")
    cluster.add_argument(
        "--cost", default="pairs", help="the file of a profile (default, or pairs: the machine's own profile)"
    )
    train = parser.add_argument_group("training")
    train.add_argument(
        "--model",
        help="a checkpoint's name, folder or config.json, or a shape: llama-8b (default), llama-34b or -70b",
    )
    train.add_argument(
        "--sharding", default="zero3", choices=("zero1", "zero2", "zero3", "fsdp"), help="of weights (default: zero3)"
    )
    train.add_argument("--tensor", type=int, default=1, help="tensor-parallel GPUs, beside which CAD runs (default: 1)")
    train.add_argument("--sequence", type=int, default=1, help="GPUs of Ulysses inside which CAD attends (default: 1)")
    train.add_argument("--pipeline", type=int, default=1, help="pipeline stages; ZeRO-1 then (default: 1)")
    train.add_argument("--micro-batches", type=int, default=1, help="of a step: gradient accumulation (default: 1)")
    train.add_argument("--no-checkpointing", action="store_true", help="keep all activations (default: checkpointing)")
    train.add_argument(
        "--offload-optimizer", action="store_true", help="the optimizer in the host's memory (default: on the GPU)"
    )
    train.add_argument(
        "--loss",
        default="auto",
        choices=("auto", "whole", "chunked"),
        help="whole: transformers' own, with all logits of a row in fp32; chunked: as Liger or TRL compute it; auto "
        "(default): whole where plain training fits so",
    )
    train.add_argument("--recompute-attention", action="store_true", help="as in the cad block (default: no)")
    train.add_argument(
        "--keep",
        choices=("device", "host"),
        default="device",
        help="as in the cad block (default: device, and host where CAD fits only so)",
    )
    train.add_argument("--tolerance", type=float, default=0.05, help="as in the cad block (default: 0.05)")
    train.add_argument(
        "--reserve", default="auto", help='GPUs that only serve attention: a number, "auto" (default) or "none"'
    )
    train.add_argument("--modes", help="which modes, comma-separated (default: all)")


def main(args: argparse.Namespace) -> int:
    """Run; returns the exit code."""
    if len(args.input) == 1 and Path(args.input[0]).suffix == ".json":
        fields = _question(Path(args.input[0]), args.field)
        if fields is not None:
            return _plan_one(fields, args)
    return _plan_data(args)


def _question(path: Path, field: str | None) -> dict[str, Any] | None:
    """The question that a .json file holds, or None where it is a data set: a list of records, or one on each line."""
    if path.is_dir():
        return None
    try:
        with path.open(encoding="utf-8") as file:
            first = next((line for line in file if line.strip()), "")
            if (
                not first
                or first.lstrip().startswith("[")
                or (_is_object(first) and any(line.strip() for line in file))
            ):
                return None
            file.seek(0)
            fields = json.load(file)
    except OSError as error:
        raise CADConfigError(f"{path} cannot be read: {error.strerror}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CADConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(fields, dict) or not KEYS.keys().isdisjoint(fields):
        return fields
    if any(name in fields for name in (*FIELDS, field)):
        return None
    raise CADConfigError(
        f"{path} is one object with the keys {', '.join(fields) or 'none'}: neither a question (its keys: "
        f"{', '.join(KEYS)}) nor a data set (a list of records, or one record on each line)"
    )


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except json.JSONDecodeError:
        return False


def _plan_one(fields: Any, args: argparse.Namespace) -> int:
    question = read_question(fields)
    plan = make_plan(question.problem)
    answer = plan.to_json()
    answer["tasks"] = [[question.number[task[0]], *task[1:]] for task in answer["tasks"]]
    _write(answer, args.output or ("-" if args.json else None))
    if args.plot:
        from deepspeed_cad.planner.picture import draw_plan

        draw_plan(question.problem, plan, args.plot, question.number)
    hottest = plan.received_bytes.max() / 2**20
    _say(
        f"attention max/mean {plan.imbalance_before:.3f} -> {plan.imbalance:.3f}, min/mean "
        f"{_least(plan.load):.3f}; moved {plan.sent_bytes.sum() / 2**20:.1f} MiB in a layer's forward, "
        f"{hottest:.1f} MiB to the hottest rank; {len(plan.tasks)} tasks in {plan.planning_ms:.2f} ms",
        args,
    )
    for note in plan.notes:
        _say(f"note: {note}", args)
    return 0


def _plan_data(args: argparse.Namespace) -> int:
    from deepspeed_cad.cli.data.checkpoint import read_model_shape
    from deepspeed_cad.cli.data.lengths import check_places, read_lengths
    from deepspeed_cad.cli.foresee import assumptions, check_options, draw, read_setting, table, wanted_modes
    from deepspeed_cad.cli.progress import Progress
    from deepspeed_cad.forecast import modes_cad
    from deepspeed_cad.forecast.attention_seconds import of_documents
    from deepspeed_cad.forecast.compare import MODES, THREADS, compare
    from deepspeed_cad.forecast.dealt import deal_out
    from deepspeed_cad.forecast.steps import for_fewer, make_steps

    check_options(args)
    check_places(args.input)
    modes, servers = wanted_modes(args)
    with Progress("reading the model") as progress:
        model = read_model_shape(args.model)
        setting = read_setting(args, model)
        progress.tell("reading the data")
        needed = int(1.3 * setting.seats * args.context * args.micro_batches * (args.steps + 1))
        skipped: list[str] = []
        lengths = read_lengths(args.input, needed, args.tokenizer, args.field, args.limit, skipped, progress.tell)
        rows = (args.context, args.packing, args.micro_batches)
        steps = make_steps(lengths, setting, *rows, args.steps, args.batch)
        if not steps:
            raise CADDataError(
                f"{len(lengths)} documents with {sum(lengths)} tokens do not fill one step of {setting.seats} ranks "
                f"with {args.context} tokens: give more data, fewer --ranks or a smaller --context"
            )
        progress.tell("planning")
        firsts = [deal_out(setting, step)[0] for step in steps]
        with ThreadPoolExecutor(THREADS) as threads:
            outlook = partial(foresee, model=model, cost=setting.cost, tolerance=args.tolerance, hosts=setting.hosts)
            if setting.seats == args.ranks:
                # What every GPU holds is what plans are made for: they are needed again below.
                plan = partial(modes_cad.plan_in_place, setting)
                plans = list(threads.map(plan, firsts))
                setting = replace(setting, made={id(layout): one for layout, one in zip(firsts, plans, strict=True)})
                outlooks = [outlook(layout, plan=one) for layout, one in zip(firsts, plans, strict=True)]
            else:
                outlooks = list(threads.map(outlook, firsts))

        def tell(mode: str, done: int, all_of_them: int) -> None:
            progress.tell(f"{MODES[mode]}: step {done} of {all_of_them}")

        if setting.deals:
            own = [of_documents(step[0], setting.cost).total for step in steps]
            outlooks = [replace(one, imbalance_before=work.max() / work.mean()) for one, work in zip(outlooks, own)]
        fewer = for_fewer(lengths, setting, *rows, len(steps), args.batch)
        comparison = compare(setting, steps, modes, servers, tell, fewer)
        full = float(np.mean([layout.tokens.mean() for step in steps for layout in step])) / args.context
        rival, cad = comparison.best_rival, comparison.of("cad")
        if rival and cad:
            gains = [before / after for before, after in zip(rival.steps, cad.steps, strict=True)]
            outlooks = [replace(outlook, gain=gain) for outlook, gain in zip(outlooks, gains, strict=True)]
        lines = [
            *assumptions(args, setting, full),
            *_about_data(lengths, outlooks if cad else [], args),
            *([f"{len(skipped)} files skipped, the first: {skipped[0]}"] if skipped else []),
            "",
            *table(comparison, setting),
        ]
        _say("\n".join(lines), args)
        summary = {
            "documents": len(lengths),
            "tokens": sum(lengths),
            "longest": max(lengths),
            "skipped": skipped,
            "ranks": args.ranks,
            "context": args.context,
            "packing": args.packing,
            "full": full,
            "gain": float(np.mean([outlook.gain for outlook in outlooks])) if rival and cad else None,
            "steps": [asdict(outlook) for outlook in outlooks],
            **comparison.to_json(),
        }
        if args.output or args.json:
            _write(summary, args.output or "-")
        if args.plot:
            _draw_outlook(outlooks, args.plot)
        if args.pictures:
            for name in draw(comparison, setting, lengths, args, modes, progress):
                _say(f"drew {name}", args)
    return 0


def _about_data(lengths: list[int], outlooks: list[StepOutlook], args: argparse.Namespace) -> list[str]:
    """Lines on documents, and on how even attention is where CAD is foreseen."""
    lines = [
        f"{len(lengths)} documents, {sum(lengths)} tokens, median {int(np.median(lengths))}, longest {max(lengths)}: "
        + say_cut(lengths, args.context, args.packing)
    ]
    if outlooks:
        before, after, took = (
            [getattr(outlook, field) for outlook in outlooks]
            for field in ("imbalance_before", "imbalance", "planning_ms")
        )
        lines.append(
            f"{len(outlooks)} steps: attention max/mean {np.mean(before):.3f} without CAD, at worst {max(before):.3f}; "
            f"with it {np.mean(after):.3f}, at worst {max(after):.3f}; planned in {np.mean(took):.0f} ms"
        )
    return lines


def _draw_outlook(outlooks: list[StepOutlook], path: str) -> None:
    from deepspeed_cad.planner.picture import draw_outlook

    before, after, gains = (
        [getattr(one, field) for one in outlooks] for field in ("imbalance_before", "imbalance", "gain")
    )
    draw_outlook(before, after, gains, path)


def _write(answer: dict[str, Any], output: str | None) -> None:
    if output is None:
        return
    text = json.dumps(answer)
    if output == "-":
        print(text)
        return
    try:
        Path(output).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise CADConfigError(f"--output: {output} cannot be written: {error.strerror}") from error


def _least(load: np.ndarray) -> float:
    mean = float(load.mean()) if len(load) else 0.0
    return float(load.min()) / mean if mean > 0 else 1.0


def _say(text: str, args: argparse.Namespace) -> None:
    """Print for people: on stderr where stdout has JSON."""
    print(text, file=sys.stderr if args.json or args.output == "-" else sys.stdout)
