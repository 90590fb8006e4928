"""Served tasks on a stream of their own beside local ones, and parking on a third, against the same work on one stream.

What the streams share is right only if every read waits for what it reads, and no memory is used again too early.
Both show as other bits. So a model is trained again and again while streams are held up at random places, and memory
that was just freed is filled with NaN; loss and gradients must be those of the run on one stream, bit by bit. Kernels
run in torch's deterministic mode; where a kernel's bits differ all the same, by as much as they differ on one stream.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from check_models import Results, Sizes, make_lengths, make_model, stream, train
from lines import Found, Lines, Place

import deepspeed_cad
from deepspeed_cad.session import Session, close_session

REPEATS = {"cuda": 60, "cpu": 3}
CYCLES = 3_000_000
"""Longest time that a stream is held up at once, in clock cycles: about 2 ms, some layers' attention."""


class Disturbance:
    """Holds streams up and spoils freed memory, at random, while it is on."""

    def __init__(self, place: Place, session: Session, *streams: Any) -> None:
        self.place, self.session, self.streams, self.on = place, session, streams, False
        self.random = random.Random(place.rank)
        self.count = 0

    def disturb(self) -> None:
        """Called between any two steps of an exchange, and around every kernel."""
        if not self.on:
            return
        self.count += 1
        rows = self.random.choice((64, 1000, 2048))
        shape, dtype = (rows, self.random.choice((2, 8)), 64), self.random.choice((torch.float32, torch.bfloat16))
        torch.full(shape, float("nan"), dtype=dtype, device=self.place.device)
        if not self.place.on_gpu or self.random.random() > 0.3:
            return
        streams = [torch.cuda.current_stream(), *self.streams, getattr(self.session.transport, "stream", None)]
        with torch.cuda.stream(self.random.choice([one for one in streams if one is not None])):
            torch.cuda._sleep(self.random.randrange(CYCLES))


class Disturbed:
    """Anything whose methods are disturbed before and after; what `dispatch` and `give_back` return, too."""

    def __init__(self, inner: Any, by: Disturbance, methods: tuple[str, ...]) -> None:
        self._inner, self._by, self._methods = inner, by, methods

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name not in self._methods:
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            self._by.disturb()
            made = found(*args, **kwargs)
            self._by.disturb()
            return Disturbed(made, self._by, ("wait",)) if name in ("dispatch", "give_back") else made

        return call


def run(place: Place, lines: Lines, case: str) -> None:
    """`case`: the transports, comma-separated; one with /N behind it has one case, in N waves."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    kernels = tuple(dict.fromkeys((place.kernel, "torch_varlen"))) if place.on_gpu else ("auto",)
    for word in case.split(","):
        transport, _, waves = word.partition("/")
        for kernel in kernels[:1] if waves else kernels:
            for documents in ("stream",) if waves else ("rows", "stream"):
                label = f"{transport}, {documents}, {kernel}" + (f", {waves} waves" if waves not in ("", "1") else "")
                lines.check("two streams", label, partial(check, place, transport, kernel, documents, int(waves or 1)))
                close_session()
    torch.use_deterministic_algorithms(False)


def check(place: Place, transport: str, kernel: str, documents: str, waves: int) -> Found:
    sizes = Sizes(512, 2048) if place.on_gpu else Sizes(64, 192)
    model = make_model(place, "llama", sizes)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    block = {"transport": transport, "kernel": kernel, "tolerance": 0.02, "timeout_s": 60.0}
    block |= {"granularity": 64 if place.on_gpu else 16, "waves": waves, "keep": "host"}
    place.together(lambda: deepspeed_cad.apply(model, block))
    session = deepspeed_cad.current_session()
    plans, parking = session.plans, session.parking
    aside = plans.aside
    if place.on_gpu and aside is None:
        return False, "the session has no second stream"
    lengths = make_lengths(documents, place.ranks, sizes.tokens)
    here = slice(place.rank * sizes.tokens, (place.rank + 1) * sizes.tokens)
    row = [column[here] for column in stream(lengths, place.device)]
    disturbance = Disturbance(place, session, aside, parking._stream)
    with disturbed(session, disturbance):
        # The second stream is the first: the same batches in the same order, one after the other.
        plans.aside = torch.cuda.current_stream(place.device) if place.on_gpu else None
        session.parking = None
        calm = [place.together(lambda: train(model, *row)) for _ in range(3)]
        # Of all tensors together: where a kernel adds in any order, three runs say little of a single one.
        noise = max(distance(one, calm[0], name) for name in calm[0] for one in calm[1:])
        plans.aside, disturbance.on = aside, True
        worst: dict[str, float] = dict.fromkeys(calm[0], 0.0)
        wrong: list[str] = []
        for repeat in range(REPEATS[place.device.type]):
            # Without it fresh memory holds what was freed last, with it NaN; filling also changes what runs when.
            torch.utils.deterministic.fill_uninitialized_memory = repeat % 2 == 0
            session.parking = parking if repeat % 4 > 1 else None
            found = train(model, *row)
            worst = {name: max(worst[name], distance(found, calm[0], name)) for name in worst}
            # The same bits, or no farther away than four times what runs on one stream are from each other.
            wrong += [f"{name} in repetition {repeat}" for name in worst if distance(found, calm[0], name) > 4 * noise]
        torch.utils.deterministic.fill_uninitialized_memory = True
    sent = sum(place.gather(session.transport.bytes_sent if session.transport else 0))
    parked = parking.host_bytes
    bits = "the same bits" if not noise else f"bits differ by {noise:.1e} on one stream too"
    moved = f"{sent >> 20} MiB sent, {parked >> 20} MiB parked"
    text = f"{REPEATS[place.device.type]} repetitions, {disturbance.count} disturbances, {moved}; {bits}"
    if wrong:
        text = f"other by up to {max(worst.values()):.1e}: {', '.join(wrong[:5])}; {text}"
    return not wrong and sent > 0 and parked > 0, text


def distance(one: Results, other: Results, name: str) -> float:
    found = float((one[name] - other[name]).norm() / other[name].norm())
    return found if found == found else float("inf")


@contextmanager
def disturbed(session: Session, by: Disturbance) -> Iterator[None]:
    crew, choose = session.plans.crew, session.kernel
    crew = replace(crew, transport=Disturbed(crew.transport, by, ("dispatch", "give_back")))
    kernel = lambda need: Disturbed(choose(need), by, ("forward", "backward"))  # noqa: E731
    with mock.patch.object(session.plans, "crew", crew), mock.patch.object(session, "kernel", kernel):
        yield
