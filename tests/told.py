"""Micro-batches whose documents are told without position ids, or padded."""

from typing import Any

import torch
import training

FORMS = ("lengths", "lengths and ones", "numbers", "numbers, padded", "bool", "additive", "additive, padded")
PADDED = 5
EOS = 63


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
        shown = ((numbers[:, :, None] == numbers[:, None]) & (numbers[:, :, None] > 0)).tril()[:, None]
        added = torch.zeros(shown.shape, dtype=torch.float64).masked_fill(~shown, torch.finfo(torch.float64).min)
        batch["attention_mask"] = shown if "bool" in form else added
    return batch


def padded(lengths: list[int], side: str, labels: str, width: int = 24) -> dict[str, torch.Tensor]:
    """One document per row of `width` tokens. `labels`: "copied" from input_ids, "masked" where padding is, "none"."""
    ids, mask = torch.full((len(lengths), width), EOS), torch.zeros(len(lengths), width, dtype=torch.long)
    for row, doc in enumerate(training.documents(lengths, seed=3)):
        here = slice(0, len(doc)) if side == "right" else slice(width - len(doc), width)
        ids[row, here], mask[row, here] = doc, 1
    batch = {"input_ids": ids, "attention_mask": mask}
    if labels != "none":
        batch["labels"] = ids.clone() if labels == "copied" else ids.masked_fill(mask == 0, -100)
    return batch


def loss_and_gradients(model: Any, batch: dict[str, torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    model.train()
    out = model(**batch, use_cache=False)
    loss = out.loss
    if loss is None:
        # A script's own loss, over every row.
        logits, targets = out.logits[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten()
        loss = torch.nn.functional.cross_entropy(logits, targets)
    loss.backward()
    return float(loss.detach()), training.gradients(model)
