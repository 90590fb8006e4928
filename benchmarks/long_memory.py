"""What each byte of memory is for in training one long document; makes the tables of docs/million-tokens.md.

    python benchmarks/long_memory.py --tokens 1048576 --ranks 4
    python benchmarks/long_memory.py --page

Arithmetic, no run. In: the shape of a model (default: Llama-3-8B), tokens, ranks and what is turned on. Out: bytes per
rank, on the GPU and on the host. The model is a Llama of transformers in bf16 under full activation checkpointing,
ZeRO-3 with the optimizer on the host. One unit is what the hidden states of this rank's tokens take: T · E · 2 bytes.
`MEASURED` has the peaks of training steps that this arithmetic is held against.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from deepspeed_cad.forecast.setting import ModelShape

GiB = 2**30
LIBRARIES = 2 * GiB
"""CUDA, NCCL and kernels: an estimate, not measured."""
BUCKETS = int(5e8) * 2
"""DeepSpeed's reduce bucket: 5e8 gradients in bf16."""
LIVE = int(1e9) * 2
"""Weights that ZeRO-3 has gathered at a time: `stage3_max_live_parameters`, in bf16."""
LOGIT = 10
"""Bytes of one logit: bf16, fp32, and its gradient in fp32."""
NORM = 4
"""Units that a RMSNorm of transformers keeps until backward: its input in fp32 (2), normalised (1), its output (1)."""
NORM_BACKWARD = 6
"""Units in fp32 while the backward of such a norm runs."""


@dataclass(frozen=True)
class Setting:
    """A document on some ranks, and what is turned on."""

    tokens: int
    ranks: int
    tile: int = 8192
    """Tokens of a tile of MLPs and loss; 0: neither is tiled."""
    keep: str = "host"
    checkpoints: str = "host"
    exchange: bool = True
    """Whether CAD's landing areas and what servers keep are counted; False for Ulysses."""


class Part(NamedTuple):
    """What some memory is for."""

    name: str
    formula: str
    device: float
    """Bytes per rank."""
    host: float
    always: bool = True
    """There in every phase, not at one moment of a layer's backward."""


def all_parameters(shape: ModelShape) -> int:
    """Weights of a model: its layers, embedding and head."""
    return shape.layers * shape.layer_parameters + 2 * shape.hidden * shape.vocabulary


def parts(shape: ModelShape, setting: Setting) -> list[Part]:
    """Memory of one rank."""
    own = setting.tokens / setting.ranks
    unit = own * shape.hidden * 2
    p, n, layers = all_parameters(shape), setting.ranks, shape.layers
    away = 1 - 1 / n
    q, kv = own * shape.heads * shape.head_dim * 2, 2 * own * shape.kv_heads * shape.head_dim * 2
    lse = own * shape.heads * 4
    kept = layers * (q + lse) * (1 + away) if setting.exchange else 0.0
    parked, stored = setting.keep == "host", setting.checkpoints == "host"
    # At the worst moment of a backward only the layer that runs has its own on the device: the next comes back later.
    here = kept / layers if parked else kept
    # What plans of one document over 2, 4 and 8 ranks need (results/spanning.md): 0.6 to 1.1 times as much.
    landing = 1.25 * away * (3 * q + 2 * kv) if setting.exchange else 0.0
    found = [
        Part("weights", "2 P / N", 2 * p / n, 0),
        Part("weights gathered, gradients on their way", "DeepSpeed's defaults", LIVE + BUCKETS, 0),
        Part("gradients, fp32 weights, two moments of Adam", "16 P / N", 0, 16 * p / n),
        Part(
            "checkpoints: the input of each layer",
            "L · T · E · 2",
            unit * (1 if stored else layers),
            unit * layers if stored else 0,
        ),
        Part(
            "what attention keeps at most: O and LSE, at home and where served",
            "L · T · H · (2 V + 4) · (2 − 1/N)",
            here,
            kept if parked else 0,
        ),
        Part("landing areas of the exchange", "1.25 · (1 − 1/N) · T · (3 H + 4 K) · D · 2", landing, 0),
        Part("one layer in its backward", _layer_formula(setting), layer_peak(shape, setting), 0, False),
        Part("logits and their gradients", f"tile · vocabulary · {LOGIT}", loss_peak(shape, setting), 0, False),
        Part("CUDA, NCCL, kernels", "estimate", LIBRARIES, 0),
    ]
    return [part for part in found if part.device or part.host]


