"""The published claim, recomputed: core attention disaggregation against an ideal packing by length, on 512 H200.

    python benchmarks/published.py            # prints the table and writes benchmarks/results/published.md

The paper (arXiv 2510.18121) reports up to 1.35 × over "WLB-ideal": 8B and 34B models, documents of up to 128K to 512K
tokens, with and without pipelines, tensor parallelism of 8 inside hosts, 50 GB/s per GPU between them. Its tables were
not at hand; the sizes below are our reading: 128K tokens per host and micro-batch, 8 micro-batches with pipelines of 4
stages. The documents are the distributions that ship with this project, cut at the longest; theirs are others.
Simulated, not measured: docs/foreseen.md says what of the simulator was compared with runs.

In: nothing. Out: tokens/s of each mode of work over that of WLB-ideal, every one at the degree that is best for it.

    ideal             documents packed anew so that attention is equal, at no cost; context parallelism inside groups of
                      seats, keys all-gathered; recompute repeats attention
    ideal, kept       the same, if its recompute did not repeat attention either
    ideal, sharded    as ideal, without tensor parallelism: weights sharded by ZeRO-3
    published         planned by counted pairs, tolerance 0.1, exchanges hidden behind linear layers too, at no cost;
                      recompute repeats attention
    ours, TP 8        planned by seconds of forward and backward, attention not repeated, exchanges hidden behind a
                      rank's own attention
    ours, sharded     the same without tensor parallelism: weights sharded by ZeRO-3, so that tasks have two dimensions
    ours, alternating as ours, sharded, with exchanges hidden behind linear layers of another part as well, which is
                      not built for documents that span ranks, as these do
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]

from deepspeed_cad.cli.model_shape import SHAPES  # noqa: E402
from deepspeed_cad.cost import PAIRS  # noqa: E402
from deepspeed_cad.layout import Layout  # noqa: E402
from deepspeed_cad.planner.outlook import ModelShape, pack  # noqa: E402
from deepspeed_cad.profiles import Profile  # noqa: E402
from deepspeed_cad.profiles.choice import SHIPPED  # noqa: E402
from deepspeed_cad.simulator import Cluster, Foreseen, Machine, Setting, modes, modes_cad, seat_shape  # noqa: E402
from deepspeed_cad.simulator.lengths import NAMED  # noqa: E402
from deepspeed_cad.simulator.step import mean  # noqa: E402

PAGE = Path(__file__).resolve().parent / "results" / "published.md"
HOST = 8
TOKENS = 131072
"""Of a host in a micro-batch."""
PIPELINES = {1: 1, 4: 8}
"""Micro-batches of a step by stages."""
MODES = ("ideal", "ideal, kept", "ideal, sharded", "published", "ours, TP 8", "ours, sharded", "ours, alternating")


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    model: str
    documents: str
    longest: int
    stages: int
    ranks: int = 512


def make_setting(case: Case, tensor: int, sharding: str) -> Setting:
    """The cluster of the paper with that split."""
    model: ModelShape = SHAPES[case.model]
    machine = Machine.load("h200").with_links(None, 50e9)
    cost = Profile.load(SHIPPED / machine.profile).cost_for(seat_shape(model, tensor))
    return Setting(
        model,
        Cluster(case.ranks, HOST, machine),
        cost,
        tensor=tensor,
        pipeline=case.stages,
        sharding=sharding,  # type: ignore[arg-type]
    )


def make_steps(case: Case, setting: Setting, count: int) -> list[list[Layout]]:
    """Steps of full rows; documents go on on the next seat."""
    tokens = TOKENS * setting.tensor // HOST
    micro = PIPELINES[case.stages]
    need = setting.seats * tokens * (micro * count + 1)
    documents = NAMED[case.documents].draw(need, seed=0, longest=case.longest)
    packed = pack(documents, setting.seats, tokens, True)
    return [[next(packed) for _ in range(micro)] for _ in range(count)]


def over(steps: list[list[Layout]], run: Callable[[list[Layout]], Foreseen]) -> Foreseen:
    """The mean of some steps."""
    return mean([run(step) for step in steps])


def ideal(setting: Setting, steps: list[list[Layout]], longest: int, kept: bool) -> Foreseen:
    """The best degree of context parallelism."""
    tokens = int(steps[0][0].tokens.max())
    found = [
        over(steps, lambda step, d=degree: modes.packed(setting, step, d, kept))  # type: ignore[misc]
        for degree in modes.packed_degrees(setting, longest, tokens)
    ]
    return max((one for one in found if one.fits), key=lambda one: one.tokens_per_second, default=found[0])


def foresee(case: Case, count: int) -> dict[str, Foreseen]:
    """All modes of work of one case."""
    by_tensor = make_setting(case, HOST, "zero1")
    steps = make_steps(case, by_tensor, count)
    theirs = replace(by_tensor, recompute_attention=True, believed=PAIRS, tolerance=0.1, overlap="pingpong")
    found = {
        "ideal": ideal(by_tensor, steps, case.longest, False),
        "ideal, kept": ideal(by_tensor, steps, case.longest, True),
        "published": over(steps, lambda step: modes_cad.in_place(theirs, step)),
        "ours, TP 8": over(steps, lambda step: modes_cad.in_place(by_tensor, step)),
    }
    if case.stages == 1:
        sharded = make_setting(case, 1, "zero3")
        parts = make_steps(case, sharded, count)
        found["ideal, sharded"] = ideal(sharded, parts, case.longest, False)
        found["ours, sharded"] = over(parts, lambda step: modes_cad.in_place(sharded, step))
        # Plans that heed the links count on what local tasks hide; here more is hidden, so freer plans are tried too.
        alternating = replace(sharded, overlap="pingpong")
        blind = replace(alternating, believed=Profile.load(SHIPPED / "h200_flash_attn_4.json").cost_for(sharded.shape))
        found["ours, alternating"] = max(
            (over(parts, lambda step, own=own: modes_cad.in_place(own, step)) for own in (alternating, blind)),  # type: ignore[misc]
            key=lambda one: one.tokens_per_second,
        )
    return found


def take_away(case: Case, count: int) -> dict[str, Foreseen]:
    """Ours without tensor parallelism, and without one thing at a time."""
    setting = make_setting(case, 1, "zero3")
    steps = make_steps(case, setting, count)
    # All heads as one group: the same work and bytes, in tasks of rows alone.
    model, groups = setting.model, setting.model.kv_heads
    rows_only = replace(
        setting,
        model=replace(model, heads=model.heads // groups, kv_heads=1, head_dim=model.head_dim * groups),
        cost=replace(
            setting.cost,
            pair=setting.cost.pair * groups,
            row=setting.cost.row * groups,
            key=setting.cost.key * groups,
            task=setting.cost.task * groups,
        ),
    )
    variants = {
        "ours, sharded": setting,
        "attention repeated in the recompute": replace(setting, recompute_attention=True),
        "planned by counted pairs": replace(setting, believed=PAIRS),
        "tasks of rows, not of head groups": rows_only,
    }
    return {
        name: over(steps, lambda step, own=own: modes_cad.in_place(own, step))  # type: ignore[misc]
        for name, own in variants.items()
    }


def row(case: Case, found: dict[str, Foreseen]) -> str:
    """A line of the table."""
    base = found["ideal"].tokens_per_second
    cells = []
    for mode in MODES:
        one = found.get(mode)
        if one is None:
            cells.append("")
            continue
        text = f"{one.tokens_per_second:,.0f}" if mode == "ideal" else f"{one.tokens_per_second / base:.2f}"
        if mode.startswith("ideal"):
            text += f" (×{one.degree})"
        elif one.seconds.exchange > 0.01 * one.seconds.total:
            text += f" (exposed {one.seconds.exchange / one.seconds.total:.0%})"
        cells.append(text + ("" if one.fits else f" †{one.peak / 2**30:.0f}"))
    moved = [found[mode].between / 1e9 for mode in MODES if mode in found and mode.startswith(("pub", "ours"))]
    named = f"{case.model} | {case.documents} | {case.longest // 1024}K | {case.stages}"
    return f"| {named} | {' | '.join(cells)} | {', '.join(f'{one:.1f}' for one in moved)} |"


def main() -> None:
    """Print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--no-page", action="store_true", help="print only")
    options = parser.parse_args()
    lines = [
        "| model | documents | longest | stages | " + " | ".join(MODES) + " | GB between hosts |",
        "|---" * (5 + len(MODES)) + "|",
    ]
    sys.stdout.write("\n".join(lines) + "\n")

    def add(line: str) -> None:
        lines.append(line)
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    for model in ("llama-8b", "llama-34b"):
        for stages in PIPELINES:
            for documents in ("web", "long-mix"):
                for longest in (131072, 262144, 524288):
                    case = Case(model, documents, longest, stages)
                    add(row(case, foresee(case, options.steps)))
    add("")
    add("| 8B, long-mix, 256K, no pipeline | tokens/s/GPU | of ours | GB a GPU sends between hosts |")
    add("|---|---|---|---|")
    found = take_away(Case("llama-8b", "long-mix", 262144, 1), options.steps)
    base = found["ours, sharded"].tokens_per_second
    for name, one in found.items():
        speed = one.tokens_per_second
        add(f"| {name} | {speed:,.0f} | {speed / base:.2f} | {one.between / 1e9:.1f} |")
    if not options.no_page:
        PAGE.write_text("\n".join(["# The published claim, recomputed", "", TEXT, *lines, ""]))


