"""The modes that CAD is compared with: plain, Ulysses, all-gather context parallelism.

In: a setting and the layouts of a step's micro-batches, one row per seat. Out: `Foreseen`.

`kept`: the recompute of activation checkpointing finds attention's output and does not attend; what `ulysses`
and `gathered` send again then is hidden. As modes dp:kept and ulysses:kept of the training benchmark. `joined`: the
rows of a group are one micro-batch, not one after the other.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from deepspeed_cad.forecast import schedule
from deepspeed_cad.forecast.attention import Floats, document_lengths, of_documents, of_pieces, summed
from deepspeed_cad.forecast.bytes_held import activation_bytes, state_bytes
from deepspeed_cad.forecast.setting import Setting
from deepspeed_cad.forecast.step import Foreseen, Seconds
from deepspeed_cad.layout import Layout

MOST_GATHERED = 64
"""Seats that gather keys with each other, at most: beyond, the gathered keys alone fill a GPU."""

Step = Sequence[Layout]
"""The micro-batches of a step."""


def plain(setting: Setting, step: Step, kept: bool = False) -> Foreseen:
    """Every seat trains its own row. Documents that span ranks are cut at the border: another computation."""
    tokens, attention = _rows(setting, step, 1, False, lambda layout: of_documents(layout, setting.cost, cut=True))
    return foresee_rows(setting, "plain", tokens, attention, kept)


def ulysses(setting: Setting, step: Step, degree: int, joined: bool = False, kept: bool = False) -> Foreseen:
    """Groups of `degree` seats train their rows one after the other, each split over the group; attention by heads,
    after an all-to-all."""
    tokens, attention = _rows(setting, step, degree, joined, lambda layout: of_documents(layout, setting.cost))
    size = tokens * schedule.ulysses_bytes(setting.shape, degree)
    once = setting.cluster.all_to_all(size, degree, setting.tensor) * setting.attending
    return foresee_rows(setting, "ulysses", tokens, attention, kept, degree, np.stack([once, once]), size)


def gathered(setting: Setting, step: Step, degree: int, joined: bool = True, kept: bool = False) -> Foreseen:
    """The same, every document cut into 2 × degree pieces; K and V are all-gathered."""

    def attend(layout: Layout) -> Floats:
        first = np.full(layout.documents, layout.ranks, np.int64)
        np.minimum.at(first, layout.segments.document, layout.segments.rank)
        return summed(of_pieces(document_lengths(layout), setting.cost, degree), first, layout.ranks)

    tokens, attention = _rows(setting, step, degree, joined, attend)
    return foresee_rows(setting, "gathered", tokens, attention, kept, degree, *gather_keys(setting, tokens, degree))


def degrees(setting: Setting, mode: str) -> list[int]:
    """Numbers of seats that may share rows in "ulysses" or "gathered": their heads and the seats can be divided so."""
    heads, groups = setting.shape.query_heads, setting.shape.groups
    powers = [1 << power for power in range(1, setting.seats.bit_length()) if setting.seats % (1 << power) == 0]
    if mode == "ulysses":
        return [one for one in powers if heads % one == 0 and (groups % one == 0 or one % groups == 0)]
    return [one for one in powers if one <= MOST_GATHERED]


def foresee_rows(
    setting: Setting, mode: str, tokens: Floats, attention: Floats, kept: bool, degree: int = 1,
    exchange: Floats | None = None, sent: Floats | None = None, held: float = 0.0,
) -> Foreseen:  # fmt: skip
    """The step that groups of `degree` seats make of micro-batches, one after the other.

    [micro-batches, groups]: `tokens` of a micro-batch at one seat; bytes `sent` in a layer's exchange. [2, …] seconds:
    `attention` of one head group in one layer, run once; `exchange` that nothing hides, of all layers, sent once.
    `kept`: whether its recompute does not attend. `held`: bytes besides activations."""
    # All groups, the layers of a stage, and kernels in training.
    kernels = attention * (setting.shape.groups * setting.attending * setting.machine.in_training)
    attended = setting.in_pass(kernels, kept)
    exposed = setting.in_pass(np.zeros_like(attention) if exchange is None else exchange, kept)
    times = 1 if setting.forward_only else 3 if setting.checkpointing else 2
    moved = 0.0 if sent is None else float(sent.sum(0).mean()) * setting.attending * times
    own = replace(setting, keep="device", recompute_attention=False)  # which say what CAD keeps
    in_flight = min(own.pipeline, len(tokens)), 1
    other = schedule.non_attention(setting, tokens)
    each = other.each + attended + exposed
    if setting.pipeline > 1:
        ran = schedule.one_forward_one_backward(each, setting.pipeline, other.loss).max()
    elif schedule.meets_at_the_end(setting):
        ran = each.sum((0, 1)).max()
    else:
        ran = each.sum(0).max(1).sum()
    parts = other.layers.sum(0) + other.loss / setting.pipeline, attended.sum(0), exposed.sum(0), other.tensor.sum(0)
    return schedule.compose(
        setting,
        f"{mode} kept" if kept else mode,
        float(ran),
        Seconds(*(float(part.sum(0).mean()) for part in parts)),
        len(tokens),
        float(tokens.sum()) * setting.seats / tokens.shape[1],
        moved * np.array(setting.cluster.shares(degree, setting.tensor)),
        peak=state_bytes(own, own.seats) + activation_bytes(own, float(tokens.max()), in_flight, kept) + held,
        degree=degree,
    )


def _rows(
    setting: Setting, step: Step, degree: int, joined: bool, attend: Callable[[Layout], Floats]
) -> tuple[Floats, Floats]:
    """Rows of each group, split over its seats: tokens and attention, [micro-batches, groups] and [2, …].

    A stream whose documents span ranks is one row of all its seats. `attend`: [2, seats] seconds of their rows."""
    parts = []
    for layout in step:
        rows = np.stack([layout.tokens.astype(np.float64), *attend(layout)])
        folded = rows.reshape(3, setting.seats // degree, degree)
        if degree > 1 and (joined or layout.segments.begin.any()):
            folded = folded.sum(2, keepdims=True)
        parts.append(folded.transpose(0, 2, 1) / degree)
    found = np.concatenate(parts, axis=1)
    return found[0], found[1:]


def gather_keys(setting: Setting, tokens: Floats, degree: int) -> tuple[Floats, Floats, float]:
    """Seconds and bytes of gathering K and V of a row, and of scattering their gradients; and what is held of them
    where an MLP holds most: what two runs read, which is 2 × degree + 1 of the 2 × degree parts of a row."""
    size = tokens * degree * (2.0 * setting.shape.groups * setting.shape.head_dim * setting.shape.bytes_per_element)
    gather = setting.cluster.gather(size, degree, setting.tensor)
    # Head and tail pieces read one and a half times the row, out of what was gathered.
    copies = 1.5 * 2.0 * size / setting.machine.memory_rate
    exchange = np.stack([gather + copies, gather + 2.0 * copies]) * setting.attending
    return exchange, size, (1.0 + 0.5 / degree) * float(size.max())
