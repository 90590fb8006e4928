"""A tiny model beside one reserved server, the last rank, against every document alone in fp64; see check_models.py.

All other ranks train. Linear layers of one part run while the other is attended, with and without checkpointing, at
once and in more waves than have memory at once.

Cases in which a server dies: the last rank starts servers as processes of their own. The first one is killed, by
itself, when what it serves of a layer has been queued on its GPU; the trainers go on alone, and then beside a server
that came later. Losses and gradients of every step are compared, also of that in which the server died.
"""

import copy
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from check_models import Sizes, check, judge, make_block, make_lengths, make_model, references, stream, train
from lines import Found, Lines, Place

import deepspeed_cad
from deepspeed_cad.config import CADConfig
from deepspeed_cad.request import VARIABLE, Request
from deepspeed_cad.server.launch import take_role
from deepspeed_cad.server.process import serve
from deepspeed_cad.server.servers import SurvivingServers
from deepspeed_cad.session import close_session

OWN_WORLD = True
"""The server is in no world of torch.distributed."""
RESERVED = {"reserved": 1}
DIES_AT = 2
"""The step in which the first server dies; as many run before with it, as many alone after it, and then as many beside
one that came later."""
CHANGE_S = 60.0
"""For the step in which it dies."""
COME_S = 120.0
"""For a server to start, or to end."""


def run(place: Place, lines: Lines, case: str) -> None:
    """Transports; every case meets anew, as another attempt of the same launch. Or a case in which a server dies."""
    if case:
        transport, how = case.split(": ")
        part = _keep_servers if place.rank == place.ranks - 1 else _train_on
        lines.check(f"reserved by {transport}", how, lambda: part(place, transport, how.split()[-1]))
        return
    known: list[Any] = []
    transports = ["nvlink", "nccl"] if place.on_gpu else ["c10d"]
    # Two waves are both on their way at once; of five the later ones start as earlier ones are back.
    ways: list[tuple[bool, int | str]] = [(kept, waves) for waves in ("auto", 2, 5) for kept in (True, False)]
    cases = [(transport, *way) for transport in transports for way in ways]
    for attempt, (transport, checkpointing, waves) in enumerate(cases):
        label = f"{place.ranks - 1} + 1, llama{', checkpointing' * checkpointing}"
        label += "" if waves == "auto" else f", {waves} waves"
        # By pairs: so little work is not worth several waves in seconds, and plans would move nothing.
        more = {"servers": RESERVED, "waves": waves, "cost": "auto" if waves == "auto" else "pairs"}
        surrounding = {**os.environ, "TORCHELASTIC_RESTART_COUNT": str(attempt)}
        os.environ.update(surrounding)
        try:
            part = partial(_take_part, place, transport, checkpointing, known, more)
            lines.check(f"reserved by {transport}", label, part)
        finally:
            close_session()
            if dist.is_initialized():
                dist.destroy_process_group()
            os.environ.pop(VARIABLE, None)
            os.environ.update(surrounding)


def _take_part(place: Place, transport: str, checkpointing: bool, known: list[Any], more: dict[str, Any]) -> Found:
    """As trainer or server, whichever the launcher of CAD makes of this rank."""
    config = CADConfig.from_dict({**make_block(place, transport), **more})
    request, server = take_role(Request(config, "gpu_check"))
    if server is not None:
        code = serve(server, config)
        return code == 0, f"the server ended with {code}"
    request.publish()
    # A launcher has a store of its own for every attempt, and torch's groups rely on that; here they share one.
    world = {name: int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")}
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if place.on_gpu else "gloo", rank=world["RANK"], world_size=world["WORLD_SIZE"],
        store=dist.PrefixStore(f"attempt {world['TORCHELASTIC_RESTART_COUNT']}", _store()),
    )  # fmt: skip
    trainers = replace(place, rank=dist.get_rank(), ranks=dist.get_world_size())
    sizes = Sizes(512, 4096) if place.on_gpu else Sizes(64, 192)
    model = make_model(trainers, "llama", sizes)
    lengths = make_lengths("rows", trainers.ranks, sizes.tokens)
    found = check(trainers, model, lengths, transport, checkpointing, known, **more)
    dist.barrier()
    return found


