"""Exchange of documents before a step: every per-token field moves along, losses and gradients stay what they were."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import training
from pool import WorkerError, WorkerPool
from trainers import assert_same, collate, losses_of

import deepspeed_cad
from deepspeed_cad.ahead.assign import Assignment, StepDocuments
from deepspeed_cad.ahead.documents import read_documents
from deepspeed_cad.ahead.gather import Gatherer
from deepspeed_cad.ahead.move_documents import Fields, exchange_documents, read_fields
from deepspeed_cad.errors import CADConfigError, CADUnsupportedError
from deepspeed_cad.notice import notice

BLOCK = {"granularity": 16, "tolerance": 0.02, "links": training.LINKS}
SHORT = [13, 27, 8, 31, 19, 22, 11, 29]
"""160 tokens."""
LENGTHS = [[[160], [80, 80]], [SHORT, [20, 60, 5, 75]], [SHORT[::-1], SHORT]]
"""[rank][micro-batch]: documents; every row has 160 tokens."""


def _rank_batches(lengths: list[list[int]], seed: int) -> list[dict[str, torch.Tensor]]:
    return [training.pack(training.documents(row, seed + i)) for i, row in enumerate(lengths)]


# What travels


def _rich(lengths: list[int], seed: int) -> dict[str, Any]:
    """A micro-batch with every kind of field; `name` tells each document, and its place, from all others."""
    batch: dict[str, Any] = training.pack(training.documents(lengths, seed))
    tokens = sum(lengths)
    batch["name"] = torch.arange(tokens)[None] + 1000 * seed
    batch["weight"] = batch["name"][..., None].to(torch.float64) * torch.tensor([1.0, 0.5])
    batch["mask"] = batch["name"] % 3 == 0
    ends = np.r_[0, np.cumsum(lengths)]
    batch["cu_seq_lens_q"] = batch["cu_seq_lens_k"] = torch.from_numpy(ends).to(torch.int32)
    batch["max_length_q"], batch["max_length_k"] = max(lengths, default=0), torch.tensor(max(lengths, default=0))
    batch["seq_idx"] = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))[None].to(torch.int32)
    batch["attention_mask"] = batch["seq_idx"].long() + 1
    batch["nothing"], batch["flag"] = None, True
    return batch


def _shuffle(rank: int, world: int, lengths: list[list[list[int]]], seed: int) -> None:
    """A random assignment on every rank; each compares its rows with what it should have got."""
    step = _step_of(lengths)
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, step.tokens.size, len(step.rank))
    if seed == 0:
        rows = step.rank * step.micro_batches + step.micro_batch
    source = np.full(step.tokens.shape, -1)
    if seed == 0:
        source[:] = np.arange(step.micro_batches)
    place = np.zeros_like(rows)
    for row in range(step.tokens.size):
        place[rows == row] = rng.permutation(int((rows == row).sum())) if seed else np.arange(int((rows == row).sum()))
    assignment = Assignment(
        rows // step.micro_batches, rows % step.micro_batches, place, source, 1.0, 1.0, 0
    )  # fmt: skip
    batches = [[_rich(row, 10 * r + m + 1) for m, row in enumerate(of)] for r, of in enumerate(lengths)]
    fields = read_fields(batches[rank][0], read_documents(batches[rank][0]))
    assert isinstance(fields, Fields)
    group = dist.new_group(backend="gloo")
    moved = exchange_documents(batches[rank], fields, step, assignment, Gatherer(group, rank, world, None))
    names = np.concatenate([batch["name"][0].numpy() for of in batches for batch in of])
    pieces = np.split(names, np.cumsum(step.length)[:-1])
    for micro_batch, one in enumerate(moved):
        batch = one.on_device()
        if seed == 0:
            assert batch is batches[rank][micro_batch]
            continue
        here = np.flatnonzero((assignment.rank == rank) & (assignment.micro_batch == micro_batch))
        here = here[np.argsort(place[here])]
        own = step.length[here]
        expected = np.concatenate([pieces[i] for i in here]) if len(here) else names[:0]
        assert batch["name"][0].tolist() == expected.tolist()
        assert torch.equal(batch["weight"][0, :, 0], batch["name"][0].double()) and batch["weight"].shape[2] == 2
        assert torch.equal(batch["mask"], batch["name"] % 3 == 0) and batch["mask"].dtype == torch.bool
        assert batch["position_ids"][0].tolist() == [i for n in own for i in range(n)]
        assert batch["cu_seq_lens_q"].tolist() == np.r_[0, np.cumsum(own)].tolist()
        assert batch["cu_seq_lens_k"].dtype == torch.int32
        assert batch["max_length_q"] == int(batch["max_length_k"]) == own.max(initial=0)
        assert batch["seq_idx"][0].tolist() == np.repeat(np.arange(len(own)), own).tolist()
        assert batch["attention_mask"].tolist() == [[1] * own.sum()]
        assert batch["nothing"] is None and batch["flag"] is True
        local = read_documents(batch).local
        assert (local.end - local.begin).tolist() == own.tolist()


def _step_of(lengths: list[list[list[int]]]) -> StepDocuments:
    flat = np.array([(r, m, n) for r, of in enumerate(lengths) for m, row in enumerate(of) for n in row], np.int64)
    tokens = np.array([[sum(row) for row in of] for of in lengths])
    return StepDocuments(flat[:, 0], flat[:, 1], flat[:, 2] * 0, flat[:, 2], tokens, tokens < 0)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_field_travels(workers: WorkerPool, seed: int) -> None:
    workers.run(_shuffle, 3, LENGTHS, seed)


def _reason(**changes: Any) -> str:
    batch = {**training.pack(training.documents([20, 12], 0)), **changes}
    batch = {name: value for name, value in batch.items() if value is not ...}
    found = read_fields(batch, read_documents(batch))
    return found if isinstance(found, str) else ""


def test_what_cannot_travel_is_named() -> None:
    assert _reason() == ""
    assert _reason(attention_mask=torch.ones(1, 32)) == ""
    assert _reason(attention_mask=torch.tensor([[1] * 20 + [2] * 12])) == ""
    assert "position_ids" in _reason(position_ids=...)
    lengths = {"cu_seq_lens_q": torch.tensor([0, 20, 32])}
    assert "position_ids do not start again" in _reason(position_ids=torch.arange(32)[None], **lengths)
    numbers = torch.tensor([[1] * 20 + [2] * 12])
    assert '"attention_mask" of shape (1, 1, 32, 32)' in _reason(
        attention_mask=(numbers[:, None, None] == numbers[:, None, :, None]).tril()
    )
    assert "padding" in _reason(attention_mask=torch.tensor([[1] * 30 + [0] * 2]))
    assert '"pixels" of shape (2, 5)' in _reason(pixels=torch.zeros(2, 5))
    assert '"lengths" (list)' in _reason(lengths=[20, 12])
    assert "target of the document before" in _reason(labels=torch.ones(1, 32, dtype=torch.long))
    assert _reason(labels=torch.ones(1, 32), shift_labels=torch.ones(1, 32)) == ""
    rows = torch.zeros(2, 16, dtype=torch.long)
    assert "one packed row" in _reason(input_ids=rows, position_ids=torch.arange(16).expand(2, 16), labels=...)


# Losses and gradients


def _train(rank: int, world: int, block: dict[str, Any], accumulation: int) -> dict[str, Any]:
    """Gradients of two steps, summed over ranks, in a loop of its own."""
    model = deepspeed_cad.apply(training.tiny_llama(), {**BLOCK, **block})
    model.train()
    session = deepspeed_cad.current_session()
    batches = [b for s in range(2) for b in _rank_batches(LENGTHS[(rank + s) % 3], 100 * s + 10 * ((rank + s) % 3))]
    loader = session.look_ahead(batches, model, accumulation=accumulation, global_loss=True)
    assert len(loader) == 4
    found = training.sums_of_all_ranks(loader, model, 2)
    figures = session.statistics
    return found | {"before": figures.imbalance_before, "after": figures.imbalance, "bytes": figures.bytes_sent}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_losses_and_gradients_of_a_loop(workers: WorkerPool, accumulation: int) -> None:
    """The same sums, better balanced before attention moves, and less of it moved."""
    kept = workers.run(_train, 3, {"documents": "keep"}, accumulation)
    exchanged = workers.run(_train, 3, {"documents": "exchange"}, accumulation)
    for before, after in zip(kept, exchanged):
        assert after["losses"] == pytest.approx(before["losses"], rel=1e-10)
        for name, gradient in before["gradients"].items():
            assert np.abs(after["gradients"][name] - gradient).max() < 1e-9, name
        assert set(after["rows"]) == {(1, 160)}
        if accumulation == 2:
            assert after["before"] < before["before"] - 0.1 and after["after"] < 1.05
    assert accumulation == 1 or sum(one["bytes"] for one in exchanged) < sum(one["bytes"] for one in kept)


def _order(rank: int, world: int, spans: bool, documents: str) -> tuple[list[int], str]:
    """Tokens of the first document of each micro-batch, in the order in which they are trained; and the first line."""
    from deepspeed_cad import session

    said: list[str] = []
    session.notice = said.append
    model = deepspeed_cad.apply(training.tiny_llama(), {**BLOCK, "documents": documents})
    model.train()
    lengths = [[8, 8], [16], [4] * 4, [16], [8, 8], [4] * 4]
    batches = _rank_batches(lengths if rank == 0 else lengths[::-1], 0)
    if spans and rank == 1:
        batches[0]["position_ids"] = torch.cat([torch.arange(8, 12), torch.arange(4), torch.arange(8)])[None]
    seen = []
    for batch in deepspeed_cad.current_session().look_ahead(batches, model, accumulation=3):
        starts = torch.nonzero(batch["position_ids"][0, 1:] == 0)
        seen.append(int(starts[0]) + 1 if len(starts) else 16)
        training.loss_sum(model, batch).backward()
    session.notice = notice
    return seen, "".join(said)


@pytest.mark.parametrize(
    ("spans", "documents", "rank_0", "rank_1", "told"),
    [
        (False, "keep", [8, 16, 4, 16, 8, 4], [8, 16, 4, 16, 8, 4], True),
        # Heavy ones of all ranks meet, in rank 0's order; not where documents span ranks.
        (True, "keep", [8, 16, 4, 16, 8, 4], [4, 8, 16, 16, 8, 4], False),
        (False, "in_order", [8, 16, 4, 16, 8, 4], [4, 8, 16, 4, 16, 8], False),
    ],
)
def test_order_inside_steps(
    workers: WorkerPool, spans: bool, documents: str, rank_0: list[int], rank_1: list[int], told: bool
) -> None:
    (first, said), (second, nothing) = workers.run(_order, 2, spans, documents)
    assert (first, second, nothing) == (rank_0, rank_1, "")
    assert said.startswith("CAD is on: 2 ranks") and ("compare losses of whole steps" in said) == told


# Trainer


class _Rows(torch.utils.data.Dataset):
    """Packed rows of 160 tokens, long and short documents in turn."""

    def __len__(self) -> int:
        return 14

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        row = [[160], SHORT, [20, 60, 5, 75]][index % 3]
        return {name: value[0] for name, value in training.pack(training.documents(row, index)).items()}


def _trainer(cad: dict[str, Any] | None, folder: str, **changes: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    model = training.tiny_llama(torch.float32, attn_implementation="sdpa", use_cache=False)
    if cad is not None:
        deepspeed_cad.apply(model, cad)
    settings: dict[str, Any] = {
        "output_dir": folder, "use_cpu": True, "num_train_epochs": 2, "per_device_train_batch_size": 1,
        "logging_steps": 1, "save_strategy": "no", "report_to": [], "learning_rate": 1e-2, "disable_tqdm": True,
        "lr_scheduler_type": "constant", "optim": "adamw_torch", "gradient_accumulation_steps": 2,
        "average_tokens_across_devices": True,
    }  # fmt: skip
    arguments = TrainingArguments(**{**settings, **changes})
    return Trainer(model=model, args=arguments, train_dataset=_Rows(), data_collator=collate)


def _trainers(rank: int, world: int, folder: str, deepspeed_stage: int | None) -> dict[str, Any]:
    from accelerate.state import AcceleratorState

    from deepspeed_cad.session import close_session

    found: dict[str, Any] = {}
    for name in ("plain", "keep", "in_order", "exchange"):
        block = None if name == "plain" else {**BLOCK, "documents": name}
        AcceleratorState._reset_state(True)
        if deepspeed_stage is None:
            trainer = _trainer(block, folder)
        else:
            import deepspeed

            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
            deepspeed_cad.install()
            config: dict[str, Any] = {
                "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
                "gradient_clipping": "auto", "zero_optimization": {"stage": deepspeed_stage},
                "zero_allow_untested_optimizer": True,
            }  # fmt: skip
            trainer = _trainer(None, folder, deepspeed=config if block is None else {**config, "cad": block})
        trainer.train()
        found[name] = trainer.state.log_history
        close_session()
    if deepspeed_stage is not None:
        return found
    for name, changes, cad in (
        ("average", {"average_tokens_across_devices": False}, {"documents": "exchange"}),
        ("smoothing", {"label_smoothing_factor": 0.1}, {"documents": "exchange"}),
    ):
        with pytest.raises(CADUnsupportedError, match="documents") as error:
            _trainer({**BLOCK, **cad}, folder, **changes).train()
        found[name] = str(error.value)
        close_session()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("stage", [None, pytest.param(2, marks=pytest.mark.long)])
def test_trainer(fresh_workers: WorkerPool, tmp_path, stage: int | None) -> None:
    """Losses of every step as without CAD; a rest of an epoch, too; refused where the loss is not global."""
    for found in fresh_workers.run(_trainers, 2, str(tmp_path), stage, timeout=140.0):
        plain = losses_of(found["plain"])
        assert len(plain) == 8
        for name in ("keep", "in_order", "exchange"):
            assert_same(losses_of(found[name]), plain)
        before = {
            name: np.mean([e["cad/attention_max_over_mean_before"] for e in found[name] if "loss" in e])
            for name in ("keep", "exchange")
        }
        sent = {name: sum(e["cad/sent_MiB"] for e in found[name] if "loss" in e) for name in ("keep", "exchange")}
        assert before["exchange"] < before["keep"] - 0.05 and sent["exchange"] < sent["keep"], (before, sent)
        if stage is not None:
            continue
        assert "average_tokens_across_devices" in found["average"]
        assert "label_smoothing_factor" in found["smoothing"]


# DeepSpeed

ROWS = [[[160], [80, 80], SHORT], [SHORT, SHORT[::-1], [100, 60]]]
"""[rank][micro-batch]."""


def _engine(rank: int, world: int) -> dict[str, Any]:
    """A raw loop over two epochs of three micro-batches, two per step: steps go on from one epoch into the next."""
    import deepspeed

    from deepspeed_cad.session import close_session

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed_cad.install()
    found: dict[str, Any] = {}
    for name in ("keep", "in_order", "own loader", "exchange"):
        model = training.tiny_llama(torch.float32)
        batches = _rank_batches(ROWS[rank], 10 * rank)
        config = {
            "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2, "zero_optimization": {"stage": 1},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "cad": {**BLOCK, "documents": "keep" if name == "own loader" else name},
        }  # fmt: skip
        given: dict[str, Any] = {}
        if name == "own loader":
            data = [one for other in ROWS for i, row in enumerate(other) for one in _rank_batches([row], i)]
            given = {"training_data": [{name: value[0] for name, value in one.items()} for one in data]}
        engine, _, loader, _ = deepspeed.initialize(model=model, config=config, **given)
        if name != "own loader":
            loader = deepspeed_cad.current_session().look_ahead(batches, engine, global_loss=True)
        steps: list[list[float]] = [[]]
        for _ in range(2):
            for batch in loader:
                loss = training.loss_sum(engine, batch) / 250
                engine.backward(loss)
                steps[-1].append(float(loss.detach()))
                if engine.is_gradient_accumulation_boundary():
                    steps.append([])
                engine.step()
        total = torch.tensor([sum(one) for one in steps if one])
        dist.all_reduce(total)
        found[name] = {
            "own": [loss for one in steps for loss in one], "losses": total.tolist(), "kind": type(loader).__name__,
            "before": deepspeed_cad.current_session().statistics.imbalance_before,
        }  # fmt: skip
        engine.destroy()
        close_session()
    return found


@pytest.mark.slow
def test_engine(fresh_workers: WorkerPool) -> None:
    ranks = fresh_workers.run(_engine, 2, timeout=140.0)
    for rank, found in enumerate(ranks):
        same = found["keep"]["own"] == pytest.approx(found["in_order"]["own"], rel=1e-5)
        assert same == (rank == 0), "losses of micro-batches come in the loader's order on rank 0, and with in_order"
        assert found["in_order"]["losses"] == pytest.approx(found["keep"]["losses"], rel=1e-5)
        assert len(found["keep"]["losses"]) == 3 and len(found["own loader"]["losses"]) == 3
        assert found["exchange"]["losses"] == pytest.approx(found["keep"]["losses"], rel=1e-5)
        assert found["exchange"]["before"] < found["keep"]["before"] - 0.1
        assert found["own loader"]["kind"] == "LookAheadLoader"


# Accelerate


# Errors


def _bad_batch(rank: int, world: int) -> None:
    model = deepspeed_cad.apply(training.tiny_llama(), {**BLOCK, "documents": "exchange"})
    model.train()
    batches = _rank_batches(LENGTHS[rank], 0) * 2
    if rank == 1:
        batches[3] = {**batches[3], "position_ids": batches[3]["position_ids"] + 5}
        batches[3]["position_ids"][0, 30] = -3
    for batch in deepspeed_cad.current_session().look_ahead(batches, model, accumulation=2, global_loss=True):
        training.loss_sum(model, batch).backward()


def test_a_bad_batch_of_the_next_step_is_named_everywhere(workers: WorkerPool) -> None:
    with pytest.raises(WorkerError) as error:
        workers.run(_bad_batch, 2, timeout=30.0)
    for name, message, _ in error.value.errors:
        assert name == "CADDataError" and "position_ids[0, 30]" in message


# Refusals


def _unstated(rank: int, world: int, how: str) -> None:
    model = deepspeed_cad.apply(training.tiny_llama(), {**BLOCK, "documents": "exchange"})
    model.train()
    batches = _rank_batches(LENGTHS[rank], 0)
    if how == "loop":
        training.loss_sum(model, batches[0])
    deepspeed_cad.current_session().look_ahead(batches, model)


@pytest.mark.parametrize("how", ["loop", "loader"])
def test_a_loop_that_does_not_state_its_loss_is_refused(workers: WorkerPool, how: str) -> None:
    with pytest.raises(WorkerError) as error:
        workers.run(_unstated, 2, how)
    for name, message, _ in error.value.errors:
        assert name == "CADConfigError" and '"documents"' in message and "global_loss=True" in message


def test_config_needs_look_ahead() -> None:
    deepspeed_cad.CADConfig.from_dict({"documents": "exchange"})
    with pytest.raises(CADConfigError, match="look_ahead"):
        deepspeed_cad.CADConfig.from_dict({"documents": "exchange", "look_ahead": 0})


def test_a_router_loss_is_refused() -> None:
    from deepspeed_cad.ahead.step import allow_exchange

    model = torch.nn.Linear(2, 2)
    model.config = SimpleNamespace(output_router_logits=True)
    with pytest.raises(CADUnsupportedError, match="output_router_logits"):
        allow_exchange(SimpleNamespace(exchanges=False), model)


def test_a_trainer_with_a_loss_of_its_own_is_refused() -> None:
    from deepspeed_cad.integrations.trainer import refuse_loss
    from transformers import Trainer

    class Own(Trainer):
        def __init__(self) -> None:
            self.args = SimpleNamespace(average_tokens_across_devices=True, label_smoothing_factor=0.0)

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return None

    with pytest.raises(CADUnsupportedError, match="Own computes a loss of its own"):
        refuse_loss(Own(), torch.tensor(3))
    with pytest.raises(CADUnsupportedError, match="num_items_in_batch"):
        refuse_loss(Own(), None)


def _unmovable(rank: int, world: int) -> list[str]:
    """Rank 1's batches cannot be moved: nothing is exchanged with it, and it says so once."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("deepspeed_cad").addHandler(handler)
    try:
        model = deepspeed_cad.apply(training.tiny_llama(), {**BLOCK, "documents": "exchange"})
        model.train()
        batches: list[Any] = _rank_batches(LENGTHS[rank], 0) * 2
        if rank == 1:
            batches = [{**batch, "extra": [1, 2]} for batch in batches]
        own = {id(batch["input_ids"]) for batch in batches}
        for batch in deepspeed_cad.current_session().look_ahead(batches, model, accumulation=2, global_loss=True):
            extra = batch.pop("extra", None)
            assert (extra is not None) == (rank == 1)
            assert rank != 1 or id(batch["input_ids"]) in own
            training.loss_sum(model, batch).backward()
    finally:
        logging.getLogger("deepspeed_cad").removeHandler(handler)
    return [line for line in said if "not exchanged" in line]


