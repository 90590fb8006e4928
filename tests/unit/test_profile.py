"""Machine profiles: the fit, scaling between head shapes, which profile a machine gets, files, and the subcommand."""

import io
import json
import re
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from pool import WorkerPool
from ports import free_port

from deepspeed_cad import cli, groups
from deepspeed_cad.cli import profile as profile_command
from deepspeed_cad.cli import progress
from deepspeed_cad.config import CADConfig
from deepspeed_cad.errors import CADConfigError, CADError
from deepspeed_cad.kernels.interface import KernelNeed, MaskRule
from deepspeed_cad.planner.plan import HeadShape
from deepspeed_cad.profiles import Profile, ShapeCost, choose_profile, measure, speed
from deepspeed_cad.profiles import profile as choice
from deepspeed_cad.profiles.profile import GENERIC_GPU, PAIRS, SHIPPED, USUAL_SHAPE
from deepspeed_cad.profiles.speed import TOKENS, find_speeds

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
ENTRY = ShapeCost(USUAL_SHAPE, pair=1e-11, row=5e-9, key=2e-9, task=1e-7)
PROFILE = Profile("some GPU", "flash_attn_4", (ENTRY,), inside=4e11, between=5e10, date="2026-01-01", commit="abc")


def measured_as(true: tuple[float, ...], sizes: measure.Sizes = measure.GPU, groups: int = 8) -> list[measure.Measured]:
    timed = [(call, float(np.dot(call.counts, true))) for call in measure.calls(sizes, groups, most_keys=1 << 40)]
    return [measure.Measured(call, seconds * 0.3, seconds * 0.7) for call, seconds in timed]


@pytest.mark.parametrize("sizes", [measure.GPU, measure.GPU_QUICK, measure.CPU, measure.CPU_QUICK])
@pytest.mark.parametrize("true", [(1.1e-11, 6.6e-9, 2.4e-9, 1e-6), (1e-11, 0.0, 0.0, 0.0), (2e-9, 1e-7, 0.0, 1e-5)])
def test_the_fit_finds_known_coefficients(true: tuple[float, ...], sizes: measure.Sizes) -> None:
    fit = measure.fit_measured(measured_as(true, sizes=sizes))
    np.testing.assert_allclose((fit.pair, fit.row, fit.key, fit.task), true, rtol=1e-6, atol=1e-9 * max(true))
    assert np.abs(fit.errors).max() < 1e-6


@pytest.mark.parametrize("less", [(-1e-8, 0, 0), (0, -1e-8, 0), (0, 0, -1e-8)])
def test_no_cost_is_below_zero_whatever_the_times_say(less: tuple[float, ...]) -> None:
    fit = measure.fit_measured(measured_as((1e-9, *less)))
    assert fit.pair > 0 and min(fit.row, fit.key, fit.task) >= 0


@pytest.mark.parametrize(("sizes", "most"), [(measure.CPU, 1), (replace(measure.CPU, tokens=16), 1 << 40)])
def test_a_call_has_one_task_where_no_more_fit(sizes: measure.Sizes, most: int) -> None:
    """In memory, or beside shards of more rows than a call has."""
    found = [call for call in measure.calls(sizes, 8, most) if call.label.startswith("shards")]
    assert [len(call.begin) for call in found] == [1] * (2 * len(sizes.shards) * len(sizes.prefixes))
    mixed = [int(call.end.sum()) for call in measure.calls(sizes, 8, most) if call.label.startswith("mixed")]
    assert mixed == [min(most, 16)] * (2 * sizes.mixes)


def test_whole_documents_weigh_more_and_mixed_ones_nothing() -> None:
    """Where no cost model fits all: shards take a half longer than it says, mixed lengths ten times as long."""
    exact = measured_as((1.1e-11, 6.6e-9, 2.4e-9, 1e-6))
    off = [1.5 if one.call.begin.any() else 1.0 if one.call.fitted else 10.0 for one in exact]
    measured = [measure.Measured(one.call, by * one.forward, by * one.backward) for one, by in zip(exact, off)]
    counts, seconds = np.array([one.call.counts for one in measured]), np.array([one.seconds for one in measured])
    weights = [{1.5: 1.0, 1.0: measure.DOCUMENT_WEIGHT, 10.0: 0.0}[by] for by in off]
    fit, expected = measure.fit_measured(measured), measure.fit_cost(counts, seconds, np.array(weights))
    assert [fit.pair, fit.row, fit.key, fit.task] == expected.tolist()


