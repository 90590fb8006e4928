"""Documents of a data set, read by Hugging Face `datasets` as a trainer would read them.

In: files, patterns and folders. Out: for each document its text, its chat messages or its token ids, and the name of
the column that they come from. Files are streamed: none is downloaded or converted.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
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

ONE_TEXT = ("text", {"sample_by": "document"})
"""How every other file is read: as one document."""

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")

REMEDY = 'pip install "deepspeed_cad[plan]"'
"""How to get what reads data sets and texts; lengths and named distributions need nothing."""


@dataclass(frozen=True)
class Source:
    where: str
    data: Callable[[], Any]
    """Gives what `datasets` makes of it: rows, one after the other."""
    in_folder: bool = False
    """Whether it is one of the files of a folder, which is left out where it cannot be read."""


def documents(places: Sequence[str], field: str | None, skipped: list[str]) -> Iterator[Any]:
    """Each document as text, as the list of its tokens, or as a list of chat messages (dicts).

    A file of a folder that cannot be read is left out, from where it cannot, with a line in `skipped`. Raises
    CADDataError where a place does not exist, cannot be read, or has no column of that name.
    """
    for source in _sources(places):
        try:
            yield from _documents_of(source, field)
        except _UnreadableError as error:
            if not source.in_folder:
                raise
            skipped.append(str(error))


def _documents_of(source: Source, field: str | None) -> Iterator[Any]:
    with _readable(source.where):
        columns, rows = _columns(source.data())
    names = [_choose(name, columns, source.where) for name in (field.split(",") if field else [None])]
    with _readable(source.where):
        for number, row in enumerate(rows):
            where = f"{source.where}, row {number}"
            yield _joined([_checked(row.get(name), name, where) for name in names], where)


class _UnreadableError(CADDataError):
    """What a reader of `datasets` said."""


def list_files(places: Iterable[str]) -> list[Path]:
    """Files and folders that are named, patterns such as `data/*.parquet` filled in."""
    found: list[Path] = []
    for place in places:
        if Path(place).exists():
            found.append(Path(place))
            continue
        matches = sorted(glob.glob(place, recursive=True))
        if not matches:
            raise CADDataError(f"{place} does not exist" + " or fits no file" * glob.has_magic(place))
        found += map(Path, matches)
    return found


def builder_of(path: Path) -> tuple[str, dict[str, str]]:
    """The builder of `datasets` that reads a file, and its options, by the name of the file."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffixes.pop()
    return BUILDERS.get(suffixes[-1], ONE_TEXT) if suffixes else ONE_TEXT


def _sources(places: Sequence[str]) -> Iterator[Source]:
    found = list_files(places)
    datasets = _import_datasets()
    for is_folder, places_alike in groupby(found, Path.is_dir):
        if is_folder:
            for path in places_alike:
                yield from _open_folder(datasets, path)
        else:
            yield from _open_files(datasets, list(places_alike))


def _open_files(datasets: Any, files: Sequence[str | Path], in_folder: bool = False) -> Iterator[Source]:
    """One source for all files of a kind: such as the parts that a large data set is stored in. Those of a folder one
    by one, so that one may be left out."""
    kinds: dict[str, list[str | Path]] = {}
    for number, file in enumerate(files):
        kinds.setdefault(str(number) if in_folder else str(builder_of(Path(file))), []).append(file)
    for alike in kinds.values():
        builder, options = builder_of(Path(alike[0]))
        where = str(alike[0]) if len(alike) == 1 else f"{alike[0]} and {len(alike) - 1} more"
        names = [glob.escape(str(file)) for file in alike]  # datasets would take a name with brackets for a pattern
        load = partial(datasets.load_dataset, builder, data_files=names, split="train", streaming=True, **options)
        yield Source(where, load, in_folder)


def _split(data: Any) -> tuple[str, Any]:
    """What is trained on, and its name."""
    name = "train" if "train" in data else next(iter(data))
    return f" ({name})", data[name]


def _open_folder(datasets: Any, path: Path) -> Iterator[Source]:
    """What `save_to_disk` wrote, a folder of data files as the hub has them, or a folder of texts."""
    inside = [file for file in sorted(path.rglob("*")) if file.is_file() and not file.name.startswith(".")]
    if not inside:
        raise CADDataError(f"{path} holds no files")
    if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
        with _readable(str(path)):
            data = datasets.load_from_disk(str(path))
        name, data = _split(data) if isinstance(data, dict) else ("", data)
        yield Source(f"{path}{name}", lambda: data)
        return
    if not all(builder_of(file)[0] == "text" for file in inside):
        with _readable(str(path)):
            found = datasets.load_dataset_builder(str(path)).config.data_files
        inside = _split(found)[1]
    yield from _open_files(datasets, inside, in_folder=True)


def _columns(data: Any) -> tuple[list[str], Iterable[dict[str, Any]]]:
    """Names of the columns, and the rows: what is streamed may have to be begun to know them."""
    if data.column_names:
        return list(data.column_names), data
    rows = iter(data)
    first = next(rows, None)
    return ([], ()) if first is None else (list(first), chain((first,), rows))


def _choose(field: str | None, columns: list[str], where: str) -> str:
    wanted = FIELDS if field is None else (field,)
    for name in wanted:
        if name in columns:
            return name
    missing = "none of " + ", ".join(FIELDS) if field is None else f"no field {field!r}"
    raise CADDataError(f"{where} has {missing}; its fields: {', '.join(columns) or 'none'}. Choose one with --field")


def _checked(value: Any, name: str, where: str) -> Any:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(one, type(value[0])) for one in value[:1]):
        if not value or isinstance(value[0], int) or isinstance(value[0], dict):
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
        kinds = {type(one[0]) for one in (whole, part) if one}
        if len(kinds) > 1:
            raise CADDataError(f"{where}: its columns are of different kinds: text, token ids or chat messages")
        whole = whole + part if whole and part else whole or part
    return whole


def _import_datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise CADDataError(f"reading a data set needs Hugging Face datasets: {REMEDY}") from error
    return datasets


@contextmanager
def _readable(where: str) -> Iterator[None]:
    """Errors of the readers become one line; their log and their bars are left out."""
    import datasets

    level = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.disable_progress_bars()
    try:
        yield
    except CADDataError:
        raise
    except StopIteration:
        raise _UnreadableError(f"{where} is empty") from None
    except Exception as error:  # pyarrow, pandas, fsspec and datasets each have their own
        text = (str(error).strip().splitlines() or ["no message"])[0]
        raise _UnreadableError(f"{where} cannot be read: {type(error).__name__}: {text}") from error
    finally:
        datasets.logging.set_verbosity(level)
