"""Documents dealt out before a step: every per-token field moves along, losses and gradients stay what they were."""

import logging
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import training
from model_cases import known_kind, tiny_model
from pool import WorkerPool
from torch.nn.utils.rnn import pad_sequence

import deepspeed_cad
from deepspeed_cad import session
from deepspeed_cad.ahead.announced import StepMessage, to_documents
from deepspeed_cad.ahead.documents import read_documents
from deepspeed_cad.ahead.feed import Feed
from deepspeed_cad.ahead.gather import Gatherer
from deepspeed_cad.ahead.move_documents import Fields, move_documents, read_fields, read_padding
from deepspeed_cad.ahead.step import StepAhead, find_random, settle, settle_together
from deepspeed_cad.planner.deal import Dealt
from deepspeed_cad.shares import Replica, Shares

SHORT = [13, 27, 8, 31, 19, 22, 11, 29]
"""160 tokens."""
LENGTHS = [[[160, 90, 70], [80, 80]], [SHORT, [20, 60, 5]], [[9, 7], SHORT[:3]]]
"""[rank][micro-batch]: documents."""


def rank_batches(lengths: list[list[int]], seed: int) -> list[dict[str, torch.Tensor]]:
    return [training.pack(training.documents(row, seed + i)) for i, row in enumerate(lengths)]


def pad(docs: list[torch.Tensor], side: str = "right") -> dict[str, torch.Tensor]:
    """A padded batch; padding holds token 63."""
    given = {"input_ids": (docs, 63), "attention_mask": ([doc * 0 + 1 for doc in docs], 0), "labels": (docs, -100)}
    return {name: pad_sequence(rows, True, fill, side) for name, (rows, fill) in given.items()}


def _rich(lengths: list[int], seed: int, padded: bool) -> dict[str, Any]:
    """A micro-batch with every kind of field; `name` tells each token from all others."""
    packed: dict[str, Any] = training.pack(training.documents(lengths, seed))
    packed["name"] = torch.arange(sum(lengths))[None] + 1000 * seed
    packed["weight"] = packed["name"][..., None].to(torch.float64) * torch.tensor([1.0, 0.5])
    packed["mask"] = packed["name"] % 3 == 0
    axes, others = torch.stack([packed["name"], -packed["name"]]), {"nothing": None, "flag": True}
    if not padded:
        packed["labels"][0, 0] = packed["input_ids"][0, 0]  # of which no loss is taken where a row begins
        return packed | {"axes": axes} | others | _derived(lengths)
    width, fill = max(lengths), {"labels": -100}
    batch = {name: pad_sequence(x[0].split(lengths), True, fill.get(name, 0)) for name, x in packed.items()}
    batch["axes"] = torch.stack([pad_sequence(one[0].split(lengths), True) for one in axes])
    batch["attention_mask"] = (torch.arange(width) < torch.tensor(lengths)[:, None]).int()
    batch["position_ids"] = torch.arange(width)[None].expand(len(lengths), -1)
    return batch | others


def _derived(lengths: Any) -> dict[str, Any]:
    """What collators say of packed documents besides positions."""
    cumulative, longest = torch.from_numpy(np.r_[0, np.cumsum(lengths)]).to(torch.int32), max(lengths, default=0)
    number = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None].to(torch.int32)
    return {
        "cu_seq_lens_q": cumulative, "cu_seq_lens_k": cumulative[None], "max_length_q": longest,
        "max_length_k": torch.tensor(longest), "seq_idx": number, "attention_mask": number.long() + 1,
    }  # fmt: skip


