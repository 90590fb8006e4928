"""Replicas and shares: who is in which group, and one micro-batch from what the ranks of a replica announced."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import training
from deepspeed_cad.integrations import functions, shares
from deepspeed_cad.integrations.shares import PieceMask, attend_locally, find_replica, refuse_heads
from deepspeed_cad.integrations.transformers import bind
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from deepspeed_cad.ahead.announced import of_replicas
from deepspeed_cad.ahead.documents import Announcement
from deepspeed_cad.config import CADConfig
from deepspeed_cad.errors import CADConfigError, CADDataError, CADError, CADUnsupportedError
from deepspeed_cad.groups import refuse_beside_shares
from deepspeed_cad.layout import LocalSegments, segments_from_positions
from deepspeed_cad.shares import Replica, Shares, replica_in, replica_of_groups, replica_of_mesh


def test_heads_that_come_as_dtensors_leave_as_dtensors() -> None:
    """As from a projection whose output stays divided: [B, H, S, D] by heads, so [B, S, H, V] by the third axis."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, s_aux: None) -> tuple[torch.Tensor, None]:
        return (query + key + value).transpose(1, 2), None

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    devices, rows = init_device_mesh("cpu", (2,)), torch.randn(1, 2, 5, 4)
    for placement, placed, heads in ((Shard(1), Shard(2), 4), (Replicate(), Replicate(), 2)):
        q = DTensor.from_local(rows, devices, [placement], run_check=False)
        found: Any = attend_locally(attend, q, q, q, None)
        assert found.placements == (placed,) and found.shape == (1, 5, heads, 4)
        assert torch.equal(found.to_local(), 3 * rows.transpose(1, 2))
    with mock.patch.object(functions, "attend_locally") as locally:
        functions.cad_attention("layer", q, "k", "v", "mask", 0.5, s_aux="sinks", more=1)  # type: ignore[arg-type]
    given = {"scaling": 0.5, "dropout": 0.0, "softcap": None, "more": 1, "module": "layer", "attention_mask": "mask"}
    locally.assert_called_once_with(functions.cad_attention, q, "k", "v", "sinks", **given)
    tokens = DTensor.from_local(rows, devices, [Shard(2)], run_check=False)
    with pytest.raises(CADUnsupportedError, match="as a DTensor with placements"):
        attend_locally(attend, tokens, tokens, tokens, None)


@pytest.mark.parametrize("shape, names, name, known", [
    ((4,), None, "FSDPLinear", True), ((4,), None, "Linear", False), ((2, 2), None, "FSDPLinear", True),
    ((2,), None, "FSDPLinear", False), ((4, 1), ("dp", "tp"), "Linear", True), ((4, 1), ("dp", "a"), "Linear", True),
])  # fmt: skip
def test_a_mesh_without_names_is_fsdps_if_over_all_ranks(shape: Any, names: Any, name: str, known: bool) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    grid = DeviceMesh("cpu", torch.arange(int(np.prod(shape))).reshape(shape), mesh_dim_names=names)
    model = type(name, (torch.nn.Linear,), {})(2, 2, bias=False)
    model.weight = torch.nn.Parameter(DTensor.from_local(torch.ones(2, 2), grid, run_check=False))
    refuses = pytest.raises(CADConfigError, match="a mesh without names of shape .*mesh=mesh")
    with nullcontext() if known else refuses:
        assert find_replica(model) is None
    model._device_mesh = SimpleNamespace(mesh=torch.tensor([[3, 2], [1, 0]]), mesh_dim_names=None)
    assert find_replica(model) == Replica((3, 2, 1, 0))


@pytest.mark.parametrize("axes, placement, size, words", [
    ("dp tp", Shard(0), 8, "2 ranks divide k_proj of LlamaAttention of layer 1, which has 3 heads: .*leave k_proj"),
    ("dp tp", Shard(0), 6, ""), ("dp tp", Shard(1), 8, ""), ("tp dp", Shard(0), 8, ""), ("dp tp", Shard(0), None, ""),
])  # fmt: skip
def test_projections_are_divided_between_heads(axes: str, placement: Any, size: int | None, words: str) -> None:
    """By the second of two axes; k_proj has 24 or 12 rows in all. Nothing is opened before."""
    dist.init_process_group("fake", store=FakeStore(), rank=2, world_size=4)
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=tuple(axes.split()))
    weight = DTensor.from_local(torch.ones(12, 2), grid, [Replicate(), placement], run_check=False)
    model = training.tiny_llama()
    model.model.layers[1].self_attn.k_proj.weight = torch.nn.Parameter(weight)
    model.model.layers[1].self_attn.head_dim = size
    assert find_replica(model) == Replica((2, 3) if axes == "dp tp" else (0, 2))
    with pytest.raises(CADUnsupportedError, match=words) if words else nullcontext():
        bind(model, CADConfig()) if words else shares.refuse_parts_of_heads(model, 2)