TEXT = """512 H200, `python benchmarks/published.py`, which says what the columns are. WLB-ideal in tokens/s/GPU with
the degree of context parallelism that is best for it, all others over it. "Exposed": the share of a step that goes to
exchanges which nothing hides. † does not fit; the figure is GiB. The last column is what a GPU sends to other hosts in
a step: published, then ours in the order of the columns. Simulated, not measured. Its column is generous to the
published mode of work: overlap costs nothing there, and up to 1.67 is more than the 1.35 that the paper reports.

- **Ahead** without pipelines and without tensor parallelism, which weights sharded over all GPUs make superfluous: 1.16
  to 1.28 × WLB-ideal on most, but not on web documents of 256K and more with the small model. Why: keys and values of a
  whole document need not go to every server (tasks of head groups: last table), attention is not repeated in the
  recompute (last table), and no activations are gathered in every layer. That plans know what backward costs is worth
  nothing here: pieces are long.
- **Not ahead** with tensor parallelism of 8 (one head group a GPU, so tasks have one dimension as in the published
  system), with pipelines, and where few documents are very long and the rest is short (web): nearly every task reads
  keys of other ranks and waits for them, one host's keys go to dozens of servers over 50 GB/s, and no attention is left
  to run meanwhile. The published mode of work hides the exchange behind the linear layers of another part.
- **What would change that** is the same for documents that span ranks: 1.49 to 1.56 × WLB-ideal on long documents with
  the small model, 1.41 to 1.50 with the large one (column "alternating").
"""


if __name__ == "__main__":
    main()
