"""Supervised fine-tuning with TRL: SFTTrainer packs documents ("bfd") without padding. Nothing here knows of CAD:

    accelerate launch --num_processes 8 --use_fsdp --fsdp_version 2 --fsdp_state_dict_type FULL_STATE_DICT \
        --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP \
        -m deepspeed_cad.run examples/trl_sft.py --model PATH --data FILES --save OUT

On a CPU: torchrun --nproc_per_node 2 -m deepspeed_cad.run examples/trl_sft.py --tiny
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
from datasets import Dataset
from trl import SFTConfig, SFTTrainer


def main() -> None:
    """Train, and save a checkpoint that loads anywhere."""
    args = read_arguments(__doc__.split(":")[0])
    documents = get_documents(args)
    say_what_to_expect(documents, args.context, get_config(args))
    model = get_model(args)
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            model=model,
            args=SFTConfig(
                **trainer_settings(args, folder), per_device_train_batch_size=1, packing=True, max_length=args.context
            ),
            train_dataset=Dataset.from_dict({"input_ids": documents}),
            processing_class=get_tokenizer(args),
        )
        trainer.train()
    if args.save:
        trainer.save_model(args.save)
    finish()


if __name__ == "__main__":
    main()
