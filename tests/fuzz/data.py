"""The documents and micro-batches of a case. Every rank can make every document of every other.

A micro-batch has a field `document` ([rows, tokens], -1 where padded) beside what the model is given, so that what is
expected of it is known wherever its documents are trained, and `shift_labels`: the next token of the same document.
"""

from __future__ import annotations

import random

import torch

import deepspeed_cad
from fuzz.case import Case

STREAM = 9
"""In place of a rank, in numbers of documents that all ranks share."""
IGNORED = -100
MOST = 500
"""Tokens of a micro-batch whose documents are several."""


def lengths(case: Case, rank: int, index: int) -> list[int]:
    """Tokens of each document of a micro-batch, before it is brought into form."""
    rng = random.Random(f"{case.seed} {rank} {index}")
    if rng.random() < 0.1 and rank != STREAM:
        return []
    count = rng.randint(1, case.documents) * (case.world if rank == STREAM else 1)
    kinds = [1, rng.randint(1, 8), rng.randint(1, 40), case.longest]
    found = [rng.randint(1, min(rng.choice(kinds), case.longest)) for _ in range(count)]
    if rng.random() < 0.5:
        found[rng.randrange(count)] = case.longest
    while sum(found) > MOST and len(found) > 1:
        found.pop()
    return found


def form_of(case: Case, rank: int, index: int) -> str:
    """How a micro-batch is given. A stream is one on every rank."""
    shared = random.Random(f"{case.seed} form {index}").choice(case.forms)
    others = [form for form in case.forms if form != "stream"]
    return shared if shared == "stream" else random.Random(f"{case.seed} form {rank} {index}").choice(others)


def number_of(rank: int, index: int, place: int) -> int:
    """A document's name."""
    return (rank * 1000 + index) * 1000 + place


def document(case: Case, number: int) -> torch.Tensor:
    """Token ids of a document."""
    (rank, index), place = divmod(number // 1000, 1000), number % 1000
    length = lengths(case, rank, index)[place]
    generator = torch.Generator().manual_seed(case.seed * 7919 + number)
    return torch.randint(3, 96, (length,), generator=generator)


def micro_batch(case: Case, rank: int, index: int) -> dict[str, torch.Tensor]:
    """A micro-batch of a rank's loader, as the model and the oracle read it."""
    form = form_of(case, rank, index)
    home = STREAM if form == "stream" else rank
    numbers = [number_of(home, index, place) for place in range(len(lengths(case, home, index)))]
    if form == "stream":
        stream = _rows(case, [numbers])
        stream["labels"] = stream.pop("shift_labels") * 0 + stream["input_ids"]
        part = deepspeed_cad.shard_stream(stream, rank, case.world)
        del part["labels"]
        return part
    if form in ("left", "right") and numbers:
        return _rows(case, [[number] for number in numbers], padding=form)
    if form == "rows" and len(numbers) > 1:
        middle = len(numbers) // 2
        return _rows(case, [numbers[:middle], numbers[middle:]], padding="right")
    batch = _rows(case, [numbers])
    if form == "cumulative" and numbers:
        ends = torch.tensor([0, *lengths(case, home, index)]).cumsum(0).to(torch.int32)
        batch |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    return batch


def _rows(case: Case, rows: list[list[int]], padding: str = "") -> dict[str, torch.Tensor]:
    """Rows of documents; with padding, to the longest row, and a mask."""
    fields: dict[str, list[list[torch.Tensor]]] = {
        name: [] for name in ("input_ids", "position_ids", "shift_labels", "document")
    }
    for row in rows:
        columns = [_columns(case, number) for number in row]
        for name in fields:
            fields[name].append([column[name] for column in columns])
    width = max((sum(len(part) for part in row) for row in fields["input_ids"]), default=0)
    empty = {"input_ids": 0, "position_ids": 0, "shift_labels": IGNORED, "document": -1}
    batch: dict[str, torch.Tensor] = {}
    for name, of in fields.items():
        lines = []
        for parts in of:
            line = torch.cat([torch.zeros(0, dtype=torch.long), *parts])
            filler = torch.full((width - len(line),), empty[name])
            lines.append(torch.cat([filler, line] if padding == "left" else [line, filler]))
        batch[name] = torch.stack(lines)
    if padding:
        batch["attention_mask"] = (batch["document"] >= 0).long()
    return batch


def _columns(case: Case, number: int) -> dict[str, torch.Tensor]:
    ids = document(case, number)
    return {
        "input_ids": ids,
        "position_ids": torch.arange(len(ids)),
        "shift_labels": torch.cat([ids[1:], torch.tensor([IGNORED])]),
        "document": torch.full_like(ids, number),
    }
