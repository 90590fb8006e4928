"""Data, arguments and reference losses for tests that train through the Hugging Face Trainer or Accelerate."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import training
from torch.utils.data import Dataset, IterableDataset, default_collate

import deepspeed_cad
from deepspeed_cad.session import close_session

LENGTHS = [[200], [24, 30, 40, 50, 56], [100] * 2, [1, 9, 190], [20] * 10, [150, 50], [200], [40] * 5]
"""Documents of each packed row; all rows have 200 tokens, as packing gives."""

STEPS = 4
"""Optimizer steps that every way of training is compared over."""

collate = default_collate
"""Rows stacked to [rows, tokens]."""

BEFORE, AFTER = "cad/attention_max_over_mean_before", "cad/attention_max_over_mean"


class PackedRows(Dataset):
    """Packed rows: input_ids, position_ids and labels, the same on every rank."""

    def __init__(self, rows: int, seed: int = 0) -> None:
        self.rows = [training.pack(training.documents(LENGTHS[i % len(LENGTHS)], seed + i)) for i in range(rows)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: value[0] for name, value in self.rows[index].items()}


class Stream(IterableDataset):
    """The same without a length."""

    def __iter__(self) -> Any:
        return iter([PackedRows(16)[i] for i in range(16)])


def zero(stage: int) -> dict[str, Any]:
    """A DeepSpeed JSON as users of the Trainer write it."""
    return {
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }  # fmt: skip


def training_arguments(folder: str, **changes: Any) -> Any:
    """TrainingArguments of a run on CPUs that logs every step and saves nothing."""
    from transformers import TrainingArguments

    return TrainingArguments(**settings(folder, **changes))


def settings(folder: str, **changes: Any) -> dict[str, Any]:
    """What all arguments of trainers have here."""
    return {
        "output_dir": folder, "use_cpu": True, "bf16": False, "per_device_train_batch_size": 1, "logging_steps": 1,
        "save_strategy": "no", "report_to": [], "learning_rate": 1e-2, "lr_scheduler_type": "constant",
        "disable_tqdm": True, "optim": "adamw_torch",
    } | changes  # fmt: skip


def without_and_with(run: Callable[..., Any], *args: Any, **given: Any) -> tuple[Any, Any]:
    """What run(cad, …) gives without CAD and with it, each as if it were the first in its process."""
    found = []
    for cad in (False, True):
        start_anew()
        found.append(run(cad, *args, **given))
        assert (deepspeed_cad.current_session() is not None) == cad
    start_anew()
    return found[0], found[1]


def start_anew() -> None:
    """Without a session, and without the state that Accelerate keeps of a process."""
    from accelerate.state import AcceleratorState

    close_session()
    AcceleratorState._reset_state(True)


def losses_of(log_history: list[dict[str, Any]]) -> list[float]:
    return [entry["loss"] for entry in log_history if "loss" in entry]


def step_entry(loss: torch.Tensor) -> dict[str, Any]:
    """What the Trainer logs of a micro-batch, for loops of one's own: its loss and, where CAD is on, its statistics."""
    session = deepspeed_cad.current_session()
    return {"loss": float(loss.detach()), **({} if session is None else session.take_statistics("test").as_events())}


def unbalanced(steps: int, world: int, rows: int = 1) -> list[float]:
    """Max over mean of the ranks' query-key pairs in each step, from the lengths alone. In step s rank r reads `rows`
    rows of PackedRows from row (s * world + r) * rows on."""
    pairs = [sum(n * (n + 1) // 2 for n in LENGTHS[i % len(LENGTHS)]) for i in range(steps * world * rows)]
    of_rank = np.array(pairs, float).reshape(steps, world, rows).sum(axis=2)
    return list(of_rank.max(axis=1) / of_rank.mean(axis=1))


def assert_same(with_cad: list[float], without: list[float], tolerance: float = 1e-5) -> None:
    """Losses of both runs agree, and training moved them."""
    assert with_cad == pytest.approx(without, abs=tolerance) and len(set(without)) > 1


def assert_same_and_balanced(name: str, plain: list[dict], cad: list[dict], losses: int = STEPS) -> None:
    """Logs of a run without and with CAD: equal losses, of evaluations too, and attention balanced in every step.
    `losses`: how many training losses both must have. The ranks' attention without CAD must be clearly unequal."""
    assert len(losses_of(plain)) == losses, (name, plain)
    assert_same(losses_of(cad), losses_of(plain))
    evaluations = [[entry["eval_loss"] for entry in one if "eval_loss" in entry] for one in (cad, plain)]
    assert evaluations[0] == pytest.approx(evaluations[1], abs=1e-5), name
    steps = [entry for entry in cad if "loss" in entry]
    assert max(entry[AFTER] for entry in steps) <= 1.05, (name, steps)
    assert sum(entry[BEFORE] for entry in steps) / len(steps) >= 1.1, (name, steps)
    without = [*plain, *(entry for entry in cad if "eval_loss" in entry)]
    assert not any(key.startswith("cad/") for entry in without for key in entry), name


def tokenizer() -> Any:
    """Of words w0 to w60."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(61)} | {"<pad>": 61, "</s>": 62, "<unk>": 63}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="</s>", bos_token="</s>", unk_token="<unk>"
    )


def write_inputs(folder: Path) -> None:
    """A tiny checkpoint with a tokenizer in `model`, and texts of very different lengths in `data.jsonl`."""
    model = training.tiny_llama(torch.float32, pad_token_id=61, eos_token_id=62, bos_token_id=62)
    for part in (tokenizer(), model):
        part.save_pretrained(folder / "model")
    pick = random.Random(0)
    lengths = [min(200, max(4, round(20 * pick.lognormvariate(0.0, 1.3)))) for _ in range(200)]
    texts = [" ".join(f"w{pick.randrange(61)}" for _ in range(length)) for length in lengths]
    (folder / "data.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
