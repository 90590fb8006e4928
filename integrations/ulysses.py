"""Ulysses around CAD: DeepSpeed's `UlyssesSPAttentionHF` gives every rank all tokens of a few heads, and CAD attends.

In evaluation documents are read from the positions that Ulysses gathers, because each rank's batch has a piece of them
only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from deepspeed_cad.attention.microbatch import MaskDescriptor
from deepspeed_cad.errors import CADUnsupportedError
from deepspeed_cad.layout import segments_from_positions
from deepspeed_cad.session import Session

_CLASS = "UlyssesSPAttentionHF"


class Ulysses:
    """The all-to-alls of one model's attention."""

    def __init__(self, name: str, session: Session) -> None:
        """`name`: of the attention that the model has without CAD.

        Raises CADUnsupportedError where that attention is not Ulysses'.
        """
        found = ALL_ATTENTION_FUNCTIONS[name] if name in ALL_ATTENTION_FUNCTIONS else None
        cells = [cell.cell_contents for cell in getattr(found, "__closure__", None) or ()]
        self.around: Any = next((one for one in cells if type(one).__name__ == _CLASS), None)
        if self.around is None:
            raise CADUnsupportedError(
                f"ranks have pieces of each row (sequence parallelism), but the attention {name} of the model is not "
                f"that of DeepSpeed's {_CLASS}: call its register_with_transformers before CAD is turned on, or train "
                "without CAD"
            )
        self.session = session

    def mask(self, inside: MaskDescriptor | None, window: int | None) -> PieceMask:
        """What layers receive as their mask; `inside` None: in evaluation."""
        return PieceMask(self, inside, window)


class PieceMask:
    """Stands where layers that have a piece of the tokens expect a mask: the descriptor of all tokens.

    Not a dataclass: see MaskDescriptor.
    """

    __slots__ = ("inside", "ulysses", "window")

    def __init__(self, ulysses: Ulysses, inside: MaskDescriptor | None, window: int | None) -> None:
        self.ulysses, self.inside, self.window = ulysses, inside, window

    def attend(
        self, attend: Callable[..., Any], module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor,
        value: torch.Tensor, **given: Any,
    ) -> tuple[torch.Tensor, None]:  # fmt: skip
        """Attention of a piece: query [B, H, S / T, D], key and value [B, K, S / T, D]; gives [B, S / T, H · D].

        `attend`: attention of all tokens and some heads.
        """
        # A copy: other models of this process keep theirs, and so does this one without CAD.
        around = copy.copy(self.ulysses.around)

        def inside(
            module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any,
            s_aux: torch.Tensor | None = None, **given: Any,
        ) -> Any:  # fmt: skip
            heads = query.shape[1]
            if s_aux is not None and len(s_aux) > heads:
                s_aux = s_aux[around.sp_rank * heads :][:heads]
            if self.inside is None:
                self.inside = self._evaluate(given["position_ids"])
            return attend(module, query, key, value, self.inside, s_aux=s_aux, **given)

        around.attn = inside
        o: torch.Tensor = around(module, query, key, value, None, **given)[0]
        return o, None

    def _evaluate(self, position_ids: torch.Tensor) -> MaskDescriptor:
        """For positions [B, S] of whole rows."""
        session = self.ulysses.session
        micro_batch = session.plans.open_local(segments_from_positions(position_ids.detach().cpu().numpy()))
        return session.descriptor(micro_batch, self.window)
