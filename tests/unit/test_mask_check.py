"""The sampled check: it accepts the masks that transformers makes for supported models and finds every wrong one."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from deepspeed_cad.integrations import functions
from deepspeed_cad.integrations.mask_check import ForwardCheck, _evaluate, check_mask, is_due
from transformers import LlamaConfig, masking_utils

from deepspeed_cad.errors import CADUnsupportedError
from deepspeed_cad.layout import Layout, segments_from_positions

Mask = Callable[..., torch.Tensor]


@pytest.mark.parametrize("original, made", [("eager", "eager's"), ("flash_attention_9", "sdpa's")])
def test_outside_of_cad_a_model_has_its_own_mask(original: str, made: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "default_attention", lambda config: original)
    for name in ("eager", "sdpa"):
        masks = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping
        monkeypatch.setitem(masks, name, lambda *args, name=name, **kwargs: f"{name}'s")
    assert functions.cad_mask(config=None) == made


def given_by_transformers(positions: list[list[int]], mask: torch.Tensor | None, window: int | None) -> dict[str, Any]:
    """What the installed version of transformers passes to a mask interface function."""
    caught: dict[str, Any] = {}

    def catch(*args: Any, **kwargs: Any) -> None:
        caught.update(kwargs)

    masking_utils.AttentionMaskInterface.register("caught", catch)
    config = LlamaConfig(attn_implementation="caught", sliding_window=window, num_hidden_layers=1)
    config._attn_implementation = "caught"
    ids = torch.tensor(positions)
    make = masking_utils.create_causal_mask if window is None else masking_utils.create_sliding_window_causal_mask
    hidden = torch.zeros(*ids.shape, 4)
    arguments = {
        "config": config, "inputs_embeds": hidden, "input_embeds": hidden, "attention_mask": mask, "position_ids": ids,
        "cache_position": torch.arange(ids.shape[1]), "past_key_values": None, "cache": None,
    }  # fmt: skip
    known = inspect.signature(make).parameters
    make(**{name: value for name, value in arguments.items() if name in known})
    return caught


def simple(rows: int, function: Mask) -> dict[str, Any]:
    """The keyword arguments of a mask interface function, as far as the check reads them."""
    return {
        "batch_size": 1, "q_length": rows, "kv_length": rows, "q_offset": 0, "kv_offset": 0,
        "mask_function": function, "attention_mask": None, "device": torch.device("cpu"),
    }  # fmt: skip


def causal(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return key <= query


def test_the_first_mask_of_each_window_of_a_forward_is_checked() -> None:
    """Layers of a pipeline make their masks one by one, and all of a kind make the same."""
    asked: list[str] = []

    def note(name: str) -> dict[str, Any]:
        def function(batch: Any, head: Any, query: Any, key: Any) -> Any:
            asked.append(name)
            return (key <= query) & (query - key < 5) if "window" in name else key <= query

        return simple(10, function)

    forward = ForwardCheck(segments_from_positions([list(range(10))]), 1)
    for window, name in ((None, "full"), (5, "window"), (None, "full again"), (5, "window again")):
        forward.see(window, note(name))
    assert asked == ["full", "window"]
    with pytest.raises(CADUnsupportedError, match="causal attention with a window of 4"):
        forward.see(4, note("wrong window"))


@pytest.mark.parametrize("window", [None, 1, 5, 500])
@pytest.mark.parametrize("batch", [1, 3])
def test_masks_of_transformers_agree(window: int | None, batch: int, caplog: pytest.LogCaptureFixture) -> None:
    positions = [[p for length in (40, 1, 13, 46) for p in range(length)]] * batch
    local, given = segments_from_positions(positions), given_by_transformers(positions, None, window)
    for forwards in (0, 1, 3, 7):
        check_mask(local, window, given, forwards)
    assert not caplog.records, "each was asked"


@pytest.mark.parametrize("left", [True, False])
def test_padding_is_left_out(left: bool) -> None:
    """A 2-D mask: rows of padding are not compared."""
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[1, slice(0, 11) if left else slice(19, 30)] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    local = segments_from_positions(positions.numpy(), mask.numpy())
    check_mask(local, 7, given_by_transformers(positions.tolist(), mask, 7), 0)
    check_mask(segments_from_positions([[0, 0]], [[0, 0]]), None, simple(2, causal), 0)


def test_documents_that_span_ranks_and_empty_ranks() -> None:
    """Only pairs on this rank are compared; a rank without tokens has none."""
    layout = Layout.from_stream([130, 90, 1, 79], 3, 100)
    for rank in range(3):
        check_mask(layout.local(rank), 20, simple(100, lambda b, h, q, k: (k <= q) & (k > q - 20)), 0)
    nothing = Layout.from_rank_lengths([[5], []])
    check_mask(nothing.local(1), None, simple(0, causal), 0)
    check_mask(nothing.local(1), None, simple(1, causal), 0)  # such a rank runs one row that belongs to no document


WRONG: dict[str, tuple[Mask, int | None]] = {
    "bidirectional": (lambda b, h, q, k: q >= 0, None),
    "a prefix that all see": (lambda b, h, q, k: (k <= q) | (k < 64), None),
    "a window that CAD does not know": (lambda b, h, q, k: (k <= q) & (q - k < 50), None),
    "no window where CAD has one": (causal, 50),
    "a window longer by one": (lambda b, h, q, k: (k <= q) & (q - k <= 50), 50),
    "a window shorter by one": (lambda b, h, q, k: (k <= q) & (q - k < 49), 50),
    "chunks taken for a window": (lambda b, h, q, k: (k <= q) & (q // 50 == k // 50), 50),
    "all but the diagonal": (lambda b, h, q, k: k != q, None),
    "a hidden first token": (lambda b, h, q, k: (k <= q) & (k > 0), None),
    "a last token that all see but itself": (lambda b, h, q, k: (k <= q) != (k == 299), None),
    "a last token that sees nothing": (lambda b, h, q, k: (k <= q) & (q != 299), None),
}


SAID = re.compile(
    r"(hides|shows) key position (\d+) to query position (\d+) .*\(rows (\d+) and (\d+) .* CAD (.*) use it"
)


@pytest.mark.parametrize("name", list(WRONG))
def test_wrong_masks_are_found(name: str) -> None:
    """And a pair of positions is named, in the document and on the rank, of which both say something else."""
    (function, window), layout = WRONG[name], Layout.from_rank_lengths([[300, 7, 200]])
    with pytest.raises(CADUnsupportedError) as raised:
        check_mask(layout.local(0), window, simple(507, function), 0)
    found = SAID.search(str(raised.value))
    assert found is not None
    shown, used = found[1] == "shows", found[6] == "would"
    k, q, key, query = (torch.tensor(int(found[at])) for at in (2, 3, 4, 5))
    assert shown == bool(function(0, 0, query, key))
    assert used != shown and used == bool((k <= q) & (q - k < (window or 507)))
    assert key - k == query - q and int(query - q) in (0, 300, 307), "where documents begin"


def test_another_number_of_tokens_and_only_now_and_then() -> None:
    local = Layout.from_rank_lengths([[20]]).local(0)
    with pytest.raises(CADUnsupportedError, match="prompt or prefix"):
        check_mask(local, None, simple(24, causal), 0)
    assert [n for n in range(40) if is_due(n)] == [0, 1, 3, 7, 15, 31]
    check_mask(local, None, simple(20, lambda b, h, q, k: q >= 0), 2)
    for given in ({"q_length": 20, "q_offset": 3}, {"cache_position": torch.arange(20)}, {"q_length": 20}):
        at, begin = given.get("q_offset", 0), 7 * (len(given) - 1)  # of queries and keys; the least that versions give
        mask = lambda b, h, q, k, by=at - begin: (h == 0) & (k <= q - by) & (q - k < 5 + by)  # noqa: E731
        check_mask(local, 5, {"mask_function": mask, **({"kv_offset": begin} if begin else {}), **given}, 0)


def test_the_longest_documents_are_looked_at_and_others_in_turn() -> None:
    """At edges of documents and windows, beside the diagonal, and within a document."""
    lengths, asked, seen = np.arange(30, 70), set[tuple[int, int]](), list[set[int]]()
    ends, document = lengths.cumsum(), np.repeat(np.arange(40), lengths)

    def function(batch: Any, head: Any, query: Any, key: Any) -> Any:
        asked.update(zip(query.tolist(), key.tolist()))
        seen.append(set(document[query].tolist()))
        return (key <= query) & (query - key < 9)

    for forwards in (0, 1, 3, 7):
        check_mask(Layout.from_rank_lengths([lengths.tolist()]).local(0), 9, simple(len(document), function), forwards)
    assert all(len(one) <= 16 and one >= set(range(32, 40)) for one in seen) and len(set[int]().union(*seen)) > 20
    for query in {query for query, _ in asked}:
        start, stop = (ends - lengths)[document[query]], ends[document[query]]
        keys = {query, query - 1, query + 1, query - 9, query - 8, start, stop - 1}
        assert asked >= {(query, key) for key in keys if start <= key < stop}


def test_function_that_cannot_be_asked_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """A mask function for scalars only: logged at the first forward, not silently skipped, not an error."""

    def scalar(batch: Any, head: Any, query: Any, key: Any) -> Any:
        raise ValueError("only one element\ncan be asked")

    for forwards in (1, 3, 0):
        assert not caplog.records
        for function in (scalar, None):
            check_mask(Layout.from_rank_lengths([[20]]).local(0), None, simple(20, function), forwards)
    assert [record.message.count("not checked") for record in caplog.records] == [1, 1]
    assert "at single positions (ValueError: only one element); its mask" in caplog.text


def test_positions_lie_where_the_masks_own_tensors_do() -> None:
    places, meta = torch.tensor([[0, 0], [0, 0], [1, 0], [0, 1]]), torch.ones(2, device="meta")
    for name, given in (
        ("cpu", {}), ("meta", {"cache_position": meta}), ("meta", {"attention_mask": meta}),
        ("cpu", {"attention_mask": meta, "device": torch.device("cpu")}),
    ):  # fmt: skip
        seen: list[Any] = []
        found = _evaluate(lambda *asked, seen=seen: seen.extend(asked) or causal(*places), places.numpy(), given, 0)
        assert found.tolist() == [True, False] and {one.device.type for one in seen} == {name}
