"""OpenRLHF itself, where it is installed: its commands as they are, and the workers of its PPO (openrlhf_on_cpu.py)."""

from __future__ import annotations

import importlib.util
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import trainers
from launched import run, run_ranks, torchrun

HERE = Path(__file__).resolve().parent
PACKAGES = ("openrlhf", "ray", "einops", "torchdata", "optimum", "pylatexenc", "aiohttp")
BLOCK = json.dumps({"granularity": 16, "tolerance": 0.02})
BALANCED = json.dumps({"granularity": 16, "tolerance": 0.02, "forward_only": "balanced"})

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(None in map(importlib.util.find_spec, PACKAGES), reason=f"not installed: one of {PACKAGES}"),
]


def _write_inputs(folder: Path) -> None:
    """A tiny checkpoint, and rows with texts of very different lengths."""
    trainers.write_model(folder)
    pick = random.Random(0)

    def words(count: int) -> str:
        return " ".join(f"w{pick.randrange(61)}" for _ in range(count))

    rows = []
    for _ in range(24):
        texts = [words(min(200, max(4, round(20 * pick.lognormvariate(0.0, 1.3))))) for _ in range(3)]
        rows.append(
            {"input": words(5), "output": texts[0], "prompt": words(5), "chosen": texts[1], "rejected": texts[2]}
        )
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _train(cad: bool, folder: Path, dtype: str, command: str, *words: str, world: int = 2) -> list[dict[str, Any]]:
    """What all ranks wrote."""
    out = folder / f"out.{cad}"
    front = ["-m", "deepspeed_cad.run", "--cad", BLOCK] if cad else []
    done = run_ranks(
        world,
        [
            *front, str(HERE / "openrlhf_on_cpu.py"), dtype, str(out), f"openrlhf.cli.{command}",
            "--ds.packing_samples", "--model.model_name_or_path", "model", "--data.dataset", "data.jsonl",
            "--train.micro_batch_size", "2", "--train.batch_size", "8", "--data.max_len", "256",
            "--adam.lr", "1e-2", *words,
        ],
        folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(f"{out}.{rank}") for rank in range(world)]


def _assert_equal(ours: Any, theirs: Any) -> None:
    """Numbers, tensors, and lists and mappings of them, to 1e-5."""
    if isinstance(theirs, dict):
        assert ours.keys() >= theirs.keys()
        for name in theirs:
            _assert_equal(ours[name], theirs[name])
    elif isinstance(theirs, list):
        for one, other in zip(ours, theirs, strict=True):
            _assert_equal(one, other)
    elif not isinstance(theirs, str):
        torch.testing.assert_close(torch.as_tensor(ours), torch.as_tensor(theirs), rtol=0, atol=1e-5)


CHECKPOINTED = ["--model.gradient_checkpointing_enable"]
EVALUATED = ["--eval.dataset", "data.jsonl", "--eval.split", "train"]


@pytest.mark.parametrize(("world", "checkpointed"), [(2, CHECKPOINTED), (4, [])], ids=["checkpointing", "4"])
@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("train_sft", ["--data.input_key", "input", "--data.output_key", "output", "--ds.zero_stage", "3"]),
        ("train_dpo", EVALUATED),
        ("train_rm", EVALUATED),
    ],
)
def test_commands(tmp_path: Path, command: str, words: list[str], world: int, checkpointed: list[str]) -> None:
    """Three optimizer steps: the same losses, gradient norms and parameters, with attention balanced."""
    _write_inputs(tmp_path)
    words = words + checkpointed
    plain, together = (_train(cad, tmp_path, "fp32", command, *words, world=world) for cad in (False, True))
    for found, expected in zip(together, plain, strict=True):
        _assert_equal(found, expected)
        assert len(set(expected["losses"])) > 1
        before, after = found["balance"]
        assert before > 1.3 and after < 1.05


def test_the_first_loss_of_dpo_is_ln_2(tmp_path: Path) -> None:
    """In bf16, to the last bit."""
    _write_inputs(tmp_path)
    for found in _train(True, tmp_path, "bf16", "train_dpo"):
        assert found["losses"][:2] == 2 * [float(torch.tensor(math.log(2)))] != found["losses"][-2:]


DYNAMIC = "--train.dynamic_batch_enable"


def _rollouts(folder: Path, name: str, roles: str, how: str = DYNAMIC) -> list[dict[str, Any]]:
    words = [str(HERE / "openrlhf_rollouts.py"), str(folder / name), "model", roles, *how.split()]
    done = run_ranks(2, words, folder) if name == "plain" else run([*torchrun(2), *words], folder)
    assert done.returncode == 0, done.stderr[-4000:]
    return [torch.load(folder / f"{name}.{rank}") for rank in range(2)]


@pytest.mark.parametrize("mode", ["local", "balanced"])
def test_a_step_of_ppo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """Log-probabilities, values, rewards, then training of actor and critic; asked for by the environment."""
    _write_inputs(tmp_path)
    plain = _rollouts(tmp_path, "plain", "actor,critic,ref,reward")
    monkeypatch.setenv("DEEPSPEED_CAD_CONFIG", BALANCED if mode == "balanced" else BLOCK)
    together = _rollouts(tmp_path, "together", "actor,critic,ref,reward")
    for found, expected in zip(together, plain, strict=True):
        _assert_equal(found, expected)
        assert all(torch.equal(one, other) for one, other in zip(found["actor"], found["ref"], strict=True))
        assert found["looks"] == (4 * found["micro_batches"] if mode == "balanced" else 0)
        assert mode == "local" or found["balance"][0] > 1.5 > 1.05 > found["balance"][1]
    if mode == "balanced":  # a worker of Ray that only has the reference
        for found, expected in zip(_rollouts(tmp_path, "alone", "ref"), together, strict=True):
            assert all(torch.equal(one, other) for one, other in zip(found["ref"], expected["actor"], strict=True))
            assert found["looks"] == found["micro_batches"] and found["balance"][1] < 1.05


def test_workers_with_unequal_numbers_of_micro_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 6 rollouts each, and the last worker has fewer: it attends for the others, with whichever model they run."""
    _write_inputs(tmp_path)
    roles, how = "actor,critic,ref,reward", "--rollout.micro_batch_size 6"
    plain = _rollouts(tmp_path, "plain", roles, how)
    assert [one["micro_batches"] for one in plain] == [2, 1]
    monkeypatch.setenv("DEEPSPEED_CAD_CONFIG", BALANCED)
    for found, expected in zip(_rollouts(tmp_path, "together", roles, how), plain, strict=True):
        _assert_equal(found, expected)
        assert found["looks"] == 4 * 2
