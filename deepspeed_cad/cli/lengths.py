"""Document lengths in tokens, from a data set.

In: a JSONL or text file, or a folder that Hugging Face datasets reads; a tokenizer where the data is text. Out: a list
of lengths in the order of the data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from deepspeed_cad.errors import CADDataError

BATCH = 256


def read_lengths(path: str, tokenizer: str | None, field: str, limit: int) -> list[int]:
    """Lengths of at most `limit` documents. Raises CADDataError naming what is missing or unreadable."""
    lengths: list[int] = []
    texts: list[str] = []
    encode = None
    for document in _documents(Path(path), field):
        if len(lengths) + len(texts) >= limit:
            break
        if not isinstance(document, str):
            lengths.append(len(document))
            continue
        if encode is None:
            encode = _load_tokenizer(tokenizer)
        texts.append(document)
        if len(texts) == BATCH:
            lengths += [len(ids) for ids in encode(texts)["input_ids"]]
            texts = []
    if texts and encode is not None:
        lengths += [len(ids) for ids in encode(texts)["input_ids"]]
    lengths = [length for length in lengths if length]
    if not lengths:
        raise CADDataError(f"{path} holds no documents")
    return lengths


def _load_tokenizer(name: str | None) -> Any:
    if name is None:
        raise CADDataError("the data is text: give the model's tokenizer with --tokenizer")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise CADDataError("reading text needs transformers: pip install transformers") from error
    try:
        return AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise CADDataError(f"the tokenizer {name!r} cannot be loaded: {error}") from error


def _documents(path: Path, field: str) -> Iterator[Any]:
    """Each document as text, or as the list of its tokens."""
    if not path.exists():
        raise CADDataError(f"{path} does not exist")
    if path.is_dir():
        yield from _from_folder(path, field)
    elif path.suffix in (".jsonl", ".ndjson"):
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    try:
                        row = json.loads(line)
                    except json.JSONDecodeError as error:
                        raise CADDataError(f"{path}, line {number}: not JSON ({error})") from error
                    yield _pick(row, field, f"{path}, line {number}")
    else:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise CADDataError(f"{path} is neither JSONL nor UTF-8 text: {error}") from error
        yield from (part for part in text.split("\n\n") if part.strip())


def _from_folder(path: Path, field: str) -> Iterator[Any]:
    try:
        import datasets
    except ImportError as error:
        raise CADDataError("reading a data set folder needs datasets: pip install datasets") from error
    try:
        if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
            data = datasets.load_from_disk(str(path))
        else:
            data = datasets.load_dataset(str(path))
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise CADDataError(f"{path} is not a folder that datasets can read: {error}") from error
    if isinstance(data, dict):
        data = data["train"] if "train" in data else next(iter(data.values()))
    for number, row in enumerate(data):
        yield _pick(row, field, f"{path}, row {number}")


def _pick(row: Any, field: str, where: str) -> Any:
    if isinstance(row, str):
        return row
    if isinstance(row, dict):
        for key in (field, "input_ids", "text"):
            if isinstance(row.get(key), str | list):
                return _plain(row[key])
        if isinstance(row.get("messages"), list):
            return _plain(row["messages"])
    found = f"the keys {sorted(row)}" if isinstance(row, dict) else f"a {type(row).__name__}"
    raise CADDataError(f"{where} has {found}; expected {field!r} (choose another with --field), input_ids or messages")


def _plain(value: Any) -> Any:
    """Tokens as they are; chat messages as the text of their contents."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "\n".join(str(message.get("content", "")) for message in value)
    return value
