"""The loss of a causal language model in chunks of tokens, so that the logits of a long row never exist at once.

In: a model of transformers, before it is wrapped. Out: the same model, whose forward with labels gives the same loss
and no logits. 131072 tokens of a 128K vocabulary have 64 GiB of logits in fp32, and the loss keeps several copies; a
chunk of 4096 tokens has 2 GiB. The head is run again in the backward pass.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.nn.functional import cross_entropy, linear, pad
from torch.utils.checkpoint import checkpoint

CHUNK = 4096
"""Tokens."""


class ChunkedLoss:
    """Takes the place of a model's head and loss while it is given labels; keeps sums of what it computed.

    The head is computed inside its own module, where FSDP and ZeRO-3 have its weights gathered.
    """

    def __init__(self, model: Any) -> None:
        self.head = model.get_output_embeddings()
        self.labels: torch.Tensor | None = None
        self.items: Any = None
        self.sums: torch.Tensor | None = None
        model.register_forward_pre_hook(self._before, with_kwargs=True)
        model.loss_function = self._loss
        self.plain, self.head.forward = self.head.forward, self._head

    def take(self) -> torch.Tensor:
        """[sum over targets, number of targets] of this rank's rows since the last call, in fp32."""
        taken, self.sums = self.sums, None
        return torch.zeros(2) if taken is None else taken

    def _before(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        labels, shifted = kwargs.get("labels"), kwargs.get("shift_labels")
        if labels is not None and shifted is None:
            shifted = pad(labels, (0, 1), value=-100)[..., 1:]
        self.labels = shifted
        self.items = kwargs.get("num_items_in_batch")

    def _head(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.labels is None:
            return self.plain(hidden)
        rows, targets = hidden.flatten(0, -2), self.labels.flatten()
        parts = zip(rows.split(CHUNK), targets.split(CHUNK))
        total = sum(checkpoint(partial(_sum_loss, self.head), *part, use_reentrant=False) for part in parts)
        count = (targets != -100).sum()
        here = torch.stack([total.detach(), count])
        self.sums = here if self.sums is None else self.sums + here
        return total / (count if self.items is None else self.items)

    def _loss(self, logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **kwargs: Any) -> torch.Tensor:
        return logits


def _sum_loss(head: torch.nn.Linear, rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(linear(rows, head.weight, head.bias).float(), targets, ignore_index=-100, reduction="sum")
