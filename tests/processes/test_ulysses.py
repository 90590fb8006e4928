"""Ulysses inside a sequence group, CAD between groups: losses and gradients of each document alone."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import training
from engines import engine_config, import_deepspeed
from pool import WorkerPool
from torch.distributed.device_mesh import init_device_mesh
from training import BLOCK
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import deepspeed_cad

WORLD, PIECES, STEPS = 4, 2, 3
LENGTHS = [[300, 20], [40, 30, 9, 1, 80], [100, 100]]
"""Of rows whose tokens both ranks of a sequence group have half of."""
EQUAL = [[300, 20], [40, 30, 9, 1, 160, 80], [64] * 5]
"""The same of rows as DeepSpeed's adapter takes them over gloo."""


def _register(model: torch.nn.Module) -> Any:
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    return UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=model, core_attn_implementation="sdpa", sequence_parallel_size=PIECES, micro_batch_size=1
    )


def _piece(docs: list[torch.Tensor], rank: int) -> dict[str, torch.Tensor]:
    """A rank's part of a packed row; labels are those of the next token, as DeepSpeed's loader gives them."""
    batch = training.pack(docs)
    labels = torch.nn.functional.pad(batch.pop("labels"), (0, 1), value=-100)[:, 1:]
    width = labels.shape[1] // PIECES
    part = slice(rank % PIECES * width, (rank % PIECES + 1) * width)
    return {name: value[:, part] for name, value in {**batch, "shift_labels": labels}.items()}


