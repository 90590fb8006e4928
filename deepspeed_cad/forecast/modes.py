"""The modes that CAD is compared with: plain, Ulysses, all-gather context parallelism, packing by length.

In: a setting and the layouts of a step's micro-batches, one row per seat. Out: `Foreseen`.

    plain        every seat trains its own row; documents attend on that rank
    ulysses      groups of `degree` seats train their rows one after the other, each split over the group; attention by
                 heads, after an all-to-all
    gathered     the same, every document cut into 2 × degree pieces; K and V are all-gathered
    packed       "WLB-ideal": documents of a step are repacked so that all groups of `degree` seats have equal
                 attention, by an oracle and at no cost, but no document is split between groups; inside a group as
                 `gathered`
    none         no attention at all

`kept`: the recompute of activation checkpointing finds attention's output and does not attend; what `ulysses`
and `gathered` send again then is hidden. As modes dp:kept and ulysses:kept of the training benchmark.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from deepspeed_cad.forecast.attention_seconds import Both, Floats, document_lengths, of_documents, of_pieces
from deepspeed_cad.forecast.bytes_held import activation_bytes, kept_output_bytes, stage_bytes, state_bytes
from deepspeed_cad.forecast.schedule import Figures, Rows, finish
from deepspeed_cad.forecast.setting import Setting
from deepspeed_cad.forecast.step import Foreseen
from deepspeed_cad.layout import Layout

MOST_GATHERED = 64
"""Seats that gather keys with each other, at most: beyond, the gathered keys alone fill a GPU."""

Step = Sequence[Layout]
"""The micro-batches of a step."""


def plain(setting: Setting, step: Step, kept: bool = False) -> Foreseen:
    """See the module. Documents that span ranks are cut at the border: then it is another computation."""
    groups = setting.shape.groups
    attention = _stack([of_documents(layout, setting.cost, cut=True) for layout in step])
    attention = (attention * _scale(setting, groups)).repeated(setting.checkpointing and not kept)
    tokens = np.array([layout.tokens for layout in step], np.float64)
    figures = Figures((0.0, 0.0), _peak(setting, tokens, kept), measured=not kept)
    return finish(setting, _name("plain", kept), Rows(tokens, attention, _nothing(tokens)), figures)


def without_attention(setting: Setting, step: Step) -> Foreseen:
    """The linear part alone: mode bound_qkv of the training benchmark."""
    tokens = np.array([layout.tokens for layout in step], np.float64)
    rows = Rows(tokens, _nothing(tokens), _nothing(tokens))
    return finish(setting, "none", rows, Figures((0.0, 0.0), _peak(setting, tokens)))


def ulysses(setting: Setting, step: Step, degree: int, joined: bool = False, kept: bool = False) -> Foreseen:
    """See the module. `joined`: the rows of a group are one micro-batch, not one after the other."""
    parts = [_split(setting, layout, degree, of_documents(layout, setting.cost), joined) for layout in step]
    tokens = np.concatenate([part[0] for part in parts])
    attention = _join([part[1] for part in parts]) * _scale(setting, setting.shape.groups)
    shape = setting.shape
    # Where there are fewer KV heads than ranks, each is sent to all ranks that need it.
    width = 2.0 * shape.query_heads * shape.head_dim + 2.0 * max(shape.groups, degree) * shape.head_dim
    size = tokens * width * shape.bytes_per_element
    seconds = _each(size, lambda one: setting.cluster.all_to_all(one, degree, setting.tensor)) * setting.layers
    again = setting.checkpointing and not kept
    exchange = Both(seconds, seconds).repeated(again)
    times = 3 if setting.checkpointing else 2
    inside, between = setting.cluster.shares(degree, setting.tensor)
    amount = float(size.sum(0).mean()) * setting.layers * times
    rows = Rows(tokens, attention.repeated(again), exchange)
    figures = Figures((amount * inside, amount * between), _peak(setting, tokens, kept), degree, measured=not kept)
    return finish(setting, _name("ulysses", kept), rows, figures)


def ulysses_degrees(setting: Setting) -> list[int]:
    """Numbers of seats that heads and seats can be divided by."""
    heads, groups = setting.shape.query_heads, setting.shape.groups
    return [
        degree
        for degree in _powers(setting.seats)
        if degree > 1 and heads % degree == 0 and (groups % degree == 0 or degree % groups == 0)
    ]


def gathered(setting: Setting, step: Step, degree: int, joined: bool = True, kept: bool = False) -> Foreseen:
    """See the module. `joined`: the rows of a group are one micro-batch."""
    parts = []
    for layout in step:
        lengths, home = document_lengths(layout), _first_rank(layout)
        each = of_pieces(lengths, setting.cost, degree)
        parts.append(_split(setting, layout, degree, each.summed(home, layout.ranks), joined))
    tokens = np.concatenate([part[0] for part in parts])
    attention = _join([part[1] for part in parts]) * _scale(setting, setting.shape.groups)
    again = setting.checkpointing and not kept
    exchange, moved = _gather_keys(setting, tokens, degree, again)
    rows = Rows(tokens, attention.repeated(again), exchange)
    peak = _peak(setting, tokens, kept) + _gathered_bytes(setting, tokens, degree)
    return finish(setting, _name("gathered", kept), rows, Figures(moved, peak, degree, measured=False))


def gathered_degrees(setting: Setting) -> list[int]:
    """Numbers of seats that the seats can be divided by."""
    return [degree for degree in _powers(setting.seats) if 1 < degree <= MOST_GATHERED]


def packed(setting: Setting, step: Step, degree: int, kept: bool = False) -> Foreseen:
    """See the module: the least that any such packing reaches. Tokens count as equal, which is generous.

    `kept`: see the module, as if it were done as CAD does it.
    """
    lengths = np.concatenate([document_lengths(layout) for layout in step])
    each = of_pieces(lengths, setting.cost, degree)
    groups, count = setting.seats // degree, len(step)
    share = each.total / degree
    # Attention of a group's micro-batch: the mean, or all of the longest document.
    fair = float(share.sum()) / (groups * count)
    longest = int(share.argmax())
    worst = max(fair, float(share[longest]))
    of_worst = slice(longest, longest + 1) if worst > fair else slice(None)
    forward = float(each.forward[of_worst].sum() / each.total[of_worst].sum())
    scale = _scale(setting, setting.shape.groups)
    slow = np.full((count, 1), worst * scale)
    again = setting.checkpointing and not kept
    attention = Both(slow * forward, slow * (1.0 - forward)).repeated(again)
    tokens = np.full((count, 1), sum(float(layout.tokens.sum()) for layout in step) / (setting.seats * count))
    exchange, moved = _gather_keys(setting, tokens, degree, again)
    peak = _peak(setting, tokens) + _gathered_bytes(setting, tokens, degree)
    if kept:
        peak += kept_output_bytes(setting, float(tokens.max()), min(setting.pipeline, count))
    found = finish(setting, "packed", Rows(tokens, attention, exchange), Figures(moved, peak, degree, measured=False))
    return _idle_beside_longest(found, fair / worst)


def packed_degrees(setting: Setting, longest: int, tokens: int) -> list[int]:
    """Numbers of seats that together hold the longest document."""
    return [degree for degree in _powers(setting.seats) if degree * tokens >= longest] or [setting.seats]


def _idle_beside_longest(found: Foreseen, share: float) -> Foreseen:
    """The mean rank has that share of the slowest one's attention; for the rest it waits."""
    spare = found.seconds.attention * (1.0 - share)
    seconds = replace(found.seconds, attention=found.seconds.attention - spare, waiting=found.seconds.waiting + spare)
    return replace(found, seconds=seconds)