def _shuffle(rank: int, world: int, seed: int, padded: bool) -> None:
    """Documents go anywhere; each rank compares its rows with what it should have got. Seed 2: as if nobody padded."""
    batches = [[_rich(row, 10 * r + m + 1, padded) for m, row in enumerate(of)] for r, of in enumerate(LENGTHS)]
    said, fields, paddings = [], [], []
    for of in batches:
        mine = [read_documents(one) for one in of]
        said.append(StepMessage(mine))
        fields += [read_fields(batch, one) for batch, one in zip(of, mine)]
        paddings.append(read_padding(of, fields[-1], mine))
    assert len(set(fields)) == 1 and isinstance(fields[0], Fields) and fields[0].padded == padded
    documents = to_documents(said, padded)
    step = documents.step
    rows = step.rank * 2 + step.micro_batch
    if seed:
        rows = np.random.default_rng(seed).permutation(rows)
    dealt = Dealt(step.whole(rows // 2, rows % 2), step.tokens, 1.0, 1.0)
    padding = next((one for one in paddings if len(one) and seed < 2), np.zeros(0, np.int64))
    group = dist.new_group(backend="gloo")
    dist.barrier()  # who has nothing to send would leave while others still connect
    gatherer = Gatherer(group, rank, world, None, Shares.none(rank, world))
    moved = move_documents(batches[rank], fields[0], padding, documents, dealt, gatherer)
    names = [np.arange(sum(row)) + 1000 * (10 * r + m + 1) for r, of in enumerate(LENGTHS) for m, row in enumerate(of)]
    pieces = np.split(np.concatenate(names), np.cumsum(step.length)[:-1])
    for micro_batch, one in enumerate(moved):
        batch = one.on_device()
        if seed == 0:
            assert batch is batches[rank][micro_batch]
            continue
        here = np.flatnonzero((dealt.pieces.rank == rank) & (dealt.pieces.micro_batch == micro_batch))
        own = step.length[here]
        real = batch["attention_mask"].bool()
        expected = np.concatenate([pieces[i] for i in here])
        assert batch["name"][real].tolist() == batch["axes"][0][real].tolist() == expected.tolist()
        assert torch.equal(batch["weight"][..., 0], batch["name"].double()) and batch["weight"].shape[2] == 2
        assert torch.equal(batch["mask"][real], batch["name"][real] % 3 == 0) and batch["mask"].dtype == torch.bool
        assert torch.equal(batch["axes"][1], -batch["name"])
        assert batch["nothing"] is None and batch["flag"] is True
        local = read_documents(batch).local
        assert (local.end - local.begin).tolist() == own.tolist()
        if padded:
            shown = (torch.arange(own.max()) < torch.tensor(own)[:, None]).int()
            assert torch.equal(batch["attention_mask"], shown) and batch["input_ids"].shape == shown.shape
            assert batch["position_ids"].tolist() == [list(range(own.max()))] * len(own)
            assert not batch["weight"][~real].any() and (batch["labels"][~real] == -100).all()
            continue
        assert (batch["labels"][0, np.cumsum(own) - own] == -100).all()
        assert batch["position_ids"][0].tolist() == [i for n in own for i in range(n)]
        for name, value in (_derived(own) | {"attention_mask": torch.ones(1, own.sum(), dtype=torch.int64)}).items():
            assert torch.equal(torch.as_tensor(batch[name]), torch.as_tensor(value)), name


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_field_travels(workers: WorkerPool, seed: int, padded: bool) -> None:
    workers.run(_shuffle, 3, seed, padded)


def _reason(batch: dict[str, Any], **changes: Any) -> str:
    batch = {name: value for name, value in {**batch, **changes}.items() if value is not ...}
    mine = read_documents(batch)
    found = read_fields(batch, mine)
    if isinstance(found, Fields) and found.padded:
        found = read_padding([batch], found, [mine])
    return found if isinstance(found, str) else ""


DOCS = training.documents([20, 12], 0)
PACKED, PADDED = training.pack(DOCS), pad(DOCS)
NUMBERS, HIDDEN = torch.tensor([[1] * 20 + [2] * 12]), torch.tensor([[1] * 30 + [0] * 2])
TRAVELS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (PACKED, {}), (PACKED, {"attention_mask": torch.ones(1, 32)}), (PACKED, {"attention_mask": NUMBERS}),
    (PACKED, {"labels": torch.full((1, 32), -100), "attention_mask": HIDDEN}),
    (PACKED, {"labels": torch.ones(1, 32), "shift_labels": torch.ones(1, 32)}), (PADDED, {}),
    (PADDED, {"position_ids": torch.arange(20).expand(2, 20)}), (PACKED, {"labels": None, "shift_labels": None}),
]  # fmt: skip
ENDS = torch.tensor([0, 20, 32])
STAYS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("position_ids", PACKED, {"position_ids": ...}),
    ("position_ids do not start again", PACKED, {"position_ids": torch.arange(32)[None], "cu_seq_lens_q": ENDS}),
    ('"attention_mask" of shape (1, 1, 32', PACKED, {"attention_mask": (NUMBERS[:, None, None] == NUMBERS.mT).tril()}),
    ("its labels count where it is padded", PACKED, {"attention_mask": HIDDEN}),
    ('"pixels" of shape (2, 5)', PACKED, {"pixels": torch.zeros(2, 5)}),
    ('"weight" of shape (1, 31)', PACKED, {"weight": torch.zeros(1, 31)}),
    ('"lengths" (list)', PACKED, {"lengths": [20, 12]}),
    ("target of the document before", PACKED, {"labels": PACKED["input_ids"]}),
    ("its labels are not the token ids", PACKED, {"labels": PACKED["labels"].roll(-1)}),
    ("its labels are not the token ids", PADDED, {"labels": PADDED["labels"].where(PADDED["labels"] < 0, 2)}),
    ("neither position_ids", PADDED, {"attention_mask": ...}),
    ("padded on the left", pad(DOCS, "left"), {}),
    ("its labels count where it is padded", PADDED, {"labels": PADDED["input_ids"]}),
    ('"name" differs in padding', PADDED, {"name": torch.arange(40).view(2, 20)}),
    ('"cu_seq_lens_q" numbers the tokens', PADDED, {"cu_seq_lens_q": ENDS}),
    ('"reward" of shape (2,)', PADDED, {"reward": torch.zeros(2)}),
]


