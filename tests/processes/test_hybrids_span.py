"""Documents that span ranks in models with layers that carry state: as each document alone, and what moves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import served
import torch
import torch.distributed as dist
from deepspeed_cad.integrations import spanning
from engines import engine_config, import_deepspeed
from hybrids import Kernels, difference, in_fp64
from model_cases import FAMILIES, NEW, tiny_model
from pool import WorkerPool
from training import LINKS

import deepspeed_cad
from deepspeed_cad.attention.spanning import Spanning
from deepspeed_cad.errors import CADError, CADUnsupportedError
from deepspeed_cad.schedule import ROWS

BLOCK = {"granularity": 16, "tolerance": 0.02, "links": LINKS}

KINDS = (
    "qwen3_5_text", "qwen3_next", "kimi_linear", "olmo_hybrid", "granitemoehybrid", "nemotron_h", "falcon_h1", "jamba",
    "lfm2", "bamba", "zamba", "lfm3", "lfm2_moe", "qwen3_5_moe_text",
)  # fmt: skip
STREAM = [90, 3, 140, 1, 67]
"""Documents of one stream. Over three ranks of 101 rows the third lies on all of them but one row."""

pytestmark = pytest.mark.skipif(not NEW, reason="older versions of transformers have few of these models")


def _documents(lengths: list[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(3, 96, (length,), generator=generator) for length in lengths]


def _expected(model: Any, docs: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of documents alone, and weights in which every logit counts; leaves gradients."""
    alone = [model(input_ids=one[None], use_cache=False).logits[0] for one in docs]
    logits = torch.cat(alone)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    weights = weights.to(logits.dtype)
    (logits * weights).sum().backward()
    return logits.detach(), weights


def _built(kind: str, dtype: torch.dtype, **sizes: Any) -> Any:
    family = next(one for one in FAMILIES if one.kind == kind)
    return tiny_model(kind, dtype, **family.changes | sizes).train()


def _with_lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(r=4, target_modules=LORA, init_lora_weights=False))


LORA = ["in_proj_qkv", "in_proj_z", "out_proj", "q_proj"]


def _spans(
    rank: int,
    world: int,
    kind: str,
    streams: list[list[int]],
    checkpoint: bool | None,
    how: dict[str, Any],
    lora: bool = False,
    changes: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float64,
) -> list[dict[str, Any]]:
    """`checkpoint`: none, reentrant or not; `how`: as deepspeed_cad.shard_stream takes it; `changes`: of the block."""
    reference, model = _built(kind, dtype), _built(kind, dtype)
    if lora:
        reference, model = _with_lora(reference), _with_lora(model)
    if checkpoint is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpoint})
        model.enable_input_require_grads()
    deepspeed_cad.apply(model, BLOCK | (changes or {}))
    with pytest.MonkeyPatch.context() as patch:
        if dtype == torch.float64:
            in_fp64(patch, reference)
        return [_one_stream(rank, world, reference, model, lengths, how) for lengths in streams]


def _part(lengths: list[int], rank: int, world: int, **how: Any) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """This rank's part of a stream of documents, and which of its rows that are."""
    whole = {
        "input_ids": torch.cat(_documents(lengths))[None],
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "rows": torch.arange(sum(lengths))[None],
    }
    whole["labels"] = whole["input_ids"]
    part = deepspeed_cad.shard_stream(whole, rank, world, **how)
    return part, part.pop("rows")[0]


def _one_stream(rank: int, world: int, reference: Any, model: Any, lengths: list[int], how: Any) -> dict[str, Any]:
    reference.zero_grad()
    model.zero_grad()
    expected, weights = _expected(reference, _documents(lengths))
    part, here = _part(lengths, rank, world, **how)
    logits = model(**part, use_cache=False).logits[0]
    (logits * weights[here]).sum().backward()
    own = dict(reference.named_parameters())
    largest = max(float(p.grad.abs().max()) for p in own.values() if p.grad is not None)
    worst = (0.0, "")
    for name, p in sorted(model.named_parameters()):
        gradient = torch.zeros_like(p) if p.grad is None else p.grad
        dist.all_reduce(gradient)
        if own[name].grad is not None:
            worst = max(worst, (float((gradient - own[name].grad).abs().max()) / largest, name))
    return {"logits": difference(logits, expected[here]) if len(here) else 0.0, "gradients": worst}


EXACT = 1e-10
"""As a share of the largest logit or gradient, in fp64."""
STREAMS = {
    2: [STREAM, [151], [60, 20, 40], [4]],
    3: [STREAM, [50, 110, 20], [60, 20, 40], [4], [2, 2, 2]],
    4: [STREAM, [5], [90, 7, 11, 200]],
}
"""Documents on two to four ranks; ranks of whole documents, of one row, without rows; no document that spans."""


