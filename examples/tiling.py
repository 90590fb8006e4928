"""The tiled MLP and the tiled loss of DeepSpeed's ALST on a model of transformers.

In: a model, before `deepspeed.initialize`, and how many tokens a tile has. Out: the same model. What an MLP holds
between its matrix products is that of one tile, and so are the logits. A tiled MLP runs its forward again in backward:
three times in all where its layer is checkpointed.

Under ZeRO-3 every rank must take the same number of tiles, because weights are gathered for them: give every rank
equally many tokens. The tiled loss makes the gradients of the head in the forward, where nothing knows yet what the
loss will be multiplied with: no gradient accumulation.
"""

from __future__ import annotations

import types
from functools import partial
from typing import Any

import torch
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss, TiledMLP
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import cross_entropy, linear, pad


def tile_mlps(model: Any, tokens: int) -> None:
    """Run the MLP of every decoder layer in tiles of so many tokens."""
    for layer in model.get_decoder().layers:
        layer.mlp.forward = types.MethodType(partial(_tiled, type(layer.mlp).forward, tokens), layer.mlp)


def _tiled(forward: Any, tokens: int, mlp: torch.nn.Module, hidden_BSE: torch.Tensor) -> torch.Tensor:
    tiles = -(-hidden_BSE.shape[1] // tokens)
    if tiles <= 1:
        found: torch.Tensor = forward(mlp, hidden_BSE)
        return found
    return TiledMLP.apply(forward, mlp, hidden_BSE, tiles, list(mlp.parameters()))


class TiledLoss:
    """Takes the place of a model's head and loss while it is given labels.

    The loss is the sum over targets, divided by `num_items_in_batch` where that is given, else by their number. It is
    computed inside the head's own module, where ZeRO-3 has its weights gathered.
    """

    def __init__(self, model: Any, tokens: int) -> None:
        self.tokens, self.head = tokens, model.get_output_embeddings()
        self.labels: torch.Tensor | None = None
        self.items: Any = None
        model.register_forward_pre_hook(self._before, with_kwargs=True)
        model.loss_function = lambda logits, labels, vocab_size, **_: logits
        self.plain, self.head.forward = self.head.forward, self._head

    def _before(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        labels, shifted = kwargs.get("labels"), kwargs.get("shift_labels")
        if labels is not None and shifted is None:
            shifted = pad(labels, (0, 1), value=-100)[..., 1:]
        self.labels, self.items = shifted, kwargs.get("num_items_in_batch")

    def _head(self, hidden_BSE: torch.Tensor) -> torch.Tensor:
        if self.labels is None:
            return self.plain(hidden_BSE)
        count = (self.labels != -100).sum().clamp(min=1) if self.items is None else self.items

        def tile(head: torch.nn.Linear, rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            # The backward of a tile follows at once: inside `save_on_cpu` its logits would go to the host and back.
            with saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
                logits = linear(rows, head.weight, head.bias).float()
                # Divided here, not behind: the head's gradient is that of what a tile returns.
                return cross_entropy(logits, targets, ignore_index=-100, reduction="sum") / count

        tiles = max(-(-hidden_BSE.shape[1] // self.tokens), 1)
        weights = list(self.head.parameters())
        return TiledFusedLogitsLoss.apply(tile, self.head, hidden_BSE, self.labels, None, tiles, weights, "sum")
