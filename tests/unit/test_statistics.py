"""Statistics: readers change nothing, nobody is late has a number of its own, and what rank 0 says of itself."""

import logging.handlers
import os
from contextlib import closing
from dataclasses import fields, replace
from math import inf
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import training

import deepspeed_cad
from deepspeed_cad.config import CADConfig
from deepspeed_cad.errors import why_ended
from deepspeed_cad.launch.armed import farewell
from deepspeed_cad.layout import Layout
from deepspeed_cad.notice import notice
from deepspeed_cad.report import session_lines
from deepspeed_cad.report.statistics import Statistics
from deepspeed_cad.session import Session, _end, close_session


def train(steps: int = 1) -> Any:
    model = deepspeed_cad.apply(training.tiny_llama(), {}).train()
    for step in range(steps):
        training.loss_sum(model, training.pack(training.documents([9, 30], seed=step))).backward()
    return deepspeed_cad.current_session()


def test_reading_during_a_forward_changes_nothing() -> None:
    """Plans that are made after a reader looked are counted all the same."""
    model = deepspeed_cad.apply(training.tiny_llama(), {}).train()
    session: Any = deepspeed_cad.current_session()
    assert not any(vars(Statistics()).values())
    assert (session.statistics.served_s, session.statistics.servers_s) == (0.0, 0.0)
    seen = []
    model.model.layers[0].self_attn.register_forward_pre_hook(lambda *_: seen.append(session.statistics))
    training.loss_sum(model, training.pack(training.documents([9, 30], seed=0)))
    assert (seen[0].micro_batches, seen[0].mean_tokens, seen[0].mean) == (1, 39.0, 0.0)  # no plan yet
    assert seen[0].mean_tokens_before == 39.0  # none was dealt out
    pairs = 4 * (9 * 10 / 2 + 30 * 31 / 2)  # of four head groups
    assert session.statistics.mean == session.statistics.mean == pairs
    for _ in range(20):
        training.loss_sum(model, training.pack(training.documents([9, 30], seed=0)))
    assert session.statistics.mean == session.take_statistics("test").mean == 21 * pairs


def test_two_lines_of_rank_0(capfd: pytest.CaptureFixture[str]) -> None:
    """What to expect after the first forward, and the sums at the end, each once, and not through the root logger."""
    session = train(3)
    begin = capfd.readouterr().err.splitlines()
    assert [line for line in begin if "CAD is on" in line] == [
        "deepspeed_cad: CAD is on: 1 rank, nothing to exchange, kernel torch_math; attention max/mean 1.00 → 1.00 in "
        "the first micro-batch, rank 0 sent 0.0 MiB in its forward"
    ]
    begin = "3 micro-batches, attention max/mean 1.00 → 1.00, 0.0 MiB sent for each"
    assert session_lines.summary(session.facts()).startswith(begin)
    _end()
    close_session()
    end = capfd.readouterr().err
    assert end.count("CAD is done: 3 micro-batches") == 1 and "CAD stopped" not in end


def _plan(seconds: float, waves: int, before: list[float], load: list[float]) -> Any:
    plan = SimpleNamespace(load_before=np.array(before), load=np.array(load))
    return SimpleNamespace(seconds=seconds, schedules=[0] * waves, plan=plan)


def test_what_is_summed_and_what_came_since() -> None:
    """Beside a server, which is lost; two kinds of layers, of which the first has two nano-batches."""
    made, layout, after = Statistics(landing_bytes=7), Layout.from_rank_lengths([[5], [3], []]), {}
    after["a", 0], after["a", 1] = _plan(0.5, 1, [6, 1, 2], [3, 3, 3]), _plan(0.25, 2, [1, 8, 0], [4, 3, 2])
    after["b", 0] = _plan(1.0, 1, [0.5, 0.25, 0], [0.25, 0.5, 0])
    made.add(SimpleNamespace(layout=layout, loaded=np.array([2, 6]), planned=after))  # type: ignore[arg-type]
    tokens: Any = {"most_tokens_before": 6.0, "mean_tokens_before": 4.0, "most_tokens": 5.0, "mean_tokens": 4.0}
    sums: Any = {"waves": 4, "slowest_before": 9.0 + 0.5, "slowest": 3.0 + 4.0 + 0.5, "mean": 3.0 + 3.0 + 0.25}
    loads: Any = {"load_before": np.array([7.5, 9.25, 2.0]), "load": np.array([7.25, 6.5, 5.0])}
    assert repr(first := made.copy()) == repr(Statistics(1, 1.75, landing_bytes=7, **tokens, **sums, **loads))
    assert first.planning_ms == 1750.0
    layout, after = Layout.from_rank_lengths([[4], [2]]), {("a", 0): _plan(0.5, 1, [2, 4], [3, 3])}
    made.add(SimpleNamespace(layout=layout, loaded=None, planned=after))  # type: ignore[arg-type]
    tokens = {"most_tokens_before": 4.0, "mean_tokens_before": 3.0, "most_tokens": 4.0, "mean_tokens": 3.0}
    sums = {"waves": 1, "slowest_before": 4.0, "slowest": 3.0, "mean": 3.0}
    loads = {"load_before": np.array([2.0, 4.0, 0.0]), "load": np.array([3.0, 3.0, 0.0])}
    assert repr(made.copy().since(first)) == repr(Statistics(1, 0.5, landing_bytes=7, **tokens, **sums, **loads))


