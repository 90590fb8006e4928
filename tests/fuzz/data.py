"""The documents and micro-batches of a case. Every rank can make every document of every other.

A micro-batch has fields for the oracle beside what the model is given (ORACLE), so that what is expected of it is known
wherever its documents are trained: `document` ([rows, tokens], -1 where padded); `place`, the row within the document,
and `reads`, the position that the model sees there; `shift_labels`, the next token of the same document.
"""

from __future__ import annotations

import random

import torch

import deepspeed_cad
from fuzz.case import FLAT, FORMS, Case, Form

ORACLE = {"document": -1, "place": 0, "reads": 0, "shift_labels": -100}
"""Fields that the model is not given, and what padding has there."""
STREAM = 9
"""In place of a rank, in numbers of documents that all ranks share."""
MOST = 500
"""Tokens of a micro-batch whose documents are several."""


def lengths(case: Case, rank: int, index: int) -> list[int]:
    """Tokens of each document of a micro-batch, before it is brought into form."""
    rng = random.Random(f"{case.seed} {rank} {index}")
    # A pipeline refuses micro-batches without a target.
    if rng.random() < 0.1 and rank != STREAM and not case.stages:
        return []
    count = rng.randint(1, case.documents) * (case.world if rank == STREAM else 1)
    kinds = [1, rng.randint(1, 8), rng.randint(1, 40), case.longest]
    found = [rng.randint(1, min(rng.choice(kinds), case.longest)) for _ in range(count)]
    if rng.random() < 0.5 or case.stages and max(found) == 1:
        found[rng.randrange(count)] = case.longest
    while sum(found) > MOST and len(found) > 1:
        found.remove(min(found))
    return found


def form_of(case: Case, rank: int, index: int) -> Form:
    shared = random.Random(f"{case.seed} form {index}").choice(case.forms)
    others = [form for form in case.forms if form != "stream"]
    own = shared if shared == "stream" else random.Random(f"{case.seed} form {rank} {index}").choice(others)
    return FORMS[own]


def document(case: Case, number: int) -> torch.Tensor:
    (rank, index), place = divmod(number // 1000, 1000), number % 1000
    length = lengths(case, rank, index)[place]
    return torch.randint(3, 96, (length,), generator=torch.Generator().manual_seed(case.seed * 7919 + number))


def micro_batch(case: Case, rank: int, index: int) -> dict[str, torch.Tensor]:
    """A micro-batch of a rank's loader, as the model and the oracle read it."""
    form = form_of(case, rank, index)
    home = STREAM if form.shape == "stream" else rank
    numbers = [(home * 1000 + index) * 1000 + place for place in range(len(lengths(case, home, index)))]
    if form.shape == "stream":
        stream = _rows(case, [numbers])
        stream["labels"] = stream.pop("shift_labels") * 0 + stream["input_ids"]
        zigzag = random.Random(f"{case.seed} zigzag {index}").random() < 0.3
        part = deepspeed_cad.shard_stream(stream, rank, case.world, zigzag=zigzag)
        del part["labels"]
        return part
    rng = random.Random(f"{case.seed} rows {rank} {index}")
    if form.shape == "row" or not numbers:
        rows, extra = [numbers], 0
    elif form.shape == "rows":
        cuts = sorted(rng.sample(range(1, len(numbers)), min(rng.randint(0, 2), len(numbers) - 1)))
        rows = [numbers[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(numbers)])]
        extra = rng.randint(0, 3)
    else:
        rows, extra = [[number] for number in numbers], rng.choice([0, 0, 2])
    batch = _rows(case, rows, extra, padding=form.shape)
    return _in_form(batch, form, case.dtype) if numbers else batch


def _rows(case: Case, rows: list[list[int]], extra: int = 0, padding: str = "") -> dict[str, torch.Tensor]:
    """Rows of documents, padded to the longest row and `extra` tokens more; on the left where `padding` is "left"."""
    columns = [[_columns(case, number) for number in row] for row in rows]
    width = max(sum(len(part["document"]) for part in row) for row in columns) + extra if any(rows) else 0
    batch: dict[str, torch.Tensor] = {}
    for name, empty in {"input_ids": 0, "position_ids": 0, **ORACLE}.items():
        lines = []
        for row in columns:
            line = torch.cat([torch.zeros(0, dtype=torch.long), *(part[name] for part in row)])
            filler = torch.full((width - len(line),), empty)
            lines.append(torch.cat([filler, line] if padding == "left" else [line, filler]))
        batch[name] = torch.stack(lines)
    return batch


def _columns(case: Case, number: int) -> dict[str, torch.Tensor]:
    ids = document(case, number)
    places = torch.arange(len(ids))
    return {
        "input_ids": ids, "position_ids": places, "place": places, "reads": places,
        "shift_labels": torch.cat([ids[1:], torch.tensor([-100])]), "document": torch.full_like(ids, number),
    }  # fmt: skip


def _in_form(batch: dict[str, torch.Tensor], form: Form, dtype: str) -> dict[str, torch.Tensor]:
    documents = batch["document"]
    taken = documents >= 0
    if form.positions != "again":
        batch["reads"] = torch.arange(documents.shape[1]).expand_as(documents).contiguous()
        batch["position_ids"] = batch["reads"].clone()
    if form.positions == "none":
        del batch["position_ids"]
    if form.lengths:
        counts = documents[0].unique_consecutive(return_counts=True)[1]
        ends = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)]).to(torch.int32)
        longest = int(counts.max())
        batch |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
    numbered = torch.stack([row.unique_consecutive(return_inverse=True)[1] for row in documents]) + 1
    # Where a row begins with padding, its documents begin at 2.
    numbered = (numbered - (documents[:, :1] < 0).long()) * taken
    if form.mask == "numbers":
        batch["attention_mask"] = numbered
    elif form.mask in ("blocks", "bias"):
        same = (numbered[:, :, None] == numbered[:, None, :]) & taken[:, None, :]
        sees = (same & torch.ones_like(same[0]).tril())[:, None]
        zeros = torch.zeros(sees.shape, dtype=torch.float64 if dtype == "fp64" else torch.float32)
        bias = zeros.masked_fill(~sees, torch.finfo(zeros.dtype).min)
        batch["attention_mask"] = sees if form.mask == "blocks" else bias
    elif form.mask == "ones" or form.shape in ("rows", *FLAT):
        batch["attention_mask"] = taken.long()
    return batch