def _check(found: list[list[dict[str, Any]]]) -> None:
    for one in (one for of_rank in found for one in of_rank):
        assert one["logits"] < EXACT and one["gradients"][0] < EXACT, found


def _often(kind: str) -> Any:
    return pytest.param(kind, marks=() if kind in ("qwen3_5_text", "lfm2") else [pytest.mark.slow, pytest.mark.long])


@pytest.mark.parametrize("kind", [_often(kind) for kind in KINDS])
def test_as_alone(workers: WorkerPool, kind: str) -> None:
    """Every kind, over three ranks; with checkpointing, but for Zamba, whose layers checkpoint inside each other."""
    checkpoint = None if kind == "zamba" else False
    _check(workers.run(_spans, 3, kind, STREAMS[3], checkpoint, {}, timeout=240.0))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("kind", ["qwen3_5_text", "kimi_linear", "granitemoehybrid", "jamba", "lfm2"])
def test_in_fp32(workers: WorkerPool, kind: str) -> None:
    """One model for each kernel."""
    for of_rank in workers.run(_spans, 2, kind, [STREAM], False, {}, False, None, torch.float32, timeout=240.0):
        for found in of_rank:
            assert found["logits"] < 1e-5 and found["gradients"][0] < 1e-5, found


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("kind", ["qwen3_5_text", "falcon_h1", "lfm2"])
@pytest.mark.parametrize(
    ("world", "checkpoint", "zigzag"), [(2, None, False), (2, True, True), (3, None, True), (4, True, False)]
)
def test_cuts(workers: WorkerPool, kind: str, world: int, checkpoint: bool | None, zigzag: bool) -> None:
    """Two to four ranks, pieces dealt out in zigzag, without checkpointing and with the reentrant kind."""
    how = {"zigzag": zigzag, "ranks_per_host": 2 if zigzag else None}
    _check(workers.run(_spans, world, kind, STREAMS[world], checkpoint, how, timeout=240.0))


@pytest.mark.slow
@pytest.mark.parametrize(("lora", "changes"), [(True, {}), (False, {"keep": "host"})], ids=["lora", "keep_host"])
def test_adapters_and_what_is_kept(workers: WorkerPool, lora: bool, changes: dict[str, Any]) -> None:
    """Adapters on projections of both kinds of layers; what attention keeps on the host."""
    _check(workers.run(_spans, 2, "qwen3_5_text", STREAMS[2], False, {}, lora, changes, timeout=240.0))


def _with_kernels(rank: int, world: int, kind: str, module: str, kernel: str) -> dict[str, Any]:
    """Kernels that take borders, for the documents on one rank; padding behind the rows of each."""
    with pytest.MonkeyPatch.context() as patch:
        kernels = getattr(Kernels(patch, module).convolution(), kernel)()
        reference, model = _built(kind, torch.float64), _built(kind, torch.float64)
        in_fp64(patch, reference)
        expected, weights = _expected(reference, _documents(MANY))
        deepspeed_cad.apply(model, BLOCK)
        part, here = _part(MANY, rank, world)
        ids, positions = (torch.nn.functional.pad(part[name], (0, 7)) for name in ("input_ids", "position_ids"))
        mask = torch.nn.functional.pad(torch.ones_like(part["input_ids"]), (0, 7))
        kernels.calls.clear()
        logits = model(input_ids=ids, position_ids=positions, attention_mask=mask, use_cache=False).logits[0, :-7]
        (logits * weights[here]).sum().backward()
        got, wanted = model.lm_head.weight.grad, reference.lm_head.weight.grad
        dist.all_reduce(got)
        first, other = (
            next(p for n, p in one.named_parameters() if n.endswith("A_log")).grad for one in (model, reference)
        )
        dist.all_reduce(first)
        errors = difference(logits, expected[here]), difference(got, wanted), difference(first, other)
        return {"errors": errors, "calls": set(kernels.calls)}


MANY = [30, 40, 90, 20, 25]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "module", "kernel"),
    [
        ("qwen3_next", "transformers.models.qwen3_next.modeling_qwen3_next", "delta_rule"),
        ("granitemoehybrid", "transformers.models.granitemoehybrid.modeling_granitemoehybrid", "scan"),
    ],
)
def test_kernels_that_take_borders(workers: WorkerPool, kind: str, module: str, kernel: str) -> None:
    """They run whole documents in one call, and those that span ranks one by one."""
    for found in workers.run(_with_kernels, 2, kind, module, kernel):
        assert len(found["calls"]) == 2 and max(found["errors"]) < EXACT, found


