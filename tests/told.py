"""Micro-batches whose documents are told without position ids."""

from typing import Any

import torch
import training

FORMS = ("lengths", "lengths and ones", "numbers", "numbers, padded", "bool", "additive", "additive, padded")
PADDED = 5


def told(docs: list[torch.Tensor], form: str) -> dict[str, Any]:
    """One packed row; the model numbers its positions through it."""
    packed = training.pack(docs)
    batch: dict[str, Any] = {name: packed[name] for name in ("input_ids", "labels")}
    numbers = torch.cat([torch.full((len(doc),), i + 1) for i, doc in enumerate(docs)])[None]
    if "padded" in form:
        batch["input_ids"] = torch.nn.functional.pad(batch["input_ids"], (0, PADDED))
        batch["labels"] = torch.nn.functional.pad(batch["labels"], (0, PADDED), value=-100)
        numbers = torch.nn.functional.pad(numbers, (0, PADDED))
    if "lengths" in form:
        ends = torch.tensor([0, *(len(doc) for doc in docs)]).cumsum(0).to(torch.int32)
        longest = max(len(doc) for doc in docs)
        batch |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
    if "ones" in form:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    if "numbers" in form:
        batch["attention_mask"] = numbers
    if "bool" in form or "additive" in form:
        shown = (numbers[:, :, None] == numbers[:, None]) & (numbers[:, :, None] > 0)
        shown = shown.tril()[:, None]
        added = torch.zeros(shown.shape, dtype=torch.float64).masked_fill(~shown, torch.finfo(torch.float64).min)
        batch["attention_mask"] = shown if "bool" in form else added
    return batch