def test_what_cannot_travel_is_named() -> None:
    for batch, changes in TRAVELS:
        assert _reason(batch, **changes) == "", changes
    for words, batch, changes in STAYS:
        assert words in _reason(batch, **changes), words
    batch = PADDED | {"position_ids": torch.arange(20).where(PADDED["attention_mask"] > 0, 1)}
    assert "position_ids" in read_fields(batch, read_documents(batch)).names  # type: ignore[union-attr]


ONE_EACH = [[[300], [12]], [[20], [7, 5]], [[40], [90]], [[2], [3, 140]]]
"""[rank][micro-batch]: documents that no dealing of whole ones makes even."""


def _cut(rank: int, world: int, kind: str, documents: str, changes: dict[str, Any], more: str) -> dict[str, Any]:
    """Losses and gradients of two micro-batches of one step, and how many documents went on from the rank before."""
    model = training.checkpointed(tiny_model(kind, **changes.pop("model", {})), changes.pop("checkpoint", None))
    model = deepspeed_cad.apply(model, {**training.BLOCK, "documents": documents, **changes}).train()
    batches = rank_batches(ONE_EACH[rank], 10 * rank)
    derived = ()
    for batch, lengths in zip(batches, ONE_EACH[rank]):
        if more == "derived":
            derived = _derived(lengths).keys()
            batch |= _derived(lengths)
        elif more == "shift_labels":
            batch["shift_labels"] = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        elif more:
            batch[more] = batch["labels"].double()
    went_on, total = 0, torch.zeros(1, dtype=torch.float64)
    loader = deepspeed_cad.current_session().look_ahead(batches, model, accumulation=2, global_loss=True)
    deepspeed_cad.current_session().look_ahead([], model)  # of an evaluation, which states nothing
    for batch in loader:
        went_on += int(batch["position_ids"][0, 0] > 0)
        targets = batch.get("shift_labels", torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100))
        logits = model(**{name: batch[name] for name in ("input_ids", "position_ids", *derived)}).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        loss.backward()
        total += loss.detach()
    gradients = training.gradients(model)
    for summed in (total, *gradients.values()):
        dist.all_reduce(summed)
    said = "spans" in deepspeed_cad.current_session()._said
    return {"loss": float(total), "gradients": gradients, "went on": went_on, "said": said}