def test_gpus_are_measured_in_larger_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [measure.sizes_for(device, quick) for device in (CPU, GPU) for quick in (False, True)]
    assert found == [measure.CPU, measure.CPU_QUICK, measure.GPU, measure.GPU_QUICK]
    free = [8192 * 1000 + 4095, 4096]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free.pop(0), 1 << 40))
    # Of 128 + 128 elements K, V, their gradients and these for each of 4 heads in bf16, and the gradients in fp32.
    assert [measure.most_keys(GPU, USUAL_SHAPE) for _ in range(2)] == [1000, 1], "half of what is free"


@pytest.mark.parametrize("keys, most", [(128, 1 << 40), (1 << 40, 128)])
def test_what_is_measured_as_counted_by_hand(keys: int, most: int) -> None:
    """For 4 head groups and for one, with keys that are bounded by the sizes or by memory."""
    sizes = measure.Sizes(64, (16, 64), (8, 16), (32, 64), keys, repeats=1, budget=1.0, mixes=1)
    found = {kind: [one for one in measure.calls(sizes, 4, most) if one.label.startswith(kind)] for kind in "dsm"}
    # Two documents of 136 pairs for each group, four of them, and one of 64 tokens.
    counts = [[1088, 128, 128, 8], [544, 64, 64, 4], [2080, 64, 64, 1]]
    assert [(one.groups, one.counts) for one in found["d"]] == list(zip((4, 1, 1), counts))
    for one, (share, rows, prefix) in zip(found["s"], product((4, 1), (8, 16), (32, 64)), strict=True):
        assert (one.begin % rows == 0).all() and (one.end - one.begin == rows).all() and one.end.max() <= prefix
        assert one.groups == share and one.end.sum() <= 128 // share and len(one.end) <= 64 // rows and one.fitted
        pairs = sum(sum(range(begin + 1, begin + rows + 1)) for begin in one.begin.tolist())
        assert one.counts == [share * all_ for all_ in (pairs, rows * len(one.end), one.end.sum(), len(one.end))]
    assert [(one.groups, int(one.end.sum()), one.fitted) for one in found["m"]] == [(4, 32, False), (1, 64, False)]


@pytest.mark.parametrize(("size", "dtype"), [(2, torch.bfloat16), (4, torch.float32), (8, torch.float64)])
def test_kernels_are_given_the_rows_and_keys_of_a_call(size: int, dtype: torch.dtype) -> None:
    """Rows [0, 3) and [5, 9) with the keys before them, for 3 head groups of 2 heads."""
    given: list[Any] = []
    kernel: Any = SimpleNamespace(forward=lambda *x: (given.append(x), "lse"), backward=lambda *x: given.append(x))
    call = measure.Call("two shards", np.array([0, 5]), np.array([3, 9]), 3)
    measure.time_call(kernel, CPU, HeadShape(8, 4, 16, 5, size), call, 2, 99.0)
    (q, k, v, sequences, rule), *_, (do, *rest) = given
    shapes = [(7, 6, 16), (12, 3, 16), (12, 3, 5), (7, 6, 5)]
    assert [(tuple(one.shape), one.dtype) for one in (q, k, v, do)] == [(shape, dtype) for shape in shapes]
    assert [one.tolist() for one in vars(sequences).values() if not isinstance(one, int)] == [[0, 3, 7], [0, 3, 12]] * 2
    assert (sequences.max_q, sequences.max_k, rule) == (4, 9, MaskRule(0.25))
    assert rest == [q, k, v, None, "lse", sequences, rule] and len(given) == 1 + 3 + 3


@pytest.mark.parametrize("device, times, most, least", [
    (CPU, [4, 3, 5, 1], (9, 12), 1), (CPU, [4, 3, 5], (2, 99), 3), (CPU, [4], (9, 3), 4), (CPU, [0, 0], (1, 1), 0),
    (CPU, [0.5, 0.25, 0.5], (9, 1), 0.25), (GPU, [9, 4, 6, 5], (9, 1), 5), (GPU, [9, 1, 6, 5, 7, 2], (4, 99), 5),
])  # fmt: skip
def test_calls_are_repeated_as_time_allows(monkeypatch: Any, device: Any, times: Any, most: Any, least: Any) -> None:
    """The least counts on a CPU, and on a GPU the median behind a first call, which compiles."""
    left = list(times)
    monkeypatch.setattr(measure, "_once", lambda run, device: left.pop(0))
    assert measure._seconds(list, device, *most) == least and not left


