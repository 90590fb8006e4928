"""Figures on the pages against the raw files or the scripts that they are from, and how old measured ones are.

A figure that is measured is a line of `README` or `DOCS`: the words of a page with gaps, a file of benchmarks/results,
and what fills the gaps. Between the marks of README.md every table row and every commit must be in it.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import long_memory
import pytest
import steps
from long_memory import MEASURED, PAGE, Measured, foreseen
from rivals_table import kept_seconds
from scripts import ROOT

from deepspeed_cad.cli import main
from deepspeed_cad.forecast.attention import WAIT

RESULTS = ROOT / "benchmarks" / "results"
MEASURED_ROOMS = "csrc", *(f"deepspeed_cad/{room}" for room in "attention exchange kernels planner schedule".split())
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


def kept_memory(result: Any, mode: str = "cad") -> float:
    return result["modes"][mode]["peak_GiB"] / result["modes"]["ulysses:kept"]["peak_GiB"]


def both(*of: Callable[[Any], float]) -> Callable[..., list[float]]:
    """Each of these figures of each file in turn."""
    return lambda *results: [one(result) for one in of for result in results]


def shares(result: Any) -> float:
    return sum(result["step_seconds"]["kept"]) / sum(result["step_seconds"]["cad"])


def growth(result: Any) -> list[float]:
    """Least and most milliseconds of 8 and 512 ranks, seconds of 4096."""
    found = {ranks: [row["all_ms"] for row in result["growth"] if row["ranks"] == ranks] for ranks in (8, 512, 4096)}
    return [limit(found[ranks]) / ms for ranks, ms in ((8, 1), (512, 1), (4096, 1e3)) for limit in (min, max)]


def served(*results: Any) -> list[float]:
    """With a server over in place, least and most over NVLink, then over the slower links; idle servers in percent."""
    pairs = list(zip(results[::2], results[1::2]))
    for a, b in pairs:
        assert (a["servers"], b["servers"], a["commit"], a["tokens"]) == (1, 0, b["commit"], b["tokens"])
    speeds, idle, *_ = zip(*(beside_in_place(*pair) for pair in pairs))
    links = {round(reserved["link_GBps"]["between"]) for reserved, _ in pairs[2:]}
    return [*(f(v) for v in (speeds[:2], speeds[2:]) for f in (min, max)), *links, min(idle), max(idle)]


HEADLINE = ("h100x2/train_heavy_64k_2r_c42b19a.json", "h200x4/train_prolong_64k_4r_b372ae4.json")
EVEN, STREAM = (f"h100x4/train_{one}_ca692e1.json" for one in ("even_4k_4r", "stream_64k_4r"))
NEWEST = [f"h200x4/train_{one}_b372ae4.json" for one in ("heavy_64k_4r", "stream_64k_4r", "million_256k_4r")]
SMALL = 'cad@{"keep":"host","memory":3.8}'
SERVED = tuple(
    f"{gpu}x2/servers_{commit}_{mode}_{link}.json"
    for gpu, commit, link in (("h100", "c42b19a", "nvlink"), ("h200", "81c8253", "nvlink"), ("h100", "c42b19a", "host"),
                              ("h200", "5458279", "host"))
    for mode in ("reserved", "in-place")
)  # fmt: skip
SERVED4 = tuple(f"h100x4/servers_{one[0]}_{mode}_{one[1]}.json" for one in (("6af240d", "nvlink"), ("a8fbbe0", "rows"))
                for mode in ("reserved", "in-place"))  # fmt: skip
ALST4 = [(f"{gpus}x4/alst_cad{one}.json", f"{gpus}x4/alst_kept{other}.json") for gpus, one, other in (
    ("h100", "_0c3bfa8", "_0c3bfa8"), ("h200", "_d8ffd03", "_d8ffd03"), ("h200", "_priority_d8ffd03", "_d8ffd03"),
    ("h200", "_ctas_d8ffd03", "_d8ffd03"), ("h200", "_ctas_ea62db9", "_ctas_ea62db9"),
)]  # fmt: skip
PIPED = tuple(f"h100x4/pipeline_{one}.json" for one in ("pp2_4r_heavy_64k_4r_b0dd75f", "pp4_4r_heavy_64k_4r_6af240d"))
HOSTS = tuple(f"h100x4/hosts_heavy_64k_4r_{one}_6af240d.json" for one in ("host", "sockets", "host_3_1"))
SHARED = tuple(f"h100x4/shares_{divides}_b0dd75f.json" for divides in ("tensor", "ulysses"))
MILLION = "h200x2/train_million_256k_2r_594f82f.json"
MILLION4, MILLION4_KEPT = (f"h200x4/train_million_256k_4r_{commit}.json" for commit in ("d9dea06", "c81e1fe"))
WAVES, WAVED = 'cad@{"keep":"host","memory":1.3}', "h200x2/train_million_256k_2r_b12bcb0.json"
KEEP = 'cad@{"keep":"host"}'


def attention_share(result: Any) -> float:
    """Of a plain step with attention kept, in percent."""
    kept = result["modes"]["dp:kept"]
    return 100 * kept["attention_s_mean"] / sum(kept["step_seconds"])


def state_s(result: Any) -> tuple[float, float, float]:
    cad, alone = (result["modes"][mode]["state_s"] for mode in ("cad", "dp:kept"))
    return cad, alone, cad / alone


def exposed(result: Any, mode: str = "cad", of: str = "mean") -> float:
    return 100 * result["modes"][mode]["exposed_exchange_share"][of]


def alst(cad: Any, rival: Any) -> tuple[float, ...]:
    """Speed, memory of the GPU and of the host, over those of the rival."""
    return rival["step_s"] / cad["step_s"], cad["peak"] / rival["peak"], cad["host"] / rival["host"]


def beside_in_place(reserved: Any, in_place: Any) -> tuple[float, ...]:
    """Speed over in place, idle servers in percent, GiB of a trainer and of a rank in place."""
    most = (max(rank["peak"] for rank in run["ranks"]) / GIB for run in (reserved, in_place))
    speed, idle = reserved["tokens_per_s"] / in_place["tokens_per_s"], 100 * reserved["ranks"][0]["servers_idle"]
    return speed, idle, *most


def bound_by_plain(result: Any) -> float:
    """Seconds of the steps without attention and with the mean attention of plain training."""
    modes = result["modes"]
    return float(sum(modes["bound_qkv"]["step_seconds"]) + modes["dp:kept"]["attention_s_mean"])


def dealt(result: Any, mode: str) -> list[float]:
    """Tokens/s of a GPU, and over those of plain and of grouped training; the faster pass of each."""
    best = {name: min(seconds) for name, seconds in result["seconds"].items()}
    rate = result["tokens"] / result["machine"]["ranks"] / best[mode]
    return [rate, *(best[other] / best[mode] for other in ("plain:kept", "grouped:kept"))]


def passes(result: Any) -> list[float]:
    """The slower and the faster one of documents dealt out; by how many percent those of the others differ at most."""
    ways = {name: (max(seconds), min(seconds)) for name, seconds in result["seconds"].items()}
    return [*ways.pop("dealt"), max(100 * (slow / fast - 1) for slow, fast in ways.values())]


def unevenly_full(result: Any) -> list[float]:
    steps, bound = result["modes"]["cad"]["step_seconds"], result["bounds"]["bound_qkv"]["tokens_per_s_per_gpu"]
    alone = result["modes"]["bound_qkv"]["step_seconds"]
    return [over_kept(result), rate(result, "cad") / bound, sum(alone) / len(alone), min(steps), max(steps)]


of_ulysses, kept_of_ulysses = partial(over, other="ulysses"), partial(over_kept, other="ulysses")
README: list[tuple[str, str | tuple[str, ...], Callable[..., Any]]] = [
    ("nearly even ({:.2f}, of it {:.2f} by balance)", "h200x2/train_prolong_64k_2r_cad_2026-11-21.json",
     both(over, over_kept)),
    ("nothing to gain | kept {:.2f} | `ca692e1` |", EVEN, both(over_kept)),
    ("the mix that ships | {:.2f} of plain, kept {:.2f}; kept {:.2f} of Ulysses | `b372ae4` |", NEWEST[0],
     both(over, over_kept, kept_of_ulysses)),
    ("| over plain data parallelism | {:.2f} | {:.2f} |", HEADLINE, both(over)),
    ("gained by balance** | **{:.2f}** | **{:.2f}** |", HEADLINE, both(over_kept)),
    ("attention kept | {0:.2f}; {2:.2f} | {1:.2f}; {3:.2f} |", HEADLINE, both(of_ulysses, kept_of_ulysses)),
    ("free transfers, over plain | {:.2f} | {:.2f} |", HEADLINE,
     both(lambda r: r["bounds"]["bound_qkv"]["tokens_per_s_per_gpu"] / rate(r, "dp"))),
    ("plain, CAD | {0:.1f}, {2:.1f} GiB | {1:.1f}, {3:.1f} GiB |", HEADLINE,
     both(lambda r: r["modes"]["dp"]["peak_GiB"], lambda r: r["modes"]["cad"]["peak_GiB"])),
    ("6 steps | {:.2f} of plain, kept {:.2f}; kept {:.2f} of Ulysses | `c42b19a` |",
     "h100x2/train_prolong_64k_2r_c42b19a.json", both(over, over_kept, kept_of_ulysses)),
    ("attention {2:.0f} and {3:.0f} % of a step, ranks nearly even, 3 steps | kept {0:.2f}; kept {1:.2f} | `b12bcb0` |",
     tuple(f"h200x2/train_heavy_64k_2r_{shape}_b12bcb0.json" for shape in ("deepseek", "gpt_oss")),
     both(over_kept, attention_share)),
    ("documents are alike ({:.2f} of plain with attention kept),", EVEN, both(over_kept)),
    ("fills all GPUs ({:.3f} and {:.3f} of Ulysses with attention kept)", (MILLION, MILLION4), both(kept_of_ulysses)),
    ("that step is {:.3f} (plain) and {:.3f} (Ulysses) of the measured one (`c42b19a`), and {:.3f} on one H100",
     (HEADLINE[0], "h100x1/train_heavy_64k_1r_404e59b.json"),
     lambda two, one: (by_arithmetic(two, "dp"), by_arithmetic(two, "ulysses"), by_arithmetic(one, "dp"))),
    ("H100 | kept {:.2f} of Ulysses; {:.2f} of Ulysses and {:.2f} of all-gather context parallelism as they come "
     "| `b372ae4`, `ca692e1` |", (NEWEST[1], STREAM),
     lambda new, old: (kept_of_ulysses(new), of_ulysses(old), over(old, other="allgather_cp"))),
    ("| kept {:.3f} of Ulysses, {:.2f} of its memory; kept {:.3f}, {:.2f} of its memory | `594f82f` |", MILLION,
     both(kept_of_ulysses, kept_memory, partial(kept_of_ulysses, mode=KEEP), partial(kept_memory, mode=KEEP))),
    ("| kept {:.3f} of Ulysses, {:.2f} of its memory; kept {:.3f}, {:.2f} of its memory | `d9dea06`, `b372ae4` |",
     (MILLION4, NEWEST[2]), lambda old, new: (kept_of_ulysses(old), kept_memory(old), kept_of_ulysses(new, SMALL),
                                              kept_memory(new, SMALL))),
    ("the host | {:.2f} of ALST with attention kept; {:.2f} of its memory, {:.2f} of its host's | `0c3bfa8` |",
     ALST4[0], alst),
    ("gathered as often, 4 steps | {:.2f} of plain, kept {:.2f} | `ea62db9` |",
     "h200x4/fsdp2_heavy_64k_4r_ea62db9.json", lambda r: (r["cad_over_plain"], r["cad_over_plain_kept"])),
    ("| {:.2f} to {:.2f} over NVLink, {:.2f} to {:.2f} at {:.0f} GB/s; the server idle {:.0f} to {:.0f} % "
     "| `c42b19a`, `81c8253`, `5458279` |", SERVED, served),
    ("in place | {0:.2f}, {2:.2f} over NVLink; the servers idle {1:.0f}, {3:.0f} % | `6af240d`, `a8fbbe0` |", SERVED4,
     lambda *runs: [one for at in (0, 2) for one in beside_in_place(*runs[at : at + 2])[:2]]),
    ("hosts of 2 at {3:.0f} GB/s; over sockets at {4:.1f} GB/s; as 3 and 1 at {5:.0f} GB/s | kept {0:.2f} of plain and "
     "{6:.2f} of Ulysses; kept {1:.2f}; kept {2:.2f} of plain | `6af240d` |", HOSTS, lambda *runs: (
         *map(over_kept, runs), *(run["link_GBps"]["between"] for run in runs), kept_of_ulysses(runs[0]))),
    *((f"{words} | {{:.2f}} | `{PIPED[at][-12:-5]}` |", PIPED[at], lambda r: (r["speed_over_1f1b"]["cad"],))
      for at, words in enumerate(("over DeepSpeed's 1F1B, two steps", "the same with 4 stages, no replicas"))),
    ("tensor parallelism; Ulysses | kept {:.2f}; kept {:.2f} | `b0dd75f` |", SHARED, both(shares)),
    ("and wrappers, on 4 H200 | {} passed, {} failed | `b372ae4` |", "h200x4/test_gpu_b372ae4.md",
     lambda page: re.findall(r"\*\*(\d+) passed, (\d+) failed", page)[0]),
    ("one rank's schedule | {:.1f} to {:.1f} ms; {:.0f} to {:.0f} ms; {:.2f} to {:.2f} s | `4004102` |", "planner.json",
     growth),
]  # fmt: skip
TUNED, TUNED_BEFORE = (f"h100x2/finetune_{commit}.json" for commit in ("19e1654", "f0d67c3"))
HYBRID, PARTED = (f"h100x2/hybrid_long_{commit}.json" for commit in ("f6e74fe", "f0d67c3"))
LONG = "h100x2/hybrid_long_4_layers_b0dd75f.json", "h100x4/hybrid_long_b0dd75f.json"
DEALT, PADDED, MIX = (f"h100x2/dealt_{one}.json" for one in
                      ("chat_4_5d16fe3", "chat_4_padded_b1cdf08", "long_mix_4_c42b19a"))  # fmt: skip
DOCS: dict[str, list[tuple[str, str | tuple[str, ...], Callable[..., Any]]]] = {
    "steps": [
        *(
            (f"| {words} |" + " {:,.0f} | {:.2f} | {:.2f} |" * 3, (DEALT, PADDED, MIX),
             lambda *results, mode=mode: [figure for one in results for figure in dealt(one, mode)])
            for words, mode in (
                ("plain", "plain:kept"), ("plain, `group_by_length`", "grouped:kept"), ('CAD, `"keep"`', "cad"),
                ("CAD, dealt out", "dealt"),
            )
        ),
        ("dealt out took {:.1f} s, the faster one {:.1f} s", DEALT, passes),
    ],
    "speeds": [
        ("CAD ran {:.2f} times as fast as plain training that keeps attention, and {:.2f} times as fast as an even "
         "split of all work would. The full row alone takes {:.2f} s a step without its attention, and CAD's steps "
         "took {:.2f} to {:.2f} s", "h100x2/train_heavy_64k_2r_rows_100_60_5d16fe3.json", unevenly_full),
        ("{:.2f} s in step 7, ALST with attention kept {:.2f} s", [f"h100x4/alst_{x}_5_layers_074a313.json" for x in (
            "cad", "kept")], lambda cad, rival: (cad["ranks"][0]["seconds"][-1], rival["step_s"])),
        ("CAD took {:.2f} s in step 5 and ALST with attention kept {:.2f} s", [f"h100x4/alst_{x}_8_layers_1ae52c4.json"
         for x in ("cad", "kept")], lambda cad, rival: (cad["step_s"], rival["step_s"])),
    ],
    "is-it-for-me": [
        ("the median of 200 steps was {:.2f} s without CAD and {:.2f} s with it", TUNED,
         lambda r: (r["median_s"]["off"], r["median_s"]["on"])),
        ("differed by at most {:.2f})", TUNED, lambda r: (r["largest_difference_of_losses"],)),
        ("[{:.2f} s and {:.2f} s]", TUNED_BEFORE, lambda r: (r["median_s"]["off"], r["median_s"]["on"])),
        ("after a resume differed by {:.4f} in 50 steps", TUNED_BEFORE, lambda r: (r["resumed_differs_by"],)),
    ],
    "models": [
        *(
            (f"| {words} | {{:.2f}} | {{:.2f}} | {{:.2f}} |", file, state_s)
            for words, file in (
                ("131,072 tokens on two H100 | 8", HYBRID), ("the same with heads parted | 8", PARTED),
                ("262,144 tokens on two H100 | 4", LONG[0]), ("262,144 tokens on four H100 | 8", LONG[1]),
            )
        ),
        ("on four the step took {:.2f} s more than", LONG[1], lambda r: (
            r["modes"]["cad"]["seconds"] - sum(r["modes"]["bound_qkv"]["step_seconds"])
            - r["modes"]["cad"]["attention_s_mean"],)),
        ("the same for each piece, and says {:.2f} s.", LONG[1], lambda r: (3 * WAIT * state_s(r)[1],)),
        ("on four H100 took {:.2f} s, and {:.2f} s with CAD", "h100x4/hybrid_gathered_b0dd75f.json",
         lambda r: [r["modes"][mode]["seconds"] for mode in ("cad:gathered", "cad")]),
    ],
    "parallelism": [
        ("six steps ran {:.2f} times as fast", SHARED[0], lambda r: (shares(r),)),
        ("busier replica has {:.2f} times the mean", SHARED[0], lambda r: (r["attention_max_over_mean"][0],)),
        ("and {:.2f} times inside [Ulysses]", SHARED[1], lambda r: (shares(r),)),
        ("In the most uneven step it was {:.2f} times", SHARED[0],
         lambda r: (max(a / b for a, b in zip(*(r["step_seconds"][mode] for mode in ("kept", "cad")))),)),
    ],
    "plan": [("took {:.2f} times what they take on a GPU's own rows", HYBRID, lambda r: state_s(r)[2:])],
    "architecture": [
        ("which made a step {:.1f} times as long", "h100x2/dealt_chat_4_padded_5d16fe3.json",
         lambda r: (min(r["seconds"]["cad"]) / min(r["seconds"]["plain:kept"]),)),
    ],
    "servers": [
        *(
            (f"{words} | {{:.3f}} | {{:.1f}} % | {{:.1f}}, {{:.1f}} |", (*SERVED, *SERVED4)[2 * n : 2 * n + 2],
             beside_in_place)
            for n, words in enumerate((
                "| 131,072 | NVLink, commit c42b19a", "| 262,144 | NVLink, commit 81c8253",
                "| 131,072 | 18 GB/s, host memory, commit c42b19a",
                "| 262,144 | 18 GB/s, host memory, commit 5458279", "two servers | NVLink, commit 6af240d",
                "one server | NVLink, commit a8fbbe0",
            ))
        ),
        ("went on {:.1f} s after the kill; that step took {:.1f} s, those before it {:.1f} s and those after it {:.1f}",
         "h100x4/killed_continue_6af240d.json",
         lambda r: (r["change"]["seconds"], r["change"]["steps"][0], r["step_s"], r["change"]["steps"][3])),
        ("went on {:.1f} s after the kill; the step in which it happened took {:.1f} s, where steps took {:.1f} s with",
         "h200x2/killed_continue_a67af12.json",
         lambda r: (r["change"]["seconds"], r["change"]["steps"][0], r["step_s"])),
    ],
    "hosts": [
        (f"| {{:.1f}} GB/s, {link} | {{:.3f}} | {{:.3f}} | {{:.2f}} % |", file, lambda r: (
            r["link_GBps"]["between"], over_kept(r), bound_by_plain(r) / sum(r["modes"]["cad"]["step_seconds"]),
            exposed(r)))
        for link, file in zip(("host memory", "sockets", "host memory"), HOSTS)
    ],
    "million-tokens": [
        *(
            (f"{words} | {file[-12:-5]} | {{:.3f}} | {{:.3f}} | {{:.2f}} %, {{:.2f}} % |", file, both(*(
                partial(f, mode=mode) for f in (kept_of_ulysses, kept_memory, exposed, partial(exposed, of="max")))))
            for words, mode, file in (
                ("| CAD", "cad", MILLION), ('| CAD, `"keep": "host"`', KEEP, MILLION), ('"memory": 1.3`', WAVES, WAVED),
                ("| CAD", "cad", MILLION4), ('| CAD, `"keep": "host"`', KEEP, MILLION4_KEPT),
                ('"memory": 3.8`', SMALL, NEWEST[2]),
                ('"memory": 3`', 'cad@{"keep":"host","memory":3}', NEWEST[2].replace("b37", "memory_3_b37")),
            )
        ),
        *(
            ("| {0:.1f} | {2:.3f} | {1:.1f} | {3:.3f} | {4:.1f} | {5:.5f}, {6:.5f} |", files, lambda cad, rival: (
                cad["step_s"], cad["peak"] / GIB, *alst(cad, rival)[:2], cad["host"] / GIB, *cad["ranks"][0]["losses"]))
            for files in ALST4
        ),
        ('CAD {:.3f} of plain at {:.1f} GiB, with `"keep": "host"` {:.3f} at {:.1f} GiB, plain {:.1f} GiB',
         "h200x2/train_prolong_64k_2r_keep_81a8563.json",
         lambda r: (*(one for mode in ("cad", KEEP) for one in (over(r, mode), r["modes"][mode]["peak_GiB"])),
                    r["modes"]["dp"]["peak_GiB"])),
    ],
    "pipeline": [
        (words, file, lambda r: (
            *(a / b for a, b in zip(*(r["step_seconds"][one] for one in ("1f1b", "cad")))),
            r["cad_over_bound"]["bound"]))
        for words, file in (
            ("| long-document mix, two steps | 7850fb0 | {:.3f}, {:.3f} | {:.3f} |",
             "h200x2/pipeline_pp2_2r_prolong_64k_2r_7850fb0.json"),
            ("| b0dd75f | {:.3f}, {:.3f} | {:.3f} |", PIPED[0]), ("| 6af240d | {:.3f}, {:.3f} | {:.3f} |", PIPED[1]),
            ("idle stages serve | 81a8563 | {:.3f} | {:.3f} |", "h200x2/pipeline_pp2_2r_even_8192_81a8563.json"),
        )
    ],
}  # fmt: skip
FIGURES = [("README.md", one) for one in README] + [(f"docs/{at}.md", one) for at, rows in DOCS.items() for one in rows]


@cache
def read(file: str) -> Any:
    text = (RESULTS / file).read_text()
    return json.loads(text) if file.endswith(".json") else text


@cache
def page(name: str) -> str:
    return re.sub(r"\s+", " ", (ROOT / name).read_text())


def said(words: str, files: str | tuple[str, ...], figures: Callable[..., Any]) -> str:
    """The words with their figures."""
    return words.format(*figures(*map(read, (files,) if isinstance(files, str) else files)))


@pytest.mark.parametrize(("name", "figure"), FIGURES, ids=lambda one: one if isinstance(one, str) else one[0][:40])
def test_a_figure_is_that_of_its_file(name: str, figure: Any) -> None:
    assert said(*figure) in page(name), said(*figure)


def test_every_row_of_figures_is_one_of_these() -> None:
    text = (ROOT / "README.md").read_text()
    marked = re.findall(r"<!-- figures: begin.*?-->(.*?)<!-- figures: end -->", text, re.DOTALL)
    tables = re.findall(r"^\|.*\|\n\|[-|]+\|\n((?:\|.*\|\n)+)", "".join(marked), re.MULTILINE)
    rows = [row for table in tables for row in table.splitlines()]
    known = [said(*one) for one in README]
    assert len(tables) == 2 and len(rows) > 20
    for row in rows:
        assert any(one in row for one in known), row


def test_what_a_whole_model_is_foreseen_to_hold(capsys: pytest.CaptureFixture[str]) -> None:
    """By the command beside the figures, within a GiB or two."""
    command = re.search(r"`deepspeed-cad (plan long-mix --ranks 8 [^`]*)`", page("README.md"))
    words = r"torch holds (\d+) GiB in plain training, (\d+) with attention kept, (\d+) with CAD and (\d+) with"
    said = re.search(words, page("README.md"))
    assert command is not None and said is not None
    found = []
    for modes, more in (("plain,plain kept,cad", []), ("cad", ["--keep", "host"])):
        assert main([*command[1].split(), "--modes", modes, "--json", *more]) == 0
        out = capsys.readouterr().out
        found += [mode["peak"] / GIB for mode in json.loads(out[out.index("{") :])["modes"]]
    assert found == pytest.approx([float(one) for one in said.groups()], abs=2)


@pytest.mark.parametrize("number", range(len(PAGE)))
def test_the_page_on_long_documents_has_these_tables(number: int) -> None:
    """`python benchmarks/long_memory.py --page` prints them."""
    assert PAGE[number]() in (ROOT / "docs" / "million-tokens.md").read_text()


def test_the_arithmetic_takes_the_options_of_its_command(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", "long_memory.py --tokens 4096 --ranks 2 --layers 2".split())
    long_memory.main()
    assert "| 4,096 tokens on 2: GPU |" in capsys.readouterr().out


@pytest.mark.parametrize("run", MEASURED)
def test_the_arithmetic_of_long_documents_is_near_what_was_measured(run: Measured) -> None:
    assert foreseen(run) == pytest.approx(run.peak_GiB, rel=0.07)


DEALINGS = {
    "chat --documents 16": "`chat`, 16",
    "chat --documents 16 --padded": "`chat`, 16, padded",
    "chat --documents 4 --accumulation 4 --steps 6": "`chat`, 4, in each of 4 micro-batches",
}


@pytest.mark.parametrize("options", DEALINGS)
def test_what_dealing_out_gains_is_what_the_page_says(options: str, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["steps.py", *options.split()])
    steps.main()
    found = capsys.readouterr().out.splitlines()[-1].split(" | ")[1:-1]
    assert f"| {DEALINGS[options]} | {' | '.join(found)} |\n" in (ROOT / "docs" / "steps.md").read_text()


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
        assert changed is None or changed <= most, f"{changed} lines changed since {commit}, not under {most}"


def lines_changed_since(commit: str) -> int | None:
    """Added and deleted, of what is committed; None where the history is not there."""
    words = ["git", "diff", "--numstat", commit, "HEAD", "--", *MEASURED_ROOMS]
    try:
        found = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    except OSError:
        return None
    lines = [line.split("\t")[:2] for line in found.stdout.splitlines()]
    return None if found.returncode else sum(int(count) for pair in lines for count in pair if count != "-")
