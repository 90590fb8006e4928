"""Whether a row's O and LSE have the same bits however its document was cut and wherever its pieces ran, per kernel.

A document is attended whole and alone; then packed behind others; then in pieces, once as a rank attends its own rows
(all heads, strided) and once as a server does what it received (one KV head, group after group). Cuts lie at multiples
of a tile; with a window keys begin where schedules let them. A case is right where cuts at multiples of 128 and of 256
keep the bits; the line also says what 64 and 100 do.
"""

import re

import numpy as np
import torch
from cases import sequences_of
from check_kernels import SHAPES as CHECKED
from check_kernels import refusal
from lines import Found, Lines, Place
from torch import Tensor

from deepspeed_cad.attention.serve import fold_sinks
from deepspeed_cad.cost import window_start
from deepspeed_cad.kernels.interface import Kernel, MaskRule
from deepspeed_cad.kernels.registry import KERNELS

LENGTH, LENGTH_ON_CPU = 2900, 700
"""Rows of the document: its last tile is not full."""
BEFORE = 333
"""Rows of what is packed in front of it, no multiple of any tile."""
TILES = (64, 128, 256, 100)
MUST = (128, 256)
"""Multiples of these keep the bits; of the others it is only said."""

SHAPES = {
    label: shape for label, shape in CHECKED.items() if not {"view", "landed", "rows"} & {*shape}
} | {
    "8/2 × 128, window 512": {"heads": 8, "groups": 2, "head": 128, "window": 512},
    "8/2 × 64, window 100, sinks": {"heads": 8, "groups": 2, "head": 64, "window": 100, "sinks": True},
}  # fmt: skip


def run(place: Place, lines: Lines, case: str) -> None:
    """Shapes are shared out over the parts of this group ("part 1 of 2") and their ranks, as in check_kernels.py."""
    part, parts = (int(number) for number in re.findall(r"\d+", case)) if case else (1, 1)
    mine, places = (part - 1) * place.ranks + place.rank, parts * place.ranks
    for kernel in KERNELS:
        if place.kernel not in ("auto", kernel.name) or (kernel is KERNELS[-1]) == place.on_gpu:
            continue
        for i, (label, shape) in enumerate(SHAPES.items()):
            if i % places == mine:
                lines.check(f"bits {kernel.name}", label, lambda k=kernel, s=shape: check(place, k, s))


def check(place: Place, kernel: Kernel, shape: dict) -> Found:
    """Compares all ways with the document alone, and names for each tile what kept the bits."""
    reason = refusal(place, kernel, shape)
    if reason is not None:
        return None, reason
    torch.manual_seed(0)
    heads, groups, head = shape["heads"], shape["groups"], shape["head"]
    length = LENGTH if place.on_gpu else LENGTH_ON_CPU
    rows = BEFORE + length
    q, k, v = (
        torch.randn(rows, count, size, device=place.device).to(place.dtype)
        for count, size in ((heads, head), (groups, head), (groups, shape.get("value", head)))
    )
    sinks = torch.randn(heads, device=place.device) + 6 if shape.get("sinks") else None
    attend = Attend(kernel, MaskRule(head**-0.5, shape.get("window"), shape.get("softcap")), sinks)
    own = slice(BEFORE, rows)
    whole = attend.pieces(q[own].contiguous(), k[own].contiguous(), v[own].contiguous(), [(0, length)])
    packed = attend.call(q, k, v, [(0, BEFORE, 0, BEFORE), (BEFORE, rows, BEFORE, rows)])
    found = {"packed": difference(whole, tuple(x[own] for x in packed))}
    for tile in TILES:
        cuts = [0, *(tile * n for n in (1, 2, 5, 9) if tile * n < length), length]
        pieces = list(zip(cuts[:-1], cuts[1:], strict=True))
        found[f"{tile} own"] = difference(whole, attend.pieces(q[own], k[own], v[own], pieces))
        found[f"{tile} received"] = difference(whole, attend.received(q[own], k[own], v[own], pieces))
    right = not any(found[f"{tile} {way}"] for tile in MUST for way in ("own", "received")) and not found["packed"]
    return right, "; ".join(f"{name}: {text or 'same bits'}" for name, text in found.items())


class Attend:
    def __init__(self, kernel: Kernel, rule: MaskRule, sinks_H: torch.Tensor | None) -> None:
        self.kernel, self.rule, self.sinks_H = kernel, rule, sinks_H

    def call(self, q: Tensor, k: Tensor, v: Tensor, sequences: list[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
        """O and LSE of sequences (first and last query row, first and last key row) that lie one after the other."""
        lengths = [(int(last - first), int(end - begin)) for first, last, begin, end in sequences]
        o, lse = self.kernel.forward(q, k, v, sequences_of(lengths, q.device), self.rule)
        if self.sinks_H is not None:
            o, lse = fold_sinks(o, lse, self.sinks_H)
        return o, lse

    def pieces(self, q: Tensor, k: Tensor, v: Tensor, pieces: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        made = []
        for begin, end in pieces:
            first = int(window_start(begin, self.rule.window))
            made.append(self.call(q[begin:end], k[first:end], v[first:end], [(0, end - begin, 0, end - first)]))
        return torch.cat([o for o, _ in made]), torch.cat([lse for _, lse in made])

    def received(self, q: Tensor, k: Tensor, v: Tensor, pieces: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        """All pieces and head groups as sequences of one call with one KV head, as a server runs them."""
        groups, share = k.shape[1], q.shape[1] // k.shape[1]
        at = [
            (begin, end, int(window_start(begin, self.rule.window)), group)
            for begin, end in pieces for group in range(groups)
        ]  # fmt: skip
        q_RGD = torch.cat([q[begin:end, group * share : (group + 1) * share] for begin, end, _, group in at])
        k_S1D, v_S1V = (torch.cat([x[first:end, g : g + 1] for _, end, first, g in at]) for x in (k, v))
        rows = np.cumsum([0, *(end - begin for begin, end, *_ in at)])
        keys = np.cumsum([0, *(end - first for _, end, first, _ in at)])
        ends = list(zip(rows[:-1], rows[1:], keys[:-1], keys[1:], strict=True))
        o, lse = Attend(self.kernel, self.rule, None).call(q_RGD, k_S1D, v_S1V, ends)
        if self.sinks_H is not None:
            sinks = self.sinks_H.view(groups, share)
            by_row = torch.cat([sinks[group].expand(end - begin, share) for begin, end, _, group in at])
            o, lse = fold_sinks(o, lse, by_row)
        o_THV, lse_TH = o.new_empty(len(q), q.shape[1], o.shape[2]), lse.new_empty(len(q), q.shape[1])
        for i, (begin, end, _, group) in enumerate(at):
            here = slice(begin, end), slice(group * share, (group + 1) * share)
            o_THV[here], lse_TH[here] = o[rows[i] : rows[i + 1]], lse[rows[i] : rows[i + 1]]
        return o_THV, lse_TH


def difference(one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]) -> str:
    """Where O and LSE have other bits; empty where nowhere."""
    said = []
    for name, a, b in zip(("O", "LSE"), one, other, strict=True):
        rows = (a != b).flatten(1).any(1)
        if rows.any():
            said.append(f"{name} differs in {int(rows.sum())} rows by {float((a.float() - b.float()).abs().max()):.2g}")
    return ", ".join(said)
