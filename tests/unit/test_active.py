"""What was asked for must happen: the checks before optimizer steps and forwards, in one process."""

import os
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
import training
from deepspeed_cad.integrations import active
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import deepspeed_cad
from deepspeed_cad.config import CADConfig
from deepspeed_cad.errors import CADConfigError, CADError, CADUnsupportedError
from deepspeed_cad.session import close_session, open_session


class Host:
    """The session that the checks see, and the models that CAD was turned on for."""

    def __init__(self) -> None:
        self.session: Namespace | None = None
        self.bound: list[Any] = []

    def open(self, **changes: Any) -> Namespace:
        figures = Namespace(micro_batches=changes.pop("micro_batches", 1), imbalance_before=changes.pop("before", 1.5))
        self.session = Namespace(**{"group_ranks": 2, "ranks": 2, "rank": 0, "statistics": figures, **changes})
        return self.session


@pytest.fixture
def host(monkeypatch) -> Host:
    made = Host()
    monkeypatch.setattr(active, "current_session", lambda: made.session)
    monkeypatch.setattr(active, "apply", lambda model, config: made.bound.append((model, config)))
    monkeypatch.setenv("WORLD_SIZE", "1")
    return made


@pytest.fixture
def check(host, request: pytest.FixtureRequest) -> Iterator[active.ProcessCheck]:
    made = active.ProcessCheck("a launcher", getattr(request, "param", CADConfig(tolerance=0.2)))
    yield made
    made.close(), made._forward_handle.remove()


@pytest.fixture
def step() -> Any:
    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    return torch.optim.SGD([weight], lr=0.1).step


def _forward(model: torch.nn.Module) -> None:
    model(input_ids=torch.zeros(1, 4, dtype=torch.long), use_cache=False)


def test_a_process_refuses_every_step_without_cad_and_a_plugin_the_first(host, check, step) -> None:
    assert check.problem() == ""
    for _ in range(2):
        with pytest.raises(CADError, match=r"\(a launcher\) but is not active"):
            step()
    assert "not active at the first optimizer step" in check.problem()
    check.close()
    active.ActivationCheck("a plugin")
    with pytest.raises(CADError, match=r"\(a plugin\) but is not active"):
        step()
    step()


def test_a_step_that_makes_an_optimizers_state_is_no_training(check, host) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters())
    get_optimizer_state_dict(model, optimizer)
    assert optimizer.state and check.problem() == ""
    optimizer.zero_grad()
    with pytest.raises(CADError, match="not active"):
        optimizer.step()  # its gradients may lie elsewhere
    model(torch.ones(1)).backward()
    with pytest.raises(CADError, match="not active at the first optimizer step"):
        optimizer.step()


@pytest.mark.parametrize("by_name", [True, False])
def test_where_a_closure_trains_it_is_looked_behind_it(check, host, by_name: bool) -> None:
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def closure() -> torch.Tensor:
        (loss := weight.sum()).backward()
        return loss

    step = partial(optimizer.step, closure=closure) if by_name else partial(optimizer.step, closure)
    with pytest.raises(CADError, match="not active at the first optimizer step"):
        step()
    assert weight.item() == 1.0
    host.open()
    assert step() == 1.0 and weight.item() < 1.0 and check.was_active


def test_a_session_that_has_ended_is_no_problem(check, host, step) -> None:
    host.open()
    step()
    host.session = None
    step()
    assert check.was_active and check.problem() == ""


@pytest.mark.parametrize(
    ("before", "rank", "deals", "warnings"),
    [(1.0, 0, False, 1), (1.5, 0, False, 0), (1.0, 1, False, 0), (1.0, 0, True, 0)],  # what is dealt out is even
)
def test_rows_that_are_not_packed_are_told_once_by_rank_0(
    check, host, step, caplog, before: float, rank: int, deals: bool, warnings: int
) -> None:
    host.open(before=before, rank=rank, micro_batches=15)
    step()
    assert not caplog.records
    host.open(before=before, rank=rank, micro_batches=16, feeds=[Namespace(deals=deals)])
    step()
    step()
    assert sum("has nothing to balance" in record.message for record in caplog.records) == warnings


