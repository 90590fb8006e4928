"""Training loops in a line each (fuzz/case.py): right as each document alone, or one error on every rank."""

from dataclasses import replace
from typing import Any

import pytest
from fuzz.case import MOMENTS, Case, Fate, Plant
from fuzz.fuzz import run_case
from fuzz.play import Played
from model_cases import NEW
from pool import WorkerPool
from training import BLOCK

SLOW, LONG = pytest.mark.slow, pytest.mark.long
ALTERNATE, TOGETHER, STREAM = {"overlap": "interleave"}, {"forward_only": "balanced"}, ("stream",)


def loop(world: int = 2, block: dict[str, Any] | None = None, **changes: Any) -> Case:
    """Two micro-batches of a Llama on each rank, and what differs; the longest document is most of a micro-batch."""
    given = {"batches": (2,) * world, "longest": 150, "gradients": 1, **changes}
    return Case(5, world, block=BLOCK | (block or {}), **given)


def play(workers: WorkerPool, case: Case) -> list[Played]:
    """What trainers give where all of them are right, and rows moved; servers whose time had come are gone."""
    if not NEW and case.model in ("qwen3_5_text", "deepseek_v3", "llama4_text"):
        pytest.skip("transformers 4 has no such model, or no experts in fp64")
    failure, played = run_case(workers, case)
    trainers = [one for one in played[: case.world] if one is not None]
    assert not failure, failure
    assert [one.error for one in trainers] == [None] * case.world
    assert all(one.trained > 0 for one in trainers) and (case.world == 1 or sum(one.sent for one in trainers) > 0)
    for fate in case.fates:
        assert played[case.world + fate.server] is None, fate
    return trainers


RIGHT: dict[str, Case] = {
    # Loaders of unequal lengths that every rank leaves at the same place.
    "break": loop(batches=(3, 4), stop=3, epochs=3),
    "islice": loop(batches=(3, 4), stop=2, epochs=3, islice=True),
    "break, two in a step": loop(batches=(3, 4), stop=2, epochs=3, accumulation=2),
    "islice, two in a step": loop(batches=(3, 4), stop=3, epochs=3, accumulation=2, islice=True),
    "break, four in a step": loop(batches=(3, 4), stop=3, epochs=3, accumulation=4),
    # Ways to say where documents are.
    "cumulative lengths": loop(block=ALTERNATE, forms=("row none lengths ones",)),
    "padded on the right": loop(block=ALTERNATE, forms=("right",)),
    "padded on the left": loop(block=ALTERNATE, forms=("left",)),
    "numbers, padded": loop(forms=("rows none numbers",)),
    "additive": loop(block=ALTERNATE, forms=("row none bias",)),
    "a stream": loop(3, ALTERNATE, forms=STREAM),
    "a stream, state": loop(2, TOGETHER, model="qwen3_5_text", forms=STREAM, look=1, evaluate=1),
    "streams, state": loop(4, model="lfm2", forms=STREAM, batches=(4,) * 4, checkpoint="reentrant"),
    "a stream, chunks": loop(model="llama4_text", forms=STREAM),
    "a stream, sinks": loop(model="gpt_oss", forms=STREAM),
    "a stream, latent attention": loop(model="deepseek_v3", forms=STREAM),
    "streams, some in zigzag": loop(3, block={"waves": 2}, forms=STREAM, batches=(4,) * 3),
    # Documents are dealt out, and the longest are cut.
    "dealt": loop(3, block={"documents": "deal"}, accumulation=2),
    "dealt, padded": loop(3, block={"documents": "deal"}, accumulation=2, forms=("right",)),
    # One rank evaluates more often than the other; all ranks look together, also at a document of all.
    "evaluation": loop(evaluate=1),
    "looks": loop(3, {**TOGETHER, **ALTERNATE, "look_ahead": 0}, look=1, evaluate=1),
    "looks at streams": loop(2, {**TOGETHER, "keep": "host", "memory": 2e-4}, look=1, forms=STREAM),
    # Nano-batches that alternate over the decoder, of two micro-batches in flight.
    "interleaved": loop(3, {**ALTERNATE, "recompute_attention": True}, flight=2, checkpoint="plain"),
    "interleaved, reentrant": loop(3, ALTERNATE, flight=2, checkpoint="reentrant"),
    "interleaved, DDP": loop(block=ALTERNATE, ddp=True, accumulation=2),
    # Beside reserved servers.
    "2 + 1": loop(servers=1, batches=(3, 3)),
    "1 + 2": loop(1, servers=2, batches=(3,)),
    "3 + 3": loop(3, servers=3, batches=(3,) * 3),
    "1 + 1": loop(1, servers=1, batches=(3,)),
    "2 + 1, a stream": loop(servers=1, forms=STREAM),
    "2 + 1, in flight": loop(2, TOGETHER, servers=1, flight=3, look=1, evaluate=1, batches=(3, 3)),
    "2 + 1, dealt": loop(block={"documents": "deal"}, servers=1, accumulation=2),
}
SELDOM = {"streams, state": SLOW, "interleaved, reentrant": LONG, "3 + 3": SLOW, "1 + 1": LONG}


