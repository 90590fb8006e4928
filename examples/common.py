"""What the examples for Hugging Face trainers share: command line, documents, model, and what to expect of CAD.

In: a checkpoint by path or hub id and text files, or `--tiny` for random ones. Out: a model, documents as token ids,
and on rank 0 a histogram of their lengths with the gain that CAD should bring.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from packing import synthetic, tokenized
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

try:
    import deepspeed_cad  # noqa: F401 - a checkout that is not installed is put on the path
except ImportError:
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from deepspeed_cad.cost import PAIRS
from deepspeed_cad.planner.outlook import ModelShape, foresee, pack

RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
ON_GPU = torch.cuda.is_available()
DTYPE = torch.bfloat16 if ON_GPU else torch.float32


def read_arguments(description: str) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", help="a checkpoint: a folder, or a name on the hub")
    parser.add_argument("--data", nargs="+", help='text files, .jsonl files with a "text" field, or folders of them')
    parser.add_argument("--tiny", action="store_true", help="random weights and documents instead: for a CPU")
    parser.add_argument("--context", type=int, help="tokens of a packed row (default 131072; 512 with --tiny)")
    parser.add_argument("--documents", type=int, help="how many to read (default 2000; 400 with --tiny)")
    parser.add_argument("--steps", type=int, default=10, help="optimizer steps (default 10)")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches of a step (default 1)")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--save", metavar="FOLDER", help="write the trained checkpoint here")
    args = parser.parse_args()
    if not args.tiny and not (args.model and args.data):
        parser.error("--model and --data, or --tiny")
    args.context = args.context or (512 if args.tiny else 131072)
    args.documents = args.documents or (400 if args.tiny else 2000)
    return args


def get_model(args: argparse.Namespace) -> Any:
    """The checkpoint, or a Llama of random weights."""
    if not args.tiny:
        return AutoModelForCausalLM.from_pretrained(args.model, dtype=DTYPE)
    torch.manual_seed(0)
    size = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=8192, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(size).to(DTYPE)


def get_tokenizer(args: argparse.Namespace) -> Any:
    """The checkpoint's, or one of 510 made-up words."""
    if not args.tiny:
        return AutoTokenizer.from_pretrained(args.model)
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(510)} | {"<pad>": 510, "</s>": 511}
    core = Tokenizer(models.WordLevel(words, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="</s>", unk_token="w0")


def get_documents(args: argparse.Namespace) -> list[list[int]]:
    """Token ids of documents, none longer than a row."""
    if args.tiny:
        found = synthetic(args.context // 12, 1.2, 510)
    else:
        found = tokenized(args.data, get_tokenizer(args))
    return [ids[: args.context] for ids in islice(found, args.documents)]


def say_what_to_expect(documents: Sequence[Sequence[int]], context: int, model: Any) -> None:
    """Print the lengths and what balance is worth here; the same as `deepspeed-cad plan`."""
    if RANK != 0:
        return
    lengths = [len(ids) for ids in documents]
    print(f"{len(lengths)} documents, {sum(lengths)} tokens")
    edges = [0, *(2**k for k in range(3, 31))]
    counts, _ = np.histogram(lengths, edges)
    for low, high, count in zip(edges, edges[1:], counts):
        if count:
            print(f"  {low:>8} to {high - 1:<8} {'#' * max(1, round(50 * count / counts.max()))} {count}")
    config = model.config
    heads = config.num_attention_heads
    shape = ModelShape(
        config.num_hidden_layers, config.hidden_size, config.intermediate_size, config.vocab_size, heads,
        config.num_key_value_heads, getattr(config, "head_dim", None) or config.hidden_size // heads,
    )  # fmt: skip
    steps = [foresee(layout, shape, PAIRS, 0.05) for layout in islice(pack(lengths, WORLD, context, False), 32)]
    if WORLD > 1 and steps:
        before, after, gain = (
            np.mean([getattr(step, name) for step in steps]) for name in ("imbalance_before", "imbalance", "gain")
        )
        print(
            f"{WORLD} ranks of {context} tokens: attention max/mean {before:.2f} without CAD, {after:.2f} with it; "
            f"steps {gain:.2f} times faster if transfers are hidden",
            flush=True,
        )


def finish() -> None:
    """Leave together."""
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
