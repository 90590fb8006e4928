"""What keeps attention's output through activation checkpointing, for the baselines of the training benchmark.

In: O and LSE of a layer's forward. Out: the same, when checkpointing runs the layer again in the backward. So the
baselines keep attention as deepspeed_cad does, and attend once. torch's selective checkpointing keeps the same two
tensors where attention is an operator of its own; it also sends every other operation of a layer through Python.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from deepspeed_cad.attention.parking import Parcel, Parking


class KeptOutput:
    """O and LSE of one layer."""

    def __init__(self, outputs: KeptOutputs, label: str) -> None:
        self.outputs, self.label = outputs, label
        self._held: list[torch.Tensor] | Parcel | None = None
        self._number = 0

    def put(self, *tensors: torch.Tensor) -> None:
        """Keep what the forward made. Raises RuntimeError where the forward before it was not run again."""
        if self._held is not None:
            raise RuntimeError(f"{self.label} kept what no recompute took: modes :kept need activation checkpointing")
        self._held = [x.detach() for x in tensors]
        if self.outputs.parking is not None:
            self.outputs.parking.settle()
            self._held = self.outputs.parking.park(self._held, self.label)
            self._number = self._held.number

    def take(self) -> list[torch.Tensor] | None:
        """What was kept, in the backward; None in a forward."""
        if torch._C._current_graph_task_id() < 0:
            return None
        held, self._held = self._held, None
        if held is None:
            raise RuntimeError(f"{self.label} runs again, and its first forward kept nothing")
        return held.take() if isinstance(held, Parcel) else held

    def fetch_before(self) -> None:
        """Its backward begins: what the layer before kept begins to come back from host memory."""
        if self.outputs.parking is not None:
            self.outputs.parking.fetch_before(self._number)


class KeptOutputs:
    """Those of all layers of a model."""

    def __init__(self, parking: Parking | None = None) -> None:
        """`parking`: they wait in host memory, as with "keep": "host"; None: on the device."""
        self.parking = parking
        self.arriving: list[dist.Work] = []
        """Exchanges of the layer that runs again, for which nothing has waited yet."""
        self._layers: dict[int, KeptOutput] = {}

    def of(self, module: torch.nn.Module) -> KeptOutput:
        """That of a layer, by its attention module."""
        return self._layers.setdefault(id(module), KeptOutput(self, f"layer {len(self._layers)}"))

    def arrive(self) -> None:
        """Let the device wait for exchanges that are under way; what they sent is given back."""
        for work in self.arriving:
            work.wait()
        self.arriving.clear()
