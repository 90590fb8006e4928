"""Ranks that divide heads among them: tensor parallelism within a replica, attention exchanged between replicas.

Two shares of two replicas on four processes, fp64 where a framework lets it: losses and gradients are those of each
document alone.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import training
from model_cases import BY_KIND, NEW, Family, tiny_model
from pool import WorkerPool
from ports import free_port
from served import play
from test_pipeline_shares import SumOverShares
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import deepspeed_cad
from deepspeed_cad.errors import CADError

WORLD, SHARES = 4, 2
LENGTHS = [[300, 20], [40, 30, 9, 1, 50]]
BLOCK = {"granularity": 8, "tolerance": 0.02, "links": training.LINKS}


def _divide(model: torch.nn.Module, tp: Any, kv_heads: int) -> None:
    """The heads and MLPs of a model; what several heads read is whole on every rank, and its gradient is their sum."""

    def share(width: int) -> Callable[..., torch.Tensor]:
        def hook(module: torch.nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor:
            own, shared = out.split([out.shape[-1] - width, width], -1)
            return torch.cat([own, SumOverShares.apply(shared, tp.get_group(), False)], -1)

        return hook

    columns = ["mlp.gate_proj", "mlp.up_proj", "self_attn.q_proj", "self_attn.q_b_proj", "self_attn.kv_b_proj"]
    if kv_heads % SHARES == 0:
        columns += ["self_attn.k_proj", "self_attn.v_proj"]
    plan: dict[str, Any] = {name: ColwiseParallel() for name in columns}
    plan |= {"mlp.down_proj": RowwiseParallel(), "self_attn.o_proj": RowwiseParallel()}
    for layer in model.model.layers:
        attention = layer.self_attn
        modules = dict(layer.named_modules())
        parallelize_module(layer, tp, {name: style for name, style in plan.items() if name in modules})
        for projection in (attention.k_proj, attention.v_proj) if kv_heads % SHARES else ():
            projection.register_forward_hook(share(projection.out_features))
        if hasattr(attention, "kv_a_proj_with_mqa"):
            attention.kv_a_proj_with_mqa.register_forward_hook(share(attention.qk_rope_head_dim))
        if hasattr(attention, "sinks"):
            attention.sinks = torch.nn.Parameter(distribute_tensor(attention.sinks.detach(), tp, [Shard(0)]))


def _train(
    rank: int, world: int, kv_heads: int, checkpoint: str | None, block: dict[str, Any], shares: int = SHARES,
    family: Family | None = None,
) -> dict[str, Any]:  # fmt: skip
    mesh = init_device_mesh("cpu", (world // shares, shares), mesh_dim_names=("dp", "tp"))
    make, near = partial(training.tiny_llama, num_key_value_heads=kv_heads), 1e-10
    if family is not None:
        make, near = partial(tiny_model, family.kind, **family.changes), family.tolerance
    reference, model = make(), make()
    _divide(model, mesh["tp"], kv_heads)
    deepspeed_cad.apply(model, BLOCK | block, mesh=mesh)
    training.checkpointed(model, checkpoint).train()
    session = deepspeed_cad.current_session()
    replica = rank // shares
    for step in range(2):
        docs = training.documents(LENGTHS[(replica + step) % 2], seed=10 * step + replica)
        training.step_as_alone(model, reference, docs, near)
    docs = training.documents(LENGTHS[replica], seed=replica)
    expected, _ = training.alone(reference, docs)
    model.eval()
    with torch.no_grad():
        assert abs(float(training.loss_sum(model, training.pack(docs))) - expected) < 10 * near * max(1, expected)
    together = block.get("forward_only") == "balanced" and shares < world
    assert session.forward_only.micro_batches == together
    assert not together or session.forward_only.imbalance < session.forward_only.imbalance_before
    return ({"sent": 0} if session.transport is None else training.figures()) | {"line": session.describe()}


@pytest.mark.parametrize("kv_heads, checkpoint, block", [
    (4, None, {}), (1, None, {}), (4, "reentrant", {}), (4, "non-reentrant", {"overlap": "interleave"}),
    (4, None, {"verify": 1}), (1, None, {"forward_only": "balanced"}),
])  # fmt: skip
def test_parallelize_module(workers: WorkerPool, kv_heads: int, checkpoint: str | None, block: dict[str, Any]) -> None:
    results = workers.run(_train, WORLD, kv_heads, checkpoint, block)
    assert len({(one["before"], one["after"]) for one in results}) == 1
    assert results[0]["before"] > 1.3 and results[0]["after"] < 1.05
    assert all(sum(one["sent"] for one in results[share::SHARES]) > 0 for share in range(SHARES))
    assert "(2 replicas of 2 by tensor parallelism)" in results[0]["line"]


@pytest.mark.parametrize("kind", ["mistral", "gpt_oss", "deepseek_v3"])
def test_windows_sinks_and_latent_attention(workers: WorkerPool, kind: str) -> None:
    if not NEW and kind == "deepseek_v3":
        pytest.skip("transformers 4 has no experts in fp64")
    results = workers.run(_train, WORLD, 4, None, {"forward_only": "balanced"}, SHARES, BY_KIND[kind])
    assert results[0]["after"] < results[0]["before"] and all(one["sent"] for one in results)


def _on_hosts(rank: int, world: int, hosts: list[int]) -> list[int]:
    """A step on such hosts, where the ranks of each share time links as often as they need to; who is on which."""
    rounds = mock.patch("deepspeed_cad.exchange.links.ROUNDS", 2 + rank % SHARES)
    with rounds, mock.patch("deepspeed_cad.exchange.probe.host_number", lambda: hosts[rank]):
        found = _train(rank, world, 4, None, {"links": "measure"})
    session = deepspeed_cad.current_session()
    assert found["sent"] and found["after"] < 1.05
    crew = session.plans.crew
    assert crew.several_hosts == (session.links.between is not None) == (session.links.inside is None)
    return crew.hosts.tolist()


@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, 1]])
def test_hosts_and_links_are_those_of_a_share(workers: WorkerPool, hosts: list[int]) -> None:
    assert workers.run(_on_hosts, WORLD, hosts) == [hosts[::SHARES], hosts[1::SHARES]] * 2


def test_one_replica_has_nothing_to_balance(workers: WorkerPool) -> None:
    results = workers.run(_train, 2, 4, None, {}, 2)
    assert not any(one["sent"] for one in results) and "1 replica of 2" in results[0]["line"]


def _differ(rank: int, world: int) -> str:
    mesh = init_device_mesh("cpu", (world // SHARES, SHARES), mesh_dim_names=("dp", "tp"))
    model = deepspeed_cad.apply(training.tiny_llama(), BLOCK, mesh=mesh)
    with pytest.raises(CADError) as error:
        training.loss_sum(model.train(), training.pack(training.documents(LENGTHS[1], seed=int(rank == 3))))
    return str(error.value)


def test_a_replica_with_two_batches_is_one_error_everywhere(workers: WorkerPool) -> None:
    said = workers.run(_differ, WORLD)
    words = "ranks 2, 3 divide the heads .* documents of rank 3 are as long as those of rank 2, but of other tokens"
    assert len(set(said)) == 1 and re.search(words, said[0])


def _beside_servers(rank: int, trainers: int, block: dict[str, Any]) -> None:
    mesh = init_device_mesh("cpu", (1, trainers), mesh_dim_names=("dp", "tp"))
    deepspeed_cad.apply(training.tiny_llama(), block, mesh=mesh)


def test_reserved_servers_beside_shares_are_one_error_everywhere(fresh_workers: WorkerPool) -> None:
    # As long a server looks for trainers that may have ended before it came.
    block = {**BLOCK, "servers": {"reserved": 1}, "timeout_s": 4}
    given = free_port(), block, _beside_servers
    errors, _ = fresh_workers.try_run(play, 3, *given, timeout=60.0, joined=False, once=True)
    for error in errors[:2]:
        assert error is not None and error[0] == "CADUnsupportedError" and "servers know of no shares" in error[1]
    assert errors[2] is not None and errors[2][0] not in ("Hung", "Died"), "the server ends without a loop"


def _fail(rank: int, world: int) -> None:
    """One rank raises in a layer of its second forward: of the others one waits for it in attention, and one in a
    collective of tensor parallelism."""
    mesh = init_device_mesh("cpu", (world // SHARES, SHARES), mesh_dim_names=("dp", "tp"))
    model = training.tiny_llama()
    _divide(model, mesh["tp"], 4)
    deepspeed_cad.apply(model, BLOCK, mesh=mesh).train()
    for step in range(2):
        if rank == 3 and step:
            model.model.layers[0].register_forward_pre_hook(lambda module, args: 1 // 0)
        training.loss_sum(model, training.pack(training.documents(LENGTHS[rank // SHARES], seed=1))).backward()


def test_a_rank_that_raises_ends_all_groups(fresh_workers: WorkerPool) -> None:
    errors, _ = fresh_workers.try_run(_fail, WORLD, timeout=60.0, grace=30.0, once=True)
    assert [error is not None and error[0] not in ("Hung", "Died") for error in errors] == [True] * WORLD, errors
    assert errors[3][0] == "ZeroDivisionError"
    assert any("rank 3" in errors[rank][1] for rank in range(3)), errors
