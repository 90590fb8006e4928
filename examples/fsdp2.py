"""A loop of plain torch with FSDP2: one line turns CAD on, before `fully_shard`.

    torchrun --nproc_per_node 8 examples/fsdp2.py --model PATH --data FILES --save OUT

On a CPU: torchrun --nproc_per_node 2 examples/fsdp2.py --tiny
"""

from __future__ import annotations

import os
from itertools import chain, repeat

import torch
import torch.distributed as dist
from chunked_loss import ChunkedLoss
from common import DTYPE, ON_GPU, finish, get_config, get_documents, get_model, read_arguments, say_what_to_expect
from packing import pack
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import deepspeed_cad


def main() -> None:
    """Train, and save a checkpoint that loads anywhere."""
    args = read_arguments(__doc__.split(":")[0])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if ON_GPU else torch.device("cpu")
    if ON_GPU:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if ON_GPU else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    documents = get_documents(args)
    say_what_to_expect(documents, args.context, get_config(args))
    model = get_model(args).float()
    ChunkedLoss(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    deepspeed_cad.apply(model, {"tolerance": 0.05})  # this line
    policy = MixedPrecisionPolicy(param_dtype=DTYPE, reduce_dtype=torch.float32)
    mesh = dist.device_mesh.init_device_mesh(device.type, (world,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)

    session = deepspeed_cad.current_session()
    rows = pack(chain.from_iterable(repeat(documents)), args.context, args.steps * args.accumulation * world)
    batches = session.look_ahead(rows[rank::world], model, accumulation=args.accumulation)
    for number, batch in enumerate(batches):
        batch = {name: value.to(device) for name, value in batch.items()}
        loss = model(**batch, use_cache=False).loss / args.accumulation
        loss.backward()
        if (number + 1) % args.accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
            report(number // args.accumulation + 1, loss.detach() * args.accumulation, session, rank)
    if args.save:
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            model.save_pretrained(args.save, state_dict={name: value.to(DTYPE) for name, value in state.items()})
    finish()


def report(step: int, loss: torch.Tensor, session: deepspeed_cad.session.Session, rank: int) -> None:
    """Print a step."""
    dist.all_reduce(loss)
    figures = session.take_statistics("fsdp2")
    if rank == 0:
        print(
            f"step {step}  loss {float(loss) / dist.get_world_size():.4f}  attention max/mean "
            f"{figures.imbalance_before:.2f} -> {figures.imbalance:.2f}  {figures.bytes_sent / 2**20:.1f} MiB sent",
            flush=True,
        )


if __name__ == "__main__":
    main()
