"""All modes beside each other: what is shown, what is left out and why, and the sentence that recommends one."""

import json
from dataclasses import replace
from typing import Any

import pytest
from scripts import load_script

from deepspeed_cad.cost import CostModel
from deepspeed_cad.errors import CADConfigError
from deepspeed_cad.forecast import Cluster, Foreseen, Machine, Seconds, Setting, modes_cad
from deepspeed_cad.forecast.compare import MODES, Comparison, _choices, choose, compare, recommend, say_need
from deepspeed_cad.forecast.setting import ModelShape
from deepspeed_cad.forecast.step import COMPARED, OUTSIDE, RUNS, SERVERS
from deepspeed_cad.layout import Layout

MODEL = ModelShape(layers=4, vocabulary=32000)
COST = CostModel("test", "seconds", pair=1.1e-11, row=6.5e-9, key=2.4e-9)
LONG = [[Layout.from_rank_lengths([[65536], [4096] * 16, [1024] * 64, [2048] * 32])]]


def setting(ranks: int = 4, memory: float = 140.0, **changes: Any) -> Setting:
    return Setting(MODEL, Cluster(ranks, ranks, replace(Machine.load("h200"), memory=memory * 2**30)), COST, **changes)


def test_every_mode_is_foreseen_and_told() -> None:
    heard: list[str] = []
    found = compare(setting(), LONG * 3, tell=heard.append)
    assert [one.mode for one in found.found] == list(MODES) and not found.left_out
    assert [words for words in heard if "step 1" in words] == [f"{name}: step 1 of 3" for name in MODES.values()]
    assert all(len(one.steps) == 3 for one in found.found)
    for one, two in zip(found.found, compare(setting(), [2 * LONG[0]]).found):
        assert two.inside == pytest.approx(2 * one.inside), "two such micro-batches"
    assert found.best_rival is not None and not found.best_rival.mode.startswith("cad")


def test_what_keeps_nothing_keeps_nothing_on_the_host() -> None:
    found = _choices(setting(keep="host"), LONG, "cad", None, None)
    kept = [(run.args[0].keep, run.args[0].recompute_attention) for run, _ in found]
    assert kept == [("host", False), ("device", True)]


def test_no_steps_and_no_such_mode() -> None:
    for steps in ([], [[], *LONG]):
        with pytest.raises(CADConfigError, match="there is no step"):
            compare(setting(), steps)
    with pytest.raises(CADConfigError, match="there is no mode 'nosuch'"):
        compare(setting(), LONG, ["nosuch"])


def made(mode: str, total: float, peak: float = 10.0, **parts: float) -> Foreseen:
    """A step of `total` seconds, most of them outside attention; memory in GiB, of 100."""
    seconds = Seconds(non_attention=total - sum(parts.values()), **parts)
    repeats = not mode.endswith("kept") and not mode.startswith("cad")
    sizes = {"peak": peak * 2**30, "capacity": 100 * 2**30, "state": 5 * 2**30}
    return Foreseen(mode, seconds, 1000.0, 4, **sizes, repeats=repeats, measured=True)


