"""What a decoder returns for two nano-batches, joined to what it would have returned for both."""

from __future__ import annotations

import pytest
import torch
from deepspeed_cad.integrations.interleavable import why_not_twice
from deepspeed_cad.integrations.joined import CannotJoin, Join
from model_cases import tiny_model
from transformers.modeling_outputs import BaseModelOutputWithPast

from deepspeed_cad.attention.pingpong import RowCut

CUTS = [RowCut(1, 10, 3), RowCut(1, 10, 0), RowCut(1, 10, 10), RowCut(4, 10, 30), RowCut(4, 10, 0), RowCut(2, 2, 2)]


@pytest.mark.parametrize("cut", CUTS)
def test_what_was_cut_is_joined_again(cut: RowCut) -> None:
    hidden = torch.rand(cut.batch, cut.width, 6, requires_grad=True)
    logits = torch.rand(cut.batch * cut.width, 5)
    first, second = cut.split(hidden)
    at = max(cut.at, 1 if cut.batch == 1 else cut.width)
    rows = logits.split([cut.at, len(logits) - cut.at])
    stand_in = logits[:at] if cut.at == 0 else logits[: 1 if cut.batch == 1 else cut.width]
    routed = [part if len(part) else stand_in[: 1 if cut.batch == 1 else cut.width] for part in rows]

    def output(x: torch.Tensor, router: torch.Tensor) -> BaseModelOutputWithPast:
        found = BaseModelOutputWithPast(last_hidden_state=x, past_key_values=None, hidden_states=(x, x * 2))
        found["router_logits"] = (router,)
        return found

    joined = Join(cut).join(output(first, routed[0]), output(second, routed[1]))
    assert type(joined) is BaseModelOutputWithPast
    assert torch.equal(joined.last_hidden_state, hidden) and torch.equal(joined.hidden_states[1], hidden * 2)
    assert torch.equal(joined.router_logits[0], logits)
    (gradient,) = torch.autograd.grad(joined.last_hidden_state.sum(), hidden)
    assert torch.equal(gradient, torch.ones_like(hidden))
    as_tuple = Join(cut).join((first, None, True), (second, None, True))
    assert torch.equal(as_tuple[0], hidden) and as_tuple[1:] == (None, True)


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (torch.tensor(1.0), torch.tensor(2.0), r"shapes \[\] and \[\]"),
        (torch.ones(3), torch.ones(3), r"shapes \[3\] and \[3\]"),
        (torch.ones(1, 3, 4), torch.ones(1, 7, 5), "shapes"),
        ((torch.ones(1, 3),), (None,), r"\[0\], a Tensor and a NoneType"),
        ({"a": object()}, {"a": object()}, '"a", a object'),
        ([1], [2], r"\[0\], a int"),
        ((1,), (1, 2), "a tuple"),
    ],
)
def test_what_has_no_rows(first: object, second: object, says: str) -> None:
    with pytest.raises(CannotJoin, match=says):
        Join(RowCut(1, 10, 3)).join(first, second)


def test_a_shared_object_stays() -> None:
    cache = object()
    assert Join(RowCut(1, 10, 3)).join({"cache": cache}, {"cache": cache}) == {"cache": cache}


# Whether a decoder can run twice


def _sharded(decoder: torch.nn.Module) -> None:
    decoder.layers[1].mlp.up_proj.weight.ds_id = 3


def _reentrant(decoder: torch.nn.Module) -> None:
    decoder.gradient_checkpointing_enable({"use_reentrant": True})


def _checkpointed(decoder: torch.nn.Module) -> None:
    decoder.gradient_checkpointing_enable({"use_reentrant": False})


def _other_layers(decoder: torch.nn.Module) -> None:
    decoder.config.layer_types = ["full_attention", "linear_attention"]


def _without_attention(decoder: torch.nn.Module) -> None:
    decoder.layers[0].self_attn = torch.nn.Identity()


def _convolution(decoder: torch.nn.Module) -> None:
    decoder.layers[1].mlp.short = torch.nn.Conv1d(4, 4, 3)


def _scaled_by_the_batch(decoder: torch.nn.Module) -> None:
    decoder.config.rope_parameters = {"rope_type": "longrope", "rope_theta": 1e4}


def _opt(decoder: torch.nn.Module) -> None:
    decoder.config.model_type = "opt"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda decoder: None, ""),
        (_checkpointed, ""),
        (_sharded, "ZeRO-3"),
        (_reentrant, "reentrant"),
        (_other_layers, "linear_attention"),
        (_without_attention, "layer 0 has no attention"),
        (_convolution, "layer 1 has a convolution"),
        (_scaled_by_the_batch, '"longrope"'),
        (_opt, "OPT"),
    ],
)
def test_why_a_decoder_cannot_run_twice(change, says: str) -> None:
    decoder = tiny_model("llama").model
    change(decoder)
    found = why_not_twice(decoder)
    assert says in found and bool(says) == bool(found)
