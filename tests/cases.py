"""Layouts, random plans and the reference attention that several tests share."""

import numpy as np
import torch

from deepspeed_cad.kernels.interface import Sequences
from deepspeed_cad.layout import Layout, Tick

RANK_LENGTHS: dict[str, list[list[int]]] = {
    "one": [[37]], "two": [[300, 5, 1], [40, 40, 40]], "odd": [[257], [1, 1, 1, 33], [129, 7]],
    "hundreds": [[2] * 60, [1] * 100, [90]], "a rank with no tokens": [[200, 17], [], [64]],
    "empty documents": [[0, 30, 0], [0], [25, 0, 60]], "five": [[400], [30, 30], [11], [100, 7, 9], [64, 64]],
}  # fmt: skip
STREAMS: dict[str, tuple[list[int], int, int]] = {
    "one document over all ranks": ([400], 4, 100),
    "documents over borders": ([130, 90, 1, 79], 3, 100),
    "a tail of padding": ([150, 20], 3, 64),
}


def layouts() -> dict[str, Layout]:
    found = {name: Layout.from_rank_lengths(lengths) for name, lengths in RANK_LENGTHS.items()}
    return found | {name: Layout.from_stream(*stream) for name, stream in STREAMS.items()}


def random_tasks(tick: Tick, groups: int, rng: np.random.Generator, granularity: int = 16) -> np.ndarray:
    """Tasks that cover a tick: every segment cut at random into rectangles on random servers."""
    tasks = []
    for document, begin, end, home, _ in tick.query.to_array():
        cuts = np.arange(begin + granularity, end, granularity)
        cuts = cuts[rng.random(len(cuts)) < 0.3]
        edges = [begin, *cuts, end]
        for low, high in zip(edges[:-1], edges[1:], strict=True):
            middle = rng.integers(0, groups + 1)
            for g0, g1 in ((0, middle), (middle, groups)):
                if g1 > g0:
                    server = home if rng.random() < 0.5 else rng.integers(0, tick.ranks)
                    tasks.append((document, low, high, g0, g1, server))
    return np.array(sorted(tasks), dtype=np.int64).reshape(-1, 6)


def sequences_of(lengths: list[tuple[int, int]], device: str | torch.device = "cpu") -> Sequences:
    """Sequences of so many query and key rows, one behind the other."""
    host_q, host_k = (np.cumsum([0, *(pair[i] for pair in lengths)]).astype(np.int32) for i in (0, 1))
    cu_q, cu_k = (torch.from_numpy(x).to(device) for x in (host_q, host_k))
    return Sequences(host_q, host_k, cu_q, cu_k, max(q for q, _ in lengths), max(k for _, k in lengths))


def document_attention(
    q_THD: torch.Tensor, k_TKD: torch.Tensor, v_TKV: torch.Tensor, scale: float, window: int | None = None,
    softcap: float | None = None, sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Causal attention of one document by plain softmax, differentiable; the reference of every test."""
    share = q_THD.shape[1] // k_TKD.shape[1]
    k, v = k_TKD.repeat_interleave(share, 1), v_TKV.repeat_interleave(share, 1)
    score = torch.einsum("qhd,khd->hqk", q_THD, k) * scale
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    row = torch.arange(score.shape[1]).unsqueeze(1)
    key = torch.arange(score.shape[2]).unsqueeze(0)
    hidden = key > row
    if window is not None:
        hidden |= key <= row - window
    score = score.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        score = torch.cat([score, sinks.view(-1, 1, 1).expand(-1, score.shape[1], 1)], dim=2)
        return torch.einsum("hqk,khd->qhd", torch.softmax(score, dim=2)[:, :, :-1], v)
    return torch.einsum("hqk,khd->qhd", torch.softmax(score, dim=2), v)