@pytest.mark.parametrize("kind, changes, more, cut", [
    ("llama", {}, "", True),
    ("llama", {"checkpoint": "non-reentrant"}, "shift_labels", True),
    ("llama", {"checkpoint": "reentrant", "keep": "host"}, "", True),
    ("mistral", {}, "", True),  # a window
    ("gpt_oss", {}, "", True),  # sinks
    ("llama", {}, "derived", True),
    ("llama", {}, "weight", False),
    ("llama", {"overlap": "interleave"}, "", False),
    ("llama", {"verify": 1}, "", False),
    pytest.param(  # state
        "qwen3_next", {"model": {"layer_types": ["linear_attention", "full_attention"]}}, "", False,
        marks=pytest.mark.long,
    ),
])  # fmt: skip
def test_documents_that_are_cut(workers: WorkerPool, kind: str, changes: dict[str, Any], more: str, cut: bool) -> None:
    if not known_kind(kind):
        pytest.skip(f"transformers {version('transformers')} has no {kind}")
    kept, dealt = (workers.run(_cut, 4, kind, documents, dict(changes), more) for documents in ("keep", "deal"))
    assert (sum(one["went on"] for one in dealt) > 2) == cut and not any(one["went on"] for one in kept)
    assert not any(one["said"] for one in (*kept, *dealt)), "data whose documents span ranks"
    most = 1e-5 if kind in ("gpt_oss", "qwen3_next") else 1e-10
    for old, new in zip(kept, dealt):
        assert new["loss"] == pytest.approx(old["loss"], rel=min(most, 1e-6))
        for name, gradient in old["gradients"].items():
            assert (new["gradients"][name] - gradient).abs().max() < most * (1 + gradient.abs().max()), name


def _another_deal(rank: int, world: int) -> None:
    with mock.patch.object(Dealt, "fingerprint", lambda self: rank):
        _cut(rank, world, "llama", "deal", {}, "")


def test_ranks_that_deal_documents_out_otherwise_all_stop(workers: WorkerPool) -> None:
    for error in workers.try_run(_another_deal, 4)[0]:
        assert error is not None and error[0] == "CADPeerError" and "another" in error[1], error


def _order(rank: int, world: int, spans: bool, documents: str) -> tuple[list[int], str]:
    """Tokens of the first document of each micro-batch, in the order in which they are trained; and the first line."""
    said: list[str] = []
    model = deepspeed_cad.apply(training.tiny_llama(), {**training.BLOCK, "documents": documents}).train()
    lengths = [[8, 8], [16], [4] * 4, [16], [8, 8], [4] * 4]
    batches = rank_batches(lengths if rank == 0 else lengths[::-1], 0)
    if spans and rank == 1:
        batches[0]["position_ids"] = torch.cat([torch.arange(8, 12), torch.arange(4), torch.arange(8)])[None]
    seen = []
    with mock.patch.object(session, "notice", said.append):
        for batch in deepspeed_cad.current_session().look_ahead(batches, model, accumulation=3):
            starts = torch.nonzero(batch["position_ids"][0, 1:] == 0)
            seen.append(int(starts[0]) + 1 if len(starts) else 16)
            training.loss_sum(model, batch).backward()
    return seen, "".join(said)


@pytest.mark.parametrize("spans, documents, orders, told", [
    (False, "keep", ([8, 16, 4, 16, 8, 4], [8, 16, 4, 16, 8, 4]), True),
    # Heavy ones of all ranks meet, in rank 0's order; not where documents span ranks.
    (True, "keep", ([8, 16, 4, 16, 8, 4], [4, 8, 16, 16, 8, 4]), False),
    # Nobody says what this loop's losses depend on.
    (False, "auto", ([8, 16, 4, 16, 8, 4], [4, 8, 16, 4, 16, 8]), False),
    (False, "in_order", ([8, 16, 4, 16, 8, 4], [4, 8, 16, 4, 16, 8]), False),
])  # fmt: skip
def test_order_inside_steps(workers: WorkerPool, spans: bool, documents: str, orders: Any, told: bool) -> None:
    (first, said), (second, nothing) = workers.run(_order, 2, spans, documents)
    assert (first, second) == orders and nothing == ""
    assert "CAD is on: 2 ranks" in said and said.startswith("documents span ranks") == spans
    assert ("compare losses of whole steps" in said) == told


