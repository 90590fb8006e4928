"""Pipelines whose stages divide the heads of their layers: pipe, data and model axes, in lockstep rounds per share."""

from typing import Any

import pipelines
import pytest
import torch
import torch.distributed as dist
import training
from pool import WorkerPool

SHARES, STAGES, COUNT = 2, 2, 3
BLOCK = {"cost": "pairs", "granularity": 2, "links": training.LINKS}
DIVIDED = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1}
"""Projections of attention, and along which axis of their weights ranks divide them."""


class SumOverShares(torch.autograd.Function):
    """Sums over the ranks that divide heads: forward what these give, or backward what they know of gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any, forward: bool) -> torch.Tensor:
        ctx.group, ctx.backward_too = group, not forward
        return _sum(x, group) if forward else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return (_sum(grad, ctx.group) if ctx.backward_too else grad), None, None


def _sum(x: torch.Tensor, group: Any) -> torch.Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group)
    return x


def _part(name: str, weight: torch.Tensor, share: int) -> torch.Tensor:
    axis = next((axis for projection, axis in DIVIDED.items() if projection in name), None)
    return weight if axis is None else weight.chunk(SHARES, axis)[share]


def _divide(model: torch.nn.Module, share: int, group: Any) -> torch.nn.Module:
    def enter(module: torch.nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        return args, {**given, "hidden_states": SumOverShares.apply(given["hidden_states"], group, False)}

    for layer in model.model.layers:
        attention = layer.self_attn
        for name in DIVIDED:
            projection = getattr(attention, name)
            projection.weight = torch.nn.Parameter(_part(name, projection.weight.detach(), share).clone())
        attention.register_forward_pre_hook(enter, with_kwargs=True)
        attention.o_proj.register_forward_hook(lambda module, args, out: SumOverShares.apply(out, group, True))
    return model


def _train(rank: int, world: int) -> tuple[float, float]:
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    import deepspeed_cad
    from deepspeed_cad.errors import CADUnsupportedError

    deepspeed = pipelines.start()
    replicas = world // SHARES // STAGES
    topology = PipeModelDataParallelTopology(num_pp=STAGES, num_mp=SHARES, num_dp=replicas)
    share = topology.get_coord(rank).model
    groups = [dist.new_group(ranks) for ranks in topology.get_axis_comm_lists("model")]
    group = next(one for one, ranks in zip(groups, topology.get_axis_comm_lists("model")) if rank in ranks)
    model = _divide(training.tiny_llama(num_hidden_layers=4), share, group)
    module = pipelines.by_hand(model, STAGES, topology=topology)
    module.dynamic_shape = True
    config = pipelines.config(COUNT, cad=BLOCK, pipeline={"pipe_partitioned": False, "grad_partitioned": False})
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    with pytest.raises(CADUnsupportedError, match='"pipe_partitioned": false, "grad_partitioned": false'):
        deepspeed.initialize(model=module, optimizer=optimizer, config={**config, "pipeline": {}})
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    total = pipelines.summed_gradients(engine)
    whole = training.tiny_llama(num_hidden_layers=4)
    for step in range(2):
        engine.train_batch(iter(pipelines.pairs(engine.grid.get_data_parallel_id(), COUNT, step)))
        expected = pipelines.in_one_process(whole, replicas, COUNT, step)
        if engine.is_last_stage() and replicas == 1:
            assert abs(float(engine.total_loss) / COUNT - expected) < 1e-10
    parts = torch.nn.ModuleDict({str(i): part for i, part in enumerate(pipelines.layers(whole))})
    alone = {name: _part(name, parameter.grad / replicas, share) for name, parameter in parts.named_parameters()}
    torch.testing.assert_close(total, {name: alone[name] for name in total}, atol=1e-10, rtol=0)
    session = deepspeed_cad.current_session()
    assert session is not None and session.shares.count == SHARES and session.group_ranks == world // SHARES
    return session.statistics.imbalance, float(session.transport.bytes_sent)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.long)])
def test_shares_of_heads_in_stages(fresh_workers: WorkerPool, replicas: int) -> None:
    found = fresh_workers.run(_train, SHARES * STAGES * replicas, timeout=120.0)
    assert all(imbalance < 1.05 for imbalance, _ in found)
    assert all(sum(sent for _, sent in found[share::SHARES]) > 0 for share in range(SHARES))