def test_of_all_rounds_the_least_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    times, told, how = np.random.default_rng(0).random((2, 12, 2)), list[str](), set[Any]()
    each = iter(times.reshape(-1, 2).tolist())
    monkeypatch.setattr(measure, "time_call", lambda kernel, device, shape, call, *its: (
        how.add((kernel, device, shape, *its)), measure.Measured(call, *next(each)))[1])  # fmt: skip
    sizes = replace(TINY, rounds=2, repeats=3, budget=0.5)
    found = measure.measure_calls("a kernel", CPU, USUAL_SHAPE, sizes, told.append)  # type: ignore[arg-type]
    assert [[one.forward, one.backward] for one in found] == times.min(axis=0).tolist()
    assert told == [f"attention call {number} of 24" for number in range(1, 25)]
    assert how == {("a kernel", CPU, USUAL_SHAPE, 3, 0.5)}


PAIRS_ALONE = measured_as((1.0, 0, 0, 0))
SHARDS = [one for one in PAIRS_ALONE if one.call.begin.any()]


@pytest.mark.parametrize("measured", [measured_as((0, 0, 0, 0)), SHARDS[:3], [*SHARDS[:3], PAIRS_ALONE[-1]]])
def test_the_fit_refuses_times_that_say_nothing(measured: Any) -> None:
    assert measure.fit_measured(SHARDS[:4]).pair == pytest.approx(1.0), "one more says enough, if it is fitted"
    with pytest.raises(CADError, match="cannot be fitted"), np.errstate(divide="ignore", invalid="ignore"):
        measure.fit_measured(measured)


def test_ratios_become_seconds_of_this_machine(monkeypatch: Any, caplog: pytest.LogCaptureFixture) -> None:
    """512 tokens take 131,328 pairs, 512 rows and 512 keys; 3 s for them is the scale of all."""
    asked: list[Any] = []

    def time_call(kernel: Any, device: Any, shape: HeadShape, call: Any, *sizes: Any) -> Any:
        asked.append((kernel.name, shape, call.counts, sizes))
        return measure.Measured(call, 1.0, 2.0)

    monkeypatch.setattr(speed, "time_call", time_call)
    found = speed.in_seconds(GENERIC_GPU, CPU, "auto")
    assert asked == [("torch_math", HeadShape(4, 1, 128, 128, 4), [131328.0, 512.0, 512.0, 1.0], (3, 0.1))]
    (entry,), (ratio,) = found.entries, GENERIC_GPU.entries
    scale = 3.0 / (131328 * ratio.pair + 512 * ratio.row + 512 * ratio.key)
    assert (entry.pair, entry.row, entry.key) == pytest.approx((scale, scale * 490, scale * 250))
    assert (found.unit, found.kernel) == ("seconds", "torch_math, timed at start")
    assert found.source == "any GPU: ratios; 3e+03 ms for 512 tokens of one head group"
    assert speed.in_seconds(GENERIC_GPU, CPU, "torch_math").cost_for(USUAL_SHAPE).of(0, 512) == pytest.approx(3.0)
    monkeypatch.undo()
    before = torch.get_rng_state()
    assert 0 < speed.in_seconds(GENERIC_GPU, CPU, "auto").entries[0].pair < 1e-5, "and really timed"
    assert torch.equal(torch.get_rng_state(), before), "what the training draws is as without CAD"
    # They stay where the kernel does not run.
    same = speed.in_seconds(GENERIC_GPU, CPU, "none_such")
    assert same is GENERIC_GPU and same.cost_for(USUAL_SHAPE).row == 490 and "no kernel none_such" in caplog.text


