"""Measured figures on the pages against their raw files, and how old they are.

A figure that is measured is a line of `FIGURES`: the words of a page with gaps, a file of benchmarks/results, and what
fills the gaps. Between the marks of README.md every table row and every commit must be in it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

from rivals_table import kept_seconds  # noqa: E402

from deepspeed_cad.cli import main  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
MEASURED_ROOMS = (
    "csrc",
    *(f"deepspeed_cad/{room}" for room in ("attention", "exchange", "kernels", "planner", "schedule")),
)
"""What runs in a step."""
GIB = 2**30


def rate(result: Any, mode: str) -> float:
    return result["modes"][mode]["tokens_per_s_per_gpu"]["median"]


def over(result: Any, mode: str = "cad", other: str = "dp") -> float:
    return rate(result, mode) / rate(result, other)


def over_kept(result: Any, mode: str = "cad", other: str = "dp") -> float:
    """Over the other mode where it does not repeat attention; by arithmetic where that was not measured."""
    if f"{other}:kept" in result["modes"]:
        return over(result, mode, f"{other}:kept")
    return kept_seconds(result["modes"][other]) / sum(result["modes"][mode]["step_seconds"])


def by_arithmetic(result: Any, mode: str) -> float:
    """The step with attention kept, by arithmetic over measured."""
    return kept_seconds(result["modes"][mode]) / sum(result["modes"][f"{mode}:kept"]["step_seconds"])


def memory(result: Any, mode: str = "cad", other: str = "ulysses") -> float:
    return result["modes"][mode]["peak_GiB"] / result["modes"][other]["peak_GiB"]


def both(*of: Callable[[Any], float]) -> Callable[..., list[float]]:
    """Each of these figures of each file in turn."""
    return lambda *results: [one(result) for one in of for result in results]


def wrong_of(pages: list[str]) -> tuple[int, int]:
    """Cases that are wrong, and all."""
    counts = [re.search(r"^(\d+) cases, (\d+) wrong", page, re.MULTILINE) for page in pages]
    return sum(int(one[2]) for one in counts if one), sum(int(one[1]) for one in counts if one)


def speedups(result: Any) -> list[float]:
    """Of each step of a pipeline."""
    return [a / b for a, b in zip(result["step_seconds"]["1f1b"], result["step_seconds"]["cad"])]


def growth(result: Any) -> list[float]:
    """Least and most milliseconds of 8 and 512 ranks, seconds of 4096."""
    found = {ranks: [row["all_ms"] for row in result["growth"] if row["ranks"] == ranks] for ranks in (8, 512, 4096)}
    return [
        *(limit(found[ranks]) for ranks in (8, 512) for limit in (min, max)),
        *(limit(found[4096]) / 1e3 for limit in (min, max)),
    ]


def served(*results: Any) -> list[float]:
    """With a server over in place, least and most over NVLink, then over the slower links; idle servers in percent."""
    pairs = list(zip(results[::2], results[1::2]))
    assert all(
        (a["servers"], b["servers"], a["commit"], a["tokens"]) == (1, 0, b["commit"], b["tokens"]) for a, b in pairs
    )
    speeds = [reserved["tokens_per_s"] / in_place["tokens_per_s"] for reserved, in_place in pairs]
    links = [reserved["link_GBps"]["between"] for reserved, _ in pairs[2:]]
    idle = [100 * reserved["ranks"][0]["servers_idle"] for reserved, _ in pairs]
    return [f(v) for v in (speeds[:2], speeds[2:], links, idle) for f in (min, max)]


HEADLINE = ("h200x2/train_heavy_64k_2r_b12bcb0.json", "h200x4/train_prolong_64k_4r_2026-11-21.json")
SERVED = tuple(
    f"h200x2/servers_{commit}_{mode}_{link}.json"
    for commit, link in (("5458279", "nvlink"), ("81c8253", "nvlink"), ("fcc832a", "host"), ("5458279", "host"))
    for mode in ("reserved", "in-place")
)
EXACT = tuple(
    f"h200x2/exactness_hosts_{kernel}_88a09b1.md" for kernel in ("flash_attn_4", "flash_attn_2", "torch_varlen")
)
ALST = ("h200x2/alst_cad_81a8563.json", "h200x2/alst_ulysses_81a8563.json")
MILLION = "h200x2/train_million_256k_2r_b12bcb0.json"
WAVES = 'cad@{"keep":"host","memory":1.3}'

GAINED = {
    "nearly even ({:.2f}, of it {:.2f} by balance)": "h200x2/train_prolong_64k_2r_cad_2026-11-21.json",
    "even | {:.2f} of plain, kept {:.2f} | `20d1bbb` |": "h200x2/train_prolong_64k_2r_cad_2026-11-21.json",
    "attn 2 | {:.2f} of plain, kept {:.2f} | `963163a` |": "h200x2/train_heavy_64k_2r_flash_attn_2_2026-11-21.json",
    "nothing to gain | {:.2f} of plain, kept {:.2f} | `9e17d32` |": "h200x4/train_even_64k_4r_2026-11-21.json",
    "each, 3 steps | {:.2f} of plain, kept {:.2f} | `aad1172` |": "h200x4/train_wlb_128k_4r_2026-11-21.json",
}
"""Words of README.md with CAD over plain, and over plain with attention kept, and their file."""

FIGURES: list[tuple[str, str, str | tuple[str, ...], Callable[..., Any]]] = [
    *(("README.md", words, file, both(over, over_kept)) for words, file in GAINED.items()),
    ("README.md", "| over plain data parallelism | {:.2f} | {:.2f} |", HEADLINE, both(over)),
    ("README.md", "gained by balance** | **{:.2f}** | **{:.2f}** * |", HEADLINE, both(over_kept)),
    (
        "README.md",
        "attention kept | {0:.2f}; {2:.2f} | {1:.2f}; {3:.2f} * |",
        HEADLINE,
        both(partial(over, other="ulysses"), partial(over_kept, other="ulysses")),
    ),
    (
        "README.md",
        "free transfers, over plain | {:.2f} | {:.2f} |",
        HEADLINE,
        both(lambda r: r["bounds"]["bound_qkv"]["tokens_per_s_per_gpu"] / rate(r, "dp")),
    ),
    (
        "README.md",
        "plain, CAD | {0:.1f}, {2:.1f} GiB | {1:.1f}, {3:.1f} GiB |",
        HEADLINE,
        both(lambda r: r["modes"]["dp"]["peak_GiB"], lambda r: r["modes"]["cad"]["peak_GiB"]),
    ),
    (
        "README.md",
        "6 steps | {:.2f} of plain, kept {:.2f}; kept {:.2f} of Ulysses | `b12bcb0` |",
        "h200x2/train_prolong_64k_2r_b12bcb0.json",
        both(over, over_kept, partial(over_kept, other="ulysses")),
    ),
    (
        "README.md",
        "attention {2:.0f} and {3:.0f} % of a step, ranks nearly even, 3 steps | kept {0:.2f}; kept {1:.2f} | "
        "`b12bcb0` |",
        tuple(f"h200x2/train_heavy_64k_2r_{shape}_b12bcb0.json" for shape in ("deepseek", "gpt_oss")),
        both(
            over_kept,
            lambda r: 100 * r["modes"]["dp:kept"]["attention_s_mean"] / sum(r["modes"]["dp:kept"]["step_seconds"]),
        ),
    ),
    (
        "README.md",
        "documents are alike ({:.2f} of plain),",
        "h200x4/train_even_64k_4r_2026-11-21.json",
        both(over),
    ),
    (
        "README.md",
        "fills all GPUs ({:.2f} of Ulysses with attention kept)",
        MILLION,
        both(partial(over_kept, other="ulysses")),
    ),
    (
        "README.md",
        "that step is {:.3f} (plain) and {:.3f} (Ulysses) of the measured one (`b12bcb0`), and {:.3f} on one H100",
        (HEADLINE[0], "h100x1/train_heavy_64k_1r_404e59b.json"),
        lambda two, one: (by_arithmetic(two, "dp"), by_arithmetic(two, "ulysses"), by_arithmetic(one, "dp")),
    ),
    (
        "README.md",
        "recomputed like all else over plain | {:.3f}; {:.2f} % of a step; {:.2f} | `aad1172` |",
        HEADLINE[1],
        lambda r: (
            r["modes"]["cad"]["attention_max_over_mean"],
            100 * r["modes"]["cad"]["exposed_exchange_share"]["mean"],
            over(r, "cad:recompute"),
        ),
    ),
    (
        "README.md",
        "up to 262,144 tokens, timed once | {:.2f} of Ulysses | `9e17d32` |",
        "h200x4/train_span_64k_4r_2026-11-21.json",
        both(partial(over, other="ulysses")),
    ),
    (
        "README.md",
        "2 layers, one step | kept {:.2f} of Ulysses; {:.2f} of its memory | `b12bcb0` |",
        MILLION,
        both(partial(over_kept, other="ulysses"), partial(memory, other="ulysses:kept")),
    ),
    (
        "README.md",
        '"memory": 1.3` | kept {:.2f} of Ulysses; {:.2f} of its memory | `b12bcb0` |',
        MILLION,
        both(partial(over_kept, mode=WAVES, other="ulysses"), partial(memory, mode=WAVES, other="ulysses:kept")),
    ),
    (
        "README.md",
        "the host | {:.2f} of DeepSpeed's ALST; {:.2f} of its memory, {:.2f} of its host's | `81a8563` |",
        ALST,
        lambda cad, alst: (alst["step_s"] / cad["step_s"], cad["peak"] / alst["peak"], cad["host"] / alst["host"]),
    ),
    (
        "README.md",
        "gathered as often, 4 steps | {:.2f} of plain | `720b9da` |",
        "h200x4/fsdp2_prolong_64k_4r.json",
        lambda r: (r["tokens_per_s_per_gpu"]["cad"] / r["tokens_per_s_per_gpu"]["plain"],),
    ),
    (
        "README.md",
        "128K tokens on each, 7 steps | {:.2f} of plain | `52a67ff` |",
        "h200x4/accelerate_fsdp2_128k.md",
        lambda page: [
            sum(float(row[0]) for row in rows) / sum(float(row[1]) for row in rows)
            for rows in [re.findall(r"^\| [2-8] \|.*\| (\d\.\d{3}) \| (\d\.\d{3}) \|.*→", page, re.MULTILINE)]
            if len(rows) == 7
        ],
    ),
    (
        "README.md",
        "| {:.2f} to {:.2f} over NVLink, {:.2f} to {:.2f} at {:.0f} to {:.0f} GB/s; the server idle {:.0f} to {:.0f} % "
        "| `81c8253`, `fcc832a`, `5458279` |",
        SERVED,
        served,
    ),
    (
        "README.md",
        "long-document mix, two steps | {:.2f}, {:.2f} | `7850fb0` |",
        "h200x2/pipeline_pp2_2r_prolong_64k_2r_7850fb0.json",
        speedups,
    ),
    (
        "README.md",
        "three kernels | {} of {} combinations | `88a09b1` |",
        EXACT,
        lambda *pages: wrong_of(list(pages)),
    ),
    (
        "README.md",
        "one rank's schedule | {:.1f} to {:.1f} ms; {:.0f} to {:.0f} ms; {:.2f} to {:.2f} s | `4004102` |",
        "planner.json",
        growth,
    ),
    *(
        (
            "docs/servers.md",
            f"{words} | {{:.3f}} | {{:.1f}} % | {{:.1f}}, {{:.1f}} |",
            SERVED[number : number + 2],
            lambda reserved, in_place: (
                reserved["tokens_per_s"] / in_place["tokens_per_s"],
                100 * reserved["ranks"][0]["servers_idle"],
                reserved["ranks"][0]["peak"] / GIB,
                max(rank["peak"] for rank in in_place["ranks"]) / GIB,
            ),
        )
        for number, words in (
            (0, "| 131,072 | NVLink, commit 5458279"),
            (2, "| 262,144 | NVLink, commit 81c8253"),
            (4, "| 131,072 | 19 GB/s, host memory, commit fcc832a; 16 when in place ran"),
            (6, "| 262,144 | 18 GB/s, host memory, commit 5458279"),
        )
    ),
    *(
        (
            "docs/million-tokens.md",
            f"{words} | {{:.3f}} | {{:.2f}} | {{:.3f}} | {{:.2f}} %, {{:.2f}} % |",
            f"h200x2/train_million_256k_2r_{commit}.json",
            partial(
                lambda mode, r: (
                    over(r, mode, "ulysses"),
                    over_kept(r, mode, "ulysses"),
                    memory(r, mode),
                    *(100 * r["modes"][mode]["exposed_exchange_share"][of] for of in ("mean", "max")),
                ),
                mode,
            ),
        )
        for words, mode, commit in (
            ("| CAD | fcc832a", "cad", "fcc832a"),
            ('| CAD, `"keep": "host"` | fcc832a', 'cad@{"keep":"host"}', "fcc832a"),
            ('"memory": 1.5` | fcc832a', 'cad@{"keep":"host","memory":1.5}', "fcc832a"),
            ('"memory": 1.3` | 5458279', WAVES, "5458279"),
        )
    ),
    (
        "docs/million-tokens.md",
        "| {:.1f} | {:.3f} | {:.1f} | {:.3f} | {:.1f} | {:.5f}, {:.5f} |",
        ALST,
        lambda cad, alst: (
            cad["step_s"],
            alst["step_s"] / cad["step_s"],
            cad["peak"] / GIB,
            cad["peak"] / alst["peak"],
            cad["host"] / GIB,
            *cad["ranks"][0]["losses"],
        ),
    ),
    (
        "docs/million-tokens.md",
        'CAD {:.3f} of plain at {:.1f} GiB, with `"keep": "host"` {:.3f} at {:.1f} GiB, plain {:.1f} GiB',
        "h200x2/train_prolong_64k_2r_keep_81a8563.json",
        lambda r: (
            [one for mode in ("cad", 'cad@{"keep":"host"}') for one in (over(r, mode), r["modes"][mode]["peak_GiB"])]
            + [r["modes"]["dp"]["peak_GiB"]]
        ),
    ),
    (
        "docs/pipeline.md",
        "| long-document mix, two steps | 7850fb0 | {:.3f}, {:.3f} | {:.3f} |",
        "h200x2/pipeline_pp2_2r_prolong_64k_2r_7850fb0.json",
        lambda r: (*speedups(r), r["cad_over_bound"]["bound"]),
    ),
    (
        "docs/pipeline.md",
        "idle stages serve | 81a8563 | {:.3f} | {:.3f} |",
        "h200x2/pipeline_pp2_2r_even_8192_81a8563.json",
        lambda r: (*speedups(r), r["cad_over_bound"]["bound"]),
    ),
    (
        "docs/servers.md",
        "went on {:.1f} s after the kill; the step in which it happened took {:.1f} s, where steps took {:.1f} s with",
        "h200x2/killed_continue_a67af12.json",
        lambda r: (r["change"]["seconds"], r["change"]["steps"][0], r["step_s"]),
    ),
]


@cache
def read(file: str) -> Any:
    text = (RESULTS / file).read_text()
    return json.loads(text) if file.endswith(".json") else text


@cache
def page(name: str) -> str:
    return re.sub(r"\s+", " ", (ROOT / name).read_text())


@pytest.mark.parametrize("number", range(len(FIGURES)), ids=lambda number: FIGURES[number][1][:40])
def test_a_figure_is_that_of_its_file(number: int) -> None:
    name, words, files, figures = FIGURES[number]
    results = [read(file) for file in ((files,) if isinstance(files, str) else files)]
    said = words.format(*figures(*results))
    assert said in page(name), said


def test_every_row_of_figures_is_one_of_these() -> None:
    text = (ROOT / "README.md").read_text()
    marked = re.findall(r"<!-- figures: begin.*?-->(.*?)<!-- figures: end -->", text, re.DOTALL)
    tables = re.findall(r"^\|.*\|\n\|[-|]+\|\n((?:\|.*\|\n)+)", "".join(marked), re.MULTILINE)
    rows = [row for table in tables for row in table.splitlines()]
    said = [
        words.format(*figures(*(read(file) for file in ((files,) if isinstance(files, str) else files))))
        for name, words, files, figures in FIGURES
        if name == "README.md"
    ]
    assert len(tables) == 2 and len(rows) > 20
    for row in rows:
        assert any(one in row for one in said), row


def test_what_a_whole_model_is_foreseen_to_hold(capsys: pytest.CaptureFixture[str]) -> None:
    """By the command beside the figures, within a GiB or two."""
    command = re.search(r"`deepspeed-cad (plan long-mix --ranks 8 [^`]*)`", page("README.md"))
    said = re.search(
        r"(\d+) GiB are foreseen in plain training, (\d+) with attention kept, (\d+) with CAD and (\d+) with",
        page("README.md"),
    )
    assert command is not None and said is not None
    found = []
    for modes, more in (("plain,plain kept,cad", []), ("cad", ["--keep", "host"])):
        assert main([*command[1].split(), "--modes", modes, "--json", *more]) == 0
        out = capsys.readouterr().out
        found += [mode["peak"] / GIB for mode in json.loads(out[out.index("{") :])["modes"]]
    assert found == pytest.approx([float(one) for one in said.groups()], abs=2)


def test_a_figure_says_how_much_of_what_it_measures_changed_since() -> None:
    """README.md names the commit of each figure, and fewer than how many lines of `MEASURED_ROOMS` changed since. Where
    it fails: measure again, or say the next 5,000 that leaves 2,500. Without the history there is nothing to count."""
    text = page("README.md")
    ages = text[text.index("that were added or deleted since:") :].split(". ")[0]
    said = {
        commit: int(most.replace(",", ""))
        for most, commits in re.findall(r"under ([\d,]+): ([^;]*)", ages)
        for commit in re.findall(r"`([0-9a-f]{7})`", commits)
    }
    assert set(said) == set(re.findall(r"`([0-9a-f]{7})`", text)), "each commit of a figure has its number"
    assert lines_changed_since("0" * 7) is None, "of a commit that is not there nothing is counted"
    for commit, most in said.items():
        changed = lines_changed_since(commit)
        assert changed is None or changed <= most, (
            f"{changed} lines changed since {commit}; README.md says under {most}"
        )


def lines_changed_since(commit: str) -> int | None:
    """Added and deleted, of what is committed; None where the history is not there."""
    words = ["git", "diff", "--numstat", commit, "HEAD", "--", *MEASURED_ROOMS]
    try:
        found = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    except OSError:
        return None
    lines = [line.split("\t")[:2] for line in found.stdout.splitlines()]
    return None if found.returncode else sum(int(count) for pair in lines for count in pair if count != "-")
