"""How a benchmark opens its device and its process group: NCCL on GPUs, gloo where there are none."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist


def open_process_group(minutes: float = 10) -> torch.device:
    """This rank's device, of LOCAL_RANK; the group's collectives end in an error after so long."""
    timeout = timedelta(minutes=minutes)
    if not torch.cuda.is_available():
        dist.init_process_group("gloo", timeout=timeout)
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device, timeout=timeout)
    return device