def _feed(documents: str) -> Any:
    config = deepspeed_cad.CADConfig(documents=documents)
    return SimpleNamespace(replicas=2, shares=Shares.none(0, 2), config=config, deals=False, stays="")


@pytest.mark.parametrize("documents, unknown, wrong, deals", [
    ("auto", "", "", True), ("auto", "why", "", False), ("auto", "", "why", False), ("deal", "why", "", True),
    ("deal", "", "why", False), ("keep", "", "", False), ("in_order", "", "", False),
])  # fmt: skip
def test_when_documents_are_dealt_out(documents: str, unknown: str, wrong: str, deals: bool) -> None:
    settle(feed := _feed(documents), torch.nn.Linear(2, 2), unknown, wrong)
    assert feed.orders == (documents != "auto" or not unknown)
    assert feed.deals == deals and ("why" in feed.stays) == (not deals and documents in ("auto", "deal"))
    assert ('"documents": "deal"' in feed.stays) == (documents == "auto" and bool(unknown))
    for alone in ({"replicas": 1}, {"config": SimpleNamespace(documents=documents, look_ahead=0)}):
        settle(feed := SimpleNamespace(**vars(_feed(documents)) | alone), torch.nn.Linear(2, 2), unknown, wrong)
        assert not feed.deals and not feed.stays, "nobody asks where they could not move"


def test_documents_that_nobody_deals_out_for_want_of_a_loader_are_said_to_stay() -> None:
    said = SimpleNamespace(deals=True, read_ahead=False, arranged="", stays="")
    assert "until a loader is read ahead" in Feed.in_words.fget(said)  # type: ignore[attr-defined]
    StepAhead(said)  # type: ignore[arg-type]
    assert Feed.in_words.fget(said) == ""  # type: ignore[attr-defined]


BY_LAYERS = {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "dynamic"}, "factor": 2.0}


def test_a_router_loss_and_shared_micro_batches_stay() -> None:
    adapters = {"default": SimpleNamespace(), "a": SimpleNamespace(alora_invocation_tokens=[3])}
    for model, changes, words in (
        (torch.nn.Linear(2, 2), {"config": SimpleNamespace(output_router_logits=True)}, "output_router_logits"),
        (torch.nn.Linear(2, 2), {"config": SimpleNamespace(z_loss_coefficient=0.1)}, "z_loss_coefficient"),
        (torch.nn.Linear(2, 2), {"peft_config": adapters}, "alora_invocation_tokens"),
        (torch.nn.Linear(2, 2), {"config": SimpleNamespace(rope_parameters={"rope_type": "longrope"})}, '"longrope"'),
        (torch.nn.Linear(2, 2), {"config": SimpleNamespace(rope_scaling={"type": "dynamic"})}, '"dynamic"'),
        (torch.nn.Linear(2, 2), {"config": SimpleNamespace(rope_parameters=BY_LAYERS)}, '"dynamic"'),
        (torch.nn.Sequential(training.deepspeed_experts()), {}, "DeepSpeed's mixture of experts"),
    ):
        vars(model).update(changes)
        settle(feed := _feed("deal"), model)
        assert not feed.deals and words in feed.stays
    assert "router" in str(read_fields({"input_ids": torch.ones(1, 1), "output_router_logits": True}, None))  # type: ignore[arg-type]
    feed = _feed("auto")
    feed.shares = Shares.of([Replica((0, 1)), Replica((0, 1)), Replica((2, 3)), Replica((2, 3))], 0)
    settle(feed, torch.nn.Linear(2, 2))
    assert not feed.deals and "tensor parallelism" in feed.stays


