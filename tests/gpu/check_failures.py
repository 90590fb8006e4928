"""A rank that dies or hangs in training is named by all others, in time; over `deepspeed_cad.apply`."""

import os
import time
from typing import Any

import check_models
import torch
import training
from lines import Found, Lines, Place
from loops import names

import deepspeed_cad
from deepspeed_cad.attention.spanning import Spanning

TIMEOUT_S = 12.0
"""The first step connects NCCL, beside what else runs at the same time: in 6 s that once did not end (a2666e5)."""
DIES = 7
"""Exit code of the rank that dies."""


def run(place: Place, lines: Lines, case: str) -> None:
    """`case`: a transport and what the last rank does in its third step."""
    transport, how = case.split(": ")
    lines.check(f"failure by {transport}", how, lambda: check(place, transport, how))


def check(place: Place, transport: str, how: str) -> Found:
    last = place.ranks - 1
    model: torch.nn.Module
    if how.endswith("between layers"):  # one document on all ranks
        model = check_models.make_model(place, check_models.HYBRID, check_models.Sizes(64, 64))
        batch = training.pack(training.documents([64], seed=place.rank))
        batch["position_ids"] += 64 * place.rank
    else:
        model = training.tiny_llama(torch.float32).to(place.device)
        batch = training.pack(training.documents([300, 20] if place.rank == 0 else [33], seed=place.rank))
    block = {"granularity": 16, "timeout_s": TIMEOUT_S, "transport": transport, "kernel": "torch_math"}
    # The same plan in every step: a kernel that is met first in the last one could keep the GPU from being freed. By
    # pairs attention moves also where GPUs wait for their hosts, as they do in steps this small.
    block |= {"links": {"inside": 100.0, "between": 100.0}, "cost": "pairs"}
    deepspeed_cad.apply(model, block)
    batch = {name: value.to(place.device) for name, value in batch.items()}
    for _ in range(2):
        train(model, batch)
    place.synchronize()
    place.gather(None)
    begun = time.perf_counter()
    if place.rank == last:
        fail(how)
    try:
        for _ in range(4):  # where an exchange is missing on a GPU, the step after it says so
            train(model, batch)
    except deepspeed_cad.CADPeerError as error:
        seconds, text = time.perf_counter() - begun, str(error)
        return names(text, last) and seconds < TIMEOUT_S + 20, f"after {seconds:.1f} s: {text[:160]}"
    return place.rank == last, "it hung itself, and heard nothing" if place.rank == last else "no error in 4 steps"


def fail(how: str) -> None:
    session = deepspeed_cad.current_session()

    def leave(*_: Any) -> Any:
        if how.startswith("hangs"):
            time.sleep(TIMEOUT_S + 14)
        os._exit(DIES)

    if how.endswith("before its lengths"):
        leave()
    elif how.endswith("between layers"):  # where the rank before waits for a gradient of the state
        carry = Spanning.carry
        Spanning.carry = lambda *given, backward: leave() if backward else carry(*given, backward=backward)  # type: ignore
    elif how.endswith("in the exchange"):
        session.transport.dispatch = leave  # type: ignore[method-assign,union-attr]
    else:
        raise ValueError(how)


def train(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> None:
    model.zero_grad()
    training.forward_backward(model, batch)
