"""Documents of a data set, read by Hugging Face `datasets` as a trainer would read them.

In: files, patterns and folders. Out: for each document its text, its chat messages or its token ids. Files are
streamed: none is downloaded or converted.
"""

import glob
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from deepspeed_cad.errors import CADDataError

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


def documents(places: Sequence[str], field: str | None, skipped: list[str]) -> Iterator[Any]:
    """Each document as text, as the list of its tokens, or as a list of chat messages (dicts).

    A file of a folder that cannot be read is left out, from where it cannot, with a line in `skipped`. Raises
    CADDataError where a place does not exist, cannot be read, or has no column of that name.
    """
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
        text = (str(error).strip().splitlines() or ["no message"])[0]
        raise _UnreadableError(f"{where} cannot be read: {type(error).__name__}: {text}") from error


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