def test_figures_by_name_and_in_words() -> None:
    numbers = {field.name: at + 2.0 for at, field in enumerate(fields(Statistics)) if field.type in ("int", "float")}
    made = replace(Statistics(), **numbers)  # type: ignore[arg-type]
    events = {
        "attention_max_over_mean_before": made.slowest_before / made.mean,
        "attention_max_over_mean": made.slowest / made.mean,
        "tokens_max_over_mean_before": made.most_tokens_before / made.mean_tokens_before,
        "tokens_max_over_mean": made.most_tokens / made.mean_tokens, "sent_MiB": made.bytes_sent / 1048576,
        "landing_MiB": made.landing_bytes / 1048576, "planning_ms": made.planning_s * 1000 / made.micro_batches,
        "waited_s": made.waited_s, "servers_idle": max(0.0, 1 - made.served_s / made.servers_s),
        "forward_only_micro_batches": made.looks,
        "forward_only_max_over_mean_before": made.looks_slowest_before / made.looks_mean,
        "forward_only_max_over_mean": made.looks_slowest / made.looks_mean,
    }  # fmt: skip
    assert made.as_events() == pytest.approx({f"cad/{name}": value for name, value in events.items()})
    assert [*Statistics().as_events().values()] == [1.0] * 4 + [0.0] * 5, "none of forwards without backward"
    assert Statistics(slowest=1.0, mean=0.5).imbalance == 2.0 and not Statistics().load.any()
    assert [Statistics(served_s=one, servers_s=0.5).servers_idle for one in (0.25, 1.0)] == [0.5, 0.0]
    words = replace(made, micro_batches=4, bytes_sent=6 << 20, landing_bytes=3 << 20, planning_s=0.02).in_words("even")
    assert words.startswith("4 micro-batches, even, 1.5 MiB sent for each, 5.0 ms to plan each, ")
    assert ", 3 MiB kept for what arrives" in words


def test_a_forked_worker_has_no_session_to_end() -> None:
    """Loaders fork workers, and under the launcher a process that ends ends its session."""
    train()
    if not (child := os.fork()):
        os._exit(deepspeed_cad.current_session() is not None)
    close_session()
    assert os.waitpid(child, 0)[1] == 0


def _close_while_an_error_passes(session: Any) -> None:
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        close_session()


@pytest.mark.parametrize("end, reason", [
    (lambda session: _end(), "ValueError: no data"),
    (lambda session: farewell(why_ended(SystemExit(3))), "exit code 3"),  # under the launcher, by os._exit perhaps
    (_close_while_an_error_passes, "KeyboardInterrupt"),
    (lambda session: setattr(session.plans, "abandoned", "rank 0: out of memory") or _end(), "rank 0: out of memory"),
])  # fmt: skip
def test_the_last_line_tells_a_crash(end: Any, reason: str, monkeypatch: Any, capfd: Any) -> None:
    if "no data" in reason:
        monkeypatch.setattr("sys.last_value", ValueError("no data"), raising=False)
    end(session := train())
    assert reason in (session.ended, session.plans.abandoned), "servers are told"
    said = [line for line in capfd.readouterr().err.splitlines() if "CAD is done" in line or "CAD stopped" in line]
    assert len(said) == 1 and said[0].startswith(f"deepspeed_cad: CAD stopped early ({reason}): 1 micro-batch, ")
    close_session()
    assert "CAD" not in capfd.readouterr().err


def test_why_a_process_ended() -> None:
    errors = [None, SystemExit(), SystemExit(0), SystemExit("no data"), KeyError(), KeyError("labels")]
    assert [why_ended(one) for one in errors] == ["", "", "", "exit code no data", "KeyError", "KeyError: 'labels'"]


