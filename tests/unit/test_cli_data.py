"""`deepspeed-cad plan` on data sets: formats, fields, packing, and the models whose shape it reads."""

import builtins
import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import trainers
from model_cases import NEW

from deepspeed_cad.cli import main
from deepspeed_cad.cli.data.checkpoint import read_model_shape
from deepspeed_cad.cli.data.documents import BATCH, _count_documents, _joined, _open_file, read_lengths
from deepspeed_cad.errors import CADConfigError
from deepspeed_cad.forecast.packing import TRL_BATCH, say_cut, trl_rows
from deepspeed_cad.forecast.setting import SHAPES, StateLayers

datasets = pytest.importorskip("datasets")
transformers = pytest.importorskip("transformers")

LENGTHS = [9, 40, 3, 17, 64, 5, 30, 22]
ROWS = [{"id": number, "text": "w " * length} for number, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One token a word; its chat template adds two words a message."""
    made = trainers.tokenizer()
    made.save_pretrained(tmp_path_factory.mktemp("plain"))
    made.chat_template = "{% for m in messages %}{{ m.role }} says {{ m.content }} {% endfor %}"
    folder = tmp_path_factory.mktemp("tokenizer")
    made.save_pretrained(folder)
    return folder


Plan = Callable[..., tuple[int, Any, str]]
"""Exit code of a command, what it wrote, what it said."""


@pytest.fixture
def plan(tmp_path: Path, tokenizer: Path, capsys: pytest.CaptureFixture[str]) -> Plan:
    """Runs `deepspeed-cad plan` on 2 ranks of 64 tokens."""

    def run(*words: str | Path, tokenize: bool = True) -> tuple[int, Any, str]:
        target = tmp_path / "answer.json"
        target.unlink(missing_ok=True)
        common = ["--ranks", "2", "--context", "64", "--output", str(target)]
        common += ["--tokenizer", str(tokenizer)] * tokenize
        code = main(["plan", *common, *map(str, words)])
        return code, json.loads(target.read_text()) if target.exists() else None, "".join(capsys.readouterr())

    return run


def _lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _texts(path: Path, rows: list[dict[str, Any]]) -> None:
    path.mkdir()
    (path / ".hidden").write_text("which nobody reads")
    for row in rows:
        (path / f"{row['id']}.py").write_text(row["text"].replace(" ", "\n\n"))


def _hub(path: Path, rows: list[dict[str, Any]]) -> None:
    path.mkdir()
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(path / "train-00000-of-00001.parquet")
    table.select([0]).to_parquet(path / "test-00000-of-00001.parquet")


FORMATS: dict[str, Callable[[Path, list[dict[str, Any]]], Any]] = {
    "list.json": lambda path, rows: path.write_text(json.dumps(rows)),
    "indented.json": lambda path, rows: path.write_text(json.dumps(rows, indent=2)),
    "lines.json": lambda path, rows: path.write_text(_lines(rows)),
    "lines.jsonl": lambda path, rows: path.write_text(_lines(rows)),
    "lines.jsonl.gz": lambda path, rows: path.write_bytes(gzip.compress(_lines(rows).encode())),
    "table.parquet": lambda path, rows: datasets.Dataset.from_list(rows).to_parquet(path),
    "table.csv": lambda path, rows: datasets.Dataset.from_list(rows).to_csv(path),
    "table.tsv": lambda path, rows: datasets.Dataset.from_list(rows).to_csv(path, sep="\t"),
    "saved": lambda path, rows: datasets.Dataset.from_list(rows).save_to_disk(path),
    "saved_splits": lambda path, rows: datasets.DatasetDict(
        {name: datasets.Dataset.from_list(part) for name, part in (("test", rows[:1]), ("train", rows))}
    ).save_to_disk(path),
    "folder": _hub,
    "blank_lines.txt": lambda path, rows: path.write_text("\n\n".join(row["text"] for row in rows)),
    "texts": _texts,
}


def _write(folder: Path, name: str, rows: list[dict[str, Any]] = ROWS) -> Path:
    FORMATS[name](folder / name, rows)
    return folder / name


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_same_lengths(tmp_path: Path, plan: Plan, name: str) -> None:
    code, answer, said = plan(_write(tmp_path, name))
    assert code == 0, said
    assert (answer["documents"], answer["tokens"], answer["longest"]) == (len(LENGTHS), sum(LENGTHS), max(LENGTHS))


def test_several_files_and_patterns(tmp_path: Path, plan: Plan) -> None:
    for part in ("a", "b/c"):
        (tmp_path / part).mkdir(parents=True)
        _write(tmp_path / part, "table.parquet")
    csv = _write(tmp_path, "table.csv")
    assert isinstance(_open_file(datasets, csv)[1](), datasets.IterableDataset), "nothing is converted"
    assert plan(tmp_path / "*" / "*.parquet")[1]["documents"] == len(LENGTHS)
    assert plan(tmp_path / "**" / "*.parquet", csv)[1]["tokens"] == 3 * sum(LENGTHS)
    code, _, said = plan(tmp_path / "*.arrow")
    assert code == 2 and "does not exist or fits no file" in said


def test_a_field_is_taken_as_asked(tmp_path: Path, plan: Plan) -> None:
    rows = [{"text": "w " * 30, "input_ids": [1] * 50, "body": "w " * 60} for _ in range(8)]
    path = _write(tmp_path, "table.parquet", rows)
    assert plan(path, tokenize=False)[1]["longest"] == 50, "token ids come first and need no tokenizer"
    assert plan(path, "--field", "body")[1]["longest"] == 60
    code, _, said = plan(path, "--field", "body", tokenize=False)
    assert code == 2 and "--tokenizer" in said
    code, _, said = plan(path, "--field", "nosuch")
    assert code == 2 and "no field 'nosuch'; its fields: text, input_ids, body. Choose one with --field" in said
    code, _, said = plan(_write(tmp_path, "list.json", [{"body": "w"}]))
    assert code == 2 and "none of input_ids, text, messages; its fields: body" in said


def test_a_prompt_and_its_answer_are_one_document(tmp_path: Path, plan: Plan) -> None:
    rows = [{"prompt": "w " * 20, "answer": "w " * (n + 10), "ids": [1] * (n + 20)} for n in range(1, 9)]
    rows[2]["prompt"] = ""  # an answer alone is a document, too
    path = _write(tmp_path, "table.parquet", rows)
    assert plan(path, "--field", "prompt,answer")[1]["tokens"] == sum(range(31, 39)) - 20
    assert plan(path, "--field", "ids,ids", tokenize=False)[1]["tokens"] == 2 * sum(range(21, 29))
    code, _, said = plan(path, "--field", "prompt,ids")
    assert code == 2 and "its columns are of different kinds" in said
    (tmp_path / "lengths.json").write_text(json.dumps([[20, n] for n in range(100, 108)]))
    (tmp_path / "lengths.txt").write_text("".join(f"20 {n}\n" for n in range(100, 108)))
    for name in ("lengths.json", "lengths.txt"):
        assert plan(tmp_path / name, tokenize=False)[1]["tokens"] == sum(range(120, 128))
    chat = [{"role": "user", "content": "w"}]
    assert _joined([chat, "w w"], "") == [*chat, {"role": "assistant", "content": "w w"}]
    assert _joined(["", [1, 2]], "") == _joined([[1, 2], ""], "") == [1, 2]
    (tmp_path / "most.txt").write_text(f"1\n{(1 << 31) - 1}\n7\n")
    assert read_lengths([str(tmp_path / "most.txt")], 0, None, None, 2, [], print) == [1, (1 << 31) - 1]


def test_chats_are_counted_as_the_template_writes_them(tmp_path: Path, plan: Plan, tokenizer: Path) -> None:
    chat = [{"role": "user", "content": "w " * 10}, {"role": "assistant", "content": "w " * 20}]
    path = _write(tmp_path, "list.json", [{"messages": chat}] * 8)
    assert plan(path)[1]["longest"] == 30 + 2 * 2
    assert plan(path, "--tokenizer", tokenizer.with_name("plain0"), tokenize=False)[1]["longest"] == 30


def test_nothing_is_read_behind_the_limit_and_how_far_it_is_is_told(tokenizer: Path) -> None:
    def found() -> Iterator[list[int]]:
        yield from ([1, 2], [], [3], [4, 5])
        raise AssertionError("read on")

    assert _count_documents(found(), None, 2, print) == [2, 1]
    told: list[str] = []
    assert _count_documents(["w w"] * (BATCH + 1), str(tokenizer), 999, told.append) == [2] * (BATCH + 1)
    assert told == [f"{BATCH} documents read"]


def test_a_limit_and_more_texts_than_a_batch(tmp_path: Path, plan: Plan) -> None:
    path = _write(tmp_path, "lines.jsonl", [{"text": "w"}, {"text": ""}] * (BATCH + 40))
    assert plan(path)[1]["tokens"] == BATCH + 40, "empty documents do not count"
    assert plan(path, "--limit", BATCH + 1)[1]["tokens"] == BATCH + 1


@pytest.mark.parametrize("name, content, said", [
    ("broken.jsonl", '{"text": "a"}\n{"text"\n', "broken.jsonl cannot be read: "),
    ("empty.jsonl", "", "empty.jsonl is empty: it holds neither documents nor lengths"),
    ("none.json", "[]", "none.json is empty"),
    ("a.parquet", "not Parquet", "a.parquet cannot be read: "),
    ("holes.jsonl", '{"text": "a"}\n{"other": 1}\n', "holes.jsonl, row 1: 'text' is NoneType 'None'; expected text"),
    ("numbers.jsonl", '{"text": 3}\n', "row 0: 'text' is int '3'; expected text, token ids or chat messages"),
    ("shares.jsonl", '{"text": [1.5]}\n', "row 0: 'text' is list '[1.5]'; expected text"),
    ("blank.jsonl", '{"text": ""}\n', "blank.jsonl holds no documents"),
    ("binary.bin", "\udcff", "binary.bin cannot be read: UnicodeDecodeError"),
    ("prose.txt", "w w\nw\n7\n", "1 documents with 4 tokens do not fill one step"),
    ("one.json", '{"rows": [1]}', "one.json has none of input_ids, text, messages; its fields: rows"),
    # Questions, and lengths.
    ("in.json", "{", "in.json is not JSON"), ("in.json", None, "in.json cannot be read: No such file"),
    ("of.txt", "3\n0\n5\n", "of.txt, line 2: '0'; expected the tokens of a document"),
    ("of.txt", "3\n\n4.5\n", "of.txt, line 3: '4.5'; expected"), ("of.txt", "3\n4\n\udcff\n", "line 3: '\ufffd'; "),
    ("of.txt", "length\n12\n", "line 1: 'length'; expected"), ("of.txt", "2147483648\n", "line 1: '2147483648'; "),
    ("of.txt", "[3, 4, -1]", "of.txt, entry 2: -1; expected"), ("of.txt", "[3, 4", "is not a JSON list of lengths"),
    ("of.txt", "[3, [4, 5, 6]]", "entry 1: [4, 5, 6]; expected"),
    ("of.txt", "[3, 4]", "2 documents with 7 tokens do not fill one step of 2 ranks with 64 tokens"),
    # Models.
    ("config.json", None, "cannot be read: No such file"), ("config.json", "{", "is not JSON"),
    ("config.json", "[]", "holds a list"), ("config.json", '{"model_type": "paligemma"}', "tokens of an image"),
    ("config.json", '{"model_type": "of_our_own"}',
     "no attribute 'num_attention_heads' (model_type 'of_our_own' is not known here)"),
    ("config.json", '{"model_type": "x", "num_attention_heads": 0, "hidden_size": 8}', "is not the config.json"),
])  # fmt: skip
def test_what_cannot_be_read_is_one_line(tmp_path: Path, plan: Plan, name: str, content: Any, said: str) -> None:
    datasets.enable_progress_bars(), datasets.logging.set_verbosity_warning()
    if content is not None:
        (tmp_path / name).write_bytes(content.encode("utf-8", "surrogateescape"))
    model = name == "config.json"
    code, answer, shown = plan(*(["chat", "--model", tmp_path] if model else [tmp_path / name]))
    assert code == 2 and answer is None and said in shown and shown.count("\n") == 1
    if "cannot be read: " in said and content and not model:
        assert datasets.are_progress_bars_disabled() and datasets.logging.get_verbosity() == datasets.logging.CRITICAL


@pytest.mark.parametrize("kind", ["table.parquet", "texts"])
def test_a_file_of_a_folder_that_cannot_be_read_is_left_out_and_counted(tmp_path: Path, plan: Plan, kind: str) -> None:
    folder = tmp_path / "data"
    if kind == "texts":
        _write(tmp_path, "texts").rename(folder)
        bad = [folder / "0.bin", folder / "1.bin"]
    else:
        folder.mkdir()
        _write(folder, kind).rename(folder / "train-0.parquet")
        bad = [folder / "train-1.parquet", folder / "train-2.parquet"]
    for path in bad:
        path.write_bytes(b"\xff\xfe of another kind {")
    code, answer, said = plan(folder)
    assert code == 0 and answer["documents"] == len(LENGTHS), said
    assert len(answer["skipped"]) == 2 and "cannot be read: " in answer["skipped"][0]
    assert f"\n2 files skipped, the first: {answer['skipped'][0]}\n" in said
    for good in set(folder.iterdir()) - set(bad):
        good.write_bytes(b"\xff")
    code, _, said = plan(folder)
    assert code == 2 and "holds no documents; " in said and " files cannot be read, the first: " in said
    for path in folder.iterdir():
        path.unlink()
    code, _, said = plan(folder)
    assert code == 2 and "holds no files" in said


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a package impossible to import from ours."""
    real = builtins.__import__

    def forbid(package: str) -> None:
        def load(name: str, globals: Any = None, *args: Any, **options: Any) -> Any:
            if name.partition(".")[0] == package and str((globals or {}).get("__name__")).startswith("deepspeed_cad"):
                raise ImportError(f"no {package} today")
            return real(name, globals, *args, **options)

        monkeypatch.setattr(builtins, "__import__", load)

    return forbid


@pytest.mark.parametrize("package, remedy", [
    ("datasets", 'reading a data set needs Hugging Face datasets: pip install "deepspeed_cad[plan]"'),
    ("transformers", 'reading text needs transformers: pip install "deepspeed_cad[plan]"'),
])  # fmt: skip
def test_a_missing_package_has_a_remedy(tmp_path: Path, plan: Plan, without: Any, package: str, remedy: str) -> None:
    path = _write(tmp_path, "lines.jsonl")
    without(package)
    code, _, said = plan(path)
    assert code == 2 and remedy in said and said.count("\n") == 1


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
def test_rows_are_those_of_trl(strategy: str) -> None:
    pack_dataset = pytest.importorskip("trl").pack_dataset
    lengths = np.maximum(0, np.random.default_rng(1).lognormal(3.0, 1.3, TRL_BATCH + 300).astype(int)).tolist()
    data = datasets.Dataset.from_dict({"input_ids": [[7] * length for length in lengths]})
    packed = pack_dataset(data, seq_length=128, strategy=strategy)
    expected = [[len(one["input_ids"])] if strategy == "wrapped" else list(one["seq_lengths"]) for one in packed]
    assert trl_rows(lengths, 128, strategy) == expected


LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "vocab_size": 99,
    "num_attention_heads": 8, "num_key_value_heads": 2,
}  # fmt: skip
SHAPE = {
    "layers": 3, "hidden": 64, "intermediate": 160, "vocabulary": 99, "heads": 8, "kv_heads": 2, "head_dim": 8,
    "not_counted": "", "state": None, "batch_rope": "",
}  # fmt: skip