def test_costs_scale_with_heads_and_sizes() -> None:
    cost = PROFILE.cost_for(USUAL_SHAPE)
    assert PROFILE.cost_for(replace(USUAL_SHAPE, query_heads=64, groups=16)) == cost and cost.pair == ENTRY.pair
    wider = PROFILE.cost_for(HeadShape(16, 2, 192, 128, 2))  # 8 heads a group of 320 instead of 4 of 256
    for name in ("pair", "row", "key", "task"):
        assert getattr(wider, name) == pytest.approx(getattr(ENTRY, name) * 2.5)
    double = PROFILE.cost_for(replace(USUAL_SHAPE, bytes_per_element=4))
    assert (double.pair, double.row, double.key) == pytest.approx((ENTRY.pair, 2 * ENTRY.row, 2 * ENTRY.key))
    assert (cost.unit, cost.byte_inside, cost.byte_between) == ("seconds", 2 / 4e11, 2 / 5e10)
    assert replace(PROFILE, inside=None, between=None).cost_for(USUAL_SHAPE).byte_inside == 0


def test_the_nearest_head_shape_is_scaled() -> None:
    small, many, fp32 = HeadShape(32, 8, 64, 64, 2), HeadShape(32, 2, 128, 128, 2), HeadShape(32, 8, 128, 128, 4)
    profile = replace(PROFILE, entries=(ShapeCost(small, 7e-12), ShapeCost(many, 5e-11), ShapeCost(fp32, 9e-11), ENTRY))
    assert profile.cost_for(replace(small, groups=32)).pair == pytest.approx(7e-12 / 4)
    assert profile.cost_for(replace(many, query_heads=24)).pair == pytest.approx(5e-11 * 12 / 16)
    assert [profile.cost_for(one).pair for one in (USUAL_SHAPE, replace(fp32, head_dim=64))] == [1e-11, 0.75 * 9e-11]


def pretend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, machine: str, kernel: str) -> None:
    monkeypatch.setattr(choice, "machine_name", lambda device: machine)
    monkeypatch.setattr(choice, "expected_kernel", lambda configured, device: kernel)
    monkeypatch.setattr(choice, "user_path", lambda *_: tmp_path / "mine" / "profile.json")


def test_auto_takes_the_users_then_the_shipped_then_ratios(monkeypatch: Any, tmp_path: Path, caplog: Any) -> None:
    caplog.set_level("INFO", "deepspeed_cad")
    pretend(monkeypatch, tmp_path, "NVIDIA H200", "flash_attn_4")
    shipped = choose_profile("auto", GPU)
    assert (shipped.machine, shipped.kernel, shipped.unit) == ("NVIDIA H200", "flash_attn_4", "seconds")
    PROFILE.save(choice.user_path("", ""))
    assert choose_profile("auto", GPU) == shipped, "a profile of another machine"
    mine = replace(PROFILE, machine="NVIDIA H200")
    mine.save(choice.user_path("", ""))
    assert choose_profile("auto", GPU) == mine and choose_profile("pairs", GPU) is PAIRS and PAIRS.name == "pairs"
    assert f"attention costs what {choice.user_path('', '')} says (NVIDIA H200, flash_attn_4)" in caplog.text
    pretend(monkeypatch, tmp_path, "NVIDIA H200", "flash_attn_3")
    assert choose_profile("auto", GPU) is GENERIC_GPU, "a profile of another kernel"
    assert choose_profile("auto", CPU) is PAIRS
    choice.user_path("", "").write_text("{")
    with pytest.raises(CADConfigError, match="is not JSON"):
        choose_profile("auto", GPU)
    monkeypatch.setattr(choice, "user_path", lambda *_: tmp_path / ("x" * 300))
    assert choose_profile("auto", GPU) is GENERIC_GPU, "a folder that the system refuses to look into"


@pytest.mark.parametrize("device, dtype", [(CPU, torch.float32), (GPU, torch.bfloat16)])
def test_the_kernel_of_ordinary_heads_is_the_first_that_is_willing(monkeypatch: Any, device: Any, dtype: Any) -> None:
    need = KernelNeed(device, dtype, 128, 128, 4)
    refuse = {"no": repr, "one": lambda asked: None if asked == need else "no", "two": lambda asked: None}
    kernels = [SimpleNamespace(name=name, refuse=reason) for name, reason in refuse.items()]
    monkeypatch.setattr("deepspeed_cad.kernels.registry.KERNELS", kernels)
    found = [choice.expected_kernel(name, device) for name in ("auto", "no", "two", "of our own")]
    assert found == ["one", "no", "two", "of our own"]


def test_whatever_stops_rank_0_while_it_looks_for_costs_is_said_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    for error, words in (KeyError("x"), "^rank 0 found no cost profile: KeyError: 'x'$"), (CADConfigError("x"), "^x$"):
        monkeypatch.setattr(groups, "choose_profile", mock.Mock(side_effect=error))
        with pytest.raises(CADError, match=words):
            groups.share_cost(CADConfig(), CPU, None, exchanges=True)