def _layer_formula(setting: Setting) -> str:
    return "17.5 T · E · 2" if setting.tile else "10.5 T · E · 2 + 6 T · F · 2"


def layer_peak(shape: ModelShape, setting: Setting) -> float:
    """Bytes while one checkpointed layer runs backward, besides its own input."""
    own = setting.tokens / setting.ranks
    unit = own * shape.hidden * 2
    heads = shape.heads * shape.head_dim / shape.hidden
    groups = 2 * shape.kv_heads * shape.head_dim / shape.hidden
    # Norms of both halves, Q, K, V, and the gradient of the residual stream; O, where what is kept does not count it.
    held = (2 * NORM + heads + groups + (0 if setting.exchange else heads) + 1) * unit
    rows = min(setting.tile or own, own)
    # Six tensors as wide as the MLP: two or three of the forward, and gradients of them.
    mlp = 6 * rows * shape.intermediate * 2
    if not setting.tile:
        return held + mlp
    # Gradients of a tiled MLP's input and output are whole; then the norm before it.
    return held + max(2 * unit + mlp, (1 + NORM_BACKWARD) * unit)


def loss_peak(shape: ModelShape, setting: Setting) -> float:
    """Bytes while the loss is computed: the last norm, and logits."""
    own = setting.tokens / setting.ranks
    rows = min(setting.tile or own, own)
    head = shape.vocabulary * shape.hidden * 2
    return (NORM + 1) * own * shape.hidden * 2 + rows * shape.vocabulary * LOGIT + 2 * head


def totals(shape: ModelShape, setting: Setting) -> tuple[float, float]:
    """Bytes of one rank on its GPU at the worst moment, and on the host."""
    found = parts(shape, setting)
    peak = max(part.device for part in found if not part.always)
    return sum(part.device for part in found if part.always) + peak, sum(part.host for part in found)


# Held against measurements


RESULTS = Path(__file__).parent / "results"


class Measured(NamedTuple):
    """A training step of benchmarks/train_step.py: nothing tiled but the loss (4096 rows), the optimizer sharded."""

    file: str
    tokens: int
    """That ranks share at a time."""
    ranks: int
    layers: int
    peak_GiB: float

    @staticmethod
    def read(file: str, tokens: int) -> Measured:
        """Ulysses of a file in results/."""
        found = json.loads((RESULTS / file).read_text())
        return Measured(
            file, tokens, found["machine"]["ranks"], found["settings"]["layers"], found["modes"]["ulysses"]["peak_GiB"]
        )


MEASURED = (
    Measured.read("h200x2/train_million_256k_2r_fcc832a.json", 524288),
    Measured.read("h200x4/train_span_64k_4r_2026-11-21.json", 262144),
    Measured.read("h200x4/train_prolong_64k_4r_2026-11-21.json", 65536),
)
"""Ulysses on H200s: layers of 8B size, vocabulary 32000, checkpoints on the device."""


def foreseen(run: Measured) -> float:
    """GiB of such a step by the same arithmetic."""
    shape = replace(ModelShape(), layers=run.layers, vocabulary=32000)
    setting = Setting(run.tokens, run.ranks, 0, "device", "device", exchange=False)
    unit = run.tokens / run.ranks * shape.hidden * 2
    weights = all_parameters(shape) * (4 + 12 / run.ranks)
    return (weights + run.layers * unit + layer_peak(shape, setting)) / GiB


