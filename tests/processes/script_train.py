"""A training script that knows nothing of CAD, in every idiom; launchers start it in tests/processes/test_run.py.

script_train.py {accelerate,ddp,fsdp2,deepspeed,eval} OUT.json [--steps N] [--json DS.json]
"""

import argparse
import json
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch
import torch.distributed as dist
import training
from torch.utils.data import DataLoader, DistributedSampler
from trainers import PackedRows, collate


def run_accelerate(args, model):
    from accelerate import Accelerator

    accelerator, optimizer = Accelerator(cpu=True), torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(PackedRows(16), batch_size=1, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    return loop(args, model, optimizer, loader, accelerator.backward)


def run_torch(args, model):
    dist.init_process_group("gloo")
    if args.loop == "ddp":
        model = torch.nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.fsdp import fully_shard

        for part in (*model.model.layers, model):
            fully_shard(part)
    return loop(args, model, torch.optim.AdamW(model.parameters(), lr=1e-2), sampled(), torch.Tensor.backward)


def run_deepspeed(args, model):
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, optimizer, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=json.load(open(args.json)))
    return loop(args, engine, engine, sampled(), engine.backward)


def sampled():
    sampler = DistributedSampler(PackedRows(16), shuffle=False)
    return DataLoader(PackedRows(16), batch_size=1, collate_fn=collate, sampler=sampler)


def loop(args, model, optimizer, loader, backward):
    found = []
    if args.loop != "eval":
        model.train()
    for _, batch in zip(range(args.steps), loader):
        loss = model(**batch, use_cache=False).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append({"loss": float(loss.detach())})
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("loop", choices=["accelerate", "ddp", "fsdp2", "deepspeed", "eval"])
    parser.add_argument("out")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json")
    parser.add_argument("--local_rank")
    args, model = parser.parse_args(), training.sdpa_llama()
    if args.loop == "eval":
        model.eval()
    run = {"accelerate": run_accelerate, "deepspeed": run_deepspeed, "eval": run_accelerate}
    logged, cad = run.get(args.loop, run_torch)(args, model), sys.modules.get("deepspeed_cad.session")
    session = cad.current_session() if cad else None
    if int(os.environ.get("RANK", "0")) == 0:
        figures = None if session is None else [session.statistics.imbalance_before, session.statistics.imbalance]
        json.dump({"log": logged, "balance": figures, "argv": sys.argv}, open(args.out, "w"))
    if dist.is_initialized():
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
