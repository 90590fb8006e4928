"""`"verify": N`: equal runs pass with one line each, planted errors are found and named."""

import re
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import training
from deepspeed_cad.integrations.verify import TOLERANCE, tolerance
from model_cases import tiny_model

import deepspeed_cad
from deepspeed_cad import function
from deepspeed_cad.attention import backward as backward_room
from deepspeed_cad.attention import forward as forward_room
from deepspeed_cad.errors import CADError
from deepspeed_cad.session import close_session

LINE = re.compile(r"verify: micro-batch (\d) of 2 is the same without CAD: (.*?); differences.* allowed: (.*)")


def train(dtype: Any = torch.float32, model: Any = None, batch: Any = None, backwards: int = 1, **changes: Any) -> Any:
    model = training.tiny_llama(dtype) if model is None else model
    deepspeed_cad.apply(model, {"verify": 2, **changes})
    batch = training.pack(training.documents([40, 3, 1, 77], seed=5)) if batch is None else batch
    for _ in range(3):
        loss = model.train()(**batch, use_cache=False).loss
        for _ in range(backwards):
            loss.backward(retain_graph=backwards > 1)
    return model


def lines(capfd: pytest.CaptureFixture[str]) -> list[tuple[str, ...]]:
    return [found.groups() for found in map(LINE.search, capfd.readouterr().err.splitlines()) if found]


def test_products_in_tf32_may_differ_more(monkeypatch: pytest.MonkeyPatch) -> None:
    for place, precision, expected in ("cuda", "highest", 1e-4), ("cuda", "high", 1e-2), ("cpu", "high", 1e-4):
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda precision=precision: precision)
        assert tolerance(torch.float32, torch.device(place)) == expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_one_line_for_each_micro_batch(dtype: torch.dtype, capfd: pytest.CaptureFixture[str]) -> None:
    train(dtype)
    found = lines(capfd)
    assert [one[0] for one in found] == ["1", "2"]
    for _, loss, said in found:
        with_cad, without = re.findall(r"\d+\.\d+", loss)
        assert abs(float(with_cad) - float(without)) < 0.05
        # By kind: what differs, and what is allowed.
        parts = (re.fullmatch(r"(\w+) (\S+) of (\S+)", one) for one in said.split(", "))
        of = {one[1]: (float(one[2]), float(one[3])) for one in parts if one}
        assert set(of) == {"O", "output", "dQ", "dK", "dV"}
        # Norms of a model in fp64 compute in fp32.
        exact = TOLERANCE[dtype]
        limits = {**dict.fromkeys(of, exact), "output": max(exact, 1e-4)}
        assert {kind: allowed for kind, (_, allowed) in of.items()} == limits
        # Two right kernels are far below what is allowed.
        assert all(error < exact / 5 for error, _ in of.values())


def test_windows_are_compared_in_blocks_of_rows(monkeypatch: Any, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("deepspeed_cad.integrations.verify._SCORES", 1000)
    train(model=tiny_model("mistral", sliding_window=5), backwards=2, recompute_attention=True)
    assert [one[0] for one in lines(capfd)] == ["1", "2"]


@pytest.mark.parametrize("autocast", [False, True])
def test_training_is_not_changed(autocast: bool) -> None:
    """Gradients and random numbers are those of a run that nobody verifies."""
    found = []
    for verify in (0, 2):
        torch.manual_seed(7)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            model = train(torch.float32 if autocast else torch.float64, verify=verify)
        found.append(([p.grad for p in model.parameters()], torch.rand(3)))
        close_session()
    for a, b in zip(found[0][0], found[1][0], strict=True):
        assert torch.equal(a, b)
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize("make", [
    *(partial(training.checkpointed, training.tiny_llama(), how) for how in ("reentrant", "non-reentrant")),
    lambda: tiny_model("gpt_oss", torch.float32, sliding_window=5, attn_implementation="eager"),
], ids=["reentrant", "non-reentrant", "sinks"])  # fmt: skip
def test_checkpointing_and_sinks(make: Any, capfd: pytest.CaptureFixture[str]) -> None:
    train(model=make())
    kinds = [set(re.findall(r"(\w+) \S+ of", said)) for _, _, said in lines(capfd)]
    assert kinds == [{"O", "output", "dQ", "dK", "dV"}] * 2


def _wrong(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plant an error."""
    run, back = forward_room.run_local, backward_room.run_local_backward

    def forward(setup: Any, batches: Any, qkv: Any, into: Any, *rest: Any) -> None:
        if name == "window":
            setup = replace(setup, rule=replace(setup.rule, window=30))
        run(setup, batches, qkv, into, *rest)
        if name == "one row of O":
            into.o_THV[50] *= 1.01

    def backward(setup: Any, batches: Any, home: Any, k: Any, v: Any, dk: Any, dv: Any) -> None:
        back(setup, batches, home, k, v, dk, dv)
        dq = home.dq_THD
        if name == "dK of one head":
            dk[:, 2] *= 1.1
        elif name == "dV not a number":
            dv[7, 1, 3] = float("nan")
        elif name.startswith("dQ of nothing"):
            dq += float(name.split()[-1])
            dk += float(name.split()[-1])

    rule = function.MaskRule
    if name == "an argument that is lost":
        monkeypatch.setattr(function, "MaskRule", lambda scale, *rest: rule(scale * 1.5, *rest))
    monkeypatch.setattr(forward_room, "run_local", forward)
    monkeypatch.setattr(backward_room, "run_local_backward", backward)


@pytest.mark.parametrize("name, says, ratio", [
    ("window", "O of LlamaAttention of layer 0 differs at position [3-7][0-9] of the document", None),
    ("one row of O", "O of LlamaAttention of layer 0 differs at position 6 of .* that starts at row 44", 1.01),
    ("dK of one head", "dK of LlamaAttention of layer 1 differs", 1.1),
    ("dV not a number", "dV of LlamaAttention of layer 1 differs at position 7 of", None),
    ("an argument that is lost", "the output of the decoder differs", None),
])  # fmt: skip
def test_planted_errors_are_named(name: str, says: str, ratio: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    _wrong(name, monkeypatch)
    text = f"rank 0, micro-batch 0 .*{says}.*: (.*) with CAD, (.*) without; relative error (.*), allowed 1.00e-04"
    with pytest.raises(CADError, match=text) as caught:
        train()
    if ratio:
        ours, theirs, error = map(float, re.search(text, str(caught.value)).groups())
        assert ours / theirs == pytest.approx(ratio, rel=1e-4) and error == pytest.approx(ratio - 1, rel=0.9)


@pytest.mark.parametrize("rounding", [1e-12, 1e-3])
def test_gradients_that_are_exactly_0(rounding: float, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """Documents of one token: softmax has no gradient, and rounding is no error where nothing else is there."""
    batch = training.pack(training.documents([1] * 8, seed=5))
    batch["labels"] = batch["input_ids"]
    _wrong(f"dQ of nothing {rounding}", monkeypatch)
    stops = pytest.raises(CADError, match="dQ of LlamaAttention of layer 1 differs at position 0")
    with stops if rounding > 1e-9 else nullcontext():
        train(torch.float32, batch=batch)
    assert len(lines(capfd)) == (0 if rounding > 1e-9 else 2)


def test_a_loss_that_differs_is_named() -> None:
    model, heads = training.tiny_llama(), iter([1.0, 1.01])
    model.lm_head.register_forward_hook(lambda module, args, output: output * next(heads))
    with pytest.raises(CADError, match=r"micro-batch 0 .*: the loss is 4\.\d+ with CAD and 4\.\d+ without"):
        train(model=model)
