"""Train on one document of a million tokens, spread over the GPUs of one host.

    deepspeed --num_gpus 4 examples/million_tokens.py --model PATH --data FILES --tokens 1048576 --save OUT

A checkpoint comes in and a checkpoint goes out. Each rank holds a run of the document: the same number of tokens, with
their positions in the whole. A rank whose positions begin above 0 goes on with the document of the rank before, and
that is all that CAD needs to know. Around it is what keeps a long row small elsewhere: DeepSpeed ZeRO-3 with the
optimizer on the host, full activation checkpointing with checkpoints on the host, the tiled MLP and loss of DeepSpeed's
ALST, and `"keep": "host"` for what attention keeps. docs/million-tokens.md says what each of them saves.

Without a checkpoint or data: `--tiny` for a CPU, or `--layers N` for random weights of an 8B Llama's size.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, islice
from pathlib import Path
from typing import Any

import deepspeed
import here  # noqa: F401 - for a checkout that is not installed; not needed in a script of your own
import torch
import torch.distributed as dist
from finetune_deepspeed import finish, save
from packing import tokenized
from tiling import TiledLoss, tile_mlps
from torch.autograd.graph import save_on_cpu
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from transformers.integrations import HfDeepSpeedConfig

import deepspeed_cad

ON_GPU = torch.cuda.is_available()


def main() -> None:
    """Train for `--steps` documents and print every loss."""
    args = read_arguments()
    config = json.loads(Path(args.deepspeed_config).read_text())
    if config.get("gradient_accumulation_steps", 1) != 1:
        raise SystemExit("the tiled loss makes gradients of the head in the forward: no gradient accumulation")
    if not ON_GPU:
        config["bf16"] = {"enabled": False}
        config["zero_optimization"]["offload_optimizer"]["pin_memory"] = False
    else:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    deepspeed.init_distributed()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if args.tokens % ranks:
        raise SystemExit(f"--tokens {args.tokens}: ranks hold equally many tokens, and {ranks} ranks do not divide it")
    # Kept alive: with it transformers creates the model in shards.
    sharded = HfDeepSpeedConfig(config)
    model = make_model(args, config)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    del sharded
    engine.train()
    losses = []
    for step, ids in enumerate(islice(documents(args, model.config.vocab_size), args.steps)):
        begin = time.perf_counter()
        batch = own_run(ids, rank, ranks)
        losses.append(train_one(engine, {name: value.to(engine.device) for name, value in batch.items()}, args))
        report(step, losses[-1], args.tokens, time.perf_counter() - begin)
    if args.save:
        save(engine, args.save)
        if rank == 0 and args.model and (Path(args.model) / "tokenizer_config.json").is_file():
            AutoTokenizer.from_pretrained(args.model).save_pretrained(args.save)
    if rank == 0:
        print("losses:", json.dumps(losses), flush=True)
    finish()


def own_run(ids: torch.Tensor, rank: int, ranks: int) -> dict[str, torch.Tensor]:
    """This rank's part of a document, [1, tokens / ranks] each.

    `deepspeed_cad.shard_stream` does the same for a row of several documents.
    """
    each = len(ids) // ranks
    own = slice(rank * each, (rank + 1) * each)
    # The target of a token is the one behind it, which may lie on the next rank.
    targets = torch.cat([ids[1:], ids.new_full((1,), -100)])
    return {
        "input_ids": ids[None, own],
        "position_ids": torch.arange(len(ids))[None, own],
        "labels": targets[None, own],
        "shift_labels": targets[None, own],
    }


def train_one(engine: Any, batch: dict[str, torch.Tensor], args: argparse.Namespace) -> float:
    """One optimizer step on one document; gives the mean loss of its tokens."""
    # ZeRO takes the mean of the ranks' gradients, so each rank divides by its share of all targets.
    items = (args.tokens - 1) / dist.get_world_size()
    with checkpoints(args):
        loss = engine(**batch, num_items_in_batch=items, use_cache=False).loss
    engine.backward(loss)
    engine.step()
    total = loss.detach().float()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def checkpoints(args: argparse.Namespace) -> AbstractContextManager[Any]:
    """Where inputs of layers wait for the backward."""
    return save_on_cpu(pin_memory=ON_GPU) if args.checkpoints == "host" else nullcontext()


def make_model(args: argparse.Namespace, config: dict[str, Any]) -> Any:
    """The checkpoint, or random weights; with tiles and activation checkpointing."""
    dtype = torch.bfloat16 if config["bf16"]["enabled"] else torch.float32
    if args.model:
        size = AutoConfig.from_pretrained(args.model)
    elif args.hybrid:
        size = AutoConfig.for_model(
            "qwen3_5_text", vocab_size=512 if args.tiny else 248320, hidden_size=64 if args.tiny else 4096,
            intermediate_size=128 if args.tiny else 12288, num_hidden_layers=args.layers,
            num_attention_heads=4 if args.tiny else 16, num_key_value_heads=2 if args.tiny else 4,
            head_dim=16 if args.tiny else 256, linear_num_key_heads=4 if args.tiny else 16,
            linear_num_value_heads=8 if args.tiny else 32, linear_key_head_dim=16 if args.tiny else 128,
            linear_value_head_dim=16 if args.tiny else 128, max_position_embeddings=args.tokens,
            layer_types=["full_attention" if n % 4 == 3 else "linear_attention" for n in range(args.layers)],
            tie_word_embeddings=False,
        )  # fmt: skip
    else:
        size = LlamaConfig(
            vocab_size=512 if args.tiny else 128256, hidden_size=64 if args.tiny else 4096,
            intermediate_size=128 if args.tiny else 14336, num_hidden_layers=args.layers,
            num_attention_heads=8 if args.tiny else 32, num_key_value_heads=4 if args.tiny else 8,
            rope_theta=500000.0, max_position_embeddings=args.tokens, tie_word_embeddings=False,
        )  # fmt: skip
    if args.rope_theta:
        set_rope_theta(size, args.rope_theta)
    if args.model:
        if dist.get_rank() == 0 and size.max_position_embeddings < args.tokens and not args.rope_theta:
            print(
                f"{args.model} was made for {size.max_position_embeddings} positions. Longer documents need other "
                "rotary embeddings: a configuration with rope scaling, or --rope-theta",
                flush=True,
            )
        size.max_position_embeddings = max(size.max_position_embeddings, args.tokens)
        model = AutoModelForCausalLM.from_pretrained(args.model, config=size, dtype=dtype)
    else:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(size, dtype=dtype)
    tile_mlps(model, args.tile)
    TiledLoss(model, args.tile)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def set_rope_theta(size: Any, theta: float) -> None:
    """Change the base of the rotary embeddings, wherever this version of transformers keeps it."""
    if isinstance(getattr(size, "rope_parameters", None), dict):
        size.rope_parameters["rope_theta"] = theta
    else:
        size.rope_theta = theta


def documents(args: argparse.Namespace, vocabulary: int) -> Iterator[torch.Tensor]:
    """Documents of exactly `--tokens` tokens: texts laid end to end, or random ones."""
    if not args.data:
        generator = torch.Generator().manual_seed(0)
        while True:
            yield torch.randint(0, vocabulary, (args.tokens,), generator=generator)
    tokens = chain.from_iterable(tokenized(args.data, AutoTokenizer.from_pretrained(args.model)))
    while True:
        yield torch.tensor(list(islice(tokens, args.tokens)))


def report(step: int, loss: float, tokens: int, seconds: float) -> None:
    """Print a step, on rank 0."""
    if dist.get_rank() != 0:
        return
    text = f"step {step + 1:3d}  loss {loss:.6f}  {seconds:.2f} s  {tokens / seconds:.0f} tokens/s"
    session = deepspeed_cad.current_session()
    if session is not None:
        text += f"  attention max/mean {session.take_statistics('million_tokens').imbalance:.2f}"
    if ON_GPU:
        text += f"  at most {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB"
    print(text, flush=True)


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--deepspeed_config", default=str(Path(__file__).with_name("ds_million_cad.json")), help="the DeepSpeed JSON")
    add("--local_rank", type=int, default=-1, help="given by the launcher")
    add("--tokens", type=int, help="tokens of the document (default 1048576; 512 with --tiny)")
    add("--model", help="a checkpoint: a folder, or a name on the hub")
    add("--data", nargs="+", help='text files, .jsonl files with a "text" field, or folders of them')
    add("--tiny", action="store_true", help="a tiny model of random weights, for a CPU")
    add("--layers", type=int, help="instead of --model: random weights, layers of an 8B Llama's size")
    add("--hybrid", action="store_true", help="with these: a Qwen3.5, delta nets and attention, in place of a Llama")
    add("--steps", type=int, default=2, help="documents to train on (default 2)")
    add("--tile", type=int, help="tokens of a tile of MLPs and loss (default 4096; 100 with --tiny)")
    add("--checkpoints", choices=("host", "device"), default="host", help="where inputs of layers wait for backward")
    add("--rope-theta", type=float, help="base of the rotary embeddings (default: the checkpoint's)")
    add("--save", metavar="FOLDER", help="write the trained checkpoint here")
    args = parser.parse_args()
    if not (args.model or args.layers or args.tiny):
        parser.error("--model, or random weights: --layers N, or --tiny")
    if args.data and not args.model:
        parser.error("--data needs a tokenizer: --model")
    args.layers = args.layers or (4 if args.hybrid else 2)
    args.tokens = args.tokens or (512 if args.tiny else 1 << 20)
    args.tile = args.tile or (100 if args.tiny else 4096)
    return args


if __name__ == "__main__":
    main()
