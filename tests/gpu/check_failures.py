"""A rank that dies or hangs in training is named by all others, in time; over `deepspeed_cad.apply`."""

import os
import time

import torch
import training
from lines import Found, Lines, Place
from loops import names

import deepspeed_cad

TIMEOUT_S = 6.0
DIES = 7
"""Exit code of the rank that dies."""


def run(place: Place, lines: Lines, case: str) -> None:
    """`case`: a transport and what the last rank does in its third step."""
    transport, how = case.split(": ")
    lines.check(f"failure by {transport}", how, lambda: check(place, transport, how))


def check(place: Place, transport: str, how: str) -> Found:
    last = place.ranks - 1
    model = training.tiny_llama(torch.float32).to(place.device)
    block = {"granularity": 16, "timeout_s": TIMEOUT_S, "transport": transport, "kernel": "torch_math"}
    # The same plan in every step: a kernel that is met first in the last one could keep the GPU from being freed. By
    # pairs attention moves also where GPUs wait for their hosts, as they do in steps this small.
    block |= {"links": {"inside": 100.0, "between": 100.0}, "cost": "pairs"}
    deepspeed_cad.apply(model, block)
    batch = training.pack(training.documents([300, 20] if place.rank == 0 else [33], seed=place.rank))
    batch = {name: value.to(place.device) for name, value in batch.items()}
    for _ in range(2):
        step(model, batch)
    place.synchronize()
    place.gather(None)
    begun = time.perf_counter()
    if place.rank == last:
        fail(how)
    try:
        for _ in range(4):  # where an exchange is missing on a GPU, the step after it says so
            step(model, batch)
    except deepspeed_cad.CADPeerError as error:
        seconds, text = time.perf_counter() - begun, str(error)
        return names(text, last) and seconds < TIMEOUT_S + 20, f"after {seconds:.1f} s: {text[:160]}"
    return place.rank == last, "it hung itself, and heard nothing" if place.rank == last else "no error in 4 steps"


def fail(how: str) -> None:
    session = deepspeed_cad.current_session()
    assert session is not None
    if how == "dies before its lengths":
        os._exit(DIES)
    elif how == "hangs before its lengths":
        time.sleep(TIMEOUT_S + 14)
        os._exit(DIES)
    elif how == "dies in the exchange":
        session.transport.dispatch = lambda *_: os._exit(DIES)  # type: ignore[method-assign,union-attr]
    elif how == "hangs in the exchange":
        session.transport.dispatch = lambda *_: (time.sleep(TIMEOUT_S + 14), os._exit(DIES))  # type: ignore
    else:
        raise ValueError(how)


def step(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> float:
    model.zero_grad()
    loss = training.loss_sum(model, batch)
    loss.backward()
    return float(loss.detach())