def mesh(shape: tuple[int, ...], *names: str) -> Any:
    return SimpleNamespace(mesh=np.arange(np.prod(shape)).reshape(shape), mesh_dim_names=names or None)


def of_mesh(grid: Any) -> list[Replica]:
    ranks = grid.mesh.size
    return [replica_of_mesh(grid, rank, ranks) for rank in range(ranks)]


@pytest.mark.parametrize("grid, replicas", [
    (mesh((2, 2), "dp", "tp"), [[0, 1], [2, 3]]),
    (mesh((2, 2), "tp", "dp"), [[0, 2], [1, 3]]),
    (mesh((2, 1, 2, 2), "dp_replicate", "pp", "dp_shard", "tp"), [[0, 1], [2, 3], [4, 5], [6, 7]]),
    (mesh((4,), "dp"), [[0], [1], [2], [3]]),
])  # fmt: skip
def test_groups_hold_one_rank_of_each_replica(grid: Any, replicas: list[list[int]]) -> None:
    said = of_mesh(grid)
    for rank in range(len(said)):
        mine = Shares.of(said, rank)
        assert mine.replicas.tolist() == replicas and not mine.pieces
        assert mine.groups == [list(column) for column in zip(*replicas)]
        assert rank in mine.members and mine.members[mine.replica] == rank
        assert mine.count == len(replicas[0])


