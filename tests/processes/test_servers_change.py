"""Reserved servers that die while they serve, and trainers that go on: exact, whatever the server was doing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import training
from pool import WorkerPool
from ports import free_port
from served import play
from test_servers import family_error

import deepspeed_cad
from deepspeed_cad.errors import ServerLostError
from deepspeed_cad.exchange.packed import ComparedFirst
from deepspeed_cad.server import loop, process
from deepspeed_cad.server.launch import start_server
from deepspeed_cad.server.rendezvous import take_place
from deepspeed_cad.version import __version__

LENGTHS = {1: [[260, 3, 40]], 2: [[260], [40, 30, 9, 1, 50]]}
BLOCK = {
    "granularity": 16,
    "tolerance": 0.02,
    "on_server_failure": "continue",
    "links": training.LINKS,
    "timeout_s": 60,
}
STEPS = 4


def _servers() -> Any:
    session = deepspeed_cad.current_session()
    assert session is not None
    return session.servers


def _nothing(rank: int, step: int, folder: str) -> None:
    pass


def _kill(rank: int, step: int, folder: str) -> None:
    """Between steps 1 and 2 the server dies whose process is named in a file, and every trainer knows it."""
    if step == 2:
        dist.barrier()
        if rank == 0:
            os.kill(int(Path(folder, "pid").read_text()), signal.SIGKILL)
        _await(lambda: _servers().members.generation)
        dist.barrier()


def _await(what: Any) -> None:
    while not what():
        time.sleep(0.01)


def _ask_in(rank: int, step: int, folder: str) -> None:
    """Between steps 1 and 2 a server comes."""
    if step == 2:
        Path(folder, "come").touch()
        if rank == 0:
            _await(lambda: _servers().newcomers)
        dist.barrier()


def _wake(rank: int, step: int, folder: str) -> None:
    """Before the last step the server goes on that was stopped, and that trainers have given up."""
    if step == STEPS - 1 and rank == 0:
        assert _servers().members.generation == 1
        os.kill(int(Path(folder, "pid").read_text()), signal.SIGCONT)


def _replace(rank: int, step: int, folder: str) -> None:
    """One dies between steps 0 and 1, another one comes between 1 and 2."""
    _kill(rank, step + 1, folder)
    _ask_in(rank, step, folder)


def _train(
    rank: int, trainers: int, block: dict[str, Any], folder: str, before: Any = _nothing, checkpoint: str = ""
) -> dict[str, Any]:
    """Steps of SGD beside a model of this trainer's own that runs each document alone."""
    reference, model = training.tiny_llama(), training.tiny_llama()
    deepspeed_cad.apply(model, block)
    if checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": checkpoint == "reentrant"})
    model.train()
    optimizers = [torch.optim.SGD(one.parameters(), lr=1e-4) for one in (reference, model)]
    for step in range(STEPS):
        before(rank, step, folder)
        own = training.documents(LENGTHS[trainers][(rank + step) % trainers], seed=100 * step + rank)
        loss = training.loss_sum(model, training.pack(own))
        loss.backward()
        expected, gradients = training.alone(reference, own)
        assert abs(float(loss.detach()) - expected) < 1e-10 * max(1, expected)
        training.assert_gradients(model, gradients)
        for name, parameter in reference.named_parameters():
            parameter.grad = gradients[name]
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert (ours - theirs).abs().max() < 1e-10
    return _found()


def _found() -> dict[str, Any]:
    servers, session = _servers(), deepspeed_cad.current_session()
    assert session is not None
    return {
        "servers": servers.members.servers, "repeated": servers.repeated, "load": session.statistics.load.tolist(),
        "changes": servers.members.generation,
    }  # fmt: skip