@pytest.mark.parametrize("found, exchanges, deterministic, shared", [
    (GENERIC_GPU, True, False, PROFILE), (GENERIC_GPU, False, False, GENERIC_GPU),
    (GENERIC_GPU, True, True, GENERIC_GPU), (PAIRS, True, False, PAIRS),
])  # fmt: skip
def test_ratios_become_seconds_where_times_may_count(
    monkeypatch: Any, found: Profile, exchanges: bool, deterministic: bool, shared: Profile
) -> None:
    monkeypatch.setattr(groups, "choose_profile", lambda *given: {("auto", CPU, "auto"): found}[given])
    monkeypatch.setattr(groups, "in_seconds", lambda *given: {(GENERIC_GPU, CPU, "auto"): PROFILE}[given])
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    assert groups.share_cost(CADConfig(), CPU, None, exchanges) is shared


def test_shipped_profiles_are_sound() -> None:
    assert (paths := sorted(SHIPPED.glob("*.json")))
    for path in paths:
        profile = Profile.load(path)
        assert profile.date and profile.commit and profile.source, path
        for entry in profile.entries:
            # A 32K document of an 8B model's head group: between 1 and 1000 TFLOP/s.
            cost = profile.cost_for(entry.shape)
            work = 14.0 * 32768**2 / 2 * entry.shape.heads_per_group * entry.shape.head_dim
            assert 1e12 < work / float(cost.of(0, 32768)) < 1e15, path
            assert entry.error < 0.1, path


