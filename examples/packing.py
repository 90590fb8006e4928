"""Packed micro-batches: documents of any length laid end to end in rows of a fixed number of tokens.

In: text files, or a distribution of lengths. Out: rows as Hugging Face models take them, with `position_ids` that start
again at 0 where a document starts. No padding: a document is truncated to the length of a row, and where it does not
fit any more it is cut at the end of the row and what is left is a document of its own in the next.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

TEXT = {".py", ".pyi", ".c", ".h", ".cpp", ".rs", ".go", ".java", ".js", ".ts", ".md", ".rst", ".txt", ".tex", ".jsonl"}
"""Files that are taken from a folder; files that are named are always taken."""


class Rows(Dataset):
    """Packed rows as a data set of `deepspeed.initialize(training_data=…)`."""

    def __init__(self, rows: list[dict[str, torch.Tensor]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.rows[index]


def only_row(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Collate function for micro-batches of one packed row."""
    if len(rows) != 1:
        raise ValueError(f'{len(rows)} rows in a micro-batch; packed rows need "train_micro_batch_size_per_gpu": 1')
    return rows[0]


def list_files(places: Iterable[str | Path], seed: int = 0) -> list[Path]:
    """Every text file of the folders and files named, in an order that depends on `seed` alone."""
    found: list[Path] = []
    for place in map(Path, places):
        if place.is_dir():
            inside = (path for path in place.rglob("*") if path.suffix in TEXT and "site-packages" not in path.parts)
            found += sorted(path for path in inside if path.is_file())
        elif place.is_file():
            found.append(place)
        else:
            raise FileNotFoundError(f"{place} is neither a file nor a folder")
    random.Random(seed).shuffle(found)
    return found


def read_texts(files: Iterable[Path]) -> Iterator[str]:
    """One document per file; one per line of a .jsonl file with a "text" field."""
    for path in files:
        if path.suffix == ".jsonl":
            with open(path, encoding="utf-8") as lines:
                yield from (json.loads(line)["text"] for line in lines if line.strip())
        elif text := path.read_text(encoding="utf-8", errors="ignore"):
            yield text


def tokenized(places: Iterable[str | Path], tokenizer: Any, seed: int = 0) -> Iterator[list[int]]:
    """Token ids of every document, again from the start when all are read."""
    files = list_files(places, seed)
    while True:
        some = False
        for text in read_texts(files):
            ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            some = some or bool(ids)
            if ids:
                yield ids
        if not some:
            raise ValueError(f"no text in {', '.join(map(str, places))} ({len(files)} files)")


def synthetic(median: int, sigma: float, vocabulary: int, seed: int = 0) -> Iterator[list[int]]:
    """Random documents with log-normal lengths: most are short, a few are many times as long."""
    lengths = random.Random(seed)
    ids = torch.Generator().manual_seed(seed)
    while True:
        length = max(1, round(median * lengths.lognormvariate(0.0, sigma)))
        yield torch.randint(0, vocabulary, (length,), generator=ids).tolist()


def pack(documents: Iterator[list[int]], tokens: int, rows: int) -> list[dict[str, torch.Tensor]]:
    """`rows` rows of exactly `tokens` tokens each: input_ids, position_ids and labels, all [1, tokens].

    The first token of a document is nobody's target, so its label is -100.
    """
    packed = []
    rest: list[int] = []
    for _ in range(rows):
        ids: list[int] = []
        positions: list[int] = []
        starts: list[int] = []
        while len(ids) < tokens:
            whole = rest or next(documents)[:tokens]
            room = tokens - len(ids)
            here, rest = whole[:room], whole[room:]
            starts.append(len(ids))
            ids += here
            positions += range(len(here))
        input_ids = torch.tensor([ids])
        labels = input_ids.clone()
        labels[0, starts] = -100
        packed.append({"input_ids": input_ids, "position_ids": torch.tensor([positions]), "labels": labels})
    return packed