@pytest.mark.parametrize("began, now, others, agreed, holds", [
    (None, (True, True), [3, 3], (True, True), False), (None, (True, True), [3, 2], (False, True), False),
    (None, (False, False), [0, 3], (False, False), False), ((True, True), (True, True), [], (True, True), False),
    ((True, True), (False, True), [], (True, True), True), ((False, True), (False, False), [], (False, True), True),
    # As "deal" has it: what is random does not matter.
    ((True, True), (True, False), [], (True, True), False), ((False, False), (False, True), [], (False, False), False),
])  # fmt: skip
def test_steps_are_arranged_as_all_may(capfd: Any, began: Any, now: Any, others: Any, agreed: Any, holds: Any) -> None:
    feed = _feed("auto")
    feed.rank, feed.number, feed.holds, (feed.deals, feed.orders) = 1, 0, False, now
    feed.stays = "" if now[0] else "why"
    feed.worker = SimpleNamespace(run=lambda ask: ask())
    feed.gatherer = SimpleNamespace(numbers=lambda mine, subject: others)
    assert settle_together(feed, began) == agreed == (feed.deals, feed.orders) and feed.holds == holds
    assert ("rank 1: why" in capfd.readouterr().err) == (feed.stays == "why" and (holds or 3 in others))
    assert ("another rank" in feed.stays) == (now[0] and not agreed[0])


def test_what_falls_on_tokens_at_random_is_found() -> None:
    def found(**given: Any) -> str:
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(given.pop("p", 0.0)))
        for name, value in given.items():
            setattr(model[0], name, value)
        settle(feed := _feed("keep"), model)
        assert feed.orders == (not find_random(model)), "in another order it would fall on other tokens, too"
        return find_random(model)

    assert found() == found(drop_last=True) == found(dropout=0.0) == found(rank_dropout={}) == ""
    assert found(rank_dropout={"default": 0.0}) == "" and "is 0.2" in found(rank_dropout={"a": 0.0, "b": 0.2})
    assert found(p=0.5).startswith("1.p is 0.5") and found(router_jitter_noise=0.01).startswith("0.router_jitter")


def _unmovable(rank: int, world: int, extra: Any, unpadded: bool = False) -> list[str]:
    """Rank 1's batches have another field, or all have, and no padding: all documents stay, and who sees it says so
    once."""
    said: list[str] = []
    logger = logging.getLogger("deepspeed_cad")
    with mock.patch.object(logger, "warning", lambda text, *given: said.append(text % given)):
        model = deepspeed_cad.apply(training.tiny_llama(), {**training.BLOCK, "documents": "deal"}).train()
        batches: list[Any] = rank_batches(LENGTHS[rank], 0) * 2
        if rank == 1 or unpadded:
            batches = [{**batch, "extra": extra or batch["labels"]} for batch in batches]
        if unpadded:
            rows = {"attention_mask": torch.ones, "position_ids": lambda *shape: None}
            batches = [batch | {name: of(*batch["labels"].shape) for name, of in rows.items()} for batch in batches]
        own = {id(batch["input_ids"]) for batch in batches}
        for batch in deepspeed_cad.current_session().look_ahead(batches, model, accumulation=2):
            assert (batch.pop("extra", None) is not None) == (rank == 1 or unpadded)
            assert id(batch["input_ids"]) in own
            training.loss_sum(model, batch).backward()
    return [line for line in said if "documents stay" in line]


def test_what_cannot_move_stays_and_is_told_once(workers: WorkerPool) -> None:
    said = workers.run(_unmovable, 3, [1, 2])
    assert said[0] == said[2] == [] and len(said[1]) == 1 and '"extra"' in said[1][0]
    for unpadded, words in ((False, "the fields of micro-batches differ between ranks"), (True, '"extra" is new')):
        assert all(len(one) == 1 and words in one[0] for one in workers.run(_unmovable, 3, None, unpadded))