@pytest.mark.parametrize("name", [pytest.param(name, marks=SELDOM.get(name, ())) for name in RIGHT])
def test_right(workers: WorkerPool, name: str) -> None:
    case = RIGHT[name]
    for one in play(workers, case):
        assert one.trained == case.epochs * case.given_out(one.rank)
        assert len(one.load) == case.world + case.servers and (not case.servers or min(one.load) > 0)


PIPELINES = {
    "windows": loop(stages=2, model="mistral", accumulation=3, checkpoint="plain", forms=("row", "row none lengths")),
    "parked": loop(stages=2, block={"keep": "host"}, accumulation=2, checkpoint="plain", evaluate=1),
    "sinks, two replicas": loop(4, {"waves": 3}, stages=2, model="gpt_oss", accumulation=4, checkpoint="reentrant"),
    "three stages, one micro-batch": loop(3, stages=3),
    "one stage": loop(1, stages=1, accumulation=3),
    "three stages, two replicas": loop(6, stages=3, accumulation=5),
    "four stages, two replicas": loop(8, stages=4, accumulation=6, evaluate=1),
    "latent attention": loop(stages=2, model="deepseek_v3", accumulation=9),
    "tied, two replicas": loop(4, stages=2, model="qwen2", accumulation=3, forms=("row", "row none lengths")),
}
SELDOM |= {name: SLOW if i < 4 else LONG for i, name in enumerate(PIPELINES) if i > 1}


@pytest.mark.parametrize("name", [pytest.param(name, marks=SELDOM.get(name, ())) for name in PIPELINES])
def test_pipelines(workers: WorkerPool, name: str) -> None:
    """Stages × replicas × micro-batches, fewer micro-batches than stages among them."""
    case = PIPELINES[name]
    failure, played = run_case(workers, case)
    assert not failure, failure
    assert [one and (one.error, one.trained) for one in played] == [(None, 2 * case.accumulation)] * case.world


def dying(what: str, turn: int = 1, layer: int | None = None, trainers: int = 2, servers: int = 2, wave: int = 0,
          **changes: Any) -> Case:  # fmt: skip
    """The last server dies; in the first layer of a backward, in the second of a forward."""
    layer = (0 if "backward" in what else 1) if layer is None else layer
    fate = Fate(servers - 1, changes.pop("how", "KILL"), what, turn, layer, wave=wave)
    block = {**ALTERNATE, "timeout_s": 60, **changes.pop("block", {}), "on_server_failure": "continue"}
    return loop(trainers, block, servers=servers, fates=(fate,), batches=(4,) * trainers, **changes)


IN_FLIGHT = {"flight": 2, "look": 1, "block": TOGETHER}
DEATHS = {
    "hangs": dying("backward dispatch", how="STOP", block={"timeout_s": 10}),
    **{what: dying(what) for what in MOMENTS}, "first open": dying("open", 0), "first dispatch": dying("dispatch", 0),
    "one trainer, a return": dying("return", trainers=1, servers=1),
    "one trainer, a backward": dying("backward dispatch served", trainers=1, servers=1),
    "one part": dying("backward dispatch served", block={"overlap": "local_first"}),
    # All waves of a pass run again, with others in the new plan.
    "second wave": dying("return", wave=1, block={"waves": 4}),
    "third wave of a backward": dying("backward return", wave=2, block={"waves": 4}),
    "reentrant checkpointing": dying("backward return", checkpoint="reentrant"),
    "checkpointing": dying("return", checkpoint="plain"), "not read ahead": dying("backward return", 2, ahead=False),
    # Those whose forward ran with the server attend again before their backward.
    "in flight": dying("return", 3, **IN_FLIGHT), "backward in flight": dying("backward return", 0, **IN_FLIGHT),
    "windows and sinks": dying("backward dispatch served", model="gpt_oss"),
}  # fmt: skip
SELDOM |= dict.fromkeys(list(DEATHS)[1::2], LONG)


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=SELDOM.get(name, ())) for name in DEATHS])
def test_a_server_dies(workers: WorkerPool, name: str) -> None:
    case = DEATHS[name]
    (fate,) = case.fates
    first, *others = play(workers, case)
    assert [one.changes for one in (first, *others)] == [1] * case.world
    # Whether all trainers are certain to be in that pass: one that is not begins with the new servers.
    if fate.what not in ("open", "plan") and "done" not in fate.what and (
        case.world == 1 or not fate.what.endswith("dispatch")
    ):  # fmt: skip
        assert first.repeated > 0