def _loss_sum(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(**{name: batch[name] for name in ("input_ids", "position_ids")}, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["shift_labels"].flatten(), reduction="sum")


def _train(rank: int, world: int, kv_heads: int, checkpoint: str | None, forward_only: str) -> dict[str, Any]:
    """A loop of its own on a mesh, fp64: what all ranks found together is that of the documents."""
    import_deepspeed().init_distributed(dist_backend="gloo")
    changes = {"attn_implementation": "sdpa", "num_key_value_heads": kv_heads}
    model, reference = training.tiny_llama(**changes), training.tiny_llama(**changes)
    steps = [
        [training.documents(LENGTHS[(one + step) % 3], seed=10 * step + one) for one in range(world // PIECES)]
        for step in range(2)
    ]
    alone = [[training.alone(reference, docs) for docs in rows] for rows in steps]
    last = training.documents([50, 14], seed=7)
    evaluated = training.alone(reference, last)[0]
    _register(model)  # from here on "sdpa" is Ulysses in this process
    mesh = init_device_mesh("cpu", (world // PIECES, PIECES), mesh_dim_names=("dp", "sp"))
    deepspeed_cad.apply(model, BLOCK | {"granularity": 8, "forward_only": forward_only}, mesh=mesh)
    training.checkpointed(model, checkpoint).train()
    for rows, found in zip(steps, alone):
        loss = _loss_sum(model, _piece(rows[rank // PIECES], rank))
        loss.backward()
        total, expected = loss.detach().clone(), sum(one for one, _ in found)
        for summed in (total, *(parameter.grad for parameter in model.parameters())):
            dist.all_reduce(summed)
        assert abs(float(total) - expected) < 1e-9 * expected
        training.assert_gradients(model, {name: sum(one[name] for _, one in found) for name in found[0][1]})
        model.zero_grad()
    model.eval()
    with torch.no_grad():
        # Only the first sequence group evaluates, and nothing waits for another; or all do together.
        together, total = forward_only == "balanced", torch.zeros((), dtype=torch.float64)
        if rank < PIECES or together:
            total = _loss_sum(model, _piece(last, rank)) * (1 if not together or rank < PIECES else 0)
    dist.all_reduce(total)
    assert abs(float(total) - evaluated) < 1e-9 * evaluated
    return training.figures() | {"line": deepspeed_cad.current_session().describe()}


@pytest.mark.parametrize("kv_heads, checkpoint, forward_only", [
    (4, None, "balanced"), (1, "reentrant", "local"), (4, "non-reentrant", "local"),
])  # fmt: skip
def test_same_as_each_document_alone(fresh_workers: Any, kv_heads: int, checkpoint: Any, forward_only: str) -> None:
    results = fresh_workers.run(_train, WORLD, kv_heads, checkpoint, forward_only)
    assert results[0]["after"] < 1.05 and "2 replicas of 2 by Ulysses" in results[0]["line"]
    assert all(sum(one["sent"] for one in results[piece::PIECES]) > 0 for piece in range(PIECES))


def _engine(rank: int, config: dict[str, Any], single: bool) -> list[float]:
    """The loop of DeepSpeed's tutorial; gives the loss of each micro-batch, which a sequence group trains together.
    `single`: each row is one document."""
    import deepspeed
    from deepspeed.runtime.sequence_parallel import parallel_state_sp
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPDataLoaderAdapter

    lengths = [[300 if rank < PIECES else 60] if single else EQUAL[(rank + step) % 3] for step in range(STEPS)]
    rows = [training.pack(training.documents(one, seed=100 * step + rank)) for step, one in enumerate(lengths)]
    model = training.tiny_llama(torch.float32, attn_implementation="sdpa")
    parallel_state_sp._release_sequence_parallel_groups()
    mpu = _register(model)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config, mpu=mpu)
    group = mpu.get_sequence_parallel_group()
    loader: Any = UlyssesSPDataLoaderAdapter(
        rows, sp_rank=dist.get_rank(group), sp_group=group, sp_world_size=PIECES, device=engine.device
    )
    session = deepspeed_cad.current_session()
    if session is not None:
        loader = session.look_ahead(loader, engine)
    engine.train()
    losses = []
    for batch in loader:
        # DeepSpeed takes the mean of all ranks' gradients.
        targets = (batch["shift_labels"] != -100).sum()
        dist.all_reduce(targets, group=group)
        loss = _loss_sum(engine, batch) * PIECES / targets
        engine.backward(loss)
        engine.step()
        total = loss.detach() / PIECES
        dist.all_reduce(total, group=group)
        losses.append(float(total))
    engine.destroy()
    return losses


def _zero(rank: int, world: int, stage: int, accumulation: int) -> dict[str, Any]:
    import_deepspeed().init_distributed(dist_backend="gloo")
    own, reference = ALL_ATTENTION_FUNCTIONS["sdpa"], training.tiny_llama(torch.float32)
    docs = training.documents(EQUAL[rank // PIECES * PIECES % 3], seed=rank // PIECES * PIECES)
    alone = training.alone(reference, docs)[0] / (sum(map(len, docs)) - len(docs))
    config = engine_config(stage, gradient_accumulation_steps=accumulation)
    found: dict[str, Any] = {}
    for name, block, single in (("plain", {}, True), ("cad", {"cad": BLOCK}, True), ("packed", {"cad": BLOCK}, False)):
        ALL_ATTENTION_FUNCTIONS["sdpa"] = own
        found[name] = _engine(rank, config | block, single)
        session = deepspeed_cad.current_session()
        found[f"{name} after"] = 0 if session is None else session.statistics.imbalance
        deepspeed_cad.session.close_session()
    return found | {"alone": alone}


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "accumulation"), [(3, 1), pytest.param(1, 2, marks=pytest.mark.long)])
def test_zero(fresh_workers: WorkerPool, stage: int, accumulation: int) -> None:
    """Rows of one document as DeepSpeed trains them; rows of several as each document alone."""
    for found in fresh_workers.run(_zero, WORLD, stage, accumulation, timeout=140.0):
        assert len(found["plain"]) == STEPS * PIECES and found["cad"] == pytest.approx(found["plain"], abs=1e-5)
        assert len(set(found["plain"])) > 1 and found["cad after"] < 1.05 and found["packed after"] < 1.05
        assert found["packed"][0] == pytest.approx(found["alone"], abs=1e-5)