def _die_at(
    what: str, turn: int, layer: int, wave: int = 0, how: int = signal.SIGKILL, first: Callable[[], None] | None = None
) -> None:
    """Let this server die at a moment of its loop, or stop there; `first` is called before."""

    def end() -> None:
        if first is not None:
            first()
        loop.serve_arrived, loop.serve_arrived_backward = whole
        os.kill(os.getpid(), how)

    whole = loop.serve_arrived, loop.serve_arrived_backward

    class Mortal(loop.Loop):
        def follow(self, order: Any) -> None:
            head = order.head
            here = head.get("turn") == turn and head.get("layer", layer) == layer and head.get("wave", wave) == wave
            way = "backward " if head.get("backward") else ""
            name = f"{way}{head['do']}"
            if here and what == name:
                end()
            if here and what == f"{name} served":
                serve = loop.serve_arrived_backward if way else loop.serve_arrived
                setattr(loop, serve.__name__, lambda *given: end() or serve(*given))
            super().follow(order)
            if here and what == f"{name} done":
                end()

    process.Loop = Mortal  # type: ignore[misc]


def _play(
    rank: int, world: int, port: int, block: dict[str, Any], deaths: dict[int, tuple], later: int, folder: str,
    train: Any, *args: Any
) -> Any:  # fmt: skip
    """Roles of a test: trainers, servers, some of which die, and `later` servers that come when they are asked in."""
    if rank >= world - later:
        _await(Path(folder, "come").exists)
        role, config = take_place(f"127.0.0.1:{port}", 30.0, None, __version__)
        return start_server(role, config, os.environ, "cpu")
    if rank in deaths:
        Path(folder, "pid").write_text(str(os.getpid()))
        if deaths[rank]:
            _die_at(*deaths[rank])
    try:
        return play(rank, world - later, port, block, train, folder, *args)
    finally:
        process.Loop = loop.Loop  # type: ignore[misc]


def _run(
    workers: WorkerPool, trainers: int, servers: int, deaths: dict[int, tuple], folder: Path, *args: Any,
    train: Any = _train, later: int = 0, **block: Any
) -> list[dict[str, Any]]:  # fmt: skip
    """What the trainers give; all servers but those of `deaths` end well."""
    errors, results = workers.try_run(
        _play, trainers + servers + later, free_port(), {**BLOCK, "servers": {"reserved": servers}, **block}, deaths,
        later, str(folder), train, *args, joined=False, mortal=deaths, timeout=120.0,
    )  # fmt: skip
    wakes = {rank for rank, moment in deaths.items() if signal.SIGSTOP in moment}
    for rank, error in enumerate(errors):
        died = rank in deaths and rank not in wakes
        assert (error is not None and error[0] == "Died") if died else error is None, (rank, error)
        assert rank not in wakes or results[rank].code == 1
    left = tuple(rank for rank in range(trainers, trainers + servers + later) if rank not in deaths)
    for one in results[:trainers]:
        assert one["servers"] == left
    for rank in left:
        if rank < trainers + servers:
            assert results[rank].code == 0 and results[rank].held == 0 and results[rank].opened <= 4
        else:
            assert results[rank] == 0
    return results[:trainers]


MOMENTS = [
    ("open", 0), ("dispatch", 0), ("dispatch", 1), ("dispatch served", 1), ("return", 1), ("return done", 1),
    ("backward dispatch", 1), ("backward dispatch served", 1), ("backward return", 1), ("backward return done", 1),
]  # fmt: skip


def _moment(what: str, turn: int) -> tuple[str, int, int]:
    return what, turn, 0 if "backward" in what else 1


def _runs_again(what: str, trainers: int) -> bool:
    """Whether all trainers are certain to be in that pass: one that is not begins with the new servers."""
    return what != "open" and "done" not in what and (trainers == 1 or not what.endswith("dispatch"))