def test_what_becomes_of_documents_longer_than_a_row_is_said() -> None:
    for packing, says in {
        "bfd": "their ends are dropped, 250 tokens (35.7 %)",
        "spanning": "they go on on the next GPU and stay whole; only the ends of a step cut documents",
        "bfd_split": "each is split there, and its parts do not attend to each other",
    }.items():
        assert say_cut([150, 250, 300], 150, packing) == f"2 documents are longer than a row of 150 tokens: {says}"
        assert say_cut([100, 150], 150, packing) == "no document is longer than a row"


@pytest.mark.parametrize("config, change", [
    (LLAMA, {}),
    (LLAMA | {"head_dim": 32}, {"head_dim": 32}),
    (
        {"model_type": "gpt2", "n_embd": 64, "n_layer": 3, "n_head": 8, "vocab_size": 99, "n_inner": 100},
        {"intermediate": 100, "kv_heads": 8},
    ),
    ({"model_type": "qwen2_5_vl", "text_config": LLAMA | {"model_type": "qwen2_5_vl_text"}}, {}),
    ({"model_type": "of_our_own", "text_config": LLAMA}, {}),
    (LLAMA | {"sliding_window": 4096}, {"not_counted": "3 of 3 layers (sliding_attention)"}),
    (LLAMA | {"sliding_window": 4096, "use_sliding_window": False}, {}),
    (LLAMA | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, {"batch_rope": "dynamic"}),
], ids=["llama", "head_dim", "gpt2", "images", "unknown", "windows", "none used", "RoPE"])  # fmt: skip
def test_the_shape_of_a_model(tmp_path: Path, config: dict[str, Any], change: dict[str, int]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert vars(read_model_shape(str(tmp_path))) == SHAPE | change


@pytest.mark.skipif(not NEW, reason="transformers 4 has not all of them")
def test_layers_that_carry_state_are_read_off_the_model_and_what_is_not_foreseen_is_said(tmp_path: Path) -> None:
    """Delta nets, both kinds of Mamba (B, C and dt of the second come with its convolution), short convolutions."""
    read = {}
    for kind, said in {
        "qwen3_5": "", "jamba": "its experts", "falcon_h1": "", "lfm2": "",
        "llama4": "36 of 48 layers (chunked_attention) and its experts",
        "gpt_oss": "18 of 36 layers (sliding_attention) and its experts",
    }.items():  # fmt: skip
        more = {"layer_types": ["full_attention"] * 31 + ["conv"]} if kind == "lfm2" else {}
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **more}))
        read[kind] = read_model_shape(str(tmp_path))
        assert read[kind].not_counted == said
    assert read["qwen3_5"] == SHAPES["qwen3.5-9b"]
    mamba, beside = read["jamba"].state, read["falcon_h1"].state
    assert mamba is not None and (mamba.count, mamba.attending, mamba.hands_on) == (28, 4, False)
    assert (mamba.taken, mamba.given) == (3 * 8192, 8192)
    assert beside is not None and beside.count == beside.attending == read["falcon_h1"].layers
    assert read["lfm2"].state == StateLayers(1, 31, 4 * 2560 * 2560, 0, 0, False)


def test_names_are_of_checkpoints_and_files_need_no_transformers(
    tmp_path: Path, monkeypatch: Any, without: Any
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    cached = mock.Mock(side_effect=[tmp_path / "config.json", OSError("no such repository\nno network")])
    monkeypatch.setattr("transformers.utils.cached_file", cached)
    assert vars(read_model_shape("some/llama")) == SHAPE and cached.call_args.args == ("some/llama", "config.json")
    for said in ("cannot be found as a checkpoint: no such repository", "without transformers no name is known .*"):
        with pytest.raises(CADConfigError, match=f"^--model: x is no file.* {said}; give .* llama-70b, qwen3.5-9b$"):
            read_model_shape("x")
        without("transformers")
    assert vars(read_model_shape(str(tmp_path))) == SHAPE