def test_a_part_of_a_mesh_and_groups_say_as_much() -> None:
    part: Any = SimpleNamespace(mesh=np.array([2, 3]), mesh_dim_names=("tp",))
    assert replica_in(part, 3) == Replica((2, 3))
    assert of_mesh(mesh((2, 2), "dp", "sp"))[3] == Replica((2, 3), pieces=True)
    said = [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert [replica_of_groups(said, rank) for rank in range(4)] == of_mesh(mesh((2, 2), "dp", "tp"))
    assert replica_of_groups([(0, 1)] * 2, 1) == Replica((1,)) and replica_of_groups([None] * 2, 1) is None


@pytest.mark.parametrize("grid, words", [
    (mesh((2, 2)), "the mesh has no names.*mesh_dim_names"),
    (mesh((2, 2), "dp", "cp"), 'axis "cp" of several ranks, context parallelism'),
    (mesh((2, 2), "dp", "other"), 'axis "other" of which CAD does not know'),
    (mesh((1, 2), "dp", "tp"), "the mesh has 2 ranks and the job 4"),
    (mesh((2, 2), "sp", "tp"), "heads are divided twice, by tensor parallelism and by Ulysses"),
])  # fmt: skip
def test_meshes_that_say_too_little(grid: Any, words: str) -> None:
    with pytest.raises(CADError, match=words):
        replica_of_mesh(grid, 0, 4)


@pytest.mark.parametrize("said, words", [
    ([Replica((0, 1)), Replica((1,))], r"rank 0 shares heads with ranks 0, 1, but rank 1 names ranks 1$"),
    ([Replica((0, 1)), Replica((0, 1), pieces=True)], "rank 1 names ranks 0, 1, each with a piece of the tokens"),
    ([Replica((0, 2)), Replica((1,))], "rank 2 is not in the job"),
    ([Replica((1,)), Replica((1,))], "rank 0 is not among the ranks"),
    ([Replica((0,)), Replica((1, 2)), Replica((1, 2))], "among 1 ranks and others among 2"),
    ([(0, 1), None], "rank 1 passed none as its group"),
    ([(0, 1), (0, 1), (2,)], r"the groups \[0, 1\], \[2\] do not divide 3 ranks alike"),
    ([(0, 1), (1, 2), (1, 2)], r"the groups \[0, 1\], \[1, 2\] do not divide 3 ranks alike"),
])  # fmt: skip
def test_ranks_that_do_not_agree(said: list[Any], words: str) -> None:
    """In what they say of their replicas, or of the groups between these."""
    for rank in range(len(said)):
        with pytest.raises(CADConfigError, match=words):
            (Shares.of if isinstance(said[0], Replica) else replica_of_groups)(said, rank)


def announce(*positions: list[int]) -> list[Announcement]:
    """Of ranks, by the positions of their rows; -1 is padding."""
    return [
        Announcement(segments_from_positions([own], np.array([own]) >= 0) if own else LocalSegments.none(0))
        for own in positions
    ]


TENSOR = Shares(np.array([[0, 1], [2, 3]]), 0)
PIECES = Shares(np.array([[0, 1], [2, 3]]), 0, pieces=True)


@pytest.mark.parametrize("positions, words", [
    ([[0, 1, 0], [0, 1, 2]], "at token 2 rank 2 has position 0 of a document and rank 3 position 2 of a document"),
    ([[0, 1, 2], [0, 1, -1]], "at token 2 rank 2 has position 2 of a document and rank 3 padding"),
    ([[0, 1, 2], [0, 1]], "rank 2 has 3 tokens and rank 3 2 tokens"),
])  # fmt: skip
def test_a_replica_with_different_batches(positions: list[list[int]], words: str) -> None:
    with pytest.raises(CADDataError, match=f"ranks 2, 3 divide the heads of one .*: {words}. Let the sampler"):
        of_replicas(announce([0], [0], *positions), TENSOR)
    each = of_replicas(announce([0, 1, 0], [0, 1, 0], positions[0], positions[0]), TENSOR)
    assert [one.local.positions().tolist() for one in each] == [[0, 1, 0], positions[0]]


def test_pieces_are_put_side_by_side() -> None:
    """A document may lie on both ranks of a group, begin with the second, and padding stays where it is."""
    each = of_replicas(announce([0, 1, 2], [3, 0, 1], [0, 1, 0], [0, 1, -1]), PIECES)
    assert [one.local.positions().tolist() for one in each] == [[0, 1, 2, 3, 0, 1], [0, 1, 0, 0, 1, -1]]
    with pytest.raises(CADDataError, match="of these shapes: 2 tokens; 1 tokens. With Ulysses"):
        of_replicas(announce([0, 1], [2], [0], [1]), PIECES)
    with pytest.raises(CADDataError, match="4 tokens in rows of 2.*one packed row"):
        of_replicas([Announcement(LocalSegments.none(4), 2)] * 4, PIECES)


@pytest.mark.parametrize("block, pieces, words", [
    ({"documents": "deal"}, False, '"documents": "deal" moves documents'),
    ({"overlap": "interleave"}, True, '"overlap" cannot be had beside Ulysses'),
    ({"verify": 1}, True, '"verify" cannot be had beside Ulysses'),
])  # fmt: skip
def test_what_is_not_built_beside_shares(block: dict[str, Any], pieces: bool, words: str) -> None:
    with pytest.raises(CADUnsupportedError, match=words):
        refuse_beside_shares(CADConfig.from_dict(block), pieces)
    refuse_beside_shares(CADConfig(), pieces)


@pytest.mark.parametrize("rank, whole, sinks", [(0, 8, [0, 1, 2, 3]), (1, 8, [4, 5, 6, 7]), (1, 4, [0, 1, 2, 3])])
def test_a_rank_of_ulysses_takes_the_sinks_of_its_heads(rank: int, whole: int, sinks: list[int]) -> None:
    """It has 4 of 8 heads and all tokens once Ulysses has exchanged them; sinks may come divided already."""

    class Ulysses(SimpleNamespace):
        def __call__(self, module: Any, query: torch.Tensor, *rest: Any, **given: Any) -> tuple[torch.Tensor, None]:
            return self.attn(module, query[:, :4], *rest, **given), None

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, s_aux: torch.Tensor) -> torch.Tensor:
        return s_aux

    binding, inside, rows = SimpleNamespace(ulysses=Ulysses(sp_rank=rank)), SimpleNamespace(), torch.zeros(1, 8, 3, 2)
    mask = PieceMask(binding, inside, None)  # type: ignore[arg-type]
    found, _ = mask.attend(attend, torch.nn.Module(), rows, rows, rows, s_aux=torch.arange(whole))
    assert found.tolist() == sinks


@pytest.mark.parametrize("query, key, sinks, words", [
    (4, 4, 8, "has 4 query heads on this rank and 8 attention sinks, one for each head of the model"),
    (2, 2, None, "has 2 query heads and 2 KV heads on this rank, and 2 query heads of the model share a KV head"),
    (4, 2, 4, None),
    (4, 1, None, None),
])  # fmt: skip
def test_heads_that_do_not_belong_together(query: int, key: int, sinks: int | None, words: str | None) -> None:
    """Of ranks that have a part of 8 query heads and 4 KV heads."""
    layer: Any = SimpleNamespace(layer_idx=0, num_key_value_groups=2)
    given = torch.zeros(1, query, 5, 8), torch.zeros(1, key, 5, 8), None if sinks is None else torch.zeros(sinks)
    with nullcontext() if words is None else pytest.raises(CADUnsupportedError, match=words):
        refuse_heads(layer, *given)
