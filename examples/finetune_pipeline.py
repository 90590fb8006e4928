"""Fine-tune a Hugging Face checkpoint on packed documents as a DeepSpeed pipeline; the "cad" block turns CAD on.

    deepspeed --num_gpus 8 examples/finetune_pipeline.py --deepspeed_config examples/ds_pipeline_cad.json \
        --stages 4 --model PATH --data FILES --context 65536 --save OUT

`deepspeed_cad.to_pipeline` cuts the checkpoint into stages, each of which loads its own part; `to_hf` writes a
checkpoint that loads anywhere. `--no-cad` takes the block out and changes nothing else: what is printed last,
`losses: [...]`, is what to compare. Without a checkpoint or data: `--tiny` for a CPU, or random weights of a size
(`--layers 8 --hidden 4096`), and `--synthetic MEDIAN` for documents of random tokens and heavy-tailed lengths.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import deepspeed
import here  # noqa: F401 - for a checkout that is not installed; not needed in a script of your own
import torch
import torch.distributed as dist
from packing import pack, synthetic, tokenized
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

import deepspeed_cad


def main() -> None:
    """Train for `--steps` optimizer steps and print every loss."""
    args = read_arguments()
    config = json.loads(Path(args.deepspeed_config).read_text())
    if not torch.cuda.is_available():
        config["bf16"] = {"enabled": False}
    else:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if args.no_cad:
        config.pop("cad", None)
    if args.micro_batches:
        config["gradient_accumulation_steps"] = args.micro_batches
    deepspeed.init_distributed()
    torch.manual_seed(args.seed)
    module = deepspeed_cad.to_pipeline(args.model or random_model(args, config), args.stages)
    engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=config)
    batches = make_batches(args, config["gradient_accumulation_steps"], engine)
    losses = []
    for step in range(args.steps):
        begin = time.perf_counter()
        losses.append(float(engine.train_batch(batches)))
        if dist.get_rank() == 0:
            print(f"step {step + 1:4d}  loss {losses[-1]:.6f}  {time.perf_counter() - begin:6.2f} s", flush=True)
    if args.save:
        deepspeed_cad.to_hf(engine, args.save)
    if dist.get_rank() == 0:
        print("losses:", json.dumps(losses), flush=True)
    dist.barrier()
    if not torch.cuda.is_available():
        os._exit(0)  # DeepSpeed's threads may abort the interpreter when it takes itself down on a CPU


def make_batches(args: argparse.Namespace, micro_batches: int, engine: Any) -> Iterator[Any]:
    """What DeepSpeed's pipelines read: ((input_ids, position_ids), labels), the same on all stages of a replica."""
    replicas, replica = engine.grid.get_data_parallel_world_size(), engine.grid.get_data_parallel_id()
    if args.data:
        documents = tokenized(args.data, AutoTokenizer.from_pretrained(args.tokenizer or args.model), args.seed)
    else:
        documents = synthetic(args.synthetic, 1.5, args.vocabulary, args.seed)
    rows = pack(documents, args.context, args.steps * micro_batches * replicas)
    for row in islice(rows, replica, None, replicas):
        shape = (1, -1)
        ids, positions, labels = (row[name].reshape(shape) for name in ("input_ids", "position_ids", "labels"))
        yield (ids, positions), labels


def random_model(args: argparse.Namespace, config: dict[str, Any]) -> Any:
    """A Llama of random weights."""
    heads = max(args.hidden // 128, 4)
    size = LlamaConfig(
        vocab_size=args.vocabulary, hidden_size=args.hidden, intermediate_size=args.hidden * 7 // 2,
        num_hidden_layers=args.layers, num_attention_heads=heads, num_key_value_heads=max(heads // 4, 2),
        max_position_embeddings=args.context * 64, tie_word_embeddings=False,
    )  # fmt: skip
    dtype = torch.bfloat16 if config["bf16"]["enabled"] else torch.float32
    return AutoModelForCausalLM.from_config(size, dtype=dtype)


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--deepspeed_config", default=str(Path(__file__).with_name("ds_pipeline_cad.json")), help="the DeepSpeed JSON")
    add("--local_rank", type=int, default=-1, help="given by the launcher")
    add("--no-cad", action="store_true", help='take the "cad" block out of the JSON')
    add("--stages", type=int, default=2, help="pipeline stages (default 2)")
    add("--micro-batches", type=int, help="micro-batches of a step, instead of the JSON's")
    add("--steps", type=int, default=10, help="optimizer steps (default 10)")
    add("--context", type=int, help="tokens of a packed row (default 4096; 512 with --tiny)")
    add("--seed", type=int, default=0)
    add("--save", metavar="FOLDER", help="write the trained checkpoint here")
    add("--model", help="a checkpoint: a folder, or a name on the hub")
    add("--tiny", action="store_true", help="a tiny model of random weights")
    for name, default in (("layers", 8), ("hidden", 1024), ("vocabulary", 32000)):
        add(f"--{name}", type=int, default=default, help="size of a model of random weights")
    add("--data", nargs="+", help='text files, .jsonl files with a "text" field, or folders of them')
    add("--tokenizer", help="its tokenizer (default: the model's)")
    add("--synthetic", type=int, metavar="MEDIAN", help="random documents of this median length")
    args = parser.parse_args()
    if args.tiny:
        args.layers, args.hidden, args.vocabulary = 4, 64, 512
    args.context = args.context or (512 if args.tiny else 4096)
    if args.data and not (args.model or args.tokenizer):
        parser.error("--data needs a tokenizer: --model or --tokenizer")
    args.synthetic = args.synthetic or max(args.context // 16, 1)
    return args


if __name__ == "__main__":
    main()
