"""`deepspeed-cad plan`: plan one micro-batch, or foresee training steps on a data set in every mode.

In: a JSON file with document lengths and the heads of a layer, or a data set: texts, lengths, or a distribution's name.
Out: a plan as JSON, or a table of modes, a sentence that says which one to take, JSON and pictures.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from deepspeed_cad.cli.data.documents import FIELDS
from deepspeed_cad.cli.progress import say, write
from deepspeed_cad.errors import CADConfigError
from deepspeed_cad.forecast.packing import NAMED, PACKINGS
from deepspeed_cad.planner import make_plan
from deepspeed_cad.planner.question import KEYS, read_question

LARGEST = 1 << 26
"""Bytes: no question is larger, and a data set is not read as a whole."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = "\n".join(
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
    add("--limit", type=int, default=100_000, help="most documents to read from files (default: 100000)")
    add("--steps", type=int, default=20, help="most steps to foresee (default: 20)")
    of_pictures = "where to draw throughput over GPUs, context and reserved servers, and a step (needs matplotlib)"
    add("--pictures", metavar="FOLDER", help=of_pictures)
    add = parser.add_argument_group("the cluster").add_argument
    add("--ranks", type=int, default=8, help="GPUs (default: 8)")
    add("--ranks-per-node", metavar="N[,N...]", help="GPUs of every host, or of each, as in 8,8,4 (default: 8)")
    add("--link-inside", type=float, metavar="GB/S", help="what a GPU gets from GPUs of its host (default: machine's)")
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
    add("--sharding", default="zero3", choices=("zero1", "zero2", "zero3", "fsdp"), help="of weights (default: zero3)")
    add("--tensor", type=int, default=1, help="tensor-parallel GPUs, beside which CAD runs (default: 1)")
    add("--sequence", type=int, default=1, help="GPUs of Ulysses inside which CAD attends (default: 1)")
    add("--pipeline", type=int, default=1, help="pipeline stages; ZeRO-1 then (default: 1)")
    add("--micro-batches", type=int, default=1, help="of a step: gradient accumulation (default: 1)")
    add("--no-checkpointing", action="store_true", help="keep all activations (default: checkpointing)")
    add("--offload-optimizer", action="store_true", help="the optimizer in the host's memory (default: on the GPU)")
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
        add_arguments(usual := argparse.ArgumentParser())
        same = vars(usual.parse_args(args.input)) | {name: getattr(args, name) for name in ("output", "json")}
        if idle := [name for name, value in same.items() if getattr(args, name) != value]:
            raise CADConfigError(
                f"--{idle[0].replace('_', '-')} is for a data set: a question has keys instead (--help)"
            )
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
    least = plan.load.min() / plan.load.mean() if plan.load.any() else 1.0
    lines = [
        f"attention max/mean {plan.imbalance_before:.3f} -> {plan.imbalance:.3f}, min/mean {least:.3f}; moved "
        f"{plan.sent_bytes.sum() / 2**20:.1f} MiB in a layer's forward, {plan.received_bytes.max() / 2**20:.1f} MiB to "
        f"the hottest rank; {len(plan.tasks)} tasks in {plan.planning_ms:.2f} ms",
        *(f"note: {note}" for note in plan.notes),
    ]
    say("\n".join(lines), args)
    return 0
