"""The parts of the demo: rows, files, the choice of a machine, tables."""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))
import packing  # noqa: E402


def test_pack() -> None:
    """Rows are full, positions start again with each document, and first tokens are nobody's targets."""
    documents = iter([[1, 2, 3], [4, 5, 6, 7], list(range(100, 150)), [8], [9, 9, 9, 9, 9]])
    rows = packing.pack(documents, tokens=5, rows=3)
    assert [row["input_ids"][0].tolist() for row in rows] == [
        [1, 2, 3, 4, 5],
        [6, 7, 100, 101, 102],
        [103, 104, 8, 9, 9],
    ]
    assert [row["position_ids"][0].tolist() for row in rows] == [[0, 1, 2, 0, 1], [0, 1, 0, 1, 2], [0, 1, 0, 0, 1]]
    assert rows[0]["labels"][0].tolist() == [-100, 2, 3, -100, 5]


def test_synthetic_lengths_have_a_heavy_tail() -> None:
    lengths = sorted(len(ids) for ids in islice(packing.synthetic(64, 1.5, 100, seed=1), 400))
    assert 40 < lengths[200] < 100
    assert lengths[-1] > 10 * lengths[200]
    again = [len(ids) for ids in islice(packing.synthetic(64, 1.5, 100, seed=1), 400)]
    assert sorted(again) == lengths


def test_reading(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("one")
    (tmp_path / "b.jsonl").write_text('{"text": "two"}\n\n{"text": "three"}\n')
    (tmp_path / "c.bin").write_bytes(b"\x00")
    files = packing.list_files([tmp_path])
    assert files == packing.list_files([tmp_path])
    assert sorted(packing.read_texts(files)) == ["one", "three", "two"]
    with pytest.raises(FileNotFoundError, match="nowhere"):
        packing.list_files([tmp_path / "nowhere"])
    with pytest.raises(ValueError, match="no text"):
        next(packing.tokenized([tmp_path / "c.bin"], lambda text, **_: {"input_ids": []}))
