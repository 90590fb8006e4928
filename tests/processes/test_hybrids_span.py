"""Documents that span ranks in models with layers that carry state: as each document alone, and what moves."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import training
from deepspeed_cad.integrations import spanning
from engines import engine_config, import_deepspeed
from hybrids import Kernels, in_fp64
from model_cases import NEW, VERSION, family, tiny_model
from pool import WorkerPool
from wrapped import fsdp2

import deepspeed_cad
from deepspeed_cad.attention.spanning import Spanning
from deepspeed_cad.errors import CADError
from deepspeed_cad.schedule import ROWS

KINDS = (
    "qwen3_5_text", "qwen3_next", "kimi_linear", "olmo_hybrid", "granitemoehybrid", "nemotron_h", "falcon_h1", "jamba",
    "lfm2", "bamba", "zamba", "lfm3", "lfm2_moe", "qwen3_5_moe_text",
)  # fmt: skip
STREAM = [90, 3, 140, 1, 67]
"""Documents of one stream. Over three ranks of 101 rows the third lies on all of them but one row."""
WAVES = [60, 200, 20]
STREAMS = {
    2: [STREAM, [151], [60, 20, 40], [4]],
    3: [STREAM, [50, 110, 20], [60, 20, 40], [4], [2, 2, 2]],
    4: [STREAM, [5], [90, 7, 11, 200]],
}
"""Documents on two to four ranks; ranks of whole documents, of one row, without rows; no document that spans."""
LORA = ["in_proj_qkv", "in_proj_z", "out_proj", "q_proj"]
DELTA_RULE = "torch_chunk_gated_delta_rule"
EIGHT_HEADS = {"linear_num_key_heads": 8, "linear_num_value_heads": 8}

pytestmark = pytest.mark.skipif(not NEW, reason="older versions of transformers have few of these models")


def _alone(lengths: list[int]) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": one[None] + 3} for one in training.documents(lengths, sum(lengths))]


def _part(lengths: list[int], rank: int, world: int, padding: int = 0, **how: Any) -> tuple[Any, torch.Tensor]:
    """This rank's part of a stream of documents, and which of its rows that are."""
    whole = {
        "input_ids": torch.cat([one["input_ids"] for one in _alone(lengths)], 1),
        "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
        "rows": torch.arange(sum(lengths))[None],
    }
    whole["labels"] = whole["input_ids"]
    part = deepspeed_cad.shard_stream(whole, rank, world, **how)
    here = part.pop("rows")[0]
    if padding:
        part["attention_mask"] = torch.ones_like(part["input_ids"])
        given = ("input_ids", "position_ids", "attention_mask")
        part = {name: torch.nn.functional.pad(part[name], (0, padding)) for name in given}
    return part, here


def _carry(self: Any, *given: Any, own: Any = Spanning.carry, **how: Any) -> torch.Tensor:
    """Gloo takes back a message that nobody holds."""
    came = own(self, *given, **how)
    for work, _ in self._leaving:
        work.wait()
    return came


def _train(
    rank: int, world: int, kind: str, streams: list[list[int]], checkpoint: bool | None = None,
    dtype: torch.dtype = torch.float64, how: Any = None, lora: list[str] | None = None, kernel: str = "",
    part: bool = False, ahead: bool = False, **changes: Any,
) -> tuple[float, list[int], set[str]]:  # fmt: skip
    """How far streams are from their documents alone at most, in how many waves heads came, and which kernels got
    borders. `checkpoint`: none, reentrant or not; `how`: as deepspeed_cad.shard_stream takes it; `part`: heads part,
    also where state could be handed on; `ahead`: as on GPUs; `changes`: of the block, and of the model's config."""
    sizes = {name: changes.pop(name) for name in EIGHT_HEADS if name in changes}
    waves, divide, worst, calls = [], Spanning.heads, 0.0, []

    def counted(self: Any, groups: int, *given: Any) -> Any:
        heads = divide(self, groups, *given)
        waves.append(len(heads))
        return heads

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Spanning, "heads", counted)
        if part:
            patch.setattr(spanning, "MOST_PIECES", 0)
        if ahead:
            patch.setattr(Spanning, "_ahead", property(lambda self: True, lambda self, value: None), raising=False)
            patch.setattr(Spanning, "carry", _carry)
        if kernel:
            calls = getattr(Kernels(patch, f"transformers.models.{kind}.modeling_{kind}").convolution(), kernel)().calls
        reference, model = (family(kind, dtype, **sizes) for _ in range(2))
        if lora:
            reference, model = (training.with_lora(one, target_modules=lora) for one in (reference, model))
        model = training.checkpointed(model, checkpoint is not None and ("reentrant" if checkpoint else "plain"))
        if dtype == torch.float64:
            in_fp64(patch, reference)
        deepspeed_cad.apply(model, training.BLOCK | changes)
        for lengths in streams:
            part, here = _part(lengths, rank, world, padding=7 if kernel else 0, **(how or {}))
            worst = max(worst, *training.as_alone(model, reference, part, _alone(lengths), here).values())
    return worst, waves, set(calls)


