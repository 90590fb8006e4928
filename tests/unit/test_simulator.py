"""The step simulator where the answer is known: seconds of counted work, who waits for whom, bytes, memory."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deepspeed_cad.cost import PAIRS, CostModel
from deepspeed_cad.errors import CADConfigError
from deepspeed_cad.forecast import Cluster, Machine, Setting, bytes_held, modes, modes_cad
from deepspeed_cad.forecast.attention import PARTED, WAIT, end_of_passes, find_travel, flows_of, of_documents
from deepspeed_cad.forecast.bytes_held import landing_bytes, loss_bytes, served_bytes, state_bytes
from deepspeed_cad.forecast.machine import SHIPPED
from deepspeed_cad.forecast.packing import NAMED
from deepspeed_cad.forecast.schedule import non_attention
from deepspeed_cad.forecast.setting import ModelShape, StateLayers
from deepspeed_cad.layout import Layout
from deepspeed_cad.planner import make_plan
from deepspeed_cad.planner.constants import WAVE_SECONDS
from deepspeed_cad.planner.plan import O_RECEIVED, O_SENT, QKV_RECEIVED, QKV_SENT, Flows, PlanInput
from deepspeed_cad.schedule.waves import Cut, schedule_waves

ROOT = Path(__file__).resolve().parents[2]
MODEL = ModelShape(layers=4, hidden=4096, intermediate=14336, vocabulary=32000)
COST = CostModel("test", "seconds", pair=1.1e-11, row=6.5e-9, key=2.4e-9)
UNEVEN = Layout.from_rank_lengths([[16384], [4096] * 4, [1024] * 16, [8192, 8192]])


def setting(ranks: int = 4, per_host: int = 4, cost: CostModel = COST, **changes: Any) -> Setting:
    return Setting(MODEL, Cluster(ranks, per_host, replace(Machine.load("h200"), in_training=1.0)), cost, **changes)


def test_layers_that_carry_state_are_as_measured() -> None:
    """Eight layers of a Qwen3.5 of 8B sizes, six of them delta nets, without attention."""
    run = json.loads((ROOT / "benchmarks/results/h200x2/hybrid_prolong_64k_2r_b064ed1.json").read_text())
    measured = run["modes"]["bound_qkv"]
    delta = StateLayers(6, 2, 4096 * (8192 + 2 * 4096 + 2 * 32), 8192, 4096, True)
    own = Setting(replace(MODEL, layers=8, state=delta), Cluster(2, 2, Machine.load("h200")), COST)
    found = modes.foresee_rows(own, "none", np.full((1, 2), 65536.0), np.zeros((2, 1, 2)), False)
    assert found.seconds.total == pytest.approx(np.mean(measured["step_seconds"]), rel=0.01)
    assert found.peak / 2**30 == pytest.approx(measured["peak_GiB"], rel=0.01)


@pytest.mark.parametrize(("ranks", "more"), [(2, WAIT), (3, 2 * WAIT), (9, PARTED)])
def test_layers_that_carry_state_wait_for_the_ranks_before(ranks: int, more: float) -> None:
    layout = Layout.from_stream([20, 100 * ranks - 40, 20], ranks, 100)
    delta = StateLayers(3, 1, 4096**2, 8192, 4096, True)
    own = replace(setting(ranks=ranks, checkpointing=False), model=replace(MODEL, state=delta))
    travel = find_travel(own, layout)
    run = ROOT / f"benchmarks/results/h100x2/hybrid_long_{'f0d67c3' if more == PARTED else 'f6e74fe'}.json"
    with_cad, without = (json.loads(run.read_text())["modes"][mode]["state_s"] for mode in ("cad", "dp:kept"))
    assert more == pytest.approx((with_cad / without - 1.0) * (2 if ranks == 3 else 1), abs=0.005)
    # Of the long document: the others lie on one rank. Heads part into what a kernel takes, and land out and back.
    rows, machine = 80 if ranks == 2 else 100, own.machine
    seconds = (169 + 338) * (8192 + 4096) / machine.memory_rate + 3 * 2 * 4096**2 / machine.matrix_flops
    assert travel is not None and travel.held == pytest.approx((more == PARTED) * (1 + 2 * 1.25) * 2 * 8192 * rows)
    assert (travel.late, travel.own) == pytest.approx((more * 3 * rows * seconds, 3 * rows * seconds))
    short = find_travel(replace(own, model=replace(MODEL, state=replace(delta, taken=0, given=0))), layout)
    assert short is not None and short.late == 0, "a short convolution hands no state on"


def test_ulysses_divides_heads_and_deals_groups_out_or_repeats_them() -> None:
    assert modes.degrees(replace(setting(8), model=replace(MODEL, heads=12, kv_heads=4)), "ulysses") == [2, 4]
    assert modes.degrees(replace(setting(8), model=replace(MODEL, heads=8, kv_heads=2)), "ulysses") == [2, 4, 8]


@pytest.mark.parametrize(
    "layout", [UNEVEN, Layout.from_stream([30000, 2000, 25000, 8536], 4, 16384)], ids=["whole", "spanning"]
)
def test_what_lands_and_is_kept_is_what_schedules_count(layout: Layout) -> None:
    """A server's own keys are copied beside those that arrive; its own queries stay in place."""
    own = setting()
    plan = make_plan(PlanInput(layout.tick(), own.shape, COST))
    (wave,) = schedule_waves(layout.tick(), plan.tasks, 0, own.shape.groups, None, Cut(1))
    found, shape = flows_of(plan, layout.tick()), own.shape
    assert wave.served_rows.any() and (found.served[0] == wave.served_rows[:, 0]).all()
    # Ranges of head groups that overlap in part may be counted twice.
    assert found.served[1] == pytest.approx(wave.served_rows[:, 1], rel=0.05)
    there = wave.served_rows @ np.array([shape.query_bytes + shape.output_bytes, shape.key_value_bytes])
    home = (wave.landed_rows @ np.array([shape.query_bytes, shape.key_value_bytes])).max()
    assert landing_bytes(own, found) == pytest.approx(1.25 * (there.max() + home), rel=0.05)
    # A row of a head group that was served: O of 4 heads × 128 in bf16, and their LSE in fp32, in each of 4 layers.
    row = 4 * (2 * 128 + 4)
    assert served_bytes(own, found) == pytest.approx(wave.served_rows[:, 0].max() * row * own.layers)
    assert served_bytes(setting(recompute_attention=True), found) == pytest.approx(wave.served_rows[:, 0].max() * row)
    assert served_bytes(setting(keep="host"), found) == 0
    assert served_bytes(setting(checkpointing=False), found) > 2 * served_bytes(own, found)
    there = wave.served_rows @ np.array([shape.query_bytes + (2 + 4 / 256) * shape.output_bytes, shape.key_value_bytes])
    assert landing_bytes(own, found, with_outputs=True) == pytest.approx(1.25 * (there.max() + home), rel=0.05)


