"""Fine-tune a Hugging Face checkpoint on packed documents with DeepSpeed; the "cad" block of the JSON turns CAD on.

    deepspeed --num_gpus 8 examples/finetune_deepspeed.py --deepspeed_config examples/ds_zero3_cad.json \
        --model PATH --data FILES --context 65536 --save OUT

An ordinary DeepSpeed loop, meant to be copied. It begins with the lengths of the documents and the gain to expect, and
ends with a checkpoint that loads anywhere. `--no-cad` takes the block out and changes nothing else: what is printed
last, `losses: [...]`, is what to compare. Without a checkpoint or data: `--tiny`, or random weights of a size
(`--layers 8 --hidden 4096`), and `--synthetic MEDIAN` for documents of random tokens and heavy-tailed lengths.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import time
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import deepspeed
import here  # noqa: F401 - for a checkout that is not installed; not needed in a script of your own
import torch
import torch.distributed as dist
from chunked_loss import ChunkedLoss
from common import say_what_to_expect
from packing import Rows, only_row, pack, synthetic, tokenized
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedModel
from transformers.integrations import HfDeepSpeedConfig

import deepspeed_cad


def main() -> None:
    """Train for `--steps` optimizer steps and print every loss."""
    args = read_arguments()
    config = read_config(args)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    deepspeed.init_distributed()
    torch.manual_seed(args.seed)
    # Kept alive: with ZeRO-3 it makes transformers create the model in shards.
    sharded = HfDeepSpeedConfig(config)
    size = make_config(args)
    documents = make_documents(args, size.get_text_config().vocab_size)
    sample = list(islice(documents, args.sample))
    say_what_to_expect([ids[: args.context] for ids in sample], args.context, size)
    documents = chain(sample, documents)
    model = make_model(args, config, size)
    rows_needed = args.steps * config["gradient_accumulation_steps"]

    world, rank = dist.get_world_size(), dist.get_rank()
    data = None if args.span else Rows(pack(documents, args.context, rows_needed * world))
    engine, _, loader, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config, training_data=data, collate_fn=only_row
    )
    del sharded
    if args.checkpoint and Path(args.checkpoint, "latest").exists():
        engine.load_checkpoint(args.checkpoint)
    if args.span:
        streams = pack(documents, args.context * world, rows_needed)
        loader = span_batches(streams, rank, world, args.zigzag)
    losses = train(engine, loader, args)
    if args.save:
        save(engine, args.save)
    if rank == 0:
        print("losses:", json.dumps(losses), flush=True)
    finish()


def train(engine: Any, loader: Iterable[dict[str, Any]], args: argparse.Namespace) -> list[float]:
    """The loop: `gradient_accumulation_steps` micro-batches for each step. Gives the mean loss of every step; of a run
    that goes on, of those that were missing."""
    accumulation = engine.gradient_accumulation_steps()
    # What was trained before is passed over.
    batches = islice(loader, engine.global_steps * accumulation, None)
    losses = []
    engine.train()
    for step in range(engine.global_steps, args.steps):
        begin = time.perf_counter()
        total = 0.0
        for _ in range(accumulation):
            batch = next(batches)
            batch = {name: x.to(engine.device) if isinstance(x, torch.Tensor) else x for name, x in batch.items()}
            loss = engine(**batch, use_cache=False).loss
            engine.backward(loss)
            engine.step()
            total += loss.detach().float()
        losses.append(mean_over_ranks(total / accumulation))
        report(args, step, losses[-1], time.perf_counter() - begin)
        if args.checkpoint and (step + 1) % (args.every or args.steps) == 0:
            engine.save_checkpoint(args.checkpoint)
    return losses


def span_batches(
    streams: list[dict[str, torch.Tensor]], rank: int, world: int, zigzag: bool
) -> Iterator[dict[str, Any]]:
    """This rank's part of every stream: documents go on across ranks, and so may be longer than `--context`."""
    per_host = int(os.environ.get("LOCAL_WORLD_SIZE", world)) if zigzag else None
    for stream in streams:
        batch = deepspeed_cad.shard_stream(stream, rank, world, zigzag=zigzag, ranks_per_host=per_host)
        # The mean is taken over the targets of all ranks, so that every target weighs the same.
        yield batch | {"num_items_in_batch": int((stream["labels"] != -100).sum()) / world}


