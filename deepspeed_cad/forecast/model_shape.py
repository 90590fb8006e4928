"""What of a model decides how much of a step is attention."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StateLayers:
    """Layers of a hybrid that carry state: delta nets, Mamba, short convolutions."""

    count: int
    attending: int
    """How many layers attend. Some models do both in one layer."""
    parameters: int
    """Weights of the matrices of one."""
    taken: int
    """Elements of a token that its recurrent kernel takes; 0: it has none."""
    given: int
    """Likewise, that it gives."""
    heads: tuple[int, ...]
    """Of the tensors that the kernel takes."""


@dataclass(frozen=True)
class ModelShape:
    """What decides how much of a step is attention."""

    layers: int = 32
    hidden: int = 4096
    intermediate: int = 14336
    vocabulary: int = 128256
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    not_counted: str = ""
    """What of the model a forecast takes for a layer of full attention and one MLP, in words."""
    state: StateLayers | None = None
    """Its layers that carry state; None: it has none."""

    @property
    def attending(self) -> int:
        """How many layers attend."""
        return self.layers if self.state is None else self.state.attending

    @property
    def layer_parameters(self) -> int:
        """Weights of the matrices of one layer: Q, K, V and O, and a gated MLP; of a hybrid in the mean."""
        own = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        if self.state is not None:
            own = (own * self.attending + self.state.parameters * self.state.count) // self.layers
        return own + 3 * self.hidden * self.intermediate

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + 2 * self.hidden * self.vocabulary

    @property
    def row_flops(self) -> float:
        """Forward work of one token outside core attention."""
        return 2.0 * (self.layers * self.layer_parameters + self.hidden * self.vocabulary)

    @property
    def pair_flops(self) -> float:
        """Forward work of one query-key pair in all layers and heads."""
        return 4.0 * self.attending * self.heads * self.head_dim


SHAPES = {
    "llama-8b": ModelShape(),
    "llama-34b": ModelShape(layers=48, hidden=8192, intermediate=22016, vocabulary=32000, heads=64, kv_heads=8),
    "llama-70b": ModelShape(layers=80, hidden=8192, intermediate=28672, vocabulary=128256, heads=64, kv_heads=8),
    "qwen3.5-9b": ModelShape(
        layers=32, hidden=4096, intermediate=12288, vocabulary=248320, heads=16, kv_heads=4, head_dim=256,
        state=StateLayers(24, 8, 4096 * (8192 + 2 * 4096 + 2 * 32), 8192, 4096, (16, 32)),
    ),
}  # fmt: skip
"""Usual sizes by name."""