def test_collectives_by_how_many_of_a_group_share_a_host() -> None:
    """Two hosts of four GPUs; with `stride` 4 or 8 each of a group is on a host of its own."""
    rates = {"copies": 2.0, "collective": 4.0, "all_to_all": 2.0, "between": 1.0, "latency": 100.0}
    own = Cluster(8, 4, figures := replace(Machine.load("h200"), **rates))
    gathers = {(1,): 0, (2,): 110, (4,): 115, (8,): 115, (2, 4): 140, (4, 2): 120, (2, 8): 140}
    assert {group: own.gather(80.0, *group) for group in gathers} == gathers
    # Packing takes a quarter of a second for each byte that leaves a rank, beside what the slower links take.
    sends = {(1,): 0, (2,): 100 + 10 + 10, (8,): 100 + 40 + 17.5, (2, 4): 100 + 40 + 10, (2, 8): 150}
    assert {group: own.all_to_all(80.0, *group) for group in sends} == sends
    own = replace(own, collective_between=2.0)
    assert (own.gather(80.0, 2, 4), own.all_to_all(80.0, 2, 4)) == (120, 100 + 20 + 10)
    assert [getattr(figures.with_links(8.0, 3.0), name) for name in rates] == pytest.approx([8, 16, 3.2, 3, 100])


