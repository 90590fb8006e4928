"""What `deepspeed-cad plan` says and answers to questions of many kinds, as unit/plans_said.json holds it.

Where it changes on purpose: `python tests/plans_said.py > tests/unit/plans_said.json`.
"""

import io
import json
import re
import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import Any

from deepspeed_cad.cli import main

QUESTIONS = (
    "long-mix --ranks 16 --steps 2 --link-between 25",
    "long-mix --ranks 6 --ranks-per-node 4,2 --machine h100 --sharding zero2 --reserve 1 --tolerance 0.2 --loss whole",
    "chat --packing none --batch 16 --sharding zero1 --reserve 2 --micro-batches 2 --context 16384",
    "chat --packing by_length --batch 12 --passes forward,train,forward --context 8192 --modes plain,cad",
    "long-mix --packing by_work --batch 4 --machine a100 --model llama-34b --sharding fsdp --memory 200",
    "long-mix --pipeline 2 --micro-batches 4 --no-checkpointing --machine b200 --context 32768",
    "web --packing wrapped --tensor 2 --keep host --micro-batches 2 --context 131072 --steps 1",
    "long-mix --sequence 2 --recompute-attention --model llama-70b --offload-optimizer --context 32768",
    "books-and-code --packing spanning --ranks 16 --model qwen3.5-9b --context 65536 --link-between 12 --steps 2",
    "long-mix --ranks 1 --sharding zero1 --steps 1",
    "chat --packing none --batch 4 --model qwen3.5-9b --context 131072 --sharding zero1 --steps 1",
    "chat --packing none --model qwen3.5-9b --sharding zero1 --steps 1 --no-checkpointing --offload-optimizer",
    "long-mix --packing bfd --ranks 16 --pipeline 4 --micro-batches 4 --steps 1 --modes plain,cad",
    *(f"long-mix --ranks 4 --ranks-per-node 3,1 --link-between {speed} --steps 1" for speed in (100, 3, 0.001)),
    *(f"long-mix --recompute-attention --modes cad{more} --steps 1" for more in ("", " --no-checkpointing")),
    "web --tensor 2 --pipeline 2 --ranks 16 --ranks-per-node 4 --micro-batches 4 --context 32768 --steps 1",
    "chat --packing by_length --ranks 4 --context 8192 --modes plain,cad --steps 1",
    "rollouts --ranks 2 --loss chunked --packing zigzag --reserve none --limit 50 --no-checkpointing",
    "long-mix --ranks 64 --model llama-70b --modes plain,cad --packing bfd --steps 1",
    "long-mix --ranks 64 --model llama-70b --modes plain,cad --packing bfd --steps 1 --offload-optimizer",
    "long-mix --modes plain,cad --packing bfd --steps 1 --memory 75 --link-inside 200",
    "long-mix --modes plain,cad --packing bfd --steps 1 --memory 100 --loss whole",
)


def said(question: str) -> dict[str, Any]:
    """The lines, and the JSON with what times nothing here, to seven digits."""
    out, lines = io.StringIO(), io.StringIO()
    words = question.split()
    with redirect_stdout(out), redirect_stderr(lines):
        assert main(["plan", *words, *(() if "--steps" in words else ("--steps", "3")), "--json"]) == 0
    shown = re.sub(r"planned in \d+ ms", "planned in … ms", lines.getvalue())
    shown = re.sub(r"^… .*\n", "", shown, flags=re.MULTILINE)  # what a slow machine is at
    return {"says": shown.splitlines(), "answers": _rounded(json.loads(out.getvalue()))}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items() if name != "planning_ms"}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value


if __name__ == "__main__":
    json.dump({question: said(question) for question in QUESTIONS}, sys.stdout, indent=0, ensure_ascii=False)
