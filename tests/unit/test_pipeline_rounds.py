"""Rounds of a pipeline, the ticks of unequal stages, and the order of micro-batches: known answers."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import numpy as np
import pytest
import torch
import torch.distributed as dist
from deepspeed.comm import comm
from deepspeed_cad.integrations.pipeline import from_checkpoint, refuse_dropout
from deepspeed_cad.integrations.pipeline_model import layer_work, refuse_uncut, to_hf, to_pipeline
from engines import import_deepspeed
from model_cases import SMALL, meta_model, tiny_model
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

from deepspeed_cad.ahead.announced import StepMessage, to_documents
from deepspeed_cad.ahead.documents import Announcement
from deepspeed_cad.ahead.gather import State, What
from deepspeed_cad.ahead.plan import Learned
from deepspeed_cad.attention.layer import LayerKind, kernel_need
from deepspeed_cad.attention.memory import rows_of_ticks
from deepspeed_cad.attention.setup import CallSetup, Modes
from deepspeed_cad.config import CADConfig
from deepspeed_cad.cost import CostModel
from deepspeed_cad.errors import CADDataError, CADError, CADUnsupportedError
from deepspeed_cad.feedback.memory_limit import MemoryLimit
from deepspeed_cad.kernels.interface import KernelNeed, MaskRule
from deepspeed_cad.layout import LocalSegments, segments_from_cumulative
from deepspeed_cad.pipeline import engine as engines
from deepspeed_cad.pipeline import plans as plans_room
from deepspeed_cad.pipeline.data import Reader, read_micro_batch
from deepspeed_cad.pipeline.phase import Phase, ProgramTick, merge_stages
from deepspeed_cad.pipeline.plans import Place, PlannedPhase, StepPlans, gather_documents, key_of, tick_cost
from deepspeed_cad.pipeline.rounds import Rounds, order_micro_batches
from deepspeed_cad.pipeline.step import PipelineBinding
from deepspeed_cad.planner import HeadShape
from deepspeed_cad.planner.plan import PlanInput
from deepspeed_cad.session import Session
from deepspeed_cad.shares import Shares

SHAPE = HeadShape(32, 8, 128, 128, 2)
FULL = LayerKind(SHAPE, MaskRule(1.0), torch.bfloat16)
WINDOW = LayerKind(SHAPE, MaskRule(1.0, 1024), torch.bfloat16)


def _when(rounds: Rounds, stage: int) -> tuple[dict[int, int], dict[int, int]]:
    every = range(rounds.count)
    forward = {rounds.forward(r, stage): r for r in every if rounds.forward(r, stage) is not None}
    return forward, {rounds.backward(r, stage): r for r in every if rounds.backward(r, stage) is not None}


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_every_micro_batch_runs_once_and_after_what_it_needs(stages: int, count: int) -> None:
    rounds = Rounds(stages, count)
    when = [_when(rounds, stage) for stage in range(stages)]
    for forward, backward in when:
        assert sorted(forward) == sorted(backward) == list(range(count))
        assert all(backward[m] >= forward[m] for m in forward)  # forward comes first in a round
    for (forward, backward), (later_forward, later_backward) in itertools.pairwise(when):
        assert all(later_forward[m] == forward[m] + 1 for m in forward)
        assert all(backward[m] == later_backward[m] + 1 for m in backward)
    for stage in range(stages):
        forward, backward = when[stage]
        buffers = engines.LockstepSchedule(rounds, stage).num_pipe_buffers()
        for r in range(rounds.count + 1):
            # Held at the end of a round: what is in flight, what just ran backward, and what arrives for the next.
            held = {m for m in forward if forward[m] <= r and backward[m] >= r}
            held |= {m for m in forward if forward[m] == r + 1}
            assert len({m % buffers for m in held}) == len(held)


@pytest.mark.parametrize("stages, count", [(1, 2), (2, 1), (2, 3), (3, 4), (4, 2)])
def test_neighbours_exchange_what_each_needs_and_never_wait_in_a_circle(stages: int, count: int) -> None:
    """A send blocks until its neighbour receives."""
    left = []
    for stage in range(stages):
        steps = [*itertools.chain(*engines.LockstepSchedule(Rounds(stages, count), stage).steps())]
        own, last = steps[:-3], [type(one).__name__ for one in steps[-3:]]
        assert last == ["ReduceTiedGrads", "ReduceGrads", "OptimizerStep"]
        ran = [one for one in own if isinstance(one, engines.ForwardTicks) and one.micro_batch is not None]
        assert [one.buffer_id for one in ran] == [m % Rounds(stages, count).buffers(stage) for m in range(count)]
        loads = [one.buffer_id for one in own if type(one).__name__ == "LoadMicroBatch"]
        assert loads == ([one.buffer_id for one in ran] if stage in (0, stages - 1) else [])
        moves = []
        for at, one in enumerate(own):
            verb, what = type(one).__name__[:4], type(one).__name__[4:]
            if verb in ("Send", "Recv"):
                kind = engines.ForwardTicks if what == "Activation" else engines.BackwardTicks
                ticks = own[at::-1] if verb == "Send" else own[at:]
                of = next(tick.micro_batch for tick in ticks if type(tick) is kind and tick.buffer_id == one.buffer_id)
                moves.append((verb, what, of, stage + (1 if (verb == "Send") == (what == "Activation") else -1)))
        left.append(moves)
    while any(left):
        met = [
            (stage, to) for stage, (verb, what, of, to) in ((s, own[0]) for s, own in enumerate(left) if own)
            if verb == "Send" and left[to] and left[to][0] == ("Recv", what, of, stage)
        ]  # fmt: skip
        assert met, left
        for stage in met[0]:
            del left[stage][0]


@pytest.mark.parametrize("layers, ticks", [
    ([[FULL] * 3, [FULL] * 3], 3), ([[FULL] * 3, [FULL] * 2, []], 3), ([[FULL, WINDOW] * 2, [WINDOW, FULL] * 2], 5),
    ([[WINDOW, WINDOW, FULL], [FULL, WINDOW, WINDOW]], 4), ([[FULL], [WINDOW, WINDOW, FULL]], 3), ([[], []], 0),
], ids=["alike", "unequal", "shifted", "turned", "later", "none"])  # fmt: skip
def test_ticks_hold_the_layers_of_every_stage_in_order(layers: list[list[LayerKind]], ticks: int) -> None:
    program = merge_stages(layers)
    assert len(program) == ticks
    for stage, own in enumerate(layers):
        assert [tick.kind for tick in program if stage in tick.stages] == own
    assert all(isinstance(tick, ProgramTick) and tick.stages for tick in program)


def test_light_micro_batches_come_first_and_last() -> None:
    work = [[5.0, 1.0, 4.0, 2.0, 3.0], [1.0, 1.0, 1.0, 1.0, 1.0]]
    orders = order_micro_batches(work)
    assert [work[0][m] for m in orders[0]] == [1.0, 3.0, 5.0, 4.0, 2.0]
    assert sorted(orders[1]) == list(range(5))


@pytest.fixture
def session() -> Iterator[Session]:
    opened = Session(CADConfig(cost="pairs"), torch.device("cpu"))
    yield opened
    opened.close()


def test_ranks_that_divide_heads_train_micro_batches_in_one_order(session: Session) -> None:
    """By the heads that fell to them the long document is lighter on the first rank, the others on the second."""
    session.plans.gatherer.shares = Shares(np.array([[0, 1]]), 0)
    given = [segments_from_cumulative(list(range(0, n + 1, step)), n) for n, step in ((2400, 2400), (5120, 1024))]
    orders, works = [], []
    for groups in ((1, 4), (4, 1)):
        kinds = [kind._replace(shape=HeadShape(n, n, 64, 64, 2)) for kind, n in zip((FULL, WINDOW), groups)]
        program = [ProgramTick(kind, (0,)) for kind in kinds]
        steps = StepPlans(session.plans, [Place(0, 0)], program, lambda: [given], Rounds(1, 2), 0, orders=True)
        assert steps.known
        orders.append(steps.order)
        documents = to_documents([StepMessage([Announcement(one) for one in given])], padded=False)
        works.append(session.plans.step_costs(documents, {key_of(kind): 1 for kind in kinds}, 0).work.tolist())
    assert orders[0] == orders[1] and works[0] == works[1]


def test_a_stage_without_a_micro_batch_has_no_rows(session: Session) -> None:
    given = [[segments_from_cumulative([0, tokens], tokens) for tokens in (9, 5)]]
    places, program = [Place(0, 0), Place(1, 0)], (ProgramTick(FULL, (0, 1)),)
    steps = StepPlans(session.plans, places, program, lambda: None, Rounds(2, 2), 0, orders=True)
    assert steps.known is False, "a loader ended"
    with pytest.raises(CADError, match="a step of the pipeline is planned that a loader did not reach"):
        steps.take(0, False)
    rows = [steps._layout(given, round_, False, (0, 1)).tokens.tolist() for round_ in range(3)]
    assert rows == [[9, 0], [5, 9], [0, 5]]
    assert steps._layout(given, 1, False, (1,)).tokens.tolist() == [0, 9]


@pytest.mark.parametrize("links", [None, (2e9, 1e9)])
def test_what_plans_of_ticks_depend_on(session: Session, monkeypatch: pytest.MonkeyPatch, links: Any) -> None:
    plans = session.plans
    plans.config = replace(plans.config, tolerance=0.07, granularity=32, waves=3)
    plans.crew = replace(plans.crew, hosts=np.array([4, 5]), transport=MagicMock())
    monkeypatch.setattr(plans_room, "make_plan", vars)
    cost = (plans.cost if links is None else plans.cost.with_links(*links)).cost_for(SHAPE)
    for backward in (False, True):
        found = StepPlans._plan_tick(MagicMock(_links=links, plans=plans), backward, "a tick", key_of(WINDOW))  # type: ignore[arg-type]
        given: Any = "a tick", SHAPE, tick_cost(cost, backward), 1024, 0.07, 32
        assert found == vars(PlanInput(*given, hosts=plans.crew.hosts, waves=(3,)))


LONG, SHORT = (segments_from_cumulative([0, tokens], tokens) for tokens in (9, 5))


def test_what_was_planned_of_a_step_is_compared(session: Session) -> None:
    """Micro-batches in order, the light one first, unless something falls on tokens at random; each forward and
    backward. Layers of each set of stages are planned for these alone."""
    plans, said = session.plans, MagicMock(side_effect=CADError("other plans"))
    plans.gatherer.agree, plans.warn, plans.aside = said, said.warn, "aside"  # type: ignore[assignment]
    plans.learned = Learned(memory=MemoryLimit(6.0, torch.device("cpu"), [0, 1]))
    program = ProgramTick(FULL, (0,)), ProgramTick(WINDOW, (0, 1)), ProgramTick(FULL, (0,))
    for number, (documents, orders, given, order) in enumerate((
        ("keep", True, [LONG, SHORT], [1, 0]), ("keep", True, [SHORT, LONG], [0, 1]),
        ("keep", False, [LONG, SHORT], [0, 1]), ("in_order", True, [LONG, SHORT], [0, 1]),
    )):  # fmt: skip
        plans.config = replace(plans.config, documents=documents)
        steps = StepPlans(plans, [Place(0, 0)], program, lambda given=given: [given], Rounds(1, 2), 7, orders)
        assert steps.known and steps.order == [order]
        phases = [steps.take(*which) for which in itertools.product((0, 1), (False, True))]
        found = [(phase.parts[0,].turn, phase.parts[0,].layout.tokens.tolist()) for phase in phases]
        assert found == [(4 * number + at, [given[order[at // 2]].tokens]) for at in range(4)]
        assert list(phases[0].counted.planned) == [(key_of(FULL), 0), (key_of(WINDOW), 1)]
        with pytest.raises(CADError, match="other plans"):
            steps.finish()
        part = phases[0].parts[0,]
        assert part.memory is not None and part.memory.limit == 6 << 30 and part.memory.rows is rows_of_ticks
        assert (part.rank, part.aside, part.counts) == (0, "aside", plans.counts)
    values, subjects = zip(*(one.args for one in said.call_args_list))
    assert {str(one) for one in subjects} == {"plan number 7"} and all(0 < value < 1 << 62 for value in values)
    assert said.warn.call_count == 4 and values[0] == values[1] != values[2] == values[3], "by the order, too"


def test_a_layer_runs_in_its_turn() -> None:
    """Of three layers two have run; and one more than there are."""
    ticks: Any = [ProgramTick(FULL, (0,))] * 3, [0, 1, 2], lambda *given: given, False
    phase, new = Phase(*ticks), Phase(*ticks)
    assert [phase.enter(layer, "it") for layer in (0, 1)] == [(0, "it"), (1, "it")]
    for late, layer in ((phase, 0), (phase, 1), (phase, 3), (new, 3)):
        with pytest.raises(CADError, match=rf"it runs forward as attention layer {layer + 1} of 3 of this stage, when"):
            late.enter(layer, "it")
    with pytest.raises(CADError, match="this stage ran 2 of its 3 attention layers"):
        phase.finish()


@pytest.mark.parametrize("overlap, beside", [("none", True), ("auto", False)])
def test_what_a_call_in_a_tick_is_made_of(overlap: str, beside: bool) -> None:
    kind = LayerKind(HeadShape(32, 8, 192, 128, 2), MaskRule(1.0, 1024), torch.bfloat16)
    binding, part = MagicMock(program=(None, ProgramTick(kind, (0, 1)))), MagicMock(turn=7)
    session, schedule = binding.session, part.schedule.return_value
    session.config.overlap, session.device, schedule.beside = overlap, torch.device("cpu"), beside
    assert vars(PipelineBinding._setup(binding, PlannedPhase({(0, 1): part}, part), 1, "layer 4")) == vars(CallSetup(
        schedule, session.kernel.return_value, part.transport, kind.rule,
        Modes(overlap != "none", parking=session.parking, results_travel=True), part.counts, label="layer 4",
        aside=part.aside if beside else None, turn=7, layer=1,
    ))  # fmt: skip
    need = KernelNeed(session.device, torch.bfloat16, 192, 128, 4, window=True)
    assert (part.schedule.mock_calls, session.kernel.mock_calls) == ([call(key_of(kind), 0)], [call(need)])
    assert kernel_need(kind, need.device, deterministic=True) == replace(need, deterministic=True)


def test_keys_cost_backward() -> None:
    """In shares of both directions' products: 2 ÷ 7 forward without keys, 5 ÷ 7 backward with them make the whole."""
    cost = CostModel(pair=2.0, row=3.0, key=5.0, task=7.0)
    forward, backward = (tick_cost(cost, direction) for direction in (False, True))
    assert forward.key == 0
    for begin, end in ((0, 10), (100, 357)):
        assert (2 / 7 * forward.of(begin, end) + 5 / 7 * backward.of(begin, end)) == pytest.approx(cost.of(begin, end))


MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}


@pytest.mark.parametrize("kind, changes, words", [
    ("granite", {"embedding_multiplier": 12.0}, "it does more"),
    ("gemma2", {"final_logit_softcapping": 1.0}, "it does more"), ("cohere", {"logit_scale": 0.25}, "it does more"),
    ("starcoder2", {"embedding_dropout": 0.1, "residual_dropout": 0.0}, "it does more"),
    ("qwen3_moe", {**MOE, "output_router_logits": True}, "output_router_logits"),
    *((kind, {}, "") for kind in ("llama", "qwen3", "mistral", "qwen2", "phi3", "olmo2")),
])  # fmt: skip
def test_models_that_do_more_are_refused(kind: str, changes: dict[str, Any], words: str) -> None:
    model = meta_model(kind, **changes)
    for refuse in (refuse_uncut, partial(to_pipeline, stages=1))[: 1 + bool(words)]:
        with pytest.raises(CADUnsupportedError, match=words) if words else nullcontext():
            refuse(model)


@pytest.mark.parametrize("kind, changes", [("qwen3", {"tie_word_embeddings": True}), ("gpt_oss", {})])
def test_there_and_back(kind: str, changes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two stages, one after the other: what they read of a checkpoint, what they compute, and what they write."""
    model, tied = tiny_model(kind, torch.float32, **changes), bool(changes)
    model.generation_config.update(do_sample=True, top_k=7)
    model.save_pretrained(tmp_path / "before")
    monkeypatch.setenv("LOCAL_RANK", "0")
    ids = torch.arange(5)[None] + 3
    given: Any = ids, torch.tensor([[0, 1, 0, 1, 2]])
    expected, stages = model(ids, position_ids=given[1], use_cache=False).logits, {}
    for stage, back in ((0, False), (1, False), (1, True), (0, True)):
        monkeypatch.setattr(comm, "cdb", None)
        dist.init_process_group("fake", store=FakeStore(), rank=stage, world_size=2)
        import_deepspeed().init_distributed()
        if back:
            grid = SimpleNamespace(get_data_parallel_id=lambda: 0)
            to_hf(SimpleNamespace(module=stages[stage], grid=grid, stage_id=stage, num_stages=2), tmp_path / "after")
        else:
            stages[stage] = to_pipeline(str(tmp_path / "before"), stages=2)
            given = stages[stage](given)
        dist.destroy_process_group()
    torch.testing.assert_close(given, expected)
    named, names = [set(stages[stage].named_weights()) for stage in stages], dict(model.named_parameters())
    assert not named[0] & named[1] and {int(name.split(".")[2]) for name in named[0] if ".layers." in name} == {0}
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "after")
    torch.testing.assert_close(after.state_dict(), model.state_dict(), atol=0.0, rtol=0.0)
    assert after.generation_config.top_k == 7 and not list((tmp_path / "after").glob(".*"))
    part = from_checkpoint(str(tmp_path / "before"), type(model), {})({1}, tied, False).named_parameters()
    assert dict(part).keys() == {n for n in names if ".1." in n or ".norm." in n or tied and "embed" in n}


def test_what_was_read_ahead_outlives_evaluations() -> None:
    reader, loader = Reader(), iter([(torch.arange(4)[None], None)] * 3)
    ahead, kept = reader.peek(loader, 2, False), [iter([(torch.arange(4)[None], None)]) for _ in range(20)]
    seen = [reader.peek(other, 1, False) for other in kept]
    assert reader.peek(loader, 2, False) == ahead and [reader.peek(other, 1, False) for other in kept] == seen
    for other in kept:
        reader.drop(other, 1)
    reader.drop(loader, 2)
    assert len(reader.peek(loader, 1, False)) == 1 and reader.peek(loader, 2, False) is None


def test_an_iterator_that_a_script_lets_go_is_let_go() -> None:
    pair = (torch.arange(4)[None], None)
    reader, loader = Reader(), iter(DataLoader([1, 2, 3], num_workers=1, collate_fn=lambda _: pair))
    assert reader.peek(loader, 2, False)
    (worker,) = loader._workers
    del loader
    worker.join(20)
    assert worker.exitcode is not None
    assert reader.peek(iter([pair]), 1, False) and len(reader._ahead) == 1


def test_what_was_read_ahead_is_read_again_where_set_batch_fn_changes_it() -> None:
    reader, loader = Reader(), iter([(torch.arange(4)[None], None)] * 2)
    for more in (0, 1):
        (first, _) = reader.peek(loader, 2, False, change := lambda pair, more=more: (pair[0] + more, None))
        assert first.pair[0].tolist() == [[more, 1 + more, 2 + more, 3 + more]]
    assert reader.peek(loader, 2, False, change)[0] is first


def test_a_micro_batch_that_cannot_be_read_is_an_error_when_it_is_due() -> None:
    def gives() -> Iterator[Any]:
        yield torch.arange(4)[None], None
        raise OSError("a file is damaged")

    reader, loader = Reader(), gives()
    assert reader.peek(loader, 2, False, early=True) is None
    (first,) = reader.peek(loader, 1, False)
    reader.drop(loader, 1)
    for _ in range(2):
        assert reader.peek(loader, 1, False, early=True) is None
        with pytest.raises(OSError, match="damaged"):
            reader.peek(loader, 1, False)
    assert first.documents.local.tokens == 4


@pytest.mark.parametrize("mine", ["ab", "ac", "abc", None])
@pytest.mark.parametrize("rounds, others, known", [(4, 1, True), (5, 1, True), (4, 0, True), (4, 1, False)])
def test_a_step_that_was_planned_ahead_is_the_next_one(mine: Any, rounds: Any, others: int, known: bool) -> None:
    """All ranks have what they had then: an evaluation may have taken it, and a loader may have ended."""
    binding, plans = MagicMock(_steps=itertools.count(3)), MagicMock(rounds=4, known=known)
    binding.session.worker.run = lambda job: job()
    binding.session.gatherer.gather = lambda subject, value: [SimpleNamespace(value=one) for one in (value, others)]
    is_next = PipelineBinding._is_next(binding, list("ab"), plans, mine and list(mine), rounds)
    assert is_next is ((mine, rounds, others, known) == ("ab", 4, 1, True))


@pytest.mark.parametrize("state", ["state_dict", None])
def test_a_loader_that_has_a_state_is_not_read_ahead(state: str | None) -> None:
    binding = MagicMock(program=(), engine=SimpleNamespace(training_dataloader=None))
    binding.engine.data_iterator = MagicMock(spec=[state] if state else [])
    PipelineBinding.run_ticks(binding, 0, None, False, lambda: None)
    assert (binding._plan_step.call_args.args[0] is None) == (state is not None)
    PipelineBinding.run_ticks(binding, 0, None, True, lambda: None)
    assert binding._plan_step.call_count == 1, "once, where a stage's backward is in the first round, too"


def test_work_of_layers_counts_visited_experts_only() -> None:
    work = layer_work(meta_model("qwen3_moe", **MOE, tie_word_embeddings=False))
    dense = layer_work(meta_model("qwen3", tie_word_embeddings=False))
    assert len(work) == SMALL["num_hidden_layers"] + 3
    assert work[0] == work[-2] == 0 and work[-1] == SMALL["vocab_size"] * SMALL["hidden_size"]
    # Two experts as wide as the dense layer's, and the router.
    assert work[1] - dense[1] == 3 * 48 * 32 + SMALL["num_experts"] * 32


@pytest.mark.parametrize("make", [engines._make_train_batch, engines._make_eval_batch], ids=["step", "evaluation"])
@pytest.mark.parametrize(("error", "tells"), [(OSError("the disk is gone"), True), (StopIteration("the end"), False)])
def test_a_loader_that_raises(make: Callable[..., Any], error: BaseException, tells: bool) -> None:
    """They wait for this rank's documents, unless all of them know that loaders ended."""
    engine, binding = MagicMock(data_iterator=None), MagicMock()
    binding.engine, binding.begin_step.side_effect, binding.begin_evaluation.side_effect = engine, error, error
    with pytest.raises(type(error)):
        make(binding, lambda *_, **__: None)(iter([]))
    assert binding.stop.call_args_list == ([call(error)] if tells else [])
    later = MagicMock(**{"end_step.side_effect": CADError("ranks made different plans")})
    with pytest.raises(CADError, match="different plans"):
        engines._make_train_batch(later, lambda: 1.0)()
    assert later.stop.call_args_list == [call(later.end_step.side_effect)]


def refuse_module(parts: list[int], axes: dict[str, int], stage: int) -> None:
    topology = SimpleNamespace(get_axis_names=lambda: list(axes), get_dim=axes.__getitem__)
    module, json = SimpleNamespace(topology=lambda: topology, parts=parts), {"zero_optimization": {"stage": stage}}
    engines.initialize_pipeline(lambda model, config: (), CADConfig(), (), {"model": module, "config": json})


IDS = torch.arange(4)[None]


@pytest.mark.parametrize("refuse, given, words", [
    (engines._refuse_block, [CADConfig(recompute_attention=True)], '"recompute_attention" is True, which a pipeline'),
    (engines._refuse_block, [CADConfig(speeds="measure")], "\"speeds\" is 'measure', which a pipeline cannot have"),
    (engines._refuse_block, [CADConfig(servers={"reserved": 1})], "a pipeline cannot have: idle stages serve instead"),
    (engines._refuse_block, [CADConfig(verify=1)], "\"verify\" is 1, which a pipeline .*eval_batch"),
    (engines._refuse_old, [object], r"^DeepSpeed 0.* gives no way .*deepspeed>=0\.19\.8"),
    (refuse_module, [[0, 2, 4], {"pipe": 2, "data": 2}, 2], "stage 2 with a PipelineModule"),
    (refuse_module, [[0, 2, 2, 4], {"pipe": 3}, 1], "stage 1 of 3 holds no layer: a pipeline of 4 layers needs"),
    (refuse_module, [[0, 2, 4], {"pipe": 2, "expert": 2}, 1], 'has the axis "expert" of 2 ranks'),
    *((partial(to_pipeline, stages=n), [meta_model("llama")], f"^{n} .* 2 decoder.* 1 to 2 stages") for n in (0, 3)),
    (to_hf, [SimpleNamespace(module=1), "nowhere"], "takes an engine with a module of to_pipeline; this is int"),
    (refuse_dropout, [AutoConfig.for_model("llama", attention_dropout=0.1)], "attention_dropout is 0.1"),
    (read_micro_batch, [((IDS, IDS), torch.full_like(IDS, -100)), True], "all labels of a micro-batch are -100"),
    (read_micro_batch, [((IDS, IDS), ("a", None)), True], "a micro-batch has no labels"),
    (read_micro_batch, [{"labels": IDS}, True], "has no input_ids, only labels"),
    (read_micro_batch, ["ab", False], "the loader gave a str; a pipeline needs pairs"),
    (read_micro_batch, [(IDS,), False], "the loader gave a tuple; a pipeline needs pairs"),
    (read_micro_batch, [((IDS, "positions"), None), False], "inputs of the pipeline are a tuple; expected token ids"),
    (read_micro_batch, [((), None), False], "inputs of the pipeline are a tuple; expected token ids"),
    (read_micro_batch, [((IDS, IDS[0]), None), False], r"has shape \(4,\) and type torch.int64; .* of shape \(1, 4\)"),
    (read_micro_batch, [((IDS, IDS.double()), None), False], r"has shape \(1, 4\) and type torch.float64"),
    (read_micro_batch, [((IDS, IDS > 0), None), False], "and type torch.bool; expected"),
    (read_micro_batch, [((IDS, IDS + 3), None), False], "starts at position 3: in a pipeline every"),
    (read_micro_batch, [{"input_ids": IDS, "attention_mask": IDS.clamp(max=1)}, False], "1 tokens .* are padding"),
])  # fmt: skip
def test_what_a_pipeline_cannot_have(refuse: Callable[..., Any], given: list[Any], words: str) -> None:
    with pytest.raises(CADError, match=words):
        refuse(*given)


@pytest.mark.parametrize("tokens, ids, count, replicas, words", [
    (8, 1, 1, [[0], [1]], "9 tokens in 1 documents on the first stage and 8 tokens in 1"),
    (9, 2, 1, [[0], [1]], "on the first stage and as many, but other ones,"),
    (9, 1, 2, [[0], [1]], r"replicas have \[1\] micro-batches in this step; expected 2 of each"),
    (0, 1, 1, [[0, 1]], r"ranks 0, 1 divide the heads of a stage, but load \[1, 0\] micro-batches"),
    (8, 1, 1, [[0, 1]], "rank 0 has 9 tokens and rank 1 8 tokens"), (9, 1, 1, [[0], [1]], ""),
])  # fmt: skip
def test_first_and_last_stage_load_the_same(
    tokens: int, ids: int, count: int, replicas: list[list[int]], words: str
) -> None:
    mine = [Announcement(LocalSegments(*np.array([[0], [9], [0]]), 9), ids=1)]
    others = [Announcement(LocalSegments(*np.array([[0], [tokens], [0]]), tokens), ids=ids)] * (tokens > 0)
    said = [SimpleNamespace(state=State.GOING, payload=StepMessage(one).to_array()) for one in (mine, others)]
    gatherer = MagicMock(shares=SimpleNamespace(replicas=np.array(replicas), members=[0, 1]))
    gatherer.gather.return_value = said
    with pytest.raises(CADDataError, match=words) if words else nullcontext():
        ((one,),) = gather_documents(gatherer, [Place(0, 0), Place(1, 0)], mine, 7, count) or [[None]]
        assert one is not None and one.same_as(mine[0].local)
    (subject, message), given = gatherer.gather.call_args
    assert (subject.what, subject.index, given) == (What.STEP, 7, {"state": State.GOING})
    assert message.tolist() == said[0].payload.tolist()
    said[1].state = State.ENDED
    assert gather_documents(gatherer, [Place(0, 0), Place(1, 0)], None, 7, count) is None
    assert gatherer.gather.call_args.kwargs == {"state": State.ENDED}
