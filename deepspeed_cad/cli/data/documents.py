"""Document lengths in tokens: a named distribution, a file of numbers, or a data set, read by Hugging Face `datasets`
as a trainer would read it.

In: what was given as input, files, patterns and folders among them; a tokenizer where the data is text. Out: a list of
lengths in the order of the data. Files are streamed: none is downloaded or converted.
"""

import glob
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from deepspeed_cad.errors import CADDataError, in_one_line
from deepspeed_cad.forecast.packing import NAMED

FIELDS = ("input_ids", "text", "messages")
"""Columns that are looked for, in this order, where none is named."""
BUILDERS = {
    ".json": ("json", {}),
    ".jsonl": ("json", {}),
    ".ndjson": ("json", {}),
    ".parquet": ("parquet", {}),
    ".csv": ("csv", {}),
    ".tsv": ("csv", {"sep": "\t"}),
    ".arrow": ("arrow", {}),
    ".txt": ("text", {"sample_by": "paragraph"}),
}
"""Which builder of `datasets` reads which files, and its options: blank lines separate the documents of a .txt file."""
REMEDY = 'pip install "deepspeed_cad[plan]"'
"""How to get what reads data sets and texts; lengths and named distributions need nothing."""
BATCH = 256
"""Texts that are tokenized at a time."""
LIST = re.compile(r"\s*\[\s*\[?\s*[\d.+-]")
"""How a JSON list of lengths begins."""
MOST_DRAWN = 20_000_000
"""Documents of a named distribution: about a gigabyte of numbers."""
BEGIN = 4096
"""Characters that are looked at to tell a file of lengths from text."""


def read_lengths(
    places: Sequence[str], needed: int, tokenizer: str | None, field: str | None, limit: int, skipped: list[str],
    tell: Callable[[str], None],
) -> list[int]:  # fmt: skip
    """Lengths of the first `limit` documents that are not empty; of a named distribution at least `needed` tokens.

    `skipped` gets a line for each file of a folder that cannot be read; `tell` hears how far it is. Raises CADDataError
    naming what is missing or unreadable, or line by line what is no length."""
    if len(places) == 1 and places[0] in NAMED and not Path(places[0]).exists():
        count = needed / NAMED[places[0]].mean
        if count > MOST_DRAWN:
            raise CADDataError(
                f"{places[0]}: {count:.1e} documents would be drawn, more than {MOST_DRAWN:.0e}: ask for fewer "
                "--ranks, --steps or --micro-batches, or a smaller --context"
            )
        return NAMED[places[0]].draw(needed)
    paths = [Path(place) for place in places]
    if all(path.is_file() and _is_numbers(path) for path in paths):
        return [length for path in paths for length in _parse(path)][:limit]
    if not (lengths := _count_documents(documents(places, field, skipped), tokenizer, limit, tell)):
        why = f"; {len(skipped)} files cannot be read, the first: {skipped[0]}" if skipped else ""
        raise CADDataError(f"{' '.join(places)} holds no documents{why}")
    return lengths


def _is_numbers(path: Path) -> bool:
    """Whether a file holds lengths. Raises CADDataError where it holds nothing."""
    with path.open(encoding="utf-8", errors="replace") as file:
        begin = file.read(BEGIN)
    if begin.strip() in ("", "[]"):
        raise CADDataError(f"{path} is empty: it holds neither documents nor lengths")
    # Where every second line is a length the others are mistakes, which are to be named.
    lines = begin.split("\n")
    numbers = sum(bool(re.fullmatch(r"[\d.+-][\s\d.+-]*", line.strip())) for line in lines)
    return bool(LIST.match(begin)) or 2 * numbers >= sum(bool(line.strip()) for line in lines)