def test_files_come_back_as_they_were(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "profile.json"
    PROFILE.save(path)
    assert Profile.load(path) == PROFILE and replace(PROFILE, date="another day").figures == PROFILE.figures
    for change in ({"entries": PROFILE.entries[:1] * 2}, {"inside": 7.0}, {"between": 7.0}, {"unit": "pairs"}):
        assert replace(PROFILE, **change).figures != PROFILE.figures
    # An earlier one gives what is not there, and of another machine nothing.
    other = replace(PROFILE, entries=(replace(ENTRY, pair=1.0), ShapeCost(HeadShape(1, 1, 1, 1, 1), 2.0)), inside=1.0)
    assert PROFILE.with_entries_of(other) == replace(PROFILE, entries=(ENTRY, other.entries[1]))
    assert replace(other, inside=None, between=None).with_entries_of(PROFILE) == replace(other, inside=PROFILE.inside)
    assert replace(other, machine="another").with_entries_of(PROFILE) == replace(other, machine="another")
    # Of what a file leaves out there is nothing.
    least = {"shape": vars(HeadShape(1, 1, 1, 1, 1)), "pair": 1.0}
    path.write_text(json.dumps({"machine": "some GPU", "kernel": "any", "entries": [least]}))
    (entry,) = Profile.load(path).entries
    none = dict.fromkeys(("row", "key", "task", "error", "worst"), 0.0)
    assert vars(entry) == least | {"shape": HeadShape(1, 1, 1, 1, 1)} | none
    with pytest.raises(CADConfigError, match="cannot be written"):
        PROFILE.save(path / "below a file.json")


@pytest.mark.parametrize("change, said", [
    ({"entries": []}, "no entries"), ({"speed": 1}, "unknown key 'speed'; its keys are machine"),
    ({"machine": None}, "None at machine"), ({"unit": "hours"}, "'hours' at unit"),
    ({"between": "fast"}, "'fast' at between"), ({"entries": [{"pair": 1.0}]}, "no key 'shape' at entries"),
    ({"inside": 0}, "0 at inside"), ({"entry.row": -1e-9}, "-1e-09 at entries.0..row"),
    ({"entry.pair": 0}, "0 at entries.0..pair"), ({"entry.task": True}, "True at entries.0..task"),
    ({"shape.groups": 5}, "32 query heads in 5 groups"),
    ({"shape.head_dim": 1.5}, "1.5 at entries.0..shape.head_dim"), ({"shape.head_dim": 0}, "0 at entries.0..shape"),
    ("", "not JSON"), ("[]", "expected an object"), (None, "cannot be read"),
])  # fmt: skip
def test_bad_files_are_refused_with_the_place(change: Any, said: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    PROFILE.save(path)
    content = json.loads(path.read_text())
    for key, value in change.items() if isinstance(change, dict) else ():
        where, _, name = key.rpartition(".")
        entry = content["entries"][0]
        {"": content, "entry": entry, "shape": entry["shape"]}[where][name] = value
    path.write_text(change if isinstance(change, str) else json.dumps(content))
    with pytest.raises(CADConfigError, match=said) as caught:
        choose_profile(str(path if change is not None else tmp_path / "no_profile.json"), CPU)
    assert "profile.json" in str(caught.value) and "deepspeed-cad profile" in str(caught.value)


@pytest.mark.parametrize("words, said", [
    (["--heads", "6", "--kv-heads", "4"], "expected a multiple"), (["--head-dim", "0"], "--head-dim is 0"),
    (["--kernel", "nonsense"], 'no kernel "nonsense"'),
    (["--output", "profile"], "expected a .json file"), (["--transport", "nonsense"], 'key "transport" is "nonsense"'),
])  # fmt: skip
def test_the_subcommand_refuses(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["profile", *words]) == 2 and said in capsys.readouterr().err


TINY = replace(measure.CPU, tokens=64, documents=(16, 64), shards=(8,), prefixes=(32, 64), repeats=1, rounds=1)


TRUE = (2e-9, 1e-7, 5e-8, 1e-5)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How far the times of each round are off, one factor for every second call; rounds that are left are exact."""
    off: list[float] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def measure_calls(kernel: Any, device: Any, shape: HeadShape, sizes: measure.Sizes, tell: Any) -> Any:
        assert (kernel.name, device) == ("torch_math", CPU)
        factor, found = off.pop(0) if off else 1.0, measured_as(TRUE, sizes=sizes, groups=shape.groups)
        return [replace(one, forward=one.forward * factor) if at % 2 else one for at, one in enumerate(found)]

    monkeypatch.setattr(profile_command, "measure_calls", measure_calls)
    return off


def test_times_that_do_not_fit_are_not_written(timed: list[float], tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "profile.json"
    PROFILE.save(path)
    timed += [11.0, 14.0, 17.0]
    assert cli.main(["profile", "--output", str(path)]) == 2
    shown = capsys.readouterr()
    assert "the times do not fit together" in shown.err and "Nothing was written" in shown.err
    assert shown.out.count("measuring once more") == 2 and not timed
    assert Profile.load(path) == PROFILE, "what was there stays"


def test_the_default_file_is_what_auto_finds(timed: Any, monkeypatch: Any, tmp_path: Path, capsys: Any) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path, other = (choice.user_path(machine, "torch_math") for machine in (choice.machine_name(CPU), "a GPU (80 GB)"))
    assert other == tmp_path / ".cache" / "deepspeed_cad" / "a-gpu-80-gb-torch_math.json"
    PROFILE.save(other)
    path.write_text("{")  # a damaged one is no reason to measure for nothing
    assert cli.main(["profile"]) == 0
    said = capsys.readouterr().out
    assert "torchrun --nproc-per-node GPUS -m deepspeed_cad.cli profile" in said and "replaced: " in said
    assert f"{choice.machine_name(CPU)}, torch_math: " in said and f"{path}: 1 head shape of " in said
    assert "2e-09 s a pair, 1e-07 a query row, 5e-08 a KV row, 1e-05 a task (rows as 50 pairs, KV rows as 25)" in said
    assert "name this file" not in said and set(other.parent.iterdir()) == {path, other}
    found = choose_profile("auto", CPU)
    assert found == Profile.load(path)
    (cost,) = found.entries
    assert (cost.pair, cost.row, cost.key, cost.task) == pytest.approx(TRUE, rel=1e-3)
    assert cost.shape == replace(USUAL_SHAPE, bytes_per_element=4)
    assert found.source.startswith("deepspeed-cad ") and "--quick" not in found.source and found.commit
    timed.append(1.05)
    monkeypatch.setattr(profile_command, "expected_kernel", lambda *_: "another")
    assert cli.main(["profile", "--quick", "--heads", "16", "--value-dim", "64"]) == 0
    cost, before = (found := Profile.load(path)).entries
    assert before.shape.query_heads == 32 and cost.shape == HeadShape(16, 8, 128, 64, 4), "one is added"
    assert 0 < cost.error < cost.worst < 0.05 and "--quick" in found.source and found.date
    shown = capsys.readouterr().out
    assert "takes what was measured of another; name this file" in shown
    assert "documents of 128                        8       0.219        0.512     0.731 " in shown
    checked = max(re.findall(r"^mixed lengths 1 \* .* -?([\d.]+)%$", shown, re.MULTILINE), key=float)
    worst = f"mean {cost.error:.1%}, worst {cost.worst:.1%}; * not fitted, only predicted: worst {checked}%"
    assert f"relative error: {worst}" in shown


@pytest.mark.parametrize("git, commit", [("echo ab12c", "ab12c"), ("exit 128", "unknown"), ("", "unknown")])
def test_a_profile_names_its_commit_where_it_is_known(monkeypatch: Any, tmp_path: Path, git: str, commit: str) -> None:
    (tmp_path / "git").write_text(f"#!/bin/sh\n{git}\n")
    (tmp_path / "git").chmod(0o755 if git else 0o644)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert profile_command._commit() == commit


def profile_of_two(rank: int, world: int, path: str, port: int, noisy: float) -> tuple[int, str]:
    """`torchrun --nproc-per-node 2 -m deepspeed_cad.cli profile`, in a worker: its exit code and what it said."""
    dist.barrier()  # a rank that leaves while another still connects cuts it off
    dist.destroy_process_group()
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        patch.setenv("MASTER_PORT", str(port))
        patch.setattr(profile_command, "sizes_for", lambda device, quick: TINY)
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setattr(profile_command, "NOISY", noisy)
        patch.setattr(progress, "QUIET", 0.001)
        with redirect_stdout(said), redirect_stderr(said):
            words = ["--output", path, "--kernel", "torch_math", "--heads", "4", "--kv-heads", "2", "--head-dim", "16"]
            code = cli.main(["profile", *words])
    return code, said.getvalue()


def test_under_a_launcher_rank_0_writes_and_links_are_measured(workers: WorkerPool, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    first, second = workers.run(profile_of_two, 2, str(path), free_port(), -1.0)
    assert first[0] == 2 and "do not fit together" in first[1] and not path.exists()
    assert second == (0, ""), "it neither waits nor fails"
    first, second = workers.run(profile_of_two, 2, str(path), free_port(), float("inf"))
    assert re.search(r"… attention call \d+ of \d+, \d+ s\n", first[1])
    assert first[0] == 0 and "… measuring links, " in first[1] and "GB/s from ranks of its node, by c10d" in first[1]
    assert second == (0, "")
    profile = Profile.load(path)
    assert profile.inside > 0 and profile.between is None
    assert (profile.kernel, [one.shape for one in profile.entries]) == ("torch_math", [HeadShape(4, 2, 16, 16, 4)])


def _find(wanted: Any, took: list[float], deterministic: list[bool] | None = None) -> Any:
    """What rank 0 finds where ranks take so many seconds."""
    answers = iter([[int(one) for one in deterministic or [False] * len(took)], [round(one * 1e9) for one in took]])
    return find_speeds(wanted, CPU, "torch_math", lambda mine: next(answers), False)


def test_speeds_are_relative_to_rank_0(monkeypatch: Any) -> None:
    timed: list[Any] = []
    monkeypatch.setattr(speed, "_time", lambda device, kernel, *how: timed.append(how) or 1.0)
    found = _find("measure", [0.2, 0.4, 0.1])
    assert found == pytest.approx([1.0, 0.5, 2.0]) and speed.in_words(found) == "speeds 1 0.5 2, "
    assert speed.in_words(np.ones(3)) == ""
    assert timed == [(TOKENS["cpu"], speed.REPEATS["cpu"], speed.BUDGET["cpu"])]


def test_where_speeds_are_not_known_all_count_as_equal(caplog: pytest.LogCaptureFixture) -> None:
    assert _find("measure", [1.0, 2.0], deterministic=[False, True]) is None
    assert '"speeds" is "measure" and does nothing' in caplog.text
    assert _find("measure", [1.0, 0.0, 1.0]) is None
    assert "did not run at the start on ranks [1]" in caplog.text
    told: list[int] = []
    assert find_speeds("measure", CPU, "flash_attn_4", lambda mine: told.append(mine) or [mine], False) is None
    assert told == [0, 0] and "attention was not timed: " in caplog.text
