"""Layers that carry state where documents span ranks: what their exchanges move and take, and how even they are.

In: a setting of a hybrid and the layout of a micro-batch. Out: `Travel`, of all these layers; None where nothing
travels. How they run: docs/models.md. Nothing hides these exchanges.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deepspeed_cad.forecast.attention_seconds import Floats
from deepspeed_cad.forecast.bytes_held import HEADROOM
from deepspeed_cad.forecast.exchanges import link_seconds
from deepspeed_cad.forecast.model_shape import STATE
from deepspeed_cad.forecast.setting import Setting
from deepspeed_cad.layout import Layout
from deepspeed_cad.planner.plan import BETWEEN, INSIDE
from deepspeed_cad.shares import choose_groups, divide

PASSES = 4.0
"""Bytes read and written on a rank for each byte of its rows, counted in the code: put as the kernel takes them, or as
they leave it, and taken out of where they land."""
COPIES = 1.0 + 2.0 * HEADROOM
"""Of what the kernel takes, beside what the layer would hold on one rank: as the kernel takes it, and landing areas out
and back. In waves it would be less."""
KERNELS = 2, 3
"""Exchanges of a layer with a recurrent kernel, in a recompute and in the others: what the kernel takes, what it gives,
and rows before pieces, which are kept."""


@dataclass(frozen=True)
class Travel:
    """Seconds are of a micro-batch, as often as layers run."""

    seconds: float
    """Of exchanges, copies for them included, where a rank waits."""
    late: float
    """Of the kernels of the rank that runs most, beyond those of its own rows."""
    own: float
    """Of these layers without their MLPs on a rank's own rows of such documents."""
    moved: Floats
    """[2] bytes that all ranks send, inside hosts and between them, as often as layers run."""
    busiest: float
    """Rows for which that rank runs kernels, of all heads, over the most that a rank holds."""
    held: float
    """Bytes on the fullest rank, beside what the layer holds without."""
    gathered: float
    """Seconds that the same layers would wait and work longer than on a rank's own rows if each gathered the rows of
    its documents and ran them whole, on each of their ranks."""


def find_travel(setting: Setting, layout: Layout) -> Travel | None:
    """See the module."""
    state, machine, own = setting.model.state, setting.machine, layout.segments
    if state is None or not own.begin.any():
        return None
    hosts = np.zeros(layout.ranks, np.int64) if setting.hosts is None else setting.hosts
    sent, received, gathered = np.zeros((3, 2, layout.ranks))
    inside, runs, whole = np.zeros((3, layout.ranks))
    names, spread = own.count_ranks()
    groups = choose_groups(state.heads, int(spread.max()))
    for document in names[spread > 1]:
        of = own.document == document
        held = np.bincount(own.rank[of], weights=(own.end - own.begin)[of], minlength=layout.ranks)
        share, there = divide(groups, held) / groups, held > 0
        for amount, mine, theirs in ((sent, held, share), (received, share, held), (gathered, there, held)):
            near = np.bincount(hosts, weights=theirs)[hosts]
            amount[INSIDE] += mine * (near - theirs)
            amount[BETWEEN] += mine * (theirs.sum() - near)
        inside += held
        runs += held.sum() * share
        whole += held.sum() * there
    size, most = 2.0 * (state.taken + state.given), float(layout.tokens.max())

    def slowest(rows: Floats) -> float:
        """Seconds of the busiest link for each byte of a row."""
        return float(link_seconds(machine, rows).max())

    def ran(forward: float, backward: float, kept: bool = False) -> float:
        """In all of these layers."""
        return state.count * float(setting.in_pass(np.array([forward, backward]), kept).sum())

    once = slowest(np.maximum(sent, received)) * size + PASSES * size * float(inside.max()) / machine.memory_rate
    again, every = KERNELS if state.taken else (0, 1)
    calls = ran(every, every + again * setting.checkpointing, kept=True)
    # Of a row: the kernel, and the whole layer without its MLP.
    kernel = np.array(STATE) * (size / 2.0) / machine.memory_rate
    layer = kernel + np.array([1.0, 2.0]) * (2.0 * state.parameters / machine.matrix_flops)
    extra, redone = (float((layout.tokens - inside + rows).max()) - most for rows in (runs, whole))
    gather = 2.0 * setting.model.hidden * slowest(gathered)
    return Travel(
        ran(once, once) + calls * machine.latency,
        ran(*kernel) * max(0.0, extra),
        ran(*layer) * float(inside.max()),
        sent.sum(1) * (size * ran(1.0, 1.0)),
        1.0 + max(0.0, extra) / most,
        COPIES * 2.0 * state.taken * float(np.maximum(inside, runs).max()),
        ran(*layer) * redone + ran(gather, gather),
    )