def _parse(path: Path) -> list[int]:
    text = path.read_text(encoding="utf-8", errors="replace")
    entries: list[tuple[str, Any]]
    if text.lstrip().startswith("["):
        try:
            entries = [(f"entry {number}", value) for number, value in enumerate(json.loads(text))]
        except ValueError as error:
            raise CADDataError(f"{path} is not a JSON list of lengths: {error}") from error
    else:
        entries = [(f"line {number}", line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    return [_length(value, f"{path}, {place}") for place, value in entries if value != ""]


def _length(value: Any, where: str) -> int:
    parts = value.split() if isinstance(value, str) else value if isinstance(value, list) else [value]
    whole = len(parts) < 3 and all(str(part).isdecimal() for part in parts)
    length = sum(map(int, parts)) if whole else 0
    if not 0 < length < 1 << 31:
        raise CADDataError(f"{where}: {value!r}; expected the tokens of a document, a whole number above 0")
    return length


def _count_documents(found: Iterable[Any], tokenizer: str | None, limit: int, tell: Callable[[str], None]) -> list[int]:
    lengths: list[int] = []
    texts: list[str] = []
    tokenize: Callable[..., Any] | None = None  # loaded when the first text is met
    for document in found:
        if len(lengths) + len(texts) >= limit:
            break
        if isinstance(document, list) and document and isinstance(document[0], int):
            lengths.append(len(document))
        elif document:
            tokenize = tokenize or _load_tokenizer(tokenizer)
            texts.append(document if isinstance(document, str) else _written(tokenize, document))
        if len(texts) == BATCH:
            lengths += _count(tokenize, texts)
            texts = []
            tell(f"{len(lengths)} documents read")
    return [length for length in lengths + _count(tokenize, texts) if length]


def _count(tokenize: Callable[..., Any] | None, texts: list[str]) -> list[int]:
    return [len(ids) for ids in tokenize(texts, verbose=False)["input_ids"]] if tokenize and texts else []


def _written(tokenizer: Any, messages: list[dict[str, Any]]) -> str:
    """A chat as the tokenizer's template writes it; without a template, its contents one after the other."""
    if getattr(tokenizer, "chat_template", None):
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    return "\n".join(str(message.get("content", "")) for message in messages)


def _load_tokenizer(name: str | None) -> Callable[..., Any]:
    if name is None:
        raise CADDataError("the data is text: give the model's tokenizer with --tokenizer")
    try:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(name)
    except ImportError as error:
        raise CADDataError(f"reading text needs transformers: {REMEDY}") from error
    except (OSError, ValueError) as error:
        raise CADDataError(f"the tokenizer {name!r} cannot be loaded: {in_one_line(error)}") from error


def documents(places: Sequence[str], field: str | None, skipped: list[str]) -> Iterator[Any]:
    """Each document as text, as the list of its tokens, or as a list of chat messages (dicts).

    A file of a folder that cannot be read is left out, from where it cannot, with a line in `skipped`. Raises
    CADDataError where a place does not exist, cannot be read, or has no column of that name."""
    paths = list_files(places)
    try:
        import datasets
    except ImportError as error:
        raise CADDataError(f"reading a data set needs Hugging Face datasets: {REMEDY}") from error
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.disable_progress_bars()
    for path in paths:
        for where, load in _open_folder(datasets, path) if path.is_dir() else [_open_file(datasets, path)]:
            try:
                yield from _documents_of(where, load, field)
            except _UnreadableError as error:
                if not path.is_dir():
                    raise
                skipped.append(str(error))


def list_files(places: Iterable[str]) -> list[Path]:
    """Files and folders that are named, patterns such as `data/*.parquet` filled in."""
    found: list[Path] = []
    for place in places:
        matches = [place] if Path(place).exists() else sorted(glob.glob(place, recursive=True))
        if not matches:
            raise CADDataError(f"{place} does not exist" + " or fits no file" * glob.has_magic(place))
        found += map(Path, matches)
    return found


def builder_of(path: Path) -> tuple[str, dict[str, str]]:
    """The builder of `datasets` that reads a file, and its options, by its name; every other file is one document."""
    suffixes = ["", *map(str.lower, path.suffixes)]
    kind = next(suffix for suffix in reversed(suffixes) if suffix not in (".gz", ".bz2", ".xz", ".zst"))
    return BUILDERS.get(kind, ("text", {"sample_by": "document"}))


def _open_file(datasets: Any, file: str | Path) -> tuple[str, Callable[[], Any]]:
    """Where it is, and what gives its rows."""
    builder, options = builder_of(Path(file))
    load = partial(datasets.load_dataset, builder, split="train", streaming=True, **options)
    # datasets would take a name with brackets for a pattern
    return str(file), partial(load, data_files=[glob.escape(str(file))])


def _open_folder(datasets: Any, path: Path) -> list[tuple[str, Callable[[], Any]]]:
    """Of what `save_to_disk` wrote, of data files as the hub has them, or of texts: what is trained on."""
    inside = [file for file in sorted(path.rglob("*")) if file.is_file() and not file.name.startswith(".")]
    if not inside:
        raise CADDataError(f"{path} holds no files")
    with _readable(str(path)):
        if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
            data = datasets.load_from_disk(str(path))
            data = _split(data) if isinstance(data, dict) else data
            return [(str(path), lambda: data)]
        if not all(builder_of(file)[0] == "text" for file in inside):
            inside = _split(datasets.load_dataset_builder(str(path)).config.data_files)
    return [_open_file(datasets, file) for file in inside]


def _split(data: Any) -> Any:
    return data["train"] if "train" in data else next(iter(data.values()))


def _documents_of(where: str, load: Callable[[], Any], field: str | None) -> Iterator[Any]:
    with _readable(where):
        rows = iter(load())
        first = next(rows, None)
    if first is None:
        return
    names = [_choose(name, list(first), where) for name in (field.split(",") if field else [None])]
    with _readable(where):
        for number, row in enumerate(chain((first,), rows)):
            place = f"{where}, row {number}"
            yield _joined([_checked(row.get(name), name, place) for name in names], place)


class _UnreadableError(CADDataError):
    pass


@contextmanager
def _readable(where: str) -> Iterator[None]:
    """What a reader of `datasets` says becomes one line."""
    try:
        yield
    except CADDataError:
        raise
    except Exception as error:  # pyarrow, pandas, fsspec and datasets each have their own
        raise _UnreadableError(f"{where} cannot be read: {type(error).__name__}: {in_one_line(error)}") from error


def _choose(field: str | None, columns: list[str], where: str) -> str:
    if chosen := next((name for name in ([field] if field else FIELDS) if name in columns), None):
        return chosen
    missing = "none of " + ", ".join(FIELDS) if field is None else f"no field {field!r}"
    raise CADDataError(f"{where} has {missing}; its fields: {', '.join(columns)}. Choose one with --field")


def _checked(value: Any, name: str, where: str) -> Any:
    if isinstance(value, str) or (isinstance(value, list) and all(isinstance(one, (int, dict)) for one in value[:1])):
        return value
    raise CADDataError(
        f"{where}: {name!r} is {type(value).__name__} {str(value)[:40]!r}; expected text, token ids or chat messages"
    )


def _joined(parts: list[Any], where: str) -> Any:
    """One document of the columns of a row, such as a prompt and its answer."""
    whole, *others = parts
    for part in others:
        if isinstance(part, str) and whole and isinstance(whole[0], dict):
            part = [{"role": "assistant", "content": part}]
        if len({type(one[0]) for one in (whole, part) if one}) > 1:
            raise CADDataError(f"{where}: its columns are of different kinds: text, token ids or chat messages")
        whole = whole + part if whole and part else whole or part
    return whole