def _split(setting: Setting, layout: Layout, degree: int, by_row: Both, joined: bool) -> tuple[Floats, Both]:
    """Rows of each group, split over its seats: tokens and attention, [micro-batches, groups].

    A stream whose documents span ranks is one row of all its seats.
    """
    seats = setting.seats
    spans = bool((layout.segments.begin > 0).any())
    rows = 1 if spans or joined else degree

    def fold(values: Floats) -> Floats:
        folded = values.reshape(seats // degree, degree)
        return (folded.sum(1, keepdims=True) if rows == 1 else folded).T / degree

    return fold(layout.tokens.astype(np.float64)), Both(fold(by_row.forward), fold(by_row.backward))


def _gather_keys(setting: Setting, tokens: Floats, degree: int, again: bool) -> tuple[Both, tuple[float, float]]:
    """Seconds and bytes of gathering K and V of a row, and of scattering their gradients.

    `again`: the recompute waits for K and V; else they are gathered for the backward while it runs.
    """
    if degree == 1:
        return _nothing(tokens), (0.0, 0.0)
    row = 2.0 * setting.shape.groups * setting.shape.head_dim * setting.shape.bytes_per_element
    size = tokens * degree * row
    gather = _each(size, lambda one: setting.cluster.gather(one, degree, setting.tensor))
    # Head and tail pieces read one and a half times the row, out of what was gathered.
    copies = 1.5 * 2.0 * size / setting.machine.memory_rate
    once, back = (gather + copies) * setting.layers, (gather + 2.0 * copies) * setting.layers
    times = 3 if setting.checkpointing else 2
    inside, between = setting.cluster.shares(degree, setting.tensor)
    amount = float(size.sum(0).mean()) * setting.layers * times
    return Both(once, back).repeated(again), (amount * inside, amount * between)


def _gathered_bytes(setting: Setting, tokens: Floats, degree: int) -> float:
    """What K and V of a whole row hold: gathered, picked out for two runs, and the gradients of both."""
    row = 2.0 * setting.shape.groups * setting.shape.head_dim * setting.shape.bytes_per_element
    return float(tokens.max()) * degree * row * 4.0 if degree > 1 else 0.0


def _name(mode: str, kept: bool) -> str:
    return f"{mode} kept" if kept else mode


def _peak(setting: Setting, tokens: Floats, kept: bool = False) -> float:
    own = replace(setting, keep="device", recompute_attention=False)  # which say what CAD keeps
    state, most = state_bytes(own, own.seats), float(tokens.max())
    if own.pipeline == 1:
        return state + activation_bytes(own, most) + (kept_output_bytes(own, most) if kept else 0.0)
    return state + stage_bytes(own, most, (min(own.pipeline, len(tokens)), 1), kept)


def _scale(setting: Setting, groups: int) -> float:
    """Of one head group's seconds in one layer: all groups, the layers of a stage, and kernels in training."""
    return groups * setting.layers * setting.machine.in_training


def _first_rank(layout: Layout) -> np.ndarray:
    """[documents]: the first rank that each lies on."""
    first = np.full(layout.documents, layout.ranks, np.int64)
    np.minimum.at(first, layout.segments.document, layout.segments.rank)
    return first


def _nothing(tokens: Floats) -> Both:
    return Both(np.zeros_like(tokens), np.zeros_like(tokens))


def _stack(found: list[Both]) -> Both:
    return Both(np.stack([one.forward for one in found]), np.stack([one.backward for one in found]))


def _join(found: list[Both]) -> Both:
    return Both(np.concatenate([one.forward for one in found]), np.concatenate([one.backward for one in found]))


def _each(sizes: Floats, seconds: Callable[[float], float]) -> Floats:
    """A link's seconds for each of some sizes."""
    return np.vectorize(seconds, otypes=[float])(sizes)


def _powers(limit: int) -> list[int]:
    return [1 << power for power in range(limit.bit_length()) if limit % (1 << power) == 0]