@pytest.mark.slow
@pytest.mark.parametrize("second", [("return", 1), pytest.param(("open", 3), marks=pytest.mark.long)])
def test_one_dies_after_another(workers: WorkerPool, second: tuple[str, int]) -> None:
    """The second one mostly while passes run again for the first."""
    case = dying("dispatch served")
    play(workers, replace(case, fates=(*case.fates, Fate(0, "KILL", *second, 1))))


@pytest.mark.slow
@pytest.mark.parametrize("dies", [False, True])
def test_a_server_comes_later(workers: WorkerPool, dies: bool) -> None:
    case = replace(dying("open", 0, servers=1, comes=(0.0,), awaits=True, ahead=False), batches=(5, 5))
    for one in play(workers, case if dies else replace(case, fates=())):
        assert one.changes == 1 + dies and (dies or one.repeated == 0)
        assert len(one.load) == 4 - dies and one.load[-1] > 0.1 * max(one.load)


AT_THE_NEXT = ["rank 0 ", "backward of micro-batch 2", "rank 1 waits for", "lengths at the forward number 3"]
ERRORS = {
    "rank 0 begins the next epoch": (loop(batches=(3, 4), epochs=2),
        ["loader of rank 0 ended after 3", "rank 1 trains micro-batch 3 of epoch 1"]),
    "rank 0 leaves its loop": (loop(batches=(5, 5), epochs=2, plant=Plant("break", 0, 0, 2)),
        ["rank 0 left its loop before micro-batch 2", "break"]),
    "rank 1 catches an exception": (loop(batches=(6, 6), plant=Plant("forward", 1, 0, 2, caught=True)),
        ["rank 1", "forward of micro-batch 2", "exception"]),
    # Those who wait in an exchange, and the one that waits for them elsewhere, name both.
    "rank 1 looks alone": (loop(block=TOGETHER, batches=(3, 3), plant=Plant("look", 1, 0, 2)),
        ["rank 0 ", "forward of micro-batch 2, layer 0", "forward without backward number 0"]),
    "in the backward": (loop(batches=(6, 6), ahead=False, plant=Plant("backward", 1, 0, 2, caught=True)), AT_THE_NEXT),
    "in the loss": (loop(batches=(6, 6), ahead=False, plant=Plant("loss", 1, 0, 2, caught=True)), AT_THE_NEXT),
    "positions in the next step": (
        loop(block={"documents": "deal"}, batches=(4, 4), accumulation=2, plant=Plant("positions", 1, 0, 3)),
        ["rank 1", "at row 3 position_ids jump to 5", "rows from 3 to 5"]),
    "no room": (loop(block={"memory": 1e-7}), ["does not fit", '"memory" allows', "MiB more than"]),
    "no room in a pipeline": (loop(stages=2, block={"memory": 1e-6}), ["does not fit", '"memory" to at least']),
    "no room beside a server": (loop(block={"memory": 1e-6}, servers=1), ["does not fit", '"memory" to at least']),
    "a loader": (loop(batches=(5, 5), generator=True, plant=Plant("loader", 1, 0, 2)), ["rank 1", "a torn file"]),
}  # fmt: skip


@pytest.mark.parametrize("name", ERRORS)
def test_every_rank_stops(workers: WorkerPool, name: str) -> None:
    case, words = ERRORS[name]
    failure, played = run_case(workers, case)
    assert not failure, failure
    for one in played[case.world :]:
        assert one is not None and one.exit_code == 1 and all(word in one.said for word in words), one
    for one in played[: case.world]:
        assert one is not None and one.error is not None
        # Those that are caught end with the error of CAD that comes then.
        kind, _, said, _ = one.error
        assert kind == "Planted" or all(word in said for word in words), (one.rank, said)
        assert kind != "Planted" or (case.plant is not None and one.trained == case.plant.at)
