"""Reserved servers that die while they serve, and trainers that go on: exact, whatever the server was doing."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import training
from pool import WorkerPool
from served import free_port, play

import deepspeed_cad
from deepspeed_cad.server import loop, process

LENGTHS = {1: [[260, 3, 40]], 2: [[260], [40, 30, 9, 1, 50]]}
BLOCK = {"granularity": 16, "tolerance": 0.02, "on_server_failure": "continue", "links": training.LINKS, "timeout_s": 60}
STEPS = 4


def _train(rank: int, trainers: int, block: dict[str, Any], checkpoint: str, kill: str) -> dict[str, Any]:
    """Steps of SGD beside a model of this trainer's own that runs each document alone; `kill`: between steps 1 and 2,
    the process whose number is in this file."""
    reference, model = training.tiny_llama(), training.tiny_llama()
    deepspeed_cad.apply(model, block)
    if checkpoint:
        model.gradient_checkpointing_enable({"use_reentrant": checkpoint == "reentrant"})
    model.train()
    session = deepspeed_cad.current_session()
    assert session is not None
    optimizers = [torch.optim.SGD(one.parameters(), lr=1e-4) for one in (reference, model)]
    for step in range(STEPS):
        if step == 2 and kill:
            dist.barrier()
            if rank == 0:
                os.kill(int(Path(kill).read_text()), signal.SIGKILL)
                time.sleep(0.5)
            dist.barrier()
        own = training.documents(LENGTHS[trainers][(rank + step) % trainers], seed=100 * step + rank)
        loss = training.loss_sum(model, training.pack(own))
        loss.backward()
        expected, gradients = training.alone(reference, own)
        assert abs(float(loss.detach()) - expected) < 1e-10 * max(1, expected)
        for name, parameter in model.named_parameters():
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            assert (grad - gradients[name]).abs().max() < 1e-10 * (1 + gradients[name].abs().max()), (step, name)
        for name, parameter in reference.named_parameters():
            parameter.grad = gradients[name]
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert (ours - theirs).abs().max() < 1e-10
    changes = session.reserved.changes
    return {
        "servers": changes.crew.servers, "repeated": changes.repeated, "load": session.statistics.load.tolist(),
        "sent": session.statistics.bytes_sent,
    }  # fmt: skip


def _die_at(what: str, turn: int, layer: int) -> None:
    """Let this server die at a moment of its loop."""

    def end() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    class Mortal(loop.Loop):
        def follow(self, order: Any) -> None:
            head = order.head
            here = head.get("turn") == turn and head.get("layer", layer) == layer
            way = "backward " if head.get("backward") else ""
            name = f"{way}{head['do']}"
            if here and what == name:
                end()
            if here and what == f"{name} served":
                serve = loop.serve_arrived_backward if way else loop.serve_arrived
                setattr(loop, serve.__name__, lambda *given: end())
            super().follow(order)
            if here and what == f"{name} done":
                end()

    process.Loop = Mortal  # type: ignore[misc]


def _play(rank: int, world: int, port: int, block: dict[str, Any], deaths: dict[int, tuple], pid: str, *args: Any) -> Any:
    if rank in deaths and deaths[rank]:
        _die_at(*deaths[rank])
    elif rank in deaths:
        Path(pid).write_text(str(os.getpid()))
    return play(rank, world, port, block, *args)


def _run(
    workers: WorkerPool, trainers: int, servers: int, deaths: dict[int, tuple], tmp_path: Path, *, checkpoint: str = "",
    train: Any = _train, **block: Any
) -> list[dict[str, Any]]:  # fmt: skip
    """What the trainers give; all servers but those of `deaths` end well."""
    pid = str(tmp_path / "pid")
    kill = pid if () in deaths.values() else ""
    errors, results = workers.try_run(
        _play, trainers + servers, free_port(), {**BLOCK, "servers": {"reserved": servers}, **block}, deaths, pid, train,
        checkpoint, kill, joined=False, grace=60,
    )  # fmt: skip
    for rank, error in enumerate(errors):
        assert (error is not None and error[0] == "Died") if rank in deaths else error is None, (rank, error)
    left = tuple(rank for rank in range(trainers, trainers + servers) if rank not in deaths)
    for one in results[:trainers]:
        assert one["servers"] == left
    for rank in left:
        assert results[rank].code == 0 and results[rank].held == 0 and results[rank].opened <= 4
    return results[:trainers]


MOMENTS = [
    ("open", 0), ("dispatch", 0), ("dispatch", 1), ("dispatch served", 1), ("return", 1), ("return done", 1),
    ("backward dispatch", 1), ("backward dispatch served", 1), ("backward return", 1), ("backward return done", 1),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("overlap", ["interleave", "local_first"])
@pytest.mark.parametrize(("what", "turn"), MOMENTS)
@pytest.mark.parametrize(("trainers", "servers"), [(1, 1), (2, 2)])
def test_a_server_dies_at_a_moment(
    workers: WorkerPool, tmp_path: Path, trainers: int, servers: int, what: str, turn: int, overlap: str
) -> None:
    layer = 0 if "backward" in what else 1
    found = _run(workers, trainers, servers, {trainers: (what, turn, layer)}, tmp_path, overlap=overlap)
    if what not in ("open", "return done", "backward return done"):
        assert found[0]["repeated"] > 0


def test_between_steps(workers: WorkerPool, tmp_path: Path) -> None:
    found = _run(workers, 2, 1, {2: ()}, tmp_path)
    assert found[0]["repeated"] == 0
