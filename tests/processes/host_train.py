"""One rank of a job over several hosts: trains packed documents with CAD and without, and says what it saw.

    python host_train.py '{"rank": 0, "ranks": 3, "store": "10.0.0.1", "port": 29500, …}'

Prints one JSON object as its last line; an error of CAD is part of it. Tests start it on hosts of their own.
"""

import json
import logging
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
import training

import deepspeed_cad
from deepspeed_cad.errors import CADError
from deepspeed_cad.planner.plan import HeadShape
from deepspeed_cad.profiles import Profile, ShapeCost
from deepspeed_cad.session import close_session

SHAPE = HeadShape(8, 4, 8, 8, 4)


def step(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> float:
    """Loss of this rank's documents, forward and backward."""
    model.zero_grad()
    return training.forward_backward(model, batch)


def write_profile(path: Path, pair: float) -> None:
    """Costs of the model's attention in seconds, where a rank of any host reads them."""
    Profile("these tests", "torch_math", (ShapeCost(SHAPE, pair=pair),)).save(path)


def train(rank: int, asked: dict[str, Any]) -> dict[str, Any]:
    """What was seen of steps with CAD, and the loss without it; or the error of CAD that ended them. `asked["pauses"]`:
    "joined" or "trains": what is said before CAD is turned on, or behind the first step, where a line is waited for;
    "": nowhere."""
    documents = training.documents(asked["lengths"][rank], seed=rank)
    batch = training.pack(documents)
    expected, _ = training.alone(training.tiny_llama(torch.float32, attn_implementation="eager"), documents)
    try:
        pause(asked, "joined")
        model = deepspeed_cad.apply(training.tiny_llama(torch.float32), asked["block"])
        session = deepspeed_cad.current_session()
        assert session is not None and session.transport is not None
        says = session.describe()
        step(model, batch)
        pause(asked, "trains")
        before = session.transport.bytes_sent
        losses = [step(model, batch) for _ in range(asked["steps"])]
    except CADError as error:
        return {"error": str(error)}
    exchanged = session.transport.bytes_sent - before
    close_session()
    return {"exchanged": exchanged, "expected": expected, "says": says, "losses": losses}


def pause(asked: dict[str, Any], where: str) -> None:
    """Until the test says a line."""
    if asked["pauses"] == where:
        print(where, flush=True)
        sys.stdin.readline()


def main() -> None:
    asked = json.loads(sys.argv[1])
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(asked.get("fixed", False))  # plans depend on no measured time
    rank, ranks = asked["rank"], asked["ranks"]
    store = dist.TCPStore(asked["store"], asked["port"], ranks, rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    found = train(rank, asked)
    print(json.dumps(found), flush=True)
    # Other ranks may still read the store, which is rank 0's.
    if "error" in found:
        time.sleep(asked["linger_s"])
    else:
        store.add("done", 1)
        while rank == 0 and store.add("done", 0) < ranks:
            time.sleep(0.05)
    os._exit(0)


if __name__ == "__main__":
    main()