@pytest.fixture
def errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round figures in place of those that were found."""
    monkeypatch.setattr("deepspeed_cad.forecast.compare.RATIO", 0.03)
    monkeypatch.setattr("deepspeed_cad.forecast.compare.MEMORY", 0.06)
    monkeypatch.setattr("deepspeed_cad.forecast.step.MEMORY", 0.06)


@pytest.mark.usefixtures("errors")
@pytest.mark.parametrize("found, words", [
    (
        [made("plain", 10.0, waiting=3.0), made("plain kept", 9.0), made("cad", 7.0, waiting=0.7)],
        "Take CAD in place: 1.29 ± 0.04 times plain, attention kept and 1.43 ± 0.04 times plain; balance is worth "
        "1.29 of that, as GPUs of a plain step wait 30% of it; its GPUs idle 10% of a step (waiting 10.0%, "
        "exchange 0.0%, collectives 0.0%).",
    ),
    # Not repeating attention is no reason: it is to be had without CAD.
    (
        [made("plain", 10.0, attention=2.0), made("plain kept", 9.0), made("cad", 8.9)],
        "Take plain, attention kept: 1.11 ± 0.03 times plain; do not take CAD for balance, which is worth 1.01 "
        "times plain; what else it gives, attention that is not repeated, selective checkpointing gives without it",
    ),
    (
        [made("plain", 10.0), made("plain kept", 9.0, peak=99.0), made("cad", 8.9)],
        "; not for balance, worth 1.01: attention that is not repeated fits so, and not without CAD.",
    ),
    (
        [made("plain", 10.0), made("plain kept", 9.0), made("ulysses kept", 8.0), made("cad", 8.5, exchange=1.7)],
        "Take Ulysses, attention kept: 1.12 ± 0.03 times plain, attention kept and 1.25 ± 0.04 times plain; CAD in "
        "place would be 0.94 times as fast, with GPUs idle 20% of a step (waiting 0.0%, exchange 20.0%, ",
    ),
    (
        [made("plain", 10.0), made("plain kept", 9.0), made("cad", 5.0, peak=200.0)],
        "CAD in place needs 215.0 GiB a GPU of 100.0; it would fit with rows of at most 44% of these tokens",
    ),
    ([made("ulysses", 10.0)], "Take Ulysses; its GPUs idle"),
    (
        [made("plain", 1.0, peak=300.0), made("ulysses", 2.0, peak=195.0)],
        "Nothing fits: Ulysses needs least, 209.7 GiB a GPU of 100.0; it would fit with rows of at most 45% of ",
    ),
    ([made("plain", 10.0), made("cad", 7.0)], "Take CAD in place: 1.43 ± 0.04 times plain;"),
    # Servers, where in place does not fit.
    (
        [made("plain", 10.0), made("cad", 4.0, peak=99.0), made("cad reserved", 5.0)],
        "Take CAD, 1 reserved: 2.00 ± 0.06 times plain; CAD in place needs 107.9 GiB a GPU of 100.0; it would fit",
    ),
])  # fmt: skip
def test_the_sentence(found: list[Foreseen], words: str) -> None:
    assert words in recommend(Comparison(tuple(found), {}))


def test_one_recommendation_and_servers_are_not_a_second() -> None:
    found = Comparison((made("plain", 10.0), made("cad", 7.0), replace(made("cad reserved", 5.0), degree=3)), {})
    taken = choose(found)
    assert taken is not None and taken.mode == "cad" and found.to_json()["reserve"] == 0
    lines = recommend(found).splitlines()
    assert [line.split()[0] for line in lines] == ["Take", "±:", "Reserve"]
    assert lines[2] == (
        f"Reserve no servers: 3 are foreseen at 1.40 times the speed in place, and those that ran were at "
        f"{SERVERS[0]:.2f} to {SERVERS[1]:.2f}."
    )
    assert SERVERS[1] < 1.0, "once servers are measured to win, the sentence and the choice are to be thought over"
    assert "Reserve" not in recommend(Comparison((made("cad", 7.0), made("cad reserved", 7.0)), {}))
    full = Comparison((made("cad", 7.0, peak=99.0), replace(made("cad reserved", 9.0), degree=3)), {})
    assert full.to_json()["reserve"] == 3


@pytest.mark.usefixtures("errors")
def test_what_fits_and_what_would() -> None:
    """With the largest error of any prediction, and with what CUDA and NCCL take."""
    one = made("plain", 1.0, peak=90.0)
    assert one.needed == 90 * 2**30 * (1 + 0.06) + OUTSIDE and one.fits
    assert not replace(one, peak=97 / (1 + 0.06) * 2**30 + 1).fits
    full = made("plain", 1.0, peak=195.0)
    share = (97 / (1 + 0.06) - 5) / 190
    assert say_need(full).endswith(f"it would fit with rows of at most {int(100 * share)}% of these tokens")
    heavy = replace(full, state=120 * 2**30)
    assert say_need(heavy).endswith("it would fit with more GPUs that share the weights")
    assert say_need(replace(heavy, offloadable=110 * 2**30)).endswith("it would fit with --offload-optimizer")


def test_only_what_was_compared_has_no_star() -> None:
    names = {
        (ranks, one.mode) for ranks in (1, 2, 3, 4)
        for one in compare(setting(ranks), [[Layout.from_rank_lengths([[4096]] * ranks)]], servers=1).found
        if one.measured
    }  # fmt: skip
    alike = [run for run in RUNS if (run.machine, run.sharding, run.pipeline) == ("NVIDIA H200", "zero1", 1)]
    assert names == {(run.ranks, run.mode) for run in alike}
    other = replace(setting(), cluster=Cluster(4, 4, Machine.load("b200")))
    assert not any(one.measured for one in compare(other, LONG).found)


def test_what_plan_says_of_comparisons_is_what_was_compared() -> None:
    """Run `python benchmarks/compared.py` after new measurements or changes of the simulator."""
    written, found = json.loads(COMPARED.read_text()), load_script("benchmarks/compared.py").find()
    assert written["runs"] == found["runs"] and written["servers"] == found["servers"]
    for figure in ("ratio", "memory"):
        assert written[figure] == pytest.approx(found[figure], abs=5e-3)


def test_servers_are_chosen_on_the_same_documents_as_other_modes() -> None:
    """Left out, the rows that servers would have trained may be those with most attention."""
    step = [Layout.from_rank_lengths([[1024] * 32, [1024] * 32, [1024] * 32, [32768]])]
    same = [[Layout.from_rank_lengths([[32768], [1024] * 32, [1024] * 32, []])]]
    own = setting(tolerance=0.01)
    dealt = compare(own, [step], ["cad reserved"], 1, fewer=lambda servers: same).found[0]
    cut = compare(own, [step], ["cad reserved"], 1).found[0]
    assert dealt.tokens == cut.tokens == 3 * 32768 and dealt.seconds.attention > 2 * cut.seconds.attention


def test_the_first_step_says_how_many_servers_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, tried = list[Layout](), list[int]()
    monkeypatch.setattr(modes_cad, "even_servers", lambda setting, layout: asked.append(layout) or 3)
    layouts = [Layout.from_rank_lengths([[4096]] * 4) for _ in range(3)]
    compare(setting(), [layouts[:2]], ["cad reserved"], fewer=lambda servers: tried.append(servers) or [layouts[2:]])
    assert len(asked) == 1 and asked[0] is layouts[0] and tried == [1, 2, 3]
