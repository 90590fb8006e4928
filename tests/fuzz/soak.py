"""A long training loop whose memory, threads, files and objects must not grow.

    SOAK=10000 python -m pytest tests/processes/test_fuzz.py -k grows -s

Every epoch has other documents, a loader of another length on each rank, a break before its end, evaluation, a forward
without gradients, an exception that all ranks catch between forward and backward; every second one is checkpointed. So
whatever is kept per micro-batch, layout, step or epoch shows.
"""

import ctypes
import gc
import os
import threading
from collections import Counter
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist
import training

import deepspeed_cad

EPOCH = 20
"""Micro-batches that each epoch trains."""
BLOCK = {"granularity": 16, "tolerance": 0.02, "timeout_s": 60.0, "forward_only": "balanced"}
RSS_MIB = 8
"""How much resident memory may grow after warming up: what allocators keep, not what 10,000 micro-batches would."""
CAUGHT_AT = 7
"""The micro-batch of an epoch whose backward an exception prevents, on every rank."""
Sample = Counter[str]
"""What a rank holds between two epochs: threads, files, store keys, MiB of memory; then objects by type."""


def soak(rank: int, world: int, micro_batches: int, samples: int) -> list[Sample]:
    model = training.tiny_llama(torch.float32, hidden_size=32, num_attention_heads=4, num_key_value_heads=2)
    deepspeed_cad.apply(model, BLOCK).train()
    session = deepspeed_cad.current_session()
    data = _Data(rank)
    loader = session.look_ahead(data, model, accumulation=2, global_loss=True)
    epochs, found = -(-micro_batches // EPOCH), list[Sample]()
    every = max(1, epochs // samples)
    for data.epoch in range(epochs):
        if data.epoch % 2:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            model.gradient_checkpointing_disable()
        for at, batch in enumerate(loader):
            if at == EPOCH:
                break
            if at == 3:
                with torch.no_grad():
                    training.loss_sum(model, batch)
                    training.loss_sum(model.eval(), training.pack(training.documents([5 + data.epoch % 7, 9], at)))
                    model.train()
            loss = training.loss_sum(model, batch)
            if at != CAUGHT_AT:
                loss.backward()
            loss = None
            if at % 2:
                model.zero_grad()
        if data.epoch % every == every - 1:
            # Nothing is announced, what the look-ahead has begun is over, plans that wait to be counted are counted.
            session.find_binding(model).feed.begin_epoch()
            session.worker.run(lambda: None)
            session._statistics.collect()
            dist.barrier()
            found.append(_sample())
            dist.barrier()  # a rank that closes its session says so in the store
    return found


class _Data:
    """Other documents in every epoch; some ranks have a micro-batch more."""

    def __init__(self, rank: int) -> None:
        self.rank, self.epoch = rank, 0

    def __iter__(self) -> Any:
        for index in range(EPOCH + (self.rank + self.epoch) % 3):
            seed = 1000 * self.epoch + 10 * index + self.rank
            lengths = torch.randint(1, 40, (1 + seed % 4,), generator=torch.Generator().manual_seed(seed)).tolist()
            yield training.pack(training.documents(lengths if seed % 17 else [], seed))


def _sample() -> Sample:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/statm") as file:
        rss = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    found = Counter(
        threads=len(os.listdir("/proc/self/task")), python_threads=threading.active_count(), rss_mib=rss >> 20,
        files=len(os.listdir("/proc/self/fd")), store_keys=dist.distributed_c10d._get_default_store().num_keys(),
    )  # fmt: skip
    for one in gc.get_objects():
        kind = type(one)
        if str(kind.__module__).startswith("deepspeed_cad") or kind is Future or issubclass(kind, torch.Tensor):
            found[kind.__name__] += 1
    return found


def grown(samples: list[Sample]) -> list[str]:
    """What is more in the last quarter than it ever was in the second quarter of the samples."""
    quarter, found = len(samples) // 4, []
    for name in sorted({name for one in samples for name in one}):
        low, high = (max(one[name] for one in of) for of in (samples[quarter : 2 * quarter], samples[-quarter:]))
        if high > low + (RSS_MIB if name == "rss_mib" else 0):
            found.append(f"{name}: {low} -> {high}")
    return found