SLOW, LONG = pytest.mark.slow, pytest.mark.long
CASES: dict[str, tuple[list[Any], int, dict[str, Any]]] = {
    # Zamba's layers checkpoint inside each other.
    **{
        kind: ([] if kind in ("qwen3_5_text", "lfm2") else LONG, 3, {"checkpoint": None if kind == "zamba" else False})
        for kind in KINDS
    },
    # One model for each kernel.
    **{
        f"{kind} in fp32": (LONG, 2, {"streams": [STREAM], "checkpoint": False, "dtype": torch.float32})
        for kind in ("qwen3_5_text", "kimi_linear", "granitemoehybrid", "jamba", "lfm2")
    },
    **{
        f"{kind} on {world}{' in zigzag' if zigzag else ''}": (
            LONG, world, {"checkpoint": checkpoint, "how": {"zigzag": zigzag, "ranks_per_host": 2 if zigzag else None}}
        )
        for kind in ("qwen3_5_text", "falcon_h1", "lfm2")
        for world, checkpoint, zigzag in ((2, None, False), (2, True, True), (3, None, True), (4, True, False))
    },
    **{
        f"qwen3_5_text on {world} by messages{', zigzag' * zigzag}": (
            [] if zigzag else SLOW, world, {"checkpoint": zigzag, "ahead": True, "how": {"zigzag": zigzag}}
        )
        for world, zigzag in ((2, True), (4, False))
    },
    **{
        f"{kind} by heads": (LONG, 3, {"checkpoint": False, "part": True})
        for kind in ("qwen3_5_text", "kimi_linear", "granitemoehybrid")
    },
    "qwen3_5_text with adapters of both kinds of layers": (SLOW, 2, {"checkpoint": False, "lora": LORA}),
    "qwen3_5_text where only gates of its first layer train": (SLOW, 3, {"lora": ["layers.0.linear_attn.in_proj_b"]}),
    "qwen3_5_text kept on the host": (SLOW, 2, {"checkpoint": False, "keep": "host"}),
}  # fmt: skip


@pytest.mark.parametrize("name", [pytest.param(name, marks=case[0]) for name, case in CASES.items()])
def test_as_alone(workers: WorkerPool, name: str) -> None:
    """Every kind over three ranks; two to four, pieces dealt out in zigzag, with every kind of checkpointing."""
    _, world, given = CASES[name]
    given = {"streams": STREAMS[world], **given}
    within = 1e-5 if given.get("dtype") == torch.float32 else 1e-10
    for worst, _, _ in workers.run(partial(_train, **given), world, name.split()[0], timeout=240.0):
        assert worst < within


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "kernel"), [("qwen3_next", "delta_rule"), ("granitemoehybrid", "scan")])
def test_kernels_that_take_borders(workers: WorkerPool, kind: str, kernel: str) -> None:
    """They run whole documents in one call, and pieces of those that span ranks, or their heads, one by one."""
    for part in (False, True):
        given = {"streams": [[30, 40, 90, 20, 25]], "kernel": kernel, "part": part}
        for worst, waves, calls in workers.run(partial(_train, **given), 2, kind):
            assert len(calls) == 2 and worst < 1e-10 and bool(waves) == part


def test_waves(workers: WorkerPool) -> None:
    """Where memory is short, what lands comes in parts of each rank's heads; forward and recompute alike."""
    given = {"streams": [WAVES], "checkpoint": False, "part": True, **EIGHT_HEADS}
    for more, waves in (({}, [1, 1]), ({"memory": 2e-4}, [3, 3])):
        for worst, came, _ in workers.run(partial(_train, **given, **more), 2, "qwen3_5_text"):
            assert came == waves and worst < 1e-10


def _sharded(rank: int, world: int, kind: str, how: str) -> float:
    """Largest difference of gradients, averaged over ranks as engines do, of a step under ZeRO or FSDP2."""
    reference, model = family(kind, torch.float32), training.checkpointed(family(kind, torch.float32), "non-reentrant")
    _, weights = training.weighted(reference, _alone(STREAM))
    part, here = _part(STREAM, rank, world)
    if how.startswith("zero"):
        from deepspeed.utils import safe_get_full_grad

        config = engine_config(int(how[-1]), cad=training.BLOCK)
        config["optimizer"]["params"]["lr"] = 0.0
        engine, *_ = import_deepspeed().initialize(model=model, model_parameters=model.parameters(), config=config)
        engine.train()
        engine.backward((engine(**part, use_cache=False).logits[0] * weights[here]).sum())
        got = {name: safe_get_full_grad(p).clone() for name, p in engine.module.named_parameters()}
        engine.destroy()
    else:
        turn_on = partial(deepspeed_cad.apply, config=training.BLOCK)
        for step in (fsdp2, turn_on) if how.endswith("late") else (turn_on, fsdp2):
            step(model)
        (model(**part, use_cache=False).logits[0] * weights[here]).sum().backward()
        got = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    wanted = {name: p.grad / world for name, p in reference.named_parameters()}
    largest = max(float(one.abs().max()) for one in wanted.values())
    return max(float((got[name] - one).abs().max()) for name, one in wanted.items()) / largest


