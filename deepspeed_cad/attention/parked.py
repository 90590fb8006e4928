"""What one forward kept, parked: which of its tensors go to the host, and the same put together again.

In: `Kept`, and Q, K and V of the call. Out: `Parked`, which gives `Kept` back. Where activations are checkpointed or
offloaded, O is on the device for attention alone: it is parked, and Q, K and V are made again or offloaded by others.
Else the layer behind attention saves O, its own input, and a second O on the host would free nothing; Q, K and V are
parked instead, which nobody but attention holds until backward.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from deepspeed_cad.attention.forward import HeldByAutograd, Kept
from deepspeed_cad.attention.parking import Parking
from deepspeed_cad.attention.thread_state import hooks_save_tensors


def is_saved_plainly() -> bool:
    """Whether autograd keeps on the device what layers save now; to be asked outside of autograd functions."""
    return torch.is_grad_enabled() and not hooks_save_tensors()


class Parked:
    """What one forward kept, in host memory or on its way there."""

    def __init__(
        self, parking: Parking, kept: Kept, inputs: tuple[torch.Tensor, ...], label: str, saved_plainly: bool
    ) -> None:
        """Begin to park.

        Args:
            parking: where.
            kept: what the forward kept.
            inputs: Q, K and V.
            label: the layer, in errors.
            saved_plainly: what `is_saved_plainly` said around the layer.
        """
        o_THV, *others = kept.tensors()
        self.has_inputs = saved_plainly
        """Q, K and V are parked too: autograd need not save them."""
        self.inputs: tuple[torch.Tensor, ...] = ()
        """Q, K and V, back on the device, if they were parked."""
        self._o_THV = o_THV if saved_plainly else None
        self._rest = without_tensors(kept)
        self._parking = parking
        self._parcel = parking.park([*inputs, *others] if saved_plainly else [o_THV, *others], label)

    @property
    def is_away(self) -> bool:
        """In host memory alone."""
        return self._parcel.is_away

    def take(self) -> Kept:
        """All of it on the device; once."""
        tensors = self._parcel.take()
        if self._o_THV is None:
            return replace(self._rest, version=tensors[0]._version).kept(tensors)
        self.inputs, others = tuple(tensors[:3]), tensors[3:]
        return self._rest.kept([self._o_THV, *others])

    def fetch_before(self) -> None:
        """Begin to bring back what was parked before it."""
        self._parking.fetch_before(self._parcel.number)


def without_tensors(kept: Kept) -> HeldByAutograd:
    """What is left of it where others hold its tensors."""
    return HeldByAutograd(len(kept.served), kept.sinks_H, kept.version)
