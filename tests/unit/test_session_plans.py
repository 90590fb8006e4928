"""What the session asks the planner for, and what ranks compare: each field of the question arrives."""

import dataclasses
from collections.abc import Iterator
from contextlib import closing, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from deepspeed_cad.ahead import gather
from deepspeed_cad.ahead.announced import Announcement, StepMessage
from deepspeed_cad.ahead.crew import Crew, Servers
from deepspeed_cad.ahead.feed import EpochOverError, Feed
from deepspeed_cad.ahead.gather import Subject, What, digest
from deepspeed_cad.ahead.loader import LookAheadLoader
from deepspeed_cad.ahead.plan import Gathered, Learned
from deepspeed_cad.ahead.step import NOT_STATED, ORDERED, StepAhead
from deepspeed_cad.attention.memory import rows_of_layers
from deepspeed_cad.attention.microbatch import PlanKey
from deepspeed_cad.config import CADConfig
from deepspeed_cad.cost import CostModel
from deepspeed_cad.errors import CADConfigError, CADDataError, CADPeerError
from deepspeed_cad.exchange.links import Links
from deepspeed_cad.exchange.probe import DETERMINISTIC
from deepspeed_cad.feedback.memory_limit import ALL, MemoryLimit
from deepspeed_cad.layout import Layout, segments_from_positions
from deepspeed_cad.planner import HeadShape, PlanInput, make_plan
from deepspeed_cad.planner.constants import FORWARD_SHARE
from deepspeed_cad.planner.plan import Plan
from deepspeed_cad.session import Session, current_session, open_session
from deepspeed_cad.shares import Replica

SHAPE = HeadShape(8, 2, 64, 64, 2)
BLOCK = {"tolerance": 0.02, "granularity": 64}
LAYOUT = Layout.from_rank_lengths([[30000], [20000, 64], [1024] * 4, []])
TICK = LAYOUT.tick()


def plan_of(session: Session, layout: Layout, window: int | None, crew: Crew, seconds: Any = None) -> Plan:
    gathered = Gathered(0, layout, None, seconds, None)
    return session.plans.plan_tick(gathered, crew, layout.tick(), PlanKey(window, SHAPE))


def test_who_never_reads_ahead_is_told_once() -> None:
    said: list[str] = []
    feed: Any = SimpleNamespace(number=0, _forwards=0, _unannounced=0, config=CADConfig(), replicas=2)
    feed.plans, feed._plan = SimpleNamespace(say_once=said.append), lambda job: len(said)
    assert [Feed._gather_now(feed, None) for _ in range(4)] == [0, 0, 1, 1]  # type: ignore[arg-type]


def test_what_ranks_say_is_named() -> None:
    assert str(Subject(What.CHOICE, 1)) == "choice of transport" and len(What) == len(What.__members__)
    assert str(Subject(What.LENGTHS, index=3, epoch=1)) == "document lengths of micro-batch 3 in epoch 1"
    assert str(Subject(What.STEP, 2, 1, 3)) == "documents of the step of step 3 in epoch 1 of model 2"
    assert str(Subject(What.FORWARD, -1, index=3)) == "document lengths at the forward number 3 of reference model 0"


@pytest.fixture
def session() -> Iterator[Session]:
    with closing(Session(CADConfig.from_dict(BLOCK), torch.device("cpu"))) as opened:
        yield opened


def _beside(session: Session, *names: str) -> mock.Mock:
    rooms = mock.Mock(**{"servers.at_start": 1, "servers.bytes_sent": 5, "servers.busy.return_value": (1.0, 2.0)})
    for name in names:
        setattr(session, name, getattr(rooms, name))
    return rooms


def test_whoever_closes_on_the_way_of_an_exception_says_so(session: Session) -> None:
    rooms, reason = _beside(session, "liveness", "whereabouts", "tracer", "servers", "groups"), "ValueError: no data"
    session.plans.crew = Crew(2, mock.Mock(**{"close.side_effect": [OSError("a link is gone"), None]}))
    session.references = {0: rooms.reference}  # type: ignore[assignment]
    with pytest.raises(OSError, match="a link is gone"):
        try:
            raise ValueError("no data")
        finally:
            session.close()
    assert session.ended == reason and session.worker._closed and rooms.reference.remove.called
    for told in (rooms.liveness.report, rooms.whereabouts.leave, rooms.servers.leave):
        told.assert_called_once_with(reason)
    for ended in (rooms.liveness, rooms.servers, rooms.whereabouts, rooms.groups):
        ended.close.assert_called_once_with()
    session.farewell("")
    assert session.ended == reason and rooms.tracer.finish.call_count == 2, "a timeline is written where all is well"
    session.farewell("exit code 1")
    assert rooms.tracer.finish.call_count == 2 and rooms.servers.leave.call_count == 1


