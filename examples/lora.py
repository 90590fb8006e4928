"""LoRA with Accelerate and PEFT: a CADPlugin among the handlers turns CAD on; ends with the merged checkpoint.

    accelerate launch --num_processes 8 examples/lora.py --model PATH --data FILES --save OUT

On a CPU: torchrun --nproc_per_node 2 examples/lora.py --tiny
"""

from __future__ import annotations

from itertools import chain, repeat

import torch
from accelerate import Accelerator
from chunked_loss import ChunkedLoss
from common import ON_GPU, WORLD, finish, get_config, get_documents, get_model, read_arguments, say_what_to_expect
from deepspeed_cad.integrations.accelerate import CADPlugin
from packing import Rows, only_row, pack
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader


def main() -> None:
    """Train, merge, and save a checkpoint that loads anywhere."""
    args = read_arguments(__doc__.split(":")[0])
    accelerator = Accelerator(
        cpu=not ON_GPU,
        mixed_precision="bf16" if ON_GPU else "no",
        gradient_accumulation_steps=args.accumulation,
        kwargs_handlers=[CADPlugin(tolerance=0.05)],
    )
    documents = get_documents(args)
    say_what_to_expect(documents, args.context, get_config(args))
    model = get_model(args)
    ChunkedLoss(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model = get_peft_model(model, LoraConfig(r=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.learning_rate)
    rows = pack(chain.from_iterable(repeat(documents)), args.context, args.steps * args.accumulation * WORLD)
    loader = DataLoader(Rows(rows), batch_size=1, collate_fn=only_row)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    model.train()
    for number, batch in enumerate(loader):
        with accelerator.accumulate(model):
            loss = model(**batch, use_cache=False).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.print(f"micro-batch {number + 1}  loss {accelerator.reduce(loss.detach(), 'mean').item():.4f}")
    if args.save:
        merged = accelerator.unwrap_model(model).merge_and_unload()
        if accelerator.is_main_process:
            merged.save_pretrained(args.save)
    finish()


if __name__ == "__main__":
    main()