def _train_on(place: Place, transport: str, dies_in: str) -> Found:
    ranks = place.ranks - 1
    os.environ.update(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
    dist.init_process_group("cpu:gloo,cuda:nccl" if place.on_gpu else "gloo", timeout=timedelta(seconds=120))
    trainers, sizes = replace(place, ranks=ranks), Sizes(512, 4096) if place.on_gpu else Sizes(64, 192)
    model, lengths = make_model(trainers, "llama", sizes), make_lengths("rows", ranks, sizes.tokens)
    known = references(model, lengths)
    ours = copy.deepcopy(model)
    block = {"servers": {"joined": 1}, "on_server_failure": "continue", "timeout_s": 100.0}
    deepspeed_cad.apply(ours, {**make_block(place, transport), **block})
    session = deepspeed_cad.current_session()
    assert session is not None and isinstance(session.servers, SurvivingServers)
    servers = session.servers
    begin = place.rank * sizes.tokens
    here = [column[begin : begin + sizes.tokens] for column in stream(lengths, place.device)]
    used, seconds, moved, said = [], [], [], ""
    for step in range(3 * DIES_AT + 1):
        if step == 2 * DIES_AT + 1:
            dist.barrier()
            _store().set("come", "1")
            _await(lambda: bool(servers.newcomers) or place.rank > 0, "the second server")
            dist.barrier()
        before, begun = session.statistics, time.perf_counter()
        found = train(ours, *here)
        place.synchronize()
        seconds.append(time.perf_counter() - begun)
        moved.append(session.statistics.since(before).bytes_sent)
        used.append("none" if session.transport is None else session.transport.name)
        right, said = judge(trainers, found, *known)
        if not right:
            return (False, f"step {step}, {servers.members}: {said}")
    close_session()
    moved = [sum(by_trainer) for by_trainer in zip(*trainers.gather(moved))]
    alone = slice(DIES_AT + 1, 2 * DIES_AT + 1)
    right = servers.members.generation == 2 and servers.members.servers == (ranks + 1,) and servers.repeated > 0
    right = right and used[0] == used[-1] == transport and all(moved[:DIES_AT]) and all(moved[alone.stop :])
    right = right and (ranks > 1 or not any(moved[alone])) and seconds[DIES_AT] < CHANGE_S
    return right, (
        f"the step in which it died took {seconds[DIES_AT]:.2f} s, others with it {min(seconds[:DIES_AT]):.2f}, alone "
        f"{min(seconds[alone]):.2f} s; {servers.repeated} passes ran again; bytes {moved} by {used}; last step: {said}"
    )


def _keep_servers(place: Place, transport: str, dies_in: str) -> Found:
    """Starts the servers: one that dies, and when the trainers ask for it another one."""
    script, device = Path(__file__).with_name("server_process.py"), str(place.device)
    started: list[subprocess.Popen[bytes]] = []

    def serve(*moment: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(script), f"127.0.0.1:{os.environ['MASTER_PORT']}", device, *moment]
        started.append(subprocess.Popen(command))
        return started[-1]

    try:
        first = serve("backward dispatch" if dies_in == "backward" else "dispatch", str(DIES_AT))
        _await(lambda: first.poll() is not None, "the end of the first server", 2 * COME_S)
        _await(lambda: _store().check(["come"]), "the trainers, alone,", COME_S + CHANGE_S)
        second = serve()
        _await(lambda: second.poll() is not None, "the end of the second server", 2 * COME_S)
    finally:
        for one in started:
            one.kill()
            one.wait()
    codes = first.returncode, second.returncode
    return codes == (-9, 0), f"servers ended with {codes}"


def _store() -> dist.Store:
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False, timeout=timedelta(seconds=30))
    return dist.PrefixStore("check_servers", store)


def _await(what: Callable[[], bool], name: str, seconds: float = COME_S) -> None:
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            raise TimeoutError(f"{name} did not come within {seconds:.0f} s")
        time.sleep(0.1)