def read_config(args: argparse.Namespace) -> dict[str, Any]:
    """The DeepSpeed JSON, with what depends on the machine and the command line."""
    config = json.loads(Path(args.deepspeed_config).read_text())
    if not torch.cuda.is_available():
        config["bf16"] = {"enabled": False}
    if args.no_cad:
        config.pop("cad", None)
    if args.learning_rate:
        config["optimizer"]["params"]["lr"] = args.learning_rate
    return config


def make_config(args: argparse.Namespace) -> Any:
    """The checkpoint's, or that of a Llama of the size asked for."""
    if args.model:
        return AutoConfig.from_pretrained(args.model)
    heads = args.heads or max(args.hidden // 128, 1)
    return LlamaConfig(
        vocab_size=args.vocabulary, hidden_size=args.hidden, intermediate_size=args.hidden * 7 // 2,
        num_hidden_layers=args.layers, num_attention_heads=heads,
        num_key_value_heads=args.kv_heads or max(heads // 4, 1), max_position_embeddings=args.context * 64,
        rope_theta=500000.0, tie_word_embeddings=False,
    )  # fmt: skip


def make_model(args: argparse.Namespace, config: dict[str, Any], size: Any) -> PreTrainedModel:
    """The checkpoint, or random weights."""
    dtype = torch.bfloat16 if config["bf16"]["enabled"] else torch.float32
    options: dict[str, Any] = {"dtype": dtype}
    if args.attention:
        options["attn_implementation"] = args.attention
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(args.model, **options)
    else:
        model = AutoModelForCausalLM.from_config(size, **options)
    ChunkedLoss(model)
    if not args.no_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def make_documents(args: argparse.Namespace, vocabulary: int) -> Iterator[list[int]]:
    """Token ids of the user's documents, or random ones."""
    if args.data:
        return tokenized(args.data, AutoTokenizer.from_pretrained(args.tokenizer or args.model), args.seed)
    return synthetic(args.synthetic, args.sigma, vocabulary, args.seed)


def mean_over_ranks(value: torch.Tensor) -> float:
    """The mean of a number over all ranks."""
    value = value.clone()
    dist.all_reduce(value)
    return float(value) / dist.get_world_size()


def report(args: argparse.Namespace, step: int, loss: float, seconds: float) -> None:
    """Print a step; with CAD on, what it did. `--report FILE` gets the same figures as JSON, one line per step."""
    figures: dict[str, Any] = {"step": step + 1, "loss": loss, "seconds": seconds}
    if torch.cuda.is_available():
        figures["peak_GiB"] = torch.cuda.max_memory_allocated() / 2**30
    session = deepspeed_cad.current_session()
    if session is not None:
        statistics = session.take_statistics("finetune_deepspeed")
        sent = torch.tensor(float(statistics.bytes_sent), device=session.device)
        figures |= statistics.as_events()
        figures["cad/sent_MiB"] = mean_over_ranks(sent) * dist.get_world_size() / 2**20
        figures["load_before"], figures["load"] = statistics.load_before.tolist(), statistics.load.tolist()
    if dist.get_rank() != 0:
        return
    if args.report:
        with open(args.report, "a", encoding="utf-8") as file:
            print(json.dumps(figures), file=file)
    text = f"step {step + 1:4d}  loss {loss:.6f}  {seconds:6.2f} s"
    if session is not None:
        text += (
            f"  attention max/mean {figures['cad/attention_max_over_mean_before']:.2f} -> "
            f"{figures['cad/attention_max_over_mean']:.2f}  {figures['cad/sent_MiB']:.1f} MiB moved"
        )
    print(text, flush=True)


def save(engine: Any, folder: str) -> None:
    """Write a checkpoint that `from_pretrained` loads anywhere, without deepspeed_cad."""
    if engine.zero_optimization_partition_weights():
        state = engine._zero3_consolidated_16bit_state_dict()
    else:
        state = engine.module.state_dict()
    if dist.get_rank() == 0:
        engine.module.save_pretrained(folder, state_dict=state)
    dist.barrier()


def finish() -> None:
    """Leave together. On a CPU, ZeRO-3's threads may abort the interpreter when it takes itself down: skip that."""
    dist.barrier()
    if torch.cuda.is_available():
        dist.destroy_process_group()
    else:
        atexit._run_exitfuncs()
        os._exit(0)


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--deepspeed_config", default=str(Path(__file__).with_name("ds_zero3_cad.json")), help="the DeepSpeed JSON")
    add("--local_rank", type=int, default=-1, help="given by the launcher")
    add("--no-cad", action="store_true", help='take the "cad" block out of the JSON')
    add("--steps", type=int, default=10, help="optimizer steps (default 10)")
    add("--context", type=int, help="tokens of a packed row (default 4096; 1024 with --tiny)")
    add("--span", action="store_true", help="one stream over all ranks: documents may be longer than --context")
    add("--zigzag", action="store_true", help="with --span: documents dealt out evenly, for several hosts")
    add("--learning-rate", type=float, help="instead of the JSON's")
    add("--seed", type=int, default=0)
    add("--save", metavar="FOLDER", help="write the trained checkpoint here")
    add("--checkpoint", metavar="FOLDER", help="leave the state of the run here, and go on from one that is here")
    add("--every", type=int, metavar="N", help="with --checkpoint: every N steps (default: at the end)")
    add("--report", metavar="FILE", help="append the figures of each step as JSON lines")
    model = parser.add_argument_group("model")
    model.add_argument("--model", help="a checkpoint: a folder, or a name on the hub")
    model.add_argument("--attention", help='attention without CAD, such as "flash_attention_2" (default: the model\'s)')
    model.add_argument("--no-checkpointing", action="store_true", help="keep all activations")
    model.add_argument("--tiny", action="store_true", help="a tiny model of random weights")
    for name, default in (("layers", 8), ("hidden", 1024), ("heads", 0), ("kv-heads", 0), ("vocabulary", 32000)):
        model.add_argument(f"--{name}", type=int, default=default, help="size of a model of random weights")
    data = parser.add_argument_group("data")
    data.add_argument("--data", nargs="+", help='text files, .jsonl files with a "text" field, or folders of them')
    data.add_argument("--tokenizer", help="its tokenizer (default: the model's)")
    data.add_argument("--synthetic", type=int, metavar="MEDIAN", help="random documents of this median length")
    data.add_argument("--sample", type=int, default=500, help="documents whose lengths are shown first (default 500)")
    data.add_argument("--sigma", type=float, default=1.5, help="how heavy the tail of --synthetic is (default 1.5)")
    args = parser.parse_args()
    if args.tiny:
        args.layers, args.hidden, args.heads, args.kv_heads, args.vocabulary = 2, 64, 8, 4, 512
    args.context = args.context or (1024 if args.tiny else 4096)
    if args.span and args.no_cad:
        parser.error("--span needs CAD: without it a rank cannot read the part of a document that lies on another")
    if args.zigzag and not args.span:
        parser.error("--zigzag deals out documents that span ranks: give --span too")
    if args.data and not (args.model or args.tokenizer):
        parser.error("--data needs a tokenizer: --model or --tokenizer")
    if not args.data and not args.synthetic:
        args.synthetic = max(args.context // 16, 1)
    return args


if __name__ == "__main__":
    main()
