"""Fine-tune a checkpoint on packed documents with the Hugging Face Trainer. Nothing in this file knows of CAD:

    accelerate launch --num_processes 8 --use_fsdp --fsdp_version 2 --fsdp_state_dict_type FULL_STATE_DICT \
        --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP \
        -m deepspeed_cad.run examples/trainer.py --model PATH --data FILES --save OUT

On a CPU: torchrun --nproc_per_node 2 -m deepspeed_cad.run examples/trainer.py --tiny
Without a checkpoint or data: `--layers 4 --synthetic 8192`.
"""

from __future__ import annotations

import tempfile
from itertools import chain, repeat

from chunked_loss import ChunkedLoss
from common import (
    WORLD,
    StepTimes,
    finish,
    get_config,
    get_documents,
    get_model,
    read_arguments,
    save,
    say_what_to_expect,
    trainer_settings,
)
from packing import Rows, only_row, pack
from transformers import Trainer, TrainingArguments


def main() -> None:
    """Train, and save a checkpoint that loads anywhere."""
    args = read_arguments(__doc__.split(".")[0])
    documents = get_documents(args)
    say_what_to_expect(documents, args.context, get_config(args))
    rows = pack(chain.from_iterable(repeat(documents)), args.context, args.steps * args.accumulation * WORLD)
    with tempfile.TemporaryDirectory() as folder:
        # Before the model: with FSDP only rank 0 then loads the weights.
        arguments = TrainingArguments(
            **trainer_settings(args, folder), per_device_train_batch_size=1, lr_scheduler_type="constant"
        )
        model = get_model(args)
        loss = ChunkedLoss(model)
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=Rows(rows),
            data_collator=only_row,
            callbacks=[StepTimes(loss, args.context * args.accumulation)],
        )
        trainer.train()
    if args.save:
        save(trainer.accelerator, trainer.model_wrapped, args)
    finish()


if __name__ == "__main__":
    main()