@pytest.mark.slow
@pytest.mark.parametrize("kind, how", [
    ("qwen3_5_text", "zero3"), ("lfm2", "fsdp2, late"),
    *(pytest.param(*one, marks=LONG) for one in (("falcon_h1", "fsdp2"), ("lfm2", "zero1"), ("qwen3_5_text", "zero2"))),
])  # fmt: skip
def test_sharded(fresh_workers: WorkerPool, kind: str, how: str) -> None:
    """Every rank gathers the same layers as often, whatever documents it has."""
    for worst in fresh_workers.run(_sharded, 2, kind, how, timeout=240.0):
        assert worst < 1e-4


def _moved(rank: int, world: int, kind: str, lengths: Any, part: bool, checkpoint: bool | None = None) -> list[int]:
    """Bytes that each exchange of a forward and backward moves from this rank for layers that carry state."""
    moved: list[int] = []

    def counted(own: Any, leaves: str) -> Any:
        def call(self: Any, schedule: Any, layer: int, tensors: Any, backward: bool, **lane: int) -> Any:
            rows = int(getattr(schedule, leaves)[:, ROWS].sum())
            moving = [one[0] if isinstance(one, tuple) else one for one in tensors]
            moved.append(rows * sum(one.shape[-1] * one.element_size() for one in moving))
            return own(self, schedule, layer, tensors, backward, **lane)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name, leaves in (("dispatch", "sends"), ("give_back", "receives")):
            patch.setattr(Spanning, name, counted(getattr(Spanning, name), leaves))
        if part:
            patch.setattr(spanning, "MOST_PIECES", 0)
        model = family(kind, torch.float32)
        model = training.checkpointed(model, checkpoint is not None and ("reentrant" if checkpoint else "plain"))
        deepspeed_cad.apply(model, training.BLOCK)
        model(**_part(lengths, rank, world)[0], use_cache=False).logits.sum().backward()
    return moved


@pytest.mark.skipif(VERSION < (5, 24), reason="its delta nets repeat Q and K for each value head before the kernel")
def test_what_moves(workers: WorkerPool) -> None:
    """One layer: a state, or at most what an all-to-all by heads moves. Where documents lie on one rank nothing."""
    assert workers.run(_moved, 2, "qwen3_5_text", [70, 10, 80], False) == [[], []]
    handed, parted = (np.sum(workers.run(_moved, 2, "qwen3_5_text", WAVES, part), axis=0) for part in (False, True))
    channels = 2 * 2 * 8 + 4 * 8
    before, state = 3 * channels * 4, 4 * 8 * 8 * 4
    assert handed.tolist() == [before, state, state, before]
    # Forward: rows before pieces, what the kernel reads, what it gives; backward the other way round.
    by_heads = 200 // 2 * 4 * np.array([channels + 2 * 4, 4 * 8])
    assert parted[0] == parted[5] == before
    assert (parted[1:3] <= by_heads).all() and (parted[3:5] <= by_heads[::-1]).all()


@pytest.mark.parametrize("checkpoint", [False, True])
def test_what_moves_again(workers: WorkerPool, checkpoint: bool) -> None:
    """A layer that runs again brings its kernel the rows again, but neither states nor rows before pieces."""
    parted = (workers.run(_moved, 2, "qwen3_5_text", WAVES, True, one) for one in (None, checkpoint))
    once, again = (np.sum(one, axis=0) for one in parted)
    assert again.tolist() == [*once[:3], *once[1:3], *once[3:]]
    for kind, exchanges in (("qwen3_5_text", 4), ("lfm2", 2)):
        for one, other in zip(*(workers.run(_moved, 2, kind, WAVES, False, one) for one in (None, checkpoint))):
            assert one == other and len(one) == exchanges


def _refused(rank: int, world: int, what: str) -> str:
    """What every rank says of a model whose state cannot travel."""
    axes = {name: of for name, of in spanning.KERNELS[DELTA_RULE].items() if name != "beta"}
    with pytest.MonkeyPatch.context() as patch:
        if what != "differs":
            patch.setattr(spanning, "KERNELS", {} if what == "kernel" else {DELTA_RULE: axes})
        types = ["linear_attention", "full_attention"]
        types = types[::-1] if what == "differs" and rank else types
        model = tiny_model("qwen3_5_text", torch.float32, layer_types=types, num_hidden_layers=2).train()
        with pytest.raises(CADError) as error:
            deepspeed_cad.apply(model, training.BLOCK)
            model(**_part(STREAM, rank, world)[0], use_cache=False)
    return str(error.value)


REFUSED = {
    "kernel": "Qwen3_5GatedDeltaNet of layer 0 has no kernel that CAD knows",
    "arguments": "Qwen3_5GatedDeltaNet of layer 0 called its kernel in a way that CAD does not know",
    "differs": "have another model than the rest",
}


@pytest.mark.parametrize(("what", "said"), REFUSED.items())
def test_refusals(fresh_workers: WorkerPool, what: str, said: str) -> None:
    """Kernels that CAD does not know, and ranks whose layers differ."""
    for found in fresh_workers.run(_refused, 2, what):
        assert said in found, found