# Tables

STEPS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("checkpointing", {"tile": 0, "keep": "device", "checkpoints": "device"}),
    ("and tiles", {"keep": "device", "checkpoints": "device"}),
    ('and `"keep": "host"`', {"keep": "host", "checkpoints": "device"}),
    ("and checkpoints on the host", {"keep": "host", "checkpoints": "host"}),
)
"""What is turned on, one after the other."""
LENGTHS = (16384, 32768, 65536, 131072, 196608, 262144, 393216)
"""Tokens of one rank."""


def bytes_table(shape: ModelShape, settings: list[Setting]) -> str:
    """What each byte is for; settings side by side."""
    heads = [f"{one.tokens:,} tokens on {one.ranks}: GPU" for one in settings]
    lines = [["what", "bytes per rank", *(cell for head in heads for cell in (head, "host"))]]
    for rows in zip(*(parts(shape, one) for one in settings)):
        cells = [_gib(number) for part in rows for number in (part.device, part.host)]
        name = rows[0].name if rows[0].always else f"{rows[0].name} *"
        lines.append([name, rows[0].formula, *cells])
    both = [totals(shape, one) for one in settings]
    lines.append(["at the worst moment", "", *(f"**{_gib(number)}**" for one in both for number in one)])
    return _markdown(lines)


def steps_table(shape: ModelShape, ranks: int) -> str:
    """GPU memory by tokens of a rank and what is turned on; host memory of all ranks."""
    lines = [["tokens per rank", *(name for name, _ in STEPS), "host, all ranks"]]
    for own in LENGTHS:
        settings = [Setting(own * ranks, ranks, **changes) for _, changes in STEPS]
        found = [totals(shape, one) for one in settings]
        lines.append([f"{own:,}", *(_gib(device) for device, _ in found), _gib(found[-1][1] * ranks)])
    return _markdown(lines)


def measured_table() -> str:
    """Measured peaks beside the arithmetic."""
    lines = [["tokens", "GPUs", "layers", "measured GiB", "by these formulae", "÷", "file in benchmarks/results"]]
    for run in MEASURED:
        told = foreseen(run)
        lines.append(
            [f"{run.tokens:,}", str(run.ranks), str(run.layers), f"{run.peak_GiB:.1f}", f"{told:.1f}",
             f"{told / run.peak_GiB:.2f}", f"`{run.file}`"]
        )  # fmt: skip
    return _markdown(lines)


def _gib(number: float) -> str:
    return f"{number / GiB:.1f}" if number else ""


def _markdown(lines: list[list[str]]) -> str:
    rows = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


PAGE = (
    lambda: bytes_table(ModelShape(), [Setting(1 << 20, 4), Setting(1 << 19, 2)]),
    lambda: measured_table(),
    lambda: steps_table(ModelShape(), 4),
)
"""The tables of docs/million-tokens.md, in their order."""


def main() -> None:
    """Print tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--page", action="store_true", help="the tables of docs/million-tokens.md")
    add("--tokens", type=int, default=1 << 20)
    add("--ranks", type=int, default=4)
    add("--tile", type=int, default=8192, help="tokens of a tile of MLPs and loss; 0: none")
    add("--keep", choices=("device", "host"), default="host")
    add("--checkpoints", choices=("device", "host"), default="host")
    sizes = {name: value for name, value in vars(ModelShape()).items() if isinstance(value, int)}
    for name, value in sizes.items():
        add(f"--{name.replace('_', '-')}", type=int, default=value)
    options = parser.parse_args()
    if options.page:
        sys.stdout.write("\n".join(table() for table in PAGE))
        return
    shape = ModelShape(**{name: getattr(options, name) for name in sizes})
    setting = Setting(options.tokens, options.ranks, options.tile, options.keep, options.checkpoints)
    sys.stdout.write(bytes_table(shape, [setting]))


if __name__ == "__main__":
    main()