def test_what_cannot_move_stays_and_is_told_once(workers: WorkerPool) -> None:
    said = workers.run(_unmovable, 3)
    assert said[0] == said[2] == [] and len(said[1]) == 1 and '"extra"' in said[1][0]


def test_the_end_of_an_accelerate_loader_stays_where_it_is() -> None:
    """Accelerate synchronises gradients at the last batch: reading ahead must not make it come early."""
    from accelerate import Accelerator

    from deepspeed_cad.ahead.loader import LookAheadLoader

    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare_data_loader(torch.utils.data.DataLoader(range(5)))
    feed: Any = SimpleNamespace(ranks=1, exchanges=False, begin_epoch=lambda: None, end=lambda: None)
    ahead = LookAheadLoader(loader, feed, 2)
    for _ in range(2):
        seen = [(int(batch), accelerator.gradient_state.end_of_dataloader) for batch in ahead]
        assert seen == [(i, i == 4) for i in range(5)]
        assert not accelerator.gradient_state.in_dataloader


# Rows that stay beside rows that move


def _padded_beside_packed(rank: int, world: int, positions: bool) -> float:
    """Steps of a padded micro-batch and a packed one: only documents of the packed ones change ranks."""
    model, reference = deepspeed_cad.apply(training.tiny_llama(), {**BLOCK, "documents": "exchange"}), None
    session = deepspeed_cad.current_session()
    docs = [
        training.documents([80, 80] if rank == 0 else SHORT, seed=rank),
        training.documents([20, 12], seed=5 + rank),
    ]
    ids = torch.nn.utils.rnn.pad_sequence(docs[1], batch_first=True)
    padded = {"input_ids": ids, "attention_mask": torch.tensor([[1] * 20, [1] * 12 + [0] * 8])}
    padded["labels"] = ids.masked_fill(padded["attention_mask"] == 0, -100)
    if positions:
        padded["position_ids"] = torch.arange(20).expand(2, 20)
    loader = session.look_ahead([padded, training.pack(docs[0])], model.train(), accumulation=2, global_loss=True)
    total = torch.zeros((), dtype=torch.float64)
    for batch in loader:
        loss = training.loss_sum(model, batch)
        loss.backward()
        total += loss.detach()
    dist.all_reduce(total)
    assert loader._steps.last.tokens_moved > 0
    reference = training.tiny_llama()
    expected = torch.tensor(training.alone(reference, docs[0] + docs[1])[0], dtype=torch.float64)
    dist.all_reduce(expected)
    return abs(float(total - expected))


@pytest.mark.parametrize("positions", [True, False])
def test_rows_that_stay_lend_no_fields_to_rows_that_move(workers: WorkerPool, positions: bool) -> None:
    """A mask of a padded micro-batch does not get into a row that is built of packed documents."""
    assert max(workers.run(_padded_beside_packed, 2, positions)) < 1e-8
