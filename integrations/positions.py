"""What reaches a model on the GPU against what its loader announced; masks as models want them; empty batches."""

from dataclasses import dataclass
from typing import Any

import torch

from deepspeed_cad.ahead.documents import CUMULATIVE, MASK, OF_TEXT, Announcement, batch_shape


@dataclass(eq=False)
class Unread:
    """Positions that lie on the GPU and were taken for the announced ones: compared without waiting, read later."""

    differs: torch.Tensor
    event: torch.cuda.Event


def compare_later(given: dict[str, Any], announced: Announcement) -> Unread | None:
    """Compare positions on the GPU with the announced ones without waiting; None where they must be read now."""
    positions, mask = given.get("position_ids"), given.get(MASK)
    if not isinstance(positions, torch.Tensor) or positions.device.type != "cuda" or mask is not None:
        return None
    batch, width = batch_shape(given)
    if positions.ndim == 3 and positions.shape[0] == OF_TEXT:
        positions = positions[0]
    if any(given.get(name) is not None for name in CUMULATIVE) or positions.shape != (batch, width):
        return None
    if announced.local.tokens != batch * width:
        return None
    wanted = torch.from_numpy(announced.local.positions()).pin_memory().to(positions.device, non_blocking=True)
    differs = torch.empty((), dtype=torch.bool, pin_memory=True)
    differs.copy_((wanted != positions.reshape(-1)).any(), non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return Unread(differs, event)


def plain_mask(given: dict[str, Any]) -> dict[str, Any]:
    """The mask as a model expects it: 1 for tokens and 0 for padding, also where it numbers documents. None in place of
    one with four axes: transformers would hand it to layers past the mask function."""
    mask = given.get(MASK)
    if not isinstance(mask, torch.Tensor):
        return {}
    return {MASK: None if mask.ndim == 4 else (mask != 0).to(mask.dtype)}


def one_row(given: dict[str, Any]) -> dict[str, Any]:
    """Arguments for one row of padding instead of none: transformers cannot make masks for an empty batch."""
    changed: dict[str, Any] = {MASK: None}
    for name in ("input_ids", "inputs_embeds", "position_ids"):
        if (value := given.get(name)) is not None:
            axes, of_token = ((), value.shape[2:]) if name == "inputs_embeds" else (value.shape[:-2], ())
            changed[name] = value.new_zeros(*axes, 1, 1, *of_token)
    if given.get("inputs_embeds") is not None:
        # Keeps the graph: the embedding takes part in the backward on every rank.
        changed["inputs_embeds"] = changed["inputs_embeds"] + given["inputs_embeds"].sum()
    return changed


def no_rows(output: Any) -> Any:
    """The output without its row of padding."""
    if isinstance(output, torch.Tensor):
        return output[:, :0] if output.ndim >= 2 and output.shape[:2] == (1, 1) else output
    if isinstance(output, tuple):
        return tuple(no_rows(item) for item in output)
    if isinstance(output, dict):
        for name, value in output.items():
            output[name] = no_rows(value)
    return output
