"""Fine-tune a checkpoint on packed documents with the Hugging Face Trainer. Nothing in this file knows of CAD:

    accelerate launch --num_processes 8 --use_fsdp --fsdp_version 2 --fsdp_state_dict_type FULL_STATE_DICT \
        --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP \
        -m deepspeed_cad.run examples/trainer.py --model PATH --data FILES --save OUT

On a CPU: torchrun --nproc_per_node 2 -m deepspeed_cad.run examples/trainer.py --tiny
"""

from __future__ import annotations

import tempfile
from itertools import chain, repeat

from common import ON_GPU, WORLD, finish, get_documents, get_model, read_arguments, say_what_to_expect
from packing import Rows, only_row, pack
from transformers import Trainer, TrainingArguments


def main() -> None:
    """Train, and save a checkpoint that loads anywhere."""
    args = read_arguments(__doc__.split(".")[0])
    documents = get_documents(args)
    model = get_model(args)
    say_what_to_expect(documents, args.context, model)
    rows = pack(chain.from_iterable(repeat(documents)), args.context, args.steps * args.accumulation * WORLD)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                max_steps=args.steps,
                per_device_train_batch_size=1,
                gradient_accumulation_steps=args.accumulation,
                gradient_checkpointing=True,
                gradient_checkpointing_kwargs={"use_reentrant": False},
                learning_rate=args.learning_rate,
                lr_scheduler_type="constant",
                bf16=ON_GPU,
                use_cpu=not ON_GPU,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=Rows(rows),
            data_collator=only_row,
        )
        trainer.train()
    if args.save:
        trainer.save_model(args.save)
    finish()


if __name__ == "__main__":
    main()