def test_a_server_waits_for_all_that_its_slowest_home_sends() -> None:
    """Rank 0 sends 60 bytes to rank 1 and 40 to rank 2, at a byte a second; both send half of it back."""
    moved = np.zeros((4, 2, 3))
    moved[QKV_SENT, 0], moved[QKV_RECEIVED, 0], moved[O_SENT, 0] = (100, 0, 0), (0, 60, 40), (0, 30, 20)
    moved[O_RECEIVED, 0] = 50, 0, 0
    flows = Flows(moved, np.zeros(3), np.array([[0, 1, 1], [0, 2, 1]]), np.array([0.0, 2, 2]), np.zeros((2, 3)))
    own, waiting = np.array([[10.0, 20.0, 30.0], [400.0, 20.0, 30.0]]), np.array([[0.0, 5.0, 0.0]] * 2)

    def ends(start: float = 0.0, **more: int) -> Any:
        begin = np.array([[start, 0.0, 0.0]] * 2)
        return end_of_passes(flows, None, own, waiting, begin, np.array([1.0, 1.0]), **more)

    # Arrived at 100, when all of it has left; rank 1 needs 5 seconds more, rank 2 nothing. O takes 50 to come home.
    # With dO it takes 150; dQ, dK and dV take 100 back, which rank 0 does not wait for.
    assert ends().tolist() == [[105 + 50, 105, 30], [400, 155, 30]]
    # Where the home is late all that waits for it is.
    assert ends(7.0)[0].tolist() == [7 + 105 + 50, 7 + 105, 30]
    # Two waves: half arrives and is served, 52.5; the other half arrives 50 later. The last half of O is home after 25.
    begun = WAVE_SECONDS
    assert ends(waves=2)[0] == pytest.approx(np.array([52.5 + 25 + 50, 52.5 + 50, 30]) + begun)
    # More waves than head groups are empty.
    assert ends(waves=8, passes=3)[0] == pytest.approx(np.array([127.5, 102.5, 30]) + 3 * 7 * begun)


def test_as_many_servers_as_have_equally_much_to_do() -> None:
    layout = Layout.from_rank_lengths([[16384], [4096] * 4, [1024] * 16, [8192, 8192]] * 16)
    own = setting(64, 8)
    work = float(of_documents(layout, COST).sum()) * own.shape.groups * MODEL.layers
    other = 64 * float(non_attention(own, np.array([16384.0])).each.sum())
    assert modes_cad.even_servers(own, layout) == int(64 * work / (work + other)) > 1
    # One serves however little attention there is, and one trains however much.
    few, most = (replace(own, cost=CostModel("test", "seconds", pair=pair)) for pair in (1e-20, 1e10))
    assert [modes_cad.even_servers(one, layout) for one in (few, most)] == [1, 63]


def test_state_is_sharded_as_the_stage_says() -> None:
    weights = setting().stage_parameters
    assert weights == MODEL.layers * MODEL.layer_parameters + 2 * MODEL.hidden * MODEL.vocabulary
    for sharding, whole in (("zero1", 4), ("zero2", 2)):
        own = setting(sharding=sharding)  # type: ignore[arg-type]
        assert state_bytes(own, 4) == pytest.approx(weights * (whole + (16 - whole) / 4))
    assert state_bytes(setting(sharding="zero3"), 4) > weights * 4
    assert state_bytes(replace(setting(), held=(10.0, 8.0)), 4) == pytest.approx(weights * 12)
    # On the host: the fp32 weight and two moments. What is left are weights and gradients in bf16.
    assert state_bytes(setting(offload_optimizer=True), 4) == pytest.approx(weights * 4)


