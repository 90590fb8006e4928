"""Loops that differ between ranks: loaders of unequal lengths, a `break`, an exception that the script catches,
a forward without gradients.

Either every rank trains what it should, or every rank gets a CADError within seconds; never another loss, never a hang.
"""

import time
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch
import training
from lines import Found, Lines, Place
from loops import CASES, RIGHT

import deepspeed_cad

TIMEOUT_S = 8.0
LIMIT_S = 30.0
"""Until every rank has its error."""


def run(place: Place, lines: Lines, case: str) -> None:
    """One case: after an error no other can follow in the same processes."""
    lines.check("loops that differ", case, lambda: check(place, case))


def documents_of(rank: int, count: int) -> list[list[torch.Tensor]]:
    lengths = [([120 + 8 * i] if (rank + i) % 2 == 0 else [20 + i, 30, 7]) for i in range(count)]
    return [training.documents(one, seed=100 * rank + i) for i, one in enumerate(lengths)]


def check(place: Place, case: str) -> Found:
    """Two epochs; what every rank found is compared."""
    settings = CASES[case]
    # Not fp64 on GPUs: a first launch of some of its kernels needs the whole context to be idle.
    exact = not place.on_gpu
    model = training.tiny_llama(torch.float64 if exact else torch.float32).to(place.device).train()
    reference = training.tiny_llama()  # on the CPU, which in fp64 gives the same
    deepspeed_cad.apply(model, {"granularity": 16, "tolerance": 0.02, "timeout_s": TIMEOUT_S, "kernel": "torch_math"})
    session = deepspeed_cad.current_session()
    odd = place.rank == place.ranks - 1
    documents = documents_of(place.rank, settings["lengths"][odd])
    ahead = session.look_ahead([training.pack(one) for one in documents], model)
    expected = [training.alone(reference, one)[0] for one in documents]
    farthest, begun = 0.0, time.perf_counter()
    trained, raised, seconds = 0, "", 0.0
    try:
        for _epoch in range(2):
            for i, loss in epoch(model, ahead, settings, odd, place):
                farthest = max(farthest, abs(loss / expected[i] - 1))
                trained += 1
    except deepspeed_cad.CADError as error:
        raised, seconds = f"{type(error).__name__}: {error}", time.perf_counter() - begun
    mine = (farthest, trained, raised, seconds)
    try:
        heard = place.gather(mine)
    except RuntimeError:
        if not raised:
            raise
        heard = [mine]  # another rank's process ended: that it said why is looked for in its log
    wrong = [r for r, (far, *_) in enumerate(heard) if not far < (1e-8 if exact else 1e-5)]
    silent = [r for r, (_, _, text, _) in enumerate(heard) if not text]
    late = [r for r, (*_, took) in enumerate(heard) if took > LIMIT_S]
    detail = (
        f"{trained} batches, losses off by {farthest:.0e}{f', after {seconds:.1f} s: {raised[:300]}' * bool(raised)}"
    )
    if wrong:
        return False, f"another loss than each document alone on ranks {wrong}; {detail}"
    if late or 0 < len(silent) < len(heard):
        return False, f"no error on ranks {silent}, late on ranks {late}; {detail}"
    return not raised or case not in RIGHT, detail


def epoch(model: Any, batches: Iterable, settings: dict, odd: bool, place: Place) -> Iterator[tuple[int, float]]:
    """Train an epoch; the odd rank does what the settings say. Gives index and loss of every batch trained."""
    for i, batch in enumerate(islice(batches, settings.get("stop"))):
        batch = {name: value.to(place.device) for name, value in batch.items()}
        if odd and settings.get("move") == i:
            batch["position_ids"] = 2 * batch["position_ids"]  # behind the loader, which announced what they were
        model.zero_grad()
        if odd and settings.get("evaluate"):
            model.eval()
            with torch.no_grad():
                training.loss_sum(model, batch)
            model.train()
        if odd and settings.get("look") == i:
            # All lengths are known by then: nobody comes to the collective of this forward, nor it to their exchange.
            with torch.no_grad():
                training.loss_sum(model, batch)
        hook = None
        if odd and settings.get("raise") == i:
            hook = model.model.layers[1].register_forward_pre_hook(_out_of_memory)
        try:
            loss = training.loss_sum(model, batch)
            loss.backward()
        except torch.OutOfMemoryError:
            continue  # as scripts do that skip a batch which is too large
        finally:
            if hook is not None:
                hook.remove()
        yield i, float(loss.detach())
        if odd and settings.get("break") == i + 1:
            break


def _out_of_memory(*_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory, as a batch that is too large would say")
