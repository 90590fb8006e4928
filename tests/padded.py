"""Padded batches, and what a model makes of them with its own attention."""

from typing import Any

import torch
import training

EOS = 63


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
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters()}


def assert_same(ours: Any, theirs: Any, tolerance: float) -> None:
    assert abs(ours[0] - theirs[0]) < tolerance
    for name, gradient in theirs[1].items():
        assert (ours[1][name] - gradient).abs().max() < tolerance, name
