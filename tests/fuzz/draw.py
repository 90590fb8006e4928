"""A random case of a seed, the same for the same seed."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from fuzz.case import (
    ALL,
    DENSE,
    EXCEPTIONS,
    FORMS,
    HYBRIDS,
    KINDS,
    MASKS_OF_FOUR_AXES,
    MIXTURES,
    MOMENTS,
    PIPELINED,
    WITHOUT_WINDOWS,
    Case,
    Fate,
    Plant,
)

WAYS = {"in place": 0.4, "reserved": 0.17, "killed": 0.2, "hung": 0.03, "pipeline": 0.2}
"""How often each way to run is drawn."""
LINKS = {"inside": 100, "between": 10}
"""Given to most cases: measuring takes longer than a case does."""


def draw(seed: int, worlds: tuple[int, int] = (1, 4)) -> Case:
    """A random case; `worlds`: fewest and most ranks that train."""
    rng = random.Random(seed)
    way = rng.choices(list(WAYS), list(WAYS.values()))[0]
    if way == "pipeline" and worlds[1] > 1:
        return _draw_pipeline(rng, seed, worlds)
    case = _draw_loop(rng, seed, worlds, reserved=way in ("reserved", "killed", "hung"))
    if way in ("killed", "hung"):
        return _draw_fates(rng, case, rng.choice(["STOP", "STOP", "PAUSE"]) if way == "hung" else "KILL")
    if case.world > 1 and not case.ddp and rng.random() < (0.15 if case.servers else 0.4):
        return dataclasses.replace(case, plant=_draw_plant(rng, case))
    if not case.ddp and rng.random() < 0.2:
        return dataclasses.replace(case, flight=rng.choice([2, 2, 3]))
    return case


def _draw_loop(rng: random.Random, seed: int, worlds: tuple[int, int], reserved: bool) -> Case:
    most = min(worlds[1], 3) if reserved else worlds[1]
    world = rng.choices(range(worlds[0], most + 1), [(1, 6, 3, 2)[min(n, 4) - 1] for n in range(worlds[0], most + 1)])[
        0
    ]
    model = rng.choice(rng.choice((DENSE, DENSE, MIXTURES, HYBRIDS)))
    ahead = rng.random() < 0.8
    ddp = world > 1 and rng.random() < 0.2
    forms = _draw_forms(rng, model, world, reserved)
    checkpoint = rng.choice(["", "", "plain", "reentrant"])
    if checkpoint == "reentrant" and (ddp or model in (*MIXTURES, "granitemoehybrid")):
        checkpoint = "plain"
    count = rng.randint(1, 4)
    unequal = not ddp and rng.random() < 0.4
    batches = tuple(count + (rng.randint(0, 2) if unequal else 0) for _ in range(world))
    # Most loaders of unequal lengths are left together: that is how it can be right.
    stop = rng.randint(1, min(batches)) if rng.random() < (0.7 if unequal else 0.2) else 0
    block = _draw_block(rng, ahead)
    if block.get("documents") == "deal" and rng.random() < 0.7:
        forms = ("row",)
    slow = model in HYBRIDS
    case = Case(
        seed, world, 1 + (rng.random() < 0.4) if reserved else 0, 0, model,
        dtype="fp32" if model in DENSE and rng.random() < 0.3 or model == "gemma2" else "fp64",
        checkpoint=checkpoint, ddp=ddp, block=block, ahead=ahead,
        accumulation=rng.choice([1, 1, 2, 3, 4]) if ahead else 1,
        epochs=rng.choice([1, 1, 1, 1, 2, 2, 3]), batches=batches, stop=stop, islice=rng.random() < 0.5,
        generator=rng.random() < 0.3, forms=forms,
        longest=rng.choice([8, 30, 60]) if slow else rng.choice([8, 40, 150, 300]),
        documents=rng.choice([1, 3, 5]) if slow else rng.choice([1, 3, 8]),
        evaluate=rng.choice([0, 0, 1, 2, 2]), look=rng.choice([0, 0, 0, 1, 2]), gradients=rng.choice([1, 2, 3]),
    )  # fmt: skip
    if case.look:
        block["forward_only"] = "balanced"
    return case


def _draw_forms(rng: random.Random, model: str, world: int, reserved: bool) -> tuple[str, ...]:
    """One to three ways to give micro-batches, as often of one shape as of another."""
    shapes: dict[str, list[str]] = {}
    for name, form in FORMS.items():
        windows = form.mask in MASKS_OF_FOUR_AXES and model not in WITHOUT_WINDOWS
        # State does not travel beside reserved servers.
        spans = form.shape == "stream" and ((model in HYBRIDS and reserved) or world == 1)
        # In fp64, eager attention of transformers gives NaN to rows of padding that see no token.
        if not windows and not spans:
            shapes.setdefault(form.shape, []).append(name)
    if rng.random() < 0.2:
        return ("row",)
    # "row" has most ways to tell its documents.
    drawn = [rng.choice([*shapes, "row", "row"]) for _ in range(rng.randint(1, 3))]
    return tuple(sorted({rng.choice(shapes[shape]) for shape in drawn}))


def _draw_block(rng: random.Random, ahead: bool) -> dict[str, Any]:
    choices: dict[str, list[Any]] = {
        "overlap": ["local_first", "interleave", "none"],
        "recompute_attention": [True],
        "granularity": [1, 8, 16, 64],
        "tolerance": [0.01, 0.02, 0.2],
        "cost": ["h200", "pairs"],
        "documents": ["deal"] if ahead else ["keep"],
        "look_ahead": [0],
        "check": ["off"],
        "keep": ["host"],
        "waves": [2, 3, 5],
        "memory": [2e-4, 1e-3],
        "verify": [1],
        "links": [LINKS],
    }
    odds = {
        "granularity": 0.9, "tolerance": 0.8, "overlap": 0.7, "look_ahead": 0.1, "check": 0.1, "memory": 0.1,
        "verify": 0.05, "recompute_attention": 0.15, "links": 0.9,
    }  # fmt: skip
    block = {key: rng.choice(values) for key, values in choices.items() if rng.random() < odds.get(key, 0.3)}
    if block.get("documents") == "deal":
        block.pop("look_ahead", None)
    if "keep" in block:
        block.pop("recompute_attention", None)
    return block


def _draw_plant(rng: random.Random, case: Case) -> Plant:
    kind = rng.choice(KINDS)
    rank = ALL if rng.random() < 0.3 else rng.randrange(case.world)
    least = min(case.given_out(one) for one in range(case.world))
    return Plant(
        kind, rank, rng.randrange(case.epochs), rng.randrange(least), caught=kind in EXCEPTIONS and rng.random() < 0.6
    )  # fmt: skip


def _draw_fates(rng: random.Random, case: Case, signal: str) -> Case:
    """Servers that die in a loop of which all ranks train the same."""
    least = min(case.given_out(rank) for rank in range(case.world))
    case = dataclasses.replace(case, batches=(least,) * case.world, stop=0)
    count = 1 if case.servers == 1 or rng.random() < 0.6 else 2
    turns = least * case.epochs
    fates = tuple(
        Fate(
            server, signal, rng.choice(MOMENTS), rng.randrange(turns), rng.randrange(2),
            after=rng.choice([0.0, 0.0, 0.003, 0.02, 0.1]),
        )
        for server in rng.sample(range(case.servers), count)
    )  # fmt: skip
    block = {key: value for key, value in case.block.items() if key not in ("keep", "recompute_attention")}
    block["on_server_failure"] = "continue" if rng.random() < 0.85 else "stop"
    comes = ()
    if block["on_server_failure"] == "continue" and rng.random() < 0.25:
        comes = tuple(rng.choice([0.0, 0.05, 0.3]) for _ in range(rng.choice([1, 1, 2])))
        if rng.random() < 0.3:
            fates = (dataclasses.replace(fates[0], server=case.servers), *fates[1:])
    flight = rng.choice([1, 1, 1, 2]) if not case.ddp else 1
    return dataclasses.replace(case, fates=fates, block=block, comes=comes, flight=flight)


def _draw_pipeline(rng: random.Random, seed: int, worlds: tuple[int, int]) -> Case:
    model = rng.choice(PIPELINED)
    stages = rng.choice([2, 2, 3]) if worlds[1] > 2 and model not in HYBRIDS else 2
    replicas = rng.choice([1, 2]) if worlds[1] >= 2 * stages else 1
    forms = [name for name, form in FORMS.items() if form.shape == "row"]
    if model not in WITHOUT_WINDOWS:
        forms = [name for name in forms if FORMS[name].mask not in MASKS_OF_FOUR_AXES]
    block = _draw_block(rng, True)
    for key in ("recompute_attention", "documents", "verify"):
        block.pop(key, None)
    block["overlap"] = rng.choice(["local_first", "none"])
    world = stages * replicas
    return Case(
        seed, world, 0, stages, model, dtype="fp32" if model in DENSE and rng.random() < 0.3 else "fp64",
        checkpoint=rng.choice(["", "plain", "reentrant"]), block=block, accumulation=rng.choice([1, 2, 2, 3, 4, 5]),
        batches=(rng.choice([1, 1, 2, 3]),) * world,
        forms=("row",) if rng.random() < 0.2 else tuple(sorted(rng.sample(forms, rng.randint(1, 3)))),
        longest=rng.choice([8, 40, 150, 300]), documents=rng.choice([1, 3, 6]), evaluate=rng.choice([0, 1, 2]),
        gradients=1,
    )  # fmt: skip
