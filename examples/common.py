"""What the examples for Hugging Face trainers share: command line, documents, model, and what to expect of CAD.

In: a checkpoint by path or hub id and text files; or random ones: `--tiny` for a CPU, `--layers` and `--synthetic` for
GPUs. Out: a model, documents as token ids, and on rank 0 a histogram of their lengths with the gain that CAD should
bring, before anything is loaded; at the end the merged checkpoint.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from itertools import islice
from statistics import median
from typing import Any

import numpy as np
import torch
from chunked_loss import ChunkedLoss
from packing import synthetic, tokenized
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedTokenizerFast,
    TrainerCallback,
)

try:
    import deepspeed_cad  # noqa: F401 - a checkout that is not installed is put on the path
except ImportError:
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from deepspeed_cad.cost import PAIRS
from deepspeed_cad.forecast.packing import pack
from deepspeed_cad.planner import HeadShape, PlanInput, make_plan

RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
ON_GPU = torch.cuda.is_available()
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
LOADED = torch.float32 if os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true" else DTYPE
"""Accelerate's FSDP keeps fp32 weights; loaded so, only rank 0 needs memory for them."""


def read_arguments(description: str) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", help="a checkpoint: a folder, or a name on the hub")
    parser.add_argument("--data", nargs="+", help='text files, .jsonl files with a "text" field, or folders of them')
    parser.add_argument("--tiny", action="store_true", help="random weights and documents instead: for a CPU")
    parser.add_argument("--layers", type=int, help="instead of --model: random weights, layers of an 8B Llama's size")
    parser.add_argument("--vocabulary", type=int, default=32000, help="of that model (default 32000)")
    parser.add_argument("--synthetic", type=int, metavar="MEDIAN", help="instead of --data: log-normal lengths")
    parser.add_argument("--sigma", type=float, default=1.5, help="how heavy the tail of --synthetic is (default 1.5)")
    parser.add_argument("--attention", help="attention without CAD (default: the model's); packed rows need varlen")
    parser.add_argument("--context", type=int, help="tokens of a packed row (default 131072; 512 with --tiny)")
    parser.add_argument("--documents", type=int, help="how many to read (default 2000; 400 with --tiny)")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps (default 10)")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches of a step (default 1)")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--save", metavar="FOLDER", help="write the trained checkpoint here")
    args = parser.parse_args()
    if not args.tiny and not ((args.model or args.layers) and (args.data or args.synthetic)):
        parser.error("--model and --data, or --tiny; random: --layers in place of --model, --synthetic of --data")
    if args.data and not args.model:
        parser.error("--data needs a tokenizer: --model")
    args.context = args.context or (512 if args.tiny else 131072)
    args.documents = args.documents or (400 if args.tiny else 2000)
    return args


