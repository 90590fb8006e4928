"""What may become of a case: each rank is right, or stops with one clear error. In: `Played` of every rank."""

from __future__ import annotations

from fuzz.case import ALL, FORMS, HYBRIDS, MASKS_OF_FOUR_AXES, Case
from fuzz.play import TIMEOUT_S, Played, difference, timeout_of

LIMIT_S = 0.8 * TIMEOUT_S
"""Seconds that a case may take on a rank: nothing may wait for a time-out."""
NO_ROOM = 'Set "memory" to at least'
"""In the error on every rank where attention does not fit into the memory that the case allows."""


def trains(case: Case, rank: int) -> list[tuple[int, int]]:
    """The micro-batches, as (epoch, place), that a rank trains if no error stops it, in order."""
    plant, found = case.plant, []
    for epoch in range(case.epochs):
        for at in range(case.given_out(rank)):
            here = plant is not None and case.hits(rank, epoch, at, plant.kind)
            if here and plant.kind == "break":
                break
            if here and (plant.kind in ("loader", "positions") or (plant.kind == "forward" and not plant.caught)):
                return found
            if not (here and plant.kind == "skip"):
                found.append((epoch, at))
    return found


def may(case: Case) -> list[set[str]]:
    """Of each rank that trains: which of "right", "error" (of CAD) and "planted" may be its end."""
    plans = [trains(case, rank) for rank in range(case.world)]
    if not case.ahead:  # micro-batches meet in the order of forwards, whatever epochs they belong to
        plans = [[(0, i) for i in range(len(plan))] for plan in plans]
    common = 0
    while all(len(plan) > common for plan in plans) and len({plan[common] for plan in plans}) == 1:
        common += 1
    apart = any(len(plan) != common for plan in plans)
    ends = [{"right"} if not apart else {"right", "error"} if len(plan) == common else {"error"} for plan in plans]
    plant = case.plant
    if plant is None or case.world == 1 and plant.kind in ("break", "look", "skip"):
        return ends if case.world > 1 or plant is None or plant.kind != "skip" else [{"right", "error"}]
    everywhere = plant.rank == ALL or case.world == 1
    here = [everywhere or rank == plant.rank for rank in range(case.world)]
    # Where all ranks look, one of them does not look more often.
    looks = everywhere or not case.looks_together or (case.look > 0 and plant.at % case.look == 0)
    if plant.kind == "break" or (plant.kind == "look" and looks):
        return ends
    if plant.kind == "skip":
        # A micro-batch like the skipped one can take its plan: then nothing is wrong.
        return [end | {"right", "error"} for end in ends]
    if plant.kind == "look":
        return [{"error"} if mine else {"right", "error"} for mine in here]
    if plant.kind == "positions":
        return [{"error"} if mine else end | {"error"} for mine, end in zip(here, ends)]
    last = [(plant.epoch, plant.at) == (trains(case, rank) or [None])[-1] for rank in range(case.world)]
    if plant.kind == "loader" or not plant.caught:
        # Others that need nothing more of this rank are right. One that lost its peers first does not get so far.
        others = [{"right", "error"} if plant.kind == "loader" or end else {"error"} for end in last]
        return [{"planted", "error"} if mine else other for mine, other in zip(here, others)]
    if plant.kind == "loss" and everywhere:
        return ends
    if plant.kind == "backward" and everywhere:
        return [end | {"error"} for end in ends]
    # Ranks that train no more than what comes before it never meet it, nor those that nothing comes to in their last.
    met = everywhere or trains(case, plant.rank).index((plant.epoch, plant.at)) < common
    return [
        {"right", "error"} if last[rank] else {"error"} if met or here[rank] else ends[rank] | {"error"}
        for rank in range(case.world)
    ]


def judge(case: Case, played: list[Played | None]) -> str:
    """Why a case failed, beginning with a word for the kind of failure; empty if it did not.

    Of each rank, reserved servers last: None where it gave no answer, as one that is killed.
    """
    silent = [rank for rank, one in enumerate(played) if one is None and rank not in mortal(case)]
    if silent:
        return f"hang: ranks {silent} gave no answer"
    trainers = [one for one in played[: case.world] if one is not None]
    if failure := _judge_trainers(case, trainers, played):
        return failure
    if all(one.error is None for one in trainers):
        for one in played[case.world :]:
            # What is held of a forward that ended with an exception, or in eval mode with gradients on, goes with the
            # next micro-batch, if one comes.
            may_hold = case.plant is not None or (case.looks_together and case.evaluate)
            if one is not None and (one.exit_code or (one.held and not may_hold)):
                return f"server: rank {one.rank} ended with {one.exit_code} and holds {one.held} bytes: {one.said}"
    return _compare_sums(case, trainers)