def _sharded(rank: int, world: int, kind: str, how: str) -> float:
    """Largest difference of gradients, averaged over ranks as engines do, of a step under ZeRO or FSDP2."""
    reference, model = _built(kind, torch.float32), _built(kind, torch.float32)
    _, weights = _expected(reference, _documents(STREAM))
    part, here = _part(STREAM, rank, world)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if how.startswith("zero"):
        got = _zero(int(how[-1]), model, part, weights[here])
    else:
        from torch.distributed.fsdp import fully_shard

        late = how.endswith("late")
        if not late:
            deepspeed_cad.apply(model, BLOCK)
        for layer in (*model.model.layers, model):
            fully_shard(layer)
        if late:
            deepspeed_cad.apply(model, BLOCK)
        (model(**part, use_cache=False).logits[0] * weights[here]).sum().backward()
        got = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    wanted = {name: p.grad / world for name, p in reference.named_parameters()}
    largest = max(float(one.abs().max()) for one in wanted.values())
    return max(float((got[name] - one).abs().max()) for name, one in wanted.items()) / largest


def _zero(stage: int, model: Any, part: Any, weights: torch.Tensor) -> dict[str, torch.Tensor]:
    from deepspeed.utils import safe_get_full_grad

    deepspeed = import_deepspeed()
    config = engine_config(stage, cad=BLOCK)
    config["optimizer"]["params"]["lr"] = 0.0
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    engine.train()
    engine.backward((engine(**part, use_cache=False).logits[0] * weights).sum())
    got = {name: safe_get_full_grad(p).clone() for name, p in engine.module.named_parameters()}
    engine.destroy()
    return got


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "how"),
    [
        ("qwen3_5_text", "zero3"),
        ("lfm2", "fsdp2, late"),
        *(
            pytest.param(kind, how, marks=pytest.mark.long)
            for kind, how in (("falcon_h1", "fsdp2"), ("lfm2", "zero1"), ("qwen3_5_text", "zero2"))
        ),
    ],
)
def test_sharded(fresh_workers: WorkerPool, kind: str, how: str) -> None:
    """Every rank gathers the same layers as often, whatever documents it has."""
    for worst in fresh_workers.run(_sharded, 2, kind, how, timeout=240.0):
        assert worst < 1e-4


def _moved(rank: int, world: int, kind: str, lengths: list[int], checkpoint: bool | None = None) -> list[int]:
    """Bytes that each exchange of a forward and backward moves from this rank for layers that carry state."""
    moved: list[int] = []

    def counted(own: Any, leaves: str) -> Any:
        def call(self: Any, schedule: Any, layer: int, tensors: Any, backward: bool) -> Any:
            rows = int(getattr(schedule, leaves)[:, ROWS].sum())
            moving = [one[0] if isinstance(one, tuple) else one for one in tensors]
            moved.append(rows * sum(one.shape[-1] * one.element_size() for one in moving))
            return own(self, schedule, layer, tensors, backward)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name, leaves in (("dispatch", "sends"), ("give_back", "receives")):
            patch.setattr(Spanning, name, counted(getattr(Spanning, name), leaves))
        model = _built(kind, torch.float32)
        if checkpoint is not None:
            model.gradient_checkpointing_enable({"use_reentrant": checkpoint})
            model.enable_input_require_grads()
        deepspeed_cad.apply(model, BLOCK)
        part, _ = _part(lengths, rank, world)
        model(**part, use_cache=False).logits.sum().backward()
    return moved


def _in_waves(rank: int, world: int, memory: float | None) -> tuple[dict[str, Any], list[Any]]:
    """How far eight heads are from each document alone, and in how many waves they came."""
    heads = {"linear_num_key_heads": 8, "linear_num_value_heads": 8}
    reference, model = (_built("qwen3_5_text", torch.float64, **heads) for _ in range(2))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    found, divide = [], Spanning.heads

    def counted(self: Any, groups: int, *given: Any) -> Any:
        heads = divide(self, groups, *given)
        found.append(len(heads))
        return heads

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Spanning, "heads", counted)
        in_fp64(patch, reference)
        deepspeed_cad.apply(model, {**BLOCK, "memory": memory} if memory else BLOCK)
        return _one_stream(rank, world, reference, model, [60, 200, 20], {}), found


def test_waves(workers: WorkerPool) -> None:
    """Where memory is short, what lands comes in parts of each rank's heads; forward and recompute alike."""
    for memory, waves in ((None, [1, 1]), (2e-4, [3, 3])):
        for found, came in workers.run(_in_waves, 2, memory):
            assert came == waves
            _check([[found]])