@pytest.mark.slow
@pytest.mark.parametrize(("what", "turn"), MOMENTS)
@pytest.mark.parametrize(
    ("trainers", "servers", "overlap"),
    [(2, 2, "interleave"), pytest.param(1, 1, "local_first", marks=pytest.mark.long)],
)
def test_a_server_dies_at_a_moment(
    workers: WorkerPool, tmp_path: Path, trainers: int, servers: int, overlap: str, what: str, turn: int
) -> None:
    found = _run(workers, trainers, servers, {trainers: _moment(what, turn)}, tmp_path, overlap=overlap)
    if _runs_again(what, trainers):
        assert found[0]["repeated"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("what", ["dispatch served", pytest.param("backward return", marks=pytest.mark.long)])
def test_a_server_hangs_at_a_moment_and_goes_on_later(workers: WorkerPool, tmp_path: Path, what: str) -> None:
    """It is dropped as if it had died, and what it does when it goes on disturbs nobody."""
    moment = (*_moment(what, 1), 0, signal.SIGSTOP)
    for one in _run(workers, 2, 2, {2: moment}, tmp_path, _wake, timeout_s=20):
        assert one["repeated"] > 0 and one["changes"] == 1


@pytest.mark.slow
def test_between_steps(workers: WorkerPool, tmp_path: Path) -> None:
    found = _run(workers, 2, 1, {2: ()}, tmp_path, _kill)
    assert found[0]["repeated"] == 0 and found[0]["changes"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("second", [("return", 1), pytest.param(("open", 3), marks=pytest.mark.long)])
def test_one_dies_after_another(workers: WorkerPool, tmp_path: Path, second: tuple[str, int]) -> None:
    """The second one mostly while passes run again for the first."""
    deaths = {2: _moment("dispatch served", 1), 3: _moment(*second)}
    found = _run(workers, 2, 2, deaths, tmp_path)
    assert found[0]["changes"] in (1, 2)


def _loaded(rank: int, trainers: int, block: dict[str, Any], folder: str) -> dict[str, Any]:
    """Micro-batches that a loader announces: what is planned ahead is planned for a server that is gone."""
    reference, model = training.tiny_llama(), training.tiny_llama()
    deepspeed_cad.apply(model, block).train()
    session = deepspeed_cad.current_session()
    assert session is not None
    own = [training.documents(LENGTHS[trainers][(rank + step) % trainers], 100 * step + rank) for step in range(6)]
    loader = session.look_ahead([training.pack(one) for one in own], model)
    for docs, batch in zip(own, loader, strict=True):
        training.step_as_alone(model, reference, docs, batch)
    return _found()


def _many(rank: int, trainers: int, block: dict[str, Any], folder: str) -> dict[str, Any]:
    """Micro-batches in flight whose backwards come in another order, and forwards without gradients between."""
    reference, model = training.tiny_llama(), training.tiny_llama()
    deepspeed_cad.apply(model, block).train()
    own = [training.documents([40 * (1 + (rank + step) % 2), 7, 1, 30], 10 * step + rank) for step in range(4)]
    expected = [training.alone(reference, docs) for docs in own]
    losses = [training.loss_sum(model, training.pack(docs)) for docs in own[:2]]
    with torch.no_grad():
        assert abs(float(training.loss_sum(model, training.pack(own[2]))) - expected[2][0]) < 1e-9
    losses.append(training.loss_sum(model, training.pack(own[3])))
    for index in (1, 2, 0):
        losses[index].backward()
    whole = {name: sum(expected[i][1][name] for i in (0, 1, 3)) for name in expected[0][1]}
    training.assert_gradients(model, whole, 1e-9)
    return _found()


def _windows_and_sinks(rank: int, trainers: int, block: dict[str, Any], folder: str) -> dict[str, Any]:
    lengths = [[150, 3, 39], [20, 40, 1, 30, 37]][rank]
    assert max(family_error(rank, block, "gpt_oss", {"sliding_window": 12}, [lengths] * 2)) < 1e-10
    return _found()


IN_FLIGHT = {"train": _many, "forward_only": "balanced"}
MODES: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
    (("backward dispatch served", 1), {"overlap": "pingpong"}), (("dispatch served", 1), {"trainers_serve": False}),
    # All waves of a pass run again, with others in the new plan.
    (("return", 1, 1), {"overlap": "interleave", "waves": 4}),
    (("backward return", 1, 2), {"overlap": "interleave", "waves": 4}),
    (("backward return", 1), {"checkpoint": "reentrant"}), (("return", 1), {"checkpoint": "non-reentrant"}),
    (("backward return", 2), {"train": _loaded}),
    # Those whose forward ran with the server attend again before their backward.
    (("return", 3), IN_FLIGHT), (("backward return", 0), IN_FLIGHT),
    (("backward dispatch served", 1), {"train": _windows_and_sinks}),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("moment", "mode"), MODES, ids=lambda value: " ".join(map(str, value)))
def test_in_every_mode(workers: WorkerPool, tmp_path: Path, moment: tuple[Any, ...], mode: dict[str, Any]) -> None:
    what, turn, *wave = moment
    mode = dict(mode)
    args = (_nothing, mode.pop("checkpoint")) if "checkpoint" in mode else ()
    found = _run(workers, 2, 2, {3: (*_moment(what, turn), *wave)}, tmp_path, *args, **mode)
    assert found[0]["changes"] == 1 and (found[0]["repeated"] > 0 or not _runs_again(what, 2))


def _apart(rank: int, trainers: int, block: dict[str, Any], folder: str) -> dict[str, Any]:
    """Trainer 0 is through with its backward and waits for trainer 1 in a collective of the script's own, while the
    results of trainer 1 are lost with the server."""
    reference, model = training.tiny_llama(), training.tiny_llama()
    deepspeed_cad.apply(model, block).train()
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: grad)
    for step in range(2):
        own = training.documents(LENGTHS[trainers][(rank + step) % trainers], seed=100 * step + rank)
        loss = training.loss_sum(model, training.pack(own))
        if step == 1 and rank == 1:
            _lose_last(Path(folder))
        loss.backward()
        if step == 1 and rank == 0:
            assert _servers().members.generation == 0
            Path(folder, "through").touch()
        expected, gradients = training.alone(reference, own)
        for name, parameter in model.named_parameters():
            mine, wanted = parameter.grad.clone(), gradients[name].clone()
            dist.all_reduce(mine)
            dist.all_reduce(wanted)
            assert (mine - wanted).abs().max() < 1e-10 * (1 + wanted.abs().max()), name
        model.zero_grad()
    return _found()


