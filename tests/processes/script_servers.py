"""A training loop that ends in some way at step 3 on some rank; tests/processes/test_servers_life.py launches it.

script_servers.py {raise,kill,wait,until} RANK
"""

import os
import signal
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch
import torch.distributed as dist
import training

how, who = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
rank = dist.get_rank()
model = training.tiny_llama(torch.float32).train()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(2000 if how in ("wait", "until") else 6):
    if how == "until":
        # All of them end at the same step.
        ends = torch.tensor([os.path.exists("stop")])
        dist.broadcast(ends, 0)
        if ends:
            break
    loss = training.loss_sum(model, training.pack(training.documents([[260], [40, 30, 9]][rank % 2], seed=step)))
    if step == 3 and rank == who:
        if how == "raise":
            raise ValueError("no more data")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}", flush=True)
    if how in ("wait", "until"):
        time.sleep(0.2)
if how == "until":
    dist.barrier()