def test_logits_of_the_loss_of_transformers() -> None:
    """Bytes of a logit at most, counted in a step of a Llama: what a forward and backward allocate and free."""
    transformers = pytest.importorskip("transformers")
    peaks = []
    for vocabulary in (4000, 8000):
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        config = transformers.LlamaConfig(vocab_size=vocabulary, **sizes)
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
        ids = torch.arange(512).unsqueeze(0)
        with torch.profiler.profile(profile_memory=True) as seen:
            model(input_ids=ids, labels=ids).loss.backward()
        found = [one for one in seen.profiler.kineto_results.events() if one.name() == "[memory]"]  # type: ignore
        peaks.append(np.cumsum([one.nbytes() for one in sorted(found, key=lambda one: one.start_ns())]).max())
    # The gradient of the head, 16 bytes a word, is in it too.
    assert (peaks[1] - peaks[0]) / 4000 / 512 == pytest.approx(bytes_held.WHOLE_LOGITS, abs=0.1)
    own = setting(loss="whole")
    assert loss_bytes(own) == bytes_held.WHOLE_LOGITS * MODEL.vocabulary and loss_bytes(setting()) == 0.0


@pytest.mark.parametrize("changes, words", [
    ({"tensor": 3}, "4 ranks cannot be divided into 3 tensor-parallel"), ({"tensor": 0}, "tensor parallelism is 0"),
    ({"pipeline": 4, "ranks": 4, "sharding": "zero3"}, "zero1, as pipelines need"),
    ({"ranks": 24, "pipeline": 3}, "4 layers cannot be divided into 3"),
    ({"ranks": 24, "tensor": 24}, "heads cannot be divided by 24"), ({"cost": PAIRS}, "in pairs; expected a profile"),
    ({"ranks": 8, "tensor": 2, "sequence": 2}, "Ulysses together with tensor parallelism"),
    ({"ranks": 8, "pipeline": 2, "sequence": 2}, "Ulysses together with pipeline stages"),
    ({"ranks": 6, "sequence": 4}, "cannot be divided by 4 ranks of Ulysses"),
])  # fmt: skip
def test_what_cannot_be_divided_or_timed(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CADConfigError, match=words):
        setting(**changes)


@pytest.mark.parametrize("like, change, words", [
    ("", "{", "is not JSON"), ("", "{}", "expected the keys"), ("", "[]", "holds list"),
    ("h200", ("6.36e14", "0"), "matrix_flops 0; expected a number above 0"),
    ("a100", ("3.12e14", "0"), "has flops 0; expected a number above 0"),
    ("a100", ('"port"', '"ports"'), "holds published: flops, attention, bandwidth, memory, nvlink, ports; "),
])  # fmt: skip
def test_a_machine_that_is_none(tmp_path: Path, like: str, change: Any, words: str) -> None:
    path = tmp_path / "machine.json"
    path.write_text((SHIPPED / f"{like}.json").read_text().replace(*change) if like else change)
    with pytest.raises(CADConfigError, match=words):
        Machine.load(str(path))
    with pytest.raises(CADConfigError, match="cannot be read"):
        Machine.load(str(tmp_path / "none.json"))


@pytest.mark.parametrize("name", NAMED)
def test_a_distribution_has_the_quantiles_that_describe_it(name: str) -> None:
    drawn = np.array(NAMED[name].draw(100_000_000, seed=1))
    assert drawn.sum() >= 100_000_000 and drawn[:-1].sum() < 100_000_000
    for share, length in NAMED[name].quantiles[1:-1]:
        if share * len(drawn) > 100 and (1 - share) * len(drawn) > 100:
            assert np.quantile(drawn, share) == pytest.approx(length, rel=0.25)
    assert NAMED[name].draw(1000, seed=2) == NAMED[name].draw(1000, seed=2)
    assert max(NAMED[name].draw(10**6, longest=1000)) <= 1000 and len(NAMED[name].draw(1)) == 1