def _lose_last(folder: Path) -> None:
    """What comes back in the last exchange of a backward is lost, because the server dies before all of it is sent, but
    after trainer 0 has its part."""
    finish = ComparedFirst.finish

    def lose(self: ComparedFirst, under_way: Any) -> Any:
        if "return in the backward of micro-batch 1, layer 0" not in str(under_way.identity):
            return finish(self, under_way)
        ComparedFirst.finish = finish  # type: ignore[method-assign]
        _await((folder / "through").exists)
        os.kill(int((folder / "pid").read_text()), signal.SIGKILL)
        _await(_servers().why)
        raise ServerLostError(_servers().why())

    ComparedFirst.finish = lose  # type: ignore[method-assign]


def test_a_trainer_that_is_ahead_helps(workers: WorkerPool, tmp_path: Path) -> None:
    found = _run(workers, 2, 1, {2: ()}, tmp_path, train=_apart, overlap="local_first")
    assert found[0]["repeated"] == 1


@pytest.mark.slow
@pytest.mark.parametrize(("trainers", "servers"), [pytest.param(1, 1, marks=pytest.mark.long), (2, 1)])
def test_a_server_comes_later(workers: WorkerPool, tmp_path: Path, trainers: int, servers: int) -> None:
    for one in _run(workers, trainers, servers, {}, tmp_path, _ask_in, later=1):
        assert one["changes"] == 1 and one["repeated"] == 0
        assert len(one["load"]) == trainers + servers + 1 and one["load"][-1] > 0.1 * one["load"][-2]


@pytest.mark.slow
def test_one_dies_and_another_one_comes(workers: WorkerPool, tmp_path: Path) -> None:
    for one in _run(workers, 2, 1, {2: ()}, tmp_path, _replace, later=1):
        assert one["changes"] == 2 and one["load"][-1] > 0