@pytest.mark.parametrize("landing, limit, words", [
    (0, inf, ""), (3 << 29, inf, ", landing areas 1.5 GiB"), (0, 2.0**31, ", landing areas 0 of at most 2 GiB"),
])  # fmt: skip
def test_a_rank_describes_itself(landing: int, limit: float, words: str) -> None:
    alone = train(0).facts()
    assert (alone.landing_bytes, alone.landing_limit, alone.links, alone.parked_bytes) == (0, inf, "", None)
    facts = replace(alone, trainers=2, landing_bytes=landing, landing_limit=limit, parked_bytes=5 << 20)
    for servers, beside in enumerate(["", " beside 1 reserved server"]):
        said = session_lines.describe(replace(facts, servers_at_start=servers, tolerance=0.02, cost="none"))
        begin = f"rank 0 of 2 attention servers{beside}, nothing to exchange, overlap {facts.overlap}"
        assert said == f"{begin}, tolerance 0.02, cost none{words}"
    assert "; 5 MiB of host memory for what attention keeps; rank 0 of 2, " in session_lines.summary(facts)
    balance = "attention max/mean 1.00 → 1.00 in the first micro-batch, rank 0 sent 1.5 MiB in its forward"
    means = "transport c10d, links 3, speeds 1 2, kernel a, b"
    facts = replace(facts, trainers=4, transport="c10d", links="links 3", speeds="speeds 1 2, ", kernels=("a", "b"))
    facts = replace(facts, statistics=Statistics(bytes_sent=3 << 19))
    for change, said in (
        ({"servers_at_start": 1, "arranged": "dealt"}, f"4 trainers and 1 reserved server, {means}; {balance}; dealt"),
        ({"shares": 2, "pieces": True}, f"4 ranks (2 replicas of 2 by Ulysses), {means}; {balance}"),
        ({"trainers": 2, "shares": 2}, "2 ranks (1 replica of 2 by tensor parallelism): there is nothing to balance, "
         "and attention stays where it is"),
    ):  # fmt: skip
        assert session_lines.first_line(replace(facts, **change)) == f"CAD is on: {said}"  # type: ignore[arg-type]


@pytest.mark.parametrize("level, handler_level, shown", [
    (logging.INFO, logging.INFO, True), (logging.WARNING, logging.INFO, False), (logging.INFO, logging.ERROR, False),
])  # fmt: skip
def test_a_notice_is_seen_once(level: int, handler_level: int, shown: bool, capfd: Any, monkeypatch: Any) -> None:
    """Through the logger where a handler shows it, on stderr where none does."""
    ours, keeps = logging.getLogger("deepspeed_cad"), logging.handlers.BufferingHandler(9)
    keeps.setLevel(handler_level)
    monkeypatch.setattr(ours, "handlers", [logging.NullHandler(), keeps])
    monkeypatch.setattr(ours, "propagate", False)
    monkeypatch.setattr(ours, "level", level)
    ours.manager._clear_cache()  # type: ignore[attr-defined]
    notice("100 % of it")
    ours.manager._clear_cache()  # type: ignore[attr-defined]
    assert [one.getMessage() for one in keeps.buffer] == ["100 % of it"] * shown
    assert capfd.readouterr().err == ("" if shown else "deepspeed_cad: 100 % of it\n")


SERVERS = {"servers": {"reserved": 1}}


@pytest.mark.parametrize("block, text", [
    ({}, ""), ({**SERVERS, "speeds": "measure"}, ""), ({"keep": "host"}, ""),
    ({"speeds": "measure"}, '"speeds" does nothing: no rank is reserved'),
    ({"servers": {"joined": 1}, "on_server_failure": "continue"}, ""),
    ({**SERVERS, "keep": "host"}, '"keep" is "host" and does nothing on reserved servers: trainers park'),
    ({**SERVERS, "on_server_failure": "continue"}, '"on_server_failure" is "continue" and servers are part'),
])  # fmt: skip
def test_what_does_nothing_is_said(block: dict, text: str) -> None:
    assert [line[: len(text)] for line in session_lines.unused_keys(CADConfig.from_dict(block))] == [text] * bool(text)


@pytest.mark.parametrize(("rank", "count"), [(0, 1), (1, 0)])
def test_rank_0_warns_once(rank: int, count: int, caplog: pytest.LogCaptureFixture) -> None:
    with closing(Session(CADConfig(speeds="measure"), torch.device("cpu"))) as session:
        assert caplog.text.count('"speeds" does nothing') == 1
        session.rank = rank
        session.warn(["another", "another"])
        assert caplog.text.count("another") == count