def test_one_process_is_told_that_there_is_nothing_to_balance(check, host, step, caplog) -> None:
    host.open(group_ranks=1, ranks=1)
    step()
    step()
    assert ["one process only" in record.message for record in caplog.records] == [True]


def test_the_first_training_forward_of_each_model_binds(check, host) -> None:
    model, critic = training.tiny_llama(), training.tiny_llama()
    model.eval()
    _forward(model)
    model.train()
    with torch.no_grad():
        _forward(model)
    torch.nn.Linear(4, 4)(torch.ones(4))
    assert host.bound == []
    compiled = torch.nn.Identity()
    compiled._orig_mod = model  # before it is traced
    compiled(torch.ones(1))
    for _ in range(2):
        _forward(model)
        _forward(critic)
    # The decoder inside each is a model of transformers too.
    assert host.bound == [(model, CADConfig(tolerance=0.2)), (critic, CADConfig(tolerance=0.2))]
    assert check.problem() == ""
    check._opened = host.open(micro_batches=16, rank=1)
    torch.optim.SGD(model.parameters()).step()
    _forward(late := training.tiny_llama().train())
    assert host.bound[2:] == [(late, CADConfig(tolerance=0.2))], "a model that comes later than all checks end"
    host.open()  # by the script, for a model of its own
    _forward(training.tiny_llama().train())
    assert len(host.bound) == 3


def test_a_model_that_is_refused_keeps_its_attention_and_is_named_where_none_is_trained_with_cad(
    check, host, step, monkeypatch, caplog
) -> None:
    monkeypatch.setattr(active, "apply", lambda model, config: host.open())
    for _ in range(2):
        _forward(training.sdpa_llama(attention_dropout=0.1).train())
    assert sum("LlamaForCausalLM keeps its attention" in record.message for record in caplog.records) == 2
    assert "2 training forwards of a transformers model without it: CAD does not support" in check.problem()
    with pytest.raises(CADError, match="optimizer step: CAD does not support LlamaForCausalLM .* dropout"):
        step()
    _forward(training.tiny_llama().train())
    step()


def test_what_else_cad_cannot_do_stops_at_the_first_forward(check, monkeypatch) -> None:
    monkeypatch.setattr(active, "apply", Mock(side_effect=CADUnsupportedError("a package is too old")))
    with pytest.raises(CADUnsupportedError, match="too old"):
        _forward(training.tiny_llama().train())


@pytest.mark.parametrize("check", [CADConfig(forward_only="balanced")], indirect=True)
def test_with_balanced_forwards_the_first_forward_binds_unless_it_generates(check, host) -> None:
    model = training.tiny_llama().eval()
    with torch.no_grad():
        model.generate(torch.ones(1, 3, dtype=torch.long), max_new_tokens=2, do_sample=False, pad_token_id=0)
        assert host.bound == []
        _forward(model)
    _forward(model.train())
    assert [one for one, _ in host.bound] == [model]


def test_forwards_before_the_group_is_there_are_a_problem_unless_training_follows(check, host, monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    _forward(training.tiny_llama().train())
    assert not host.bound
    assert "training forwards of a transformers model without it: torch.distributed is not init" in check.problem()
    host.open(micro_batches=0)
    assert check.problem()
    host.open()
    assert check.problem() == ""


def test_cad_waits_for_torch_distributed(monkeypatch) -> None:
    session = open_session(CADConfig(), torch.device("cpu"))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(CADConfigError, match="before torch.distributed was initialised, so each of 2 processes"):
        session.say_first()
    monkeypatch.undo()
    close_session()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(CADConfigError, match="Turn it on after init_process_group"):
        deepspeed_cad.apply(training.sdpa_llama())


def test_a_fork_answers_for_itself(check, step) -> None:
    with pytest.raises(CADError):
        step()
    child = os.fork()
    if not child:
        os._exit(0 if check.problem() == "" else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0 and check.problem()