def refused(case: Case, ranks: list[Played]) -> bool:
    """Whether trainers ended because CAD does not take a case like this one, and said so."""
    forms = [FORMS[form] for form in case.forms]
    may_be = {
        "ready-made attention mask": any(form.mask in MASKS_OF_FOUR_AXES for form in forms),
        "layers that carry state": bool(case.stages and case.model in HYBRIDS),
    }
    said = [one.error[2] for one in ranks if one.error is not None]
    return any(allowed and any(words in text for text in said) for words, allowed in may_be.items())


def mortal(case: Case) -> set[int]:
    return {case.world + fate.server for fate in case.fates if fate.signal != "PAUSE"}


def _judge_trainers(case: Case, ranks: list[Played], played: list[Played | None]) -> str:
    for one in ranks:
        if one.wrong:
            return f"wrong: {one.wrong[0]}"
    for one in ranks:
        if one.error is not None and end_of(one) == "other":
            return f"raw: rank {one.rank} ended with {one.error[0]}: {one.error[2]}"
    if refused(case, ranks):
        return ""
    if "memory" in case.block and all(one.error is not None and NO_ROOM in one.error[2] for one in ranks):
        return ""
    if case.fates and not case.goes_on and any(played[rank] is None for rank in mortal(case)):
        return _judge_lost(case, ranks)
    ended_early = any(one.error is None or one.error[0] == "Planted" for one in ranks)
    limit = LIMIT_S if not case.fates else LIMIT_S + len(case.fates) * timeout_of(case)
    for one, allowed in zip(ranks, may(case)):
        end, text = end_of(one), "" if one.error is None else f"{one.error[0]}: {one.error[2]}"
        if end not in allowed:
            return f"unexpected: rank {one.rank} was {end} instead of {' or '.join(sorted(allowed))}. {text}"
        if end == "error" and "died or hangs" in text and not ended_early:
            return f"unclear: rank {one.rank} ended with {text}"
        if one.seconds > limit:
            return f"late: rank {one.rank} took {one.seconds:.0f} s. {text}"
    return ""


def _judge_lost(case: Case, ranks: list[Played]) -> str:
    """Where trainers end with a server: all of them do, and say which; or none needed it any more."""
    names = [f"{word} {rank}" for rank in mortal(case) for word in ("server", "rank")]
    for one in ranks:
        if one.error is not None and not any(name in one.error[2] for name in names):
            return f"unclear: rank {one.rank} ended with {one.error[0]}, not with the name of a server: {one.error[2]}"
        if one.seconds > LIMIT_S:
            return f"late: rank {one.rank} took {one.seconds:.0f} s"
    return ""


def end_of(one: Played) -> str:
    """ "right", "error" (one of CAD), "planted", or "other"."""
    if one.error is None:
        return "right"
    return "planted" if one.error[0] == "Planted" else "error" if "CADError" in one.error[1] else "other"


def _compare_sums(case: Case, ranks: list[Played]) -> str:
    """Gradients summed over ranks; under DDP each rank has their mean."""
    if any(one.error is not None for one in ranks):
        return ""
    # Kernels of hybrids compute in fp32, in chunks that begin with each piece of a document that spans ranks.
    tolerance = 1e-4 if case.model in ("qwen3_5_text", "granitemoehybrid") else 1e-6
    tolerance = 1e-3 if case.dtype == "fp32" or case.model in ("gemma2", "deepseek_v3") else tolerance
    for check, rows in enumerate(zip(*(one.sums for one in ranks))):
        wanted = sum(row[1] for row in rows)
        for found in [row[0] * case.world for row in rows] if case.ddp else [sum(row[0] for row in rows)]:
            wrong = difference(found, wanted)
            if not wrong <= tolerance:
                return f"wrong: gradients summed over ranks are off by {wrong:.3g} (comparison {check})"
    return ""