def test_what_moves(workers: WorkerPool) -> None:
    """One layer of 4 heads: at most what an all-to-all by heads moves, and where documents lie on one rank nothing."""
    assert workers.run(_moved, 2, "qwen3_5_text", [70, 10, 80]) == [[], []]
    of_ranks = workers.run(_moved, 2, "qwen3_5_text", [60, 200, 20])
    total = np.sum(of_ranks, axis=0)
    # Forward: rows before pieces, what the kernel reads, what it gives; backward the other way round.
    channels = 2 * 2 * 8 + 4 * 8
    by_heads = 200 // 2 * 4 * np.array([channels + 2 * 4, 4 * 8])
    print("bytes moved by each exchange of a layer", total.tolist(), "by an all-to-all", by_heads.tolist())
    assert total[0] == total[5] == 3 * channels * 4
    assert (total[1:3] <= by_heads).all() and (total[3:5] <= by_heads[::-1]).all()


@pytest.mark.parametrize("checkpoint", [False, True])
def test_what_moves_again(workers: WorkerPool, checkpoint: bool) -> None:
    """A layer that runs again brings its kernel the rows again, which the backward needs, but not the rows before
    pieces, which are all that a short convolution moves."""
    lengths = [60, 200, 20]
    once, again = (np.sum(workers.run(_moved, 2, "qwen3_5_text", lengths, one), axis=0) for one in (None, checkpoint))
    assert again.tolist() == [*once[:3], *once[1:3], *once[3:]]
    for one, other in zip(*(workers.run(_moved, 2, "lfm2", lengths, one) for one in (None, checkpoint))):
        assert one == other and len(one) == 2


def _evaluated(rank: int, world: int, kind: str) -> float:
    reference, model = _built(kind, torch.float64).eval(), _built(kind, torch.float64).eval()
    with pytest.MonkeyPatch.context() as patch:
        in_fp64(patch, reference)
        expected, _ = _expected(reference, _documents(STREAM))
    deepspeed_cad.apply(model, {**BLOCK, "forward_only": "balanced"})
    part, here = _part(STREAM, rank, world)
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        in_fp64(patch, model)
        return difference(model(**part).logits[0], expected[here])


def test_evaluation(workers: WorkerPool) -> None:
    for found in workers.run(_evaluated, 2, "qwen3_5_text"):
        assert found < EXACT


def _beside_servers(rank: int, trainers: int, block: dict[str, Any]) -> str:
    model = deepspeed_cad.apply(_built("lfm2", torch.float32), block)
    whole, _ = _part([160, 20, 20, 120], rank, trainers)
    model(**whole, use_cache=False).logits.sum().backward()
    part, _ = _part(STREAM, rank, trainers)
    try:
        model(**part, use_cache=False)
    except CADUnsupportedError as error:
        return str(error)
    return ""


def test_servers_are_refused(workers: WorkerPool) -> None:
    """Every trainer says so, with the name of a layer, and what to do."""
    for said in served.run(workers, 2, 1, _beside_servers)[0]:
        assert "Lfm2ShortConv of layer 0" in said and "reserved servers" in said and "whole documents" in said


def _refused(rank: int, world: int, what: str) -> str:
    """What every rank says of a model whose state cannot travel."""
    (kernel,) = (name for name in spanning.KERNELS if "gated_delta" in name)
    axes = {name: of for name, of in spanning.KERNELS[kernel].items() if name != "beta"}
    with pytest.MonkeyPatch.context() as patch:
        if what != "differs":
            patch.setattr(spanning, "KERNELS", {} if what == "kernel" else {kernel: axes})
        types = ["linear_attention", "full_attention"]
        types = types[::-1] if what == "differs" and rank else types
        model = tiny_model("qwen3_5_text", torch.float32, layer_types=types, num_hidden_layers=2).train()
        try:
            deepspeed_cad.apply(model, BLOCK)
            model(**_part(STREAM, rank, world)[0], use_cache=False)
        except CADError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("kernel", "Qwen3_5GatedDeltaNet of layer 0 has no kernel that CAD knows"),
        ("arguments", "Qwen3_5GatedDeltaNet of layer 0 called its kernel in a way that CAD does not know"),
        ("differs", "have another model than the rest"),
    ],
)
def test_refusals(fresh_workers: WorkerPool, what: str, said: str) -> None:
    """Kernels that CAD does not know, and ranks whose layers differ."""
    for found in fresh_workers.run(_refused, 2, what):
        assert said in found, found
