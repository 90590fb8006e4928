"""The example for one long document, from a checkpoint to a checkpoint, against the same documents on one rank."""

from __future__ import annotations

import json
import subprocess
from itertools import chain, islice
from pathlib import Path

import pytest
import torch
import trainers
from forked import launch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
TOKENS, STEPS, LR = 400, 3, 3e-3

pytestmark = [pytest.mark.slow, pytest.mark.skipif(torch.cuda.is_available(), reason="compares in fp32, on the CPU")]


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return launch(2, ["examples/million_tokens.py", *arguments], ROOT, PYTHONWARNINGS="ignore")


def _plain(model: Path, data: Path) -> tuple[list[float], torch.nn.Module]:
    """The same documents, whole, in one process."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [json.loads(line)["text"] for line in data.read_text().splitlines()]
    ids = chain.from_iterable(tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
    trained = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    optimizer = torch.optim.AdamW(trained.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for _ in range(STEPS):
        document = torch.tensor([list(islice(ids, TOKENS))])
        loss = trained(input_ids=document, labels=document).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, trained


def test_a_checkpoint_is_trained_on_a_document_that_spans_ranks(tmp_path: Path) -> None:
    trainers.write_inputs(tmp_path)
    config = json.loads((ROOT / "examples" / "ds_million_cad.json").read_text())
    config["optimizer"]["params"]["lr"] = LR
    config["cad"] |= {"granularity": 16}
    (tmp_path / "ds.json").write_text(json.dumps(config))
    model, data, out = tmp_path / "model", tmp_path / "data.jsonl", tmp_path / "out"
    done = _run(
        "--deepspeed_config", str(tmp_path / "ds.json"), "--model", str(model), "--data", str(data),
        "--tokens", str(TOKENS), "--steps", str(STEPS), "--tile", "64", "--save", str(out),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    last = next(line for line in done.stdout.splitlines() if line.startswith("losses: "))
    expected, trained = _plain(model, data)
    assert json.loads(last.removeprefix("losses: ")) == pytest.approx(expected, abs=2e-5)
    assert len(set(expected)) == STEPS
    found = AutoModelForCausalLM.from_pretrained(out).state_dict()
    start = AutoModelForCausalLM.from_pretrained(model).state_dict()
    for name, value in trained.state_dict().items():
        # Adam's steps are signs of gradients: where those are nearly zero they may differ.
        moved = (value - start[name]).norm()
        assert float((found[name] - value).norm()) < 0.02 * float(moved), name
    assert "cad" not in (out / "config.json").read_text()
    AutoTokenizer.from_pretrained(out)


def test_tokens_that_do_not_divide() -> None:
    done = _run("--tiny", "--tokens", "511")
    assert done.returncode != 0 and "--tokens 511: ranks hold equally many tokens" in done.stderr


@pytest.mark.long
def test_a_hybrid_on_two_ranks_is_one_on_one() -> None:
    """The document's state crosses ranks."""
    losses = []
    for ranks in (1, 2):
        done = launch(ranks, ["examples/million_tokens.py", "--tiny", "--hybrid"], ROOT, PYTHONWARNINGS="ignore")
        assert done.returncode == 0, done.stderr[-4000:]
        last = next(line for line in done.stdout.splitlines() if line.startswith("losses: "))
        losses.append(json.loads(last.removeprefix("losses: ")))
    assert losses[1] == pytest.approx(losses[0], abs=2e-5)