@pytest.mark.parametrize("links, start, rule", [
    (Links(1e9, 2e9), Links(1e9, 2e9), Links(3e9, None, "of the profile H200")),
    (Links(9e9, 1e9, "given"), Links(9e9, 1e9, "given"), Links(9e9, 1e9, "given")),
    (Links(None, None, DETERMINISTIC), Links(3e9, None, f"of the profile H200; {DETERMINISTIC}"),
     Links(3e9, None, "of the profile H200")),
])  # fmt: skip
def test_what_a_session_begins_with(session: Session, links: Links, start: Links, rule: Links) -> None:
    rooms = _beside(session, "servers")
    crew = rooms.servers.crew.return_value = Crew(1, mock.Mock(bytes_sent=7, landing_bytes=0), np.array([0, 1]))
    session.links, session.cost = links, SimpleNamespace(inside=3e9, between=None, name="H200")  # type: ignore[assignment]
    session.config = dataclasses.replace(session.config, memory=2.0)
    learned = session.learned = session._learned(dataclasses.replace(crew, transport=mock.Mock()))
    assert learned.links is not None and learned.memory is not None and learned.layer_times is not None
    assert (learned.links.start, learned.links._rule, session.links) == (start, rule, start)
    assert learned.links._names == [f"rank 0 on {session.groups.hosts[0]}"] and learned.layer_times._trainers == 1
    assert (learned.memory.given, learned.memory.share, learned.memory._has_trained()) == (2 << 30, ALL, False)
    session._change_servers(opened := mock.Mock())
    assert (
        session.groups.exchange is opened.group and session.plans.crew is crew and session.transport is crew.transport
    )
    rooms.servers.crew.assert_called_once_with(opened, None)
    measured = crew.transport.transfers if links.source == "measured" else None
    assert learned.links._transfers is measured
    assert measured is None or measured._least[1] == 2 * measured._least[0] and measured._near.tolist() == [True, False]
    learned.memory.most_needed = 9.5
    found, facts = session.statistics, session.facts()
    assert (facts.landing_bytes, facts.landing_limit, facts.links) == (0, learned.memory.now.size, str(start))
    assert (found.bytes_sent, found.landing_bytes, found.served_s, found.servers_s) == (12, 9, 1.0, 2.0)
    rooms.servers.crew.return_value = Crew(1)
    session._change_servers(None)
    assert session.groups.exchange is None and session.transport is None


def test_models_of_a_process_share_one_session() -> None:
    cpu = torch.device("cpu")
    first = open_session(CADConfig(), cpu)
    assert first is open_session(CADConfig(), cpu) is open_session(CADConfig(), cpu, Replica((0,))) is current_session()
    for config, replica, words in (
        (CADConfig(tolerance=0.2), None, "already on in this process with another configuration; all models"),
        (CADConfig(), Replica((0, 1)), r"where 1 ranks divide heads among them; .* would be ranks \[0, 1\]\. All"),
    ):
        with pytest.raises(CADConfigError, match=words):
            open_session(config, cpu, replica)
    with pytest.raises(CADConfigError, match="CAD is not on for Linear: call deepspeed_cad.apply"):
        first.look_ahead([], torch.nn.Linear(1, 1))
    numbers = [first.open_feed("a model", alternates=one).number for one in (True, False, True)]
    assert numbers == [0, 1, 2] and first.plans.in_one_part == {1}


