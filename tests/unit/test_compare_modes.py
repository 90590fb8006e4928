"""All modes beside each other: what is shown, what is left out and why, and the sentence that recommends one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from deepspeed_cad.cost import CostModel
from deepspeed_cad.errors import CADConfigError, CADError
from deepspeed_cad.forecast import Cluster, Foreseen, Machine, Seconds, Setting
from deepspeed_cad.forecast.compare import MODES, Comparison, compare, label, recommend, reserve, what_would_fit
from deepspeed_cad.forecast.model_shape import ModelShape
from deepspeed_cad.forecast.picture import around, draw_curve, draw_step, sweep
from deepspeed_cad.layout import Layout

MODEL = ModelShape(layers=4, vocabulary=32000)
COST = CostModel("test", "seconds", pair=1.1e-11, row=6.5e-9, key=2.4e-9)
LONG = [[Layout.from_rank_lengths([[65536], [4096] * 16, [1024] * 64, [2048] * 32])]]


def setting(ranks: int = 4, memory: float = 140.0, **changes: Any) -> Setting:
    own = replace(Machine.load("h200"), memory=memory * 2**30)
    return Setting(MODEL, Cluster(ranks, ranks, own), COST, **changes)


def test_every_mode_is_foreseen_and_told() -> None:
    heard: list[tuple[str, int, int]] = []
    found = compare(setting(), LONG * 3, progress=lambda *words: heard.append(words))
    assert [one.mode for one in found.found] == list(MODES) and not found.left_out
    assert heard == [(mode, done, 3) for mode in MODES for done in (1, 2, 3)]
    assert all(len(one.steps) == 3 for one in found.found)
    assert found.best_other is not None and not found.best_other.mode.startswith("cad")
    saved = found.to_json()
    assert saved["modes"][0]["tokens_per_second_per_gpu"] == found.found[0].tokens_per_second
    assert saved["recommendation"] == recommend(found)


def test_the_fastest_degree_that_fits_is_taken() -> None:
    free = compare(setting(), LONG, ["ulysses", "cad"])
    assert free.found[0].degree in (2, 4) and label(free.found[1]) == "CAD in place"
    least = min(one.peak for one in compare(setting(recompute_attention=True), LONG, ["cad"]).found) / 2**30
    tight = compare(setting(memory=least + 0.1), LONG, ["cad"])
    assert tight.found[0].fits and label(tight.found[0]) == "CAD in place, recompute_attention"


@pytest.mark.parametrize(
    ("changes", "mode", "reason"),
    [
        ({"ranks": 1}, "ulysses", "have no common divisor"),
        ({"ranks": 1}, "gathered", "cannot be divided by 2"),
        ({"ranks": 1}, "cad reserved", "one seat cannot be split"),
        ({"pipeline": 4}, "cad reserved", "together with pipeline stages"),
        ({"checkpointing": False}, "plain kept", "without checkpointing no mode repeats attention"),
        ({"checkpointing": False}, "ulysses kept", "without checkpointing no mode repeats attention"),
    ],
)
def test_what_cannot_run_is_left_out_with_its_reason(changes: dict[str, Any], mode: str, reason: str) -> None:
    own = setting(**changes)
    step = [[Layout.from_rank_lengths([[4096]] * own.seats)]]
    found = compare(own, step, [mode, "plain"])
    assert reason in found.left_out[mode] and [one.mode for one in found.found] == ["plain"]


def test_more_servers_than_seats_and_no_steps() -> None:
    left_out = compare(setting(), LONG, ["cad", "cad reserved"], 4).left_out
    assert "leave no server or no trainer" in left_out["cad reserved"]
    with pytest.raises(CADConfigError, match="there is no step"):
        compare(setting(), [])
    with pytest.raises(CADConfigError, match="there is no mode 'nosuch'"):
        compare(setting(), LONG, ["nosuch"])


def made(mode: str, total: float, peak: float = 10.0, **parts: float) -> Foreseen:
    """A step of `total` seconds, most of them outside attention; memory in GiB, of 100."""
    seconds = Seconds(non_attention=total - sum(parts.values()), **parts)
    return Foreseen(mode, seconds, 1000.0, 4, peak=peak * 2**30, capacity=100 * 2**30, state=5 * 2**30)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([made("plain", 10.0, waiting=3.0), made("cad", 7.0)], "Take CAD in place: 1.43 times plain; in a plain step"),
        ([made("plain", 10.0, attention=2.0), made("cad", 9.9)], "Take plain; CAD in place would be 1.01 times"),
        ([made("plain", 10.0), made("cad", 9.0)], "does not repeat attention"),
        ([made("plain", 10.0), made("cad", 20.0, exchange=10.0)], "50% of a step on exchanges"),
        ([made("plain", 10.0), made("cad", 5.0, peak=200.0)], "CAD in place needs 200 GiB a GPU of 100"),
        ([made("plain", 10.0, peak=200.0), made("cad", 5.0)], "Take CAD in place; its GPUs idle"),
        ([made("ulysses", 10.0)], "Take Ulysses; its GPUs idle"),
        ([made("plain", 1.0, peak=300.0), made("ulysses", 2.0, peak=195.0)], "Nothing fits: Ulysses needs least, 195"),
        ([made("plain", 10.0, waiting=3.0), made("packed", 1.0), made("cad", 7.0)], "Take CAD in place"),
        (
            [made("plain", 10.0, waiting=3.0), made("cad", 7.0), replace(made("cad reserved", 5.0), measured=False)],
            "CAD, 1 reserved * would be 1.40 times as fast.",
        ),
        ([made("cad reserved", 5.0)], "Take CAD, 1 reserved"),
        (
            [made("plain", 10.0), made("ulysses", 9.0), replace(made("gathered", 8.0), measured=False), made("cad", 5)],
            "Take CAD in place: 2.00 times plain and 1.60 times all-gather CP; ",
        ),
        (
            [
                made("plain", 10.0),
                made("plain kept", 9.0),
                replace(made("ulysses kept", 8.0), degree=4),
                made("cad", 5),
            ],
            "Take CAD in place: 2.00 times plain and 1.60 times Ulysses, attention kept ×4; ",
        ),
        ([made("plain", 10.0), made("plain kept", 9.0), made("cad", 8.9)], "Take plain, attention kept: 1.11 times"),
    ],
)
def test_the_sentence(found: list[Foreseen], words: str) -> None:
    assert words in recommend(Comparison(tuple(found), {}))


def test_what_would_fit() -> None:
    assert what_would_fit(made("plain", 1.0, peak=195.0)).startswith("rows of at most 50% of these tokens")
    heavy = replace(made("plain", 1.0, peak=195.0), state=120 * 2**30)
    assert what_would_fit(heavy).startswith("more GPUs")


def test_a_sweep_has_gaps_where_nothing_can_be_said() -> None:
    heard: list[str] = []

    def at(ranks: int) -> Comparison:
        if ranks == 3:
            raise CADError("no")
        return Comparison((made("plain", 1.0), made("cad", 1.0, peak=300.0)), {})

    curve = sweep("GPUs", [2, 3, 4], at, ["plain", "cad"], heard.append)
    assert curve.by_mode == {"plain": (250.0, None, 250.0), "cad": (None, None, None)}
    assert heard == ["GPUs: 2", "GPUs: 3", "GPUs: 4"]
    assert around(8, 2, (1 / 8, 1 / 2, 1, 2)) == [4, 8, 16]


def test_pictures(tmp_path: Any) -> None:
    pytest.importorskip("matplotlib")
    found = Comparison((made("plain", 1.0), made("cad", 0.5, waiting=0.1)), {})
    draw_step(found, str(tmp_path / "step.png"))
    curve = sweep("tokens", [4096, 16384], lambda value: found, ["plain", "cad", "packed"], lambda text: None)
    draw_curve(curve, str(tmp_path / "curve.svg"))
    assert (tmp_path / "step.png").read_bytes()[:4] == b"\x89PNG" and "<svg" in (tmp_path / "curve.svg").read_text()
    with pytest.raises(CADError, match="cannot be written"):
        draw_step(found, str(tmp_path / "none" / "step.png"))


@pytest.mark.parametrize(
    ("found", "servers", "words"),
    [
        ([made("cad", 10.0)], 0, ""),
        ([made("cad", 10.0), made("cad reserved", 9.9)], 0, "Reserve none: with 3 it is 1.01 times"),
        ([made("cad", 10.0), made("cad reserved", 8.0)], 3, 'Reserve 3, "servers": {"reserved": 3}: it is 1.25 times'),
        ([made("cad", 10.0), made("cad reserved", 8.0, peak=200.0)], 0, "Reserve none: with 3 it does not fit"),
        (
            [made("cad", 10.0, peak=200.0), made("cad reserved", 20.0)],
            3,
            'Reserve 3, "servers": {"reserved": 3}: in place it does not fit',
        ),
    ],
)
def test_how_many_to_reserve(found: list[Foreseen], servers: int, words: str) -> None:
    many, text = reserve(Comparison(tuple(replace(one, degree=3) for one in found), {}))
    assert many == servers and text.startswith(words)


def test_servers_are_chosen_on_the_same_documents_as_other_modes() -> None:
    """Left out, the rows that servers would have trained may be those with most attention."""
    step = [Layout.from_rank_lengths([[1024] * 32, [1024] * 32, [1024] * 32, [32768]])]
    asked: list[int] = []

    def deal(servers: int) -> list[list[Layout]]:
        asked.append(servers)
        rows = [[32768], *[[1024] * 32] * (3 - servers)]
        return [[Layout.from_rank_lengths([*rows, *[[]] * servers])]]

    own = setting(tolerance=0.01)
    dealt = compare(own, [step], ["cad reserved"], 1, deal=deal).found[0]
    cut = compare(own, [step], ["cad reserved"], 1).found[0]
    assert asked == [1] and dealt.tokens == cut.tokens == 3 * 32768
    assert dealt.seconds.attention > 2 * cut.seconds.attention


def test_servers_wait_where_weights_are_sharded() -> None:
    """Linear layers and attention follow one another there."""
    sharded, whole = (
        compare(setting(sharding=how, memory=1000.0), [[Layout.from_rank_lengths([[65536]] * 4)]], ["cad reserved"], 2)
        for how in ("zero3", "zero1")
    )
    first, second = sharded.found[0], whole.found[0]
    assert first.seconds.total > 1.2 * second.seconds.total and first.idle > second.idle + 0.1
