"""Who trains and who serves, from the key and what launchers say; and what does not fit."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from deepspeed_cad.errors import CADConfigError
from deepspeed_cad.server.launch import Split, split
from deepspeed_cad.server.orders import TRACE
from deepspeed_cad.server.servers import ReservedServers
from deepspeed_cad.trace import WARM_UP


def torchrun(rank: int, sizes: list[int]) -> dict[str, str]:
    host = next(h for h in range(len(sizes)) if rank < sum(sizes[: h + 1]))
    local = rank - sum(sizes[:host])
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK")
    values = (rank, sum(sizes), local, sizes[host], host, len(sizes), rank)
    found = {name: str(value) for name, value in zip(names, values, strict=True)}
    return found | {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "ROLE_WORLD_SIZE": str(sum(sizes))}


def deepspeed(rank: int, sizes: list[int]) -> dict[str, str]:
    """The same under DeepSpeed's launcher, which has other names for hosts."""
    renamed = {"LOCAL_WORLD_SIZE": "LOCAL_SIZE", "GROUP_RANK": "CROSS_RANK", "GROUP_WORLD_SIZE": "CROSS_SIZE"}
    given = torchrun(rank, sizes)
    return {renamed.get(name, name): value for name, value in given.items() if not name.startswith("ROLE")}


@pytest.mark.parametrize("launcher", [torchrun, deepspeed])
@pytest.mark.parametrize("servers, sizes, expected", [
    ({"reserved": 2}, [4], [0, 1, 2, 3]), ({"reserved": 1}, [2, 2], [0, 1, 2, 3]),
    ({"ranks": [3, 1]}, [2, 2], [0, 2, 1, 3]), ({"reserved_per_node": 1}, [2, 2], [0, 2, 1, 3]),
    ({"reserved_per_node": 1}, [3, 2], [0, 1, 3, 2, 4]),
    ({"reserved_per_node": 2}, [3, 4], [0, 3, 4, 1, 2, 5, 6]), ({"joined": 2}, [2], [0, 1]),
    ({"reserved": 1}, [3, 2], [0, 1, 2, 3, 4]),
])  # fmt: skip
def test_numbers(launcher: Any, servers: dict[str, Any], sizes: list[int], expected: list[int]) -> None:
    roles = [split(servers, launcher(rank, sizes)) for rank in range(sum(sizes))]
    assert [role.rank for role, _ in roles] == expected
    assert len({(role.trainers, role.servers, role.rendezvous) for role, _ in roles}) == 1
    changed = [(role, given) for role, given in roles if given]
    name = "LOCAL_WORLD_SIZE" if launcher is torchrun else "LOCAL_SIZE"
    for role, given in changed:
        own = {"RANK": str(role.rank), "WORLD_SIZE": str(role.trainers), name: given[name]}
        own |= {f"ROLE_{key}": own[key] for key in ("RANK", "WORLD_SIZE") if launcher is torchrun}
        assert not role.is_server and given == own
    if changed:
        # Of each host, what it has left of trainers.
        assert sum(1 / int(given[name]) for _, given in changed) == pytest.approx(len(sizes))


@pytest.mark.parametrize("servers, sizes, words", [
    ({"reserved": 4}, [4], "4 ranks: at least one must train"),
    ({"ranks": [0, 1]}, [2], "at least one must train"), ({"ranks": [4]}, [4], "no rank 4"),
    ({"ranks": [0]}, [4], "rank 0 would serve and rank 1 of the same host train"),
    ({"reserved": 2}, [2, 2], "no trainer would be left on a host of 2 ranks"),
    ({"reserved_per_node": 2}, [2, 2], "no trainer would be left on a host of 2 ranks"),
])  # fmt: skip
def test_what_does_not_fit_is_refused_on_every_rank(servers: dict[str, Any], sizes: list[int], words: str) -> None:
    for rank in range(sum(sizes)):
        with pytest.raises(CADConfigError, match=words):
            split(servers, torchrun(rank, sizes))


def test_without_a_launcher() -> None:
    with pytest.raises(CADConfigError, match=r"RANK and WORLD_SIZE are not set.*torchrun"):
        split({"reserved": 1}, {})
    trains = Split(2, 1, 1, "127.0.0.1:29500"), {"RANK": "1", "WORLD_SIZE": "2"}
    assert split({"reserved": 1}, {"RANK": "1", "WORLD_SIZE": "3"}) == trains


def test_a_launcher_that_does_not_count_hosts() -> None:
    each = [torchrun(rank, [2] * 3).items() for rank in range(6)]
    roles = [split({"reserved_per_node": 1}, {k: v for k, v in one if "GROUP" not in k})[0] for one in each]
    assert [(one.rank, one.servers) for one in roles] == [(rank, 3) for rank in (0, 3, 1, 4, 2, 5)]


@pytest.mark.parametrize("outlives, attempt", [("True", 1), ("False", 0), (None, 0)])
def test_hosts_that_count_their_own_failures_meet(outlives: str | None, attempt: int) -> None:
    """Where no store of an agent outlives an attempt, another number would only keep hosts apart."""
    given = {"TORCHELASTIC_RESTART_COUNT": "1"}
    given |= {} if outlives is None else {"TORCHELASTIC_USE_AGENT_STORE": outlives}
    for rank, key in (0, "reserved"), (3, "reserved"), (0, "joined"):
        assert split({key: 1}, torchrun(rank, [2, 2]) | given)[0].attempt == attempt


def test_the_first_trainer_tells_servers_of_micro_batches() -> None:
    """And which of them are recorded: so many after those that warm up, and one that ends that."""
    link: Any = mock.Mock()
    both = [ReservedServers(split({"reserved": 1}, torchrun(rank, [3]))[0], None, link) for rank in (0, 1)]  # type: ignore[arg-type]
    first, other = (one.crew(None, None).servers for one in both)
    assert first is not None and (first.count, first.at_start) == (1, 1)
    assert callable(first.open) and other is not None and other.open is None
    for rank, servers in enumerate(both):
        servers.members = replace(servers.members, generation=5)
        for count in range(WARM_UP + 5):
            servers.trace_next(mock.Mock(rank=rank, micro_batches=count, steps=3, path="trace.json", ranks=3))
    told = {"do": TRACE, "path": "trace.json", "steps": 3, "ranks": 3}
    assert link.tell.call_args_list == [mock.call(told, generation=5)] * (WARM_UP + 4)