def test_a_loader_follows_the_engine_that_ends_steps(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless `accumulation` is another one, or the script ends steps itself."""
    monkeypatch.setattr("deepspeed_cad.session.LookAheadLoader", made := mock.Mock())
    monkeypatch.setattr("deepspeed_cad.session.settle", settled := mock.Mock())
    model: Any = torch.nn.Linear(1, 1)
    binding = session.bindings[model] = SimpleNamespace(feed="its feed")
    session.look_ahead("batches", model, accumulation=4, global_loss=True)
    model.micro_steps, model.global_steps, model.gradient_accumulation_steps = 5, 2, (steps := lambda: 3)
    for accumulation in None, 3, 2:
        session.look_ahead("batches", model, accumulation=accumulation)
    model.managed_gradient_accumulation = lambda: False
    session.look_ahead("batches", model)
    found = [(call.args[2], call.args[3] and call.args[3]()) for call in made.call_args_list]
    assert found == [(4, None), (steps, (5, 2)), (3, (5, 2)), (2, None), (1, None)]
    for call, why in zip(made.call_args_list, ("", NOT_STATED)):
        assert (*call.args[:2], call.args[4]) == ("batches", "its feed", binding)
        call.kwargs["settle"]()
        settled.assert_called_with("its feed", model, why)


def test_no_collective_follows_an_error_between_two(session: Session) -> None:
    """The others go on to the next one and hear the first error, which this rank raises again."""
    feed = session.open_feed("a model")
    for words in ("the disk is gone", "and so is its copy"):
        with pytest.raises(OSError, match=words), feed.between_collectives():
            raise OSError(words)
        with pytest.raises(CADPeerError, match="rank 0: the documents of a step: OSError: the disk is gone"):
            feed.gatherer.gather(Subject(What.LENGTHS))


@pytest.mark.parametrize("window", [None, 512])
def test_a_plan_is_that_of_the_layer_and_the_configuration(session: Session, window: int | None) -> None:
    """Planned without its window, the layer's long documents would seem to cost twenty times as much."""
    found = plan_of(session, LAYOUT, window, session.plans.crew)
    asked = PlanInput(TICK, SHAPE, session.cost.cost_for(SHAPE), window, tolerance=0.02, granularity=64)
    assert found.fingerprint() == make_plan(asked).fingerprint()
    for other in ({"window": 512 if window is None else None}, {"tolerance": 0.3}, {"granularity": 1024}):
        assert make_plan(dataclasses.replace(asked, **other)).fingerprint() != found.fingerprint()


@pytest.mark.parametrize("config, hosts, most, expected", [
    ({}, [0, 0, 1, 1], 8, (1, 2, 4, 8)), ({}, [0, 0, 1, 1], 2, (1, 2)), ({}, [0, 0, 0, 0], 8, (1,)),
    ({"waves": 3}, [0, 0, 0, 0], 1, (3,)), ({"overlap": "none"}, [0, 0, 1, 1], 8, (1,)),
])  # fmt: skip
def test_waves_where_links_between_hosts_carry_them(config, hosts, most, expected, session, monkeypatch) -> None:
    asked: list[PlanInput] = []
    monkeypatch.setattr("deepspeed_cad.ahead.plan.make_plan", lambda one: asked.append(one) or make_plan(one))
    plans, transport = session.plans, SimpleNamespace(most_waves=most, two_ways=True, close=lambda: None)
    crew = plans.crew = Crew(4, transport, np.array(hosts))  # type: ignore[arg-type]
    plans.config = dataclasses.replace(session.config, **config)
    plan_of(session, LAYOUT, None, crew)
    plan_of(session, LAYOUT, None, dataclasses.replace(crew, servers=Servers(0, 1)))
    assert all(np.array_equal(problem.hosts, hosts) for problem in asked)
    # Beside reserved servers only a number counts where linear layers have no times.
    assert [problem.waves for problem in asked] == [expected, (config.get("waves", 1),)]


def test_ranks_that_come_later_to_attention_get_less_and_loads_speak_of_attention(session: Session) -> None:
    """Rank 2 takes longer for all else, by 5 % of the mean attention."""
    crew, layout = Crew(4), Layout.from_rank_lengths([[16384]] * 4)
    mean = plan_of(session, layout, None, crew).load.mean()
    seconds = np.array([1.0, 1.0, 1.0 + 0.05 * mean / 16384, 1.0])
    found = plan_of(session, layout, None, crew, seconds)
    finish = found.load + (seconds - 1.0) * 16384
    assert finish.max() < 1.025 * finish.mean() and found.load[2] < 0.98 * mean
    assert found.load.sum() == pytest.approx(4 * mean) and found.load_before.sum() == pytest.approx(4 * mean)


def test_ranks_compare_costs_and_configuration(session: Session) -> None:
    """What "auto" finds differs between machines though their configurations are equal."""
    assert session.gatherer._settings == digest(f"{session.config.fingerprint()} {session.cost.figures}")
    with closing(Session(CADConfig.from_dict(BLOCK | {"granularity": 128}), torch.device("cpu"))) as other:
        assert other.cost.figures == session.cost.figures and other.gatherer._settings != session.gatherer._settings


def test_a_rank_attends_no_part_of_a_document_alone(session: Session) -> None:
    with pytest.raises(CADDataError, match='starts at position 7, so it began on another rank. .*"balanced"'):
        session.plans.open_local(segments_from_positions(np.array([[7, 8, 0, 1]])))


WHOLE = HeadShape(32, 8, 128, 128, 2)
COST = CostModel("H200", "seconds", 2.5e-11, 4e-9, 6e-9, 1e-7, byte_inside=2 / 360e9)
"""Reading a key costs as much as 240 pairs, in backward only."""


def test_a_forward_alone_is_even_in_what_it_costs() -> None:
    """Rollouts of very different lengths; on slow links less than half of the transfers is waited for."""
    forward = COST.of_forward(0.25)
    assert forward.key == 0 and forward.pair == COST.pair / 4 and forward.byte_inside == COST.byte_inside
    assert forward.of(0, 1000) == pytest.approx(0.25 * (COST.of(0, 1000) - COST.key * 1000))
    lengths = np.exp(np.random.default_rng(0).normal(np.log(1000), 0.9, (4, 24))).astype(int) + 16
    lengths[1, 0] = 20 * int(np.median(lengths))
    cost, tick = COST.of_forward(FORWARD_SHARE), Layout.from_rank_lengths(lengths.tolist()).tick()
    plan = make_plan(PlanInput(tick, WHOLE, cost, backward=False))
    begin, end, first, last, server = plan.tasks[:, 1:].T
    work = np.bincount(server, cost.of(begin, end) * (last - first), 4)
    assert work.max() / work.mean() <= 1.05 < plan.imbalance_before
    slow, tick = dataclasses.replace(COST, byte_inside=2 / 1e9), Layout.from_rank_lengths([[40000], [500] * 8]).tick()
    both = make_plan(PlanInput(tick, WHOLE, slow))
    alone = make_plan(PlanInput(tick, WHOLE, slow.of_forward(FORWARD_SHARE), backward=False))
    assert 0 < alone.finish.max() < 0.5 * both.finish.max()


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_batch_that_contradicts_itself_is_an_error_when_its_step_is_due(replicas: int) -> None:
    feed = mock.Mock(replicas=replicas, orders=True, deals=False, **{"shares.pieces": 0})
    assert StepAhead(feed).submit([]) is None and feed.end.called and not feed.next_step.called, "of one micro-batch"
    feed.read.side_effect = error = CADDataError("positions start at 0")
    due = StepAhead(feed, 1 if replicas == 1 else 2).submit([{"input_ids": 0}])
    assert due is not None and feed.fail_later.call_args.args == (error,) and not feed.announce.called
    with pytest.raises(CADDataError, match="positions start at 0"):
        due()


@pytest.mark.parametrize("count, said", [(1, ""), (2, ORDERED)])
def test_documents_that_stay_are_called_ordered_where_there_is_an_order(count: int, said: str) -> None:
    told = [StepMessage([Announcement(segments_from_positions([0, 1, 2]))] * count)] * 2
    feed = mock.Mock(**{"shares.replica": 1, "plans.step_costs.return_value.work": np.ones(2 * count)})
    moved, loaded = StepAhead(feed, count)._place((0, 0, 0), [{}] * count, told, None, {})
    assert len(moved) == len(loaded) == count and feed.arranged == said


def test_a_step_of_an_epoch_that_is_over_is_given_out_and_cannot_be_trained() -> None:
    over, feed = EpochOverError("the loader of rank 1 ended"), mock.Mock()
    feed.worker.wait.side_effect = over
    assert StepAhead(feed, 2)._hand_out((1, 2, 4), mock.Mock(), [5, 6], ["five", "six"], True) == [5, 6]  # type: ignore
    planned = {mine: future.exception() for mine, future in (call.args for call in feed.accept.call_args_list)}
    assert planned == {"five": over, "six": over} and not feed.announce.called and not feed.end.called


@pytest.mark.parametrize("ticks", [1, 2])
def test_nano_batches_share_the_limit_of_memory(session: Session, ticks: int) -> None:
    plans, memory = session.plans, MemoryLimit(6.0, torch.device("cpu"), [0, 1])
    assert plans.exchange_memory(plans.limit, rows_of_layers) is None, "one rank exchanges nothing"
    plans.learned = Learned(memory=memory)
    found = plans.exchange_memory(plans.limit._replace(most=2.0**34), rows_of_layers, ticks)
    assert (found.limit, found.most, found.parts) == (6 * 2**30 / ticks, 2**34 / ticks, ticks)
    assert (found.source, found.rows, found.granularity) == ('the key "memory"', rows_of_layers, 64)
    found.needed(100.0), found.lacked(64.0)
    assert memory.most_needed == 100 * ticks and memory.report(0).tolist() == [64 * ticks, 0]


class Loader(list[int]):
    end_of_dataloader = False

    def __iter__(self) -> Iterator[int]:
        for batch in list.__iter__(self):
            self.end_of_dataloader = batch == len(self) - 1
            yield batch


def test_a_step_that_began_before_it_was_announced_ends_where_it_should(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is seen to train by its first forward: of two micro-batches a step the first is not announced."""
    submit = mock.Mock(side_effect=lambda step, ended: (lambda: step) if step else None)
    monkeypatch.setattr(StepAhead, "submit", submit)
    model = SimpleNamespace(forwards=0, looked=0, looks_at_loader=lambda: True)
    for _ in LookAheadLoader(Loader(range(6)), mock.Mock(), 2, follower=model):
        model.forwards += 1
    assert [len(call.args[0]) for call in submit.call_args_list] == [1, 2, 2, 0]


@pytest.mark.parametrize("orders", [False, True])
def test_a_step_of_another_size_is_refused_where_it_was_arranged(orders: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by an engine's `set_train_batch_size`; and who sets an attribute of the loader reaches the loader."""
    monkeypatch.setattr(StepAhead, "submit", lambda self, batches, ended: (lambda: batches) if batches else None)
    fails = mock.Mock(side_effect=CADConfigError)
    feed = mock.Mock(replicas=2, orders=orders, deals=False, fail=fails, **{"shares.pieces": 0})
    count, inner = [2], Loader(range(8))
    loader = LookAheadLoader(inner, feed, lambda: count[0])
    loader.post_process_func = count.clear
    assert inner.post_process_func == count.clear and len(list(loader)) == 8  # type: ignore[attr-defined]
    batches = iter(loader)
    count[0] = next(batches) + 4
    with pytest.raises(CADConfigError) if orders else nullcontext():
        assert list(batches) == [1, 2, 3, 4, 5, 6, 7]
    for counts in (SimpleNamespace(data_sampler=SimpleNamespace(state_dict=dict)), SimpleNamespace(state_dict=dict)):
        read: list[int] = []
        ahead = LookAheadLoader(counts, feed, 2, batches=(read.append(batch) or batch for batch in range(3)))  # type: ignore[func-returns-value]
        assert [len(read) for _ in ahead] == [1, 2, 3] and not feed.read_ahead, "what was read is in checkpoints"


@pytest.mark.parametrize("steps, right", [([0, 1, 1, 2], True), ([0, 1, 1, 0], True), ([1], False), ([0, 0], False)])
def test_a_step_that_ends_elsewhere_than_arranged_is_an_error(steps: list[int], right: bool, monkeypatch: Any) -> None:
    monkeypatch.setattr(StepAhead, "submit", lambda self, batches, ended: (lambda: batches) if batches else None)
    feed, done = mock.Mock(replicas=2, fail=mock.Mock(side_effect=CADConfigError), **{"shares.pieces": 0}), [(0, 0)]
    with nullcontext() if right else pytest.raises(CADConfigError):
        for step in LookAheadLoader(Loader(range(len(steps) + 1)), feed, 2, lambda: done[0]):
            done[0] = (step + 1, [*steps, steps[-1]][step])


def test_the_batch_that_is_said_to_be_the_last_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Accelerate's loaders say it, though a step ahead was read."""
    monkeypatch.setattr(StepAhead, "submit", lambda self, batches, ended: (lambda: batches) if batches else None)
    for count in (1, 4, 5):
        loader = Loader(range(count))
        said = [loader.end_of_dataloader for _ in LookAheadLoader(loader, mock.Mock(), 2)]
        assert said == [False] * (count - 1) + [True]


def test_ranks_that_are_apart_by_one_micro_batch_are_told() -> None:
    headers = np.zeros((2, gather._WIDTH), np.int64)
    headers[:, gather._WHAT], headers[1, gather._INDEX] = gather.What.LENGTHS, 1
    one = mock.Mock(_give_up=CADPeerError)
    with pytest.raises(CADPeerError, match="rank 0 at the document lengths of micro-batch 0 .*rank 1 .*micro-batch 1 "):
        gather.Gatherer._compare(one, headers)