def trainer_settings(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """What the examples give to TrainingArguments and to TRL's, which extend them: full activation checkpointing, bf16
    on GPUs, and no files but the checkpoint at the end."""
    return {
        "output_dir": folder,
        "max_steps": args.steps,
        "gradient_accumulation_steps": args.accumulation,
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "learning_rate": args.learning_rate,
        "bf16": ON_GPU,
        "use_cpu": not ON_GPU,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }


def get_config(args: argparse.Namespace) -> Any:
    """The checkpoint's, or that of a Llama."""
    if args.model:
        return AutoConfig.from_pretrained(args.model)
    sizes = {
        "vocab_size": args.vocabulary, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_hidden_layers": args.layers, "num_key_value_heads": 8, "max_position_embeddings": 1 << 20,
    }  # fmt: skip
    if args.tiny:
        sizes |= {
            "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 8, "num_key_value_heads": 4,
        }  # fmt: skip
    return LlamaConfig(**sizes, use_cache=False)


def get_model(args: argparse.Namespace) -> Any:
    """The checkpoint, or a Llama of random weights."""
    options = {"attn_implementation": args.attention} if args.attention else {}
    if args.model:
        return AutoModelForCausalLM.from_pretrained(args.model, dtype=LOADED, **options)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(get_config(args), **options).to(LOADED)


def get_tokenizer(args: argparse.Namespace) -> Any:
    """The checkpoint's, or one of 510 made-up words."""
    if args.model:
        return AutoTokenizer.from_pretrained(args.model)
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(510)} | {"<pad>": 510, "</s>": 511}
    core = Tokenizer(models.WordLevel(words, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="</s>", unk_token="w0")


def get_documents(args: argparse.Namespace) -> list[list[int]]:
    """Token ids of documents, none longer than a row."""
    if args.data:
        found = tokenized(args.data, get_tokenizer(args))
    else:
        median_tokens, sigma = (args.synthetic, args.sigma) if args.synthetic else (args.context // 12, 1.2)
        found = synthetic(median_tokens, sigma, min(get_config(args).get_text_config().vocab_size, 32000) - 2)
    return [ids[: args.context] for ids in islice(found, args.documents)]


def say_what_to_expect(documents: Sequence[Sequence[int]], context: int, config: Any) -> None:
    """Print the lengths and how even attention is here; `deepspeed-cad plan` says what that is worth."""
    if RANK != 0:
        return
    lengths = [len(ids) for ids in documents]
    print(f"{len(lengths)} documents, {sum(lengths)} tokens")
    edges = [0, *(2**k for k in range(3, 31))]
    counts, _ = np.histogram(lengths, edges)
    for low, high, count in zip(edges, edges[1:], counts):
        if count:
            print(f"  {low:>8} to {high - 1:<8} {'#' * max(1, round(50 * count / counts.max()))} {count}")
    config = config.get_text_config()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = HeadShape(config.num_attention_heads, config.num_key_value_heads, size, size, 2)
    steps = islice(pack(lengths, WORLD, context, False), 32)
    plans = [make_plan(PlanInput(layout.tick(), shape, PAIRS)) for layout in steps]
    if WORLD > 1 and plans:
        before, after = (np.mean([getattr(plan, name) for plan in plans]) for name in ("imbalance_before", "imbalance"))
        print(
            f"{WORLD} ranks of {context} tokens: attention max/mean {before:.2f} without CAD, {after:.2f} with it",
            flush=True,
        )


class StepTimes(TrainerCallback):
    """Prints loss, seconds and tokens/s of every step on rank 0, and the losses and the median speed at the end.

    The loss is the mean over all targets of all ranks in fp32: what the Trainer logs has the precision of bf16 under
    FSDP2.
    """

    def __init__(self, loss: ChunkedLoss, tokens: int) -> None:
        self.loss, self.tokens = loss, tokens
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.begin = 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """See TrainerCallback."""
        self.begin = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """See TrainerCallback."""
        total, count = mean_over_ranks(self.loss.take()).tolist()  # also waits for the GPUs
        now = time.perf_counter()
        self.losses.append(total / max(count, 1))
        self.seconds.append(now - self.begin)
        self.begin = now
        if RANK == 0:
            speed = f"{self.seconds[-1]:.3f} s  {self.tokens / self.seconds[-1]:.0f} tokens/s"
            print(f"step {len(self.losses)}  loss {self.losses[-1]:.6f}  {speed}", flush=True)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """See TrainerCallback."""
        if RANK == 0:
            kept = self.seconds[2:] or self.seconds
            middle = median(kept)
            memory = torch.cuda.max_memory_allocated() / 2**30 if ON_GPU else 0.0
            print("losses:", [round(loss, 6) for loss in self.losses])
            print(
                f"median over {len(kept)} steps: {middle:.3f} s, {self.tokens / middle:.0f} tokens/s per rank; "
                f"at most {memory:.1f} GiB",
                flush=True,
            )


def mean_over_ranks(value: torch.Tensor) -> torch.Tensor:
    """The mean of a tensor over all ranks."""
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(value)
        value = value / WORLD
    return value


def save(accelerator: Any, model: Any, args: argparse.Namespace) -> None:
    """Write the merged checkpoint, whatever the model is wrapped in; called by all ranks."""
    state = accelerator.get_state_dict(model)
    if accelerator.is_main_process:
        weights = {name: value.to(DTYPE) for name, value in state.items()}
        accelerator.unwrap_model(model).save_pretrained(args.save, state_dict=weights)
        if args.model:
            get_tokenizer(args).save_pretrained(args.save)


def finish() -> None:
    """Leave together."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
