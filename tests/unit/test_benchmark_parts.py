"""What the inputs of benchmarks become, and what their results say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "docs")]
import steps  # noqa: E402
from train_split import cut_pieces  # noqa: E402
from train_workload import Workload  # noqa: E402

STEPS = {
    "chat --documents 16": "`chat`, 16",
    "chat --documents 16 --padded": "`chat`, 16, padded",
    "chat --documents 4 --accumulation 4 --steps 6": "`chat`, 4, in each of 4 micro-batches",
}


@pytest.mark.parametrize("options", STEPS)
def test_what_dealing_out_gains_is_what_the_page_says(
    options: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["steps.py", *options.split()])
    steps.main()
    found = capsys.readouterr().out.splitlines()[-1].split(" | ")[1:-1]
    assert f"| {STEPS[options]} | {' | '.join(found)} |\n" in (ROOT / "docs" / "steps.md").read_text()


WORKLOADS = sorted((ROOT / "benchmarks" / "workloads").glob("*.json"))


@pytest.mark.parametrize("path", WORKLOADS, ids=lambda path: path.stem)
def test_workloads_can_be_cut_and_scaled(path: Path) -> None:
    workload = Workload.load(path)
    assert workload.fit(workload.ranks, None, False, None) == workload
    for scale in (False, True):
        small = workload.fit(2, 500, scale, 2)
        assert len(small.steps) == 2
        for step in range(2):
            rows = small.make_rows(step, 64)
            assert [len(row.tokens) for row in rows] == [small.row_tokens] * small.rows
            assert sum(int((row.targets >= 0).sum()) for row in rows) == small.targets(step)
            assert sum(small.local(step, rank).tokens for rank in range(2)) == 1000
    with pytest.raises(ValueError, match="start fewer processes"):
        workload.fit(workload.ranks + 1, None, False, None)


def test_rows_that_are_not_equally_full() -> None:
    workload = Workload("some", 2, 10, False, (((7, 3), (1, 9)), ((10,), (5, 5))))
    cut = workload.fill([1.0, 0.6])
    assert cut.steps == (((7, 3), (1, 5)), ((10,), (5, 1)))
    assert (cut.tokens, cut.evenness, workload.evenness) == (32, 0.8, 1.0)
    for shares in ([1.0], [1.0, 0.0]):
        with pytest.raises(ValueError, match="rows of 2 ranks cannot be"):
            workload.fill(shares)


@pytest.mark.parametrize("window", [None, 1, 7])
def test_pairs_inside_a_window(window: int | None) -> None:
    workload = Workload("some", 2, 10, False, (((7, 3), (1, 9)),))
    lengths = [n for row in workload.steps[0] for n in row]
    expected = sum(min(row + 1, window or row + 1) for n in lengths for row in range(n))
    assert workload.pairs(0, window) == expected


def test_a_workload_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps({"ranks": 2, "tokens_per_rank": 10, "steps": [[[10], [4, 5]]]}))
    with pytest.raises(ValueError, match="step 0, row 1 has 9 tokens, not 10"):
        Workload.load(path)


@pytest.mark.parametrize("lengths", [(64,), (1, 2, 3, 50, 7), (9, 9), (1,)])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_pieces_cover_documents_and_read_their_keys(lengths: tuple[int, ...], ranks: int) -> None:
    cut = [cut_pieces(lengths, rank, ranks, torch.device("cpu")) for rank in range(ranks)]
    rows = [source.numpy() for source, _ in cut]
    assert len({len(own) for own in rows}) == 1
    everyone = np.concatenate(rows)
    assert sorted(everyone[everyone >= 0]) == list(range(sum(lengths)))
    starts = np.cumsum([0, *lengths])
    for own, (_, gathered) in zip(rows, cut):
        read = everyone[torch.cat(gathered.keys).numpy()]
        q, k = gathered.sequences.host_q, gathered.sequences.host_k
        assert q[-1] == len(own)
        assert k[-1] == len(read)
        for i in range(len(q) - 1):
            queries, keys = own[q[i] : q[i + 1]], read[k[i] : k[i + 1]]
            if queries[0] < 0:
                assert (keys < 0).all()
                continue
            document = int(np.searchsorted(starts, queries[0], side="right")) - 1
            assert keys.tolist() == list(range(starts[document], queries[-1] + 1))
            assert queries.tolist() == list(range(queries[0], queries[-1] + 1))


def test_rows_become_table_and_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("kernels-h200.json", "h200x4/exchange.json"):
        copy = tmp_path / Path(name).name
        copy.write_text((ROOT / "benchmarks/results" / name).read_text())
        subprocess.run([sys.executable, ROOT / "benchmarks/rows.py", copy], check=True, timeout=120)
        rows = json.loads(copy.read_text())["rows"]
        lines = copy.with_suffix(".md").read_text().splitlines()
        assert len([line for line in lines if line.startswith("|")]) == len(rows) + 2
        assert copy.with_suffix(".png").stat().st_size > 5000
