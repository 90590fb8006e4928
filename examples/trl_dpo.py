"""Preference training with TRL: DPOTrainer; the policy has CAD, the reference model is untouched. No line knows of CAD:

    accelerate launch --num_processes 8 -m deepspeed_cad.run examples/trl_dpo.py --model PATH --data PAIRS.jsonl

PAIRS.jsonl has the fields prompt, chosen and rejected.
On a CPU: torchrun --nproc_per_node 2 -m deepspeed_cad.run examples/trl_dpo.py --tiny
"""

from __future__ import annotations

import tempfile

from common import (
    finish,
    get_config,
    get_documents,
    get_model,
    get_tokenizer,
    read_arguments,
    say_what_to_expect,
    trainer_settings,
)
from datasets import Dataset, load_dataset
from trl import DPOConfig, DPOTrainer


def main() -> None:
    """Train, and save a checkpoint that loads anywhere."""
    args = read_arguments(__doc__.split(":")[0])
    tokenizer = get_tokenizer(args)
    pairs = made_up(get_documents(args)) if args.tiny else load_dataset("json", data_files=args.data, split="train")
    sample = pairs.select(range(min(len(pairs), 500)))
    texts = [f"{row['prompt']} {row[answer]}" for row in sample for answer in ("chosen", "rejected")]
    say_what_to_expect([tokenizer(text)["input_ids"][: args.context] for text in texts], args.context, get_config(args))
    model = get_model(args)
    with tempfile.TemporaryDirectory() as folder:
        trainer = DPOTrainer(
            model=model,
            ref_model=get_model(args),
            args=DPOConfig(**trainer_settings(args, folder), per_device_train_batch_size=2, max_length=args.context),
            train_dataset=pairs,
            processing_class=tokenizer,
        )
        trainer.train()
    if args.save:
        trainer.save_model(args.save)
    finish()


def made_up(documents: list[list[int]]) -> Dataset:
    """Prompts with two answers each, of made-up words."""
    texts = [" ".join(f"w{i}" for i in ids) for ids in documents]
    names = ("prompt", "chosen", "rejected")
    return Dataset.from_dict({name: texts[i::3][: len(texts) // 3] for i, name in enumerate(names)})


if __name__ == "__main__":
    main()
