"""What one forward kept, parked: which of its tensors go to the host, and the same put together again.

In: `Kept`, and Q, K and V of the call. Out: `Parked`, which gives `Kept` back. Where activations are checkpointed or
offloaded, O is on the device for attention alone: it is parked, and Q, K and V are made again or offloaded by others.
Else the layer behind attention saves O, its own input, and a second O on the host would free nothing; Q, K and V are
parked instead, which nobody but attention holds until backward.

What this rank keeps of tasks that it served is a parcel of its own. A layer that runs again needs its O, and then its
MLP needs the most memory there is in a step; what was served is fetched behind that, when attention's backward begins,
and nobody waits for it before served tasks run.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from deepspeed_cad.attention.forward import HeldByAutograd, Kept, ServedOutputs
from deepspeed_cad.attention.parking import Parcel, Parking
from deepspeed_cad.attention.thread_state import hooks_save_tensors


def is_saved_plainly() -> bool:
    """Whether autograd keeps on the device what layers save now; to be asked outside of autograd functions."""
    return torch.is_grad_enabled() and not hooks_save_tensors()


class Parked:
    """What one forward kept, in host memory or on its way there."""

    def __init__(
        self, parking: Parking, kept: Kept, inputs: tuple[torch.Tensor, ...], label: str, saved_plainly: bool
    ) -> None:
        """Begin to park. `inputs`: Q, K and V; `saved_plainly`: what `is_saved_plainly` said around the layer."""
        o_THV, lse_TH, *served = kept.tensors()
        self.has_inputs = saved_plainly
        """Q, K and V are parked too: autograd need not save them."""
        self.inputs: tuple[torch.Tensor, ...] = ()
        """Q, K and V, back on the device, if they were parked."""
        self._o_THV = o_THV if saved_plainly else None
        self._rest = without_tensors(kept)
        self._parking = parking
        self._parcel = parking.park([*inputs, lse_TH] if saved_plainly else [o_THV, lse_TH], label)
        self._served = parking.park(served, label, wanted_early=False) if served else None

    @property
    def is_away(self) -> bool:
        """In host memory alone, apart from what was served."""
        return self._parcel.is_away

    def take(self) -> Kept:
        """O, LSE and what was parked with them on the device; what was served comes when it is asked for. Once."""
        tensors, rest, version = self._parcel.take(), self._rest, self._rest.version
        if self._o_THV is None:
            o_THV, lse_TH = tensors
            version = o_THV._version
        else:
            o_THV, (*inputs, lse_TH) = self._o_THV, tensors
            self.inputs = tuple(inputs)
        served = () if self._served is None else ServedLater(self._served, rest)
        return Kept(o_THV, lse_TH, served, rest.sinks_H, version)

    def part_with_served(self) -> None:
        """The layer runs again: what was served leaves now, where its forward was the last one."""
        if self._served is not None:
            self._parking.let_go(self._served)

    def fetch(self) -> None:
        """Begin to bring back what was served, and what backward needs next: that of the layer before."""
        if self._served is not None and self._served.is_away:
            self._served.fetch()
        self._parking.fetch_before(self._parcel.number)


class ServedLater(Sequence[ServedOutputs]):
    """Results of served tasks, by waves, of which the stream that first asks for one waits until they are there."""

    def __init__(self, parcel: Parcel, rest: HeldByAutograd) -> None:
        self._parcel, self._rest = parcel, rest

    @cached_property
    def _found(self) -> tuple[ServedOutputs, ...]:
        return self._rest.served(self._parcel.take())

    def __len__(self) -> int:
        return self._rest.waves

    def __getitem__(self, wave: Any) -> Any:
        return self._found[wave]


def without_tensors(kept: Kept) -> HeldByAutograd:
    """What is left of it where others hold its tensors."""
    return HeldByAutograd(len(kept.served), kept.sinks_H, kept.version)
