"""Document lengths in tokens: a named distribution, a file of numbers, or a data set.

In: what was given as input; a tokenizer where the data is text. Out: a list of lengths in the order of the data.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from deepspeed_cad.cli.data.documents import REMEDY, documents
from deepspeed_cad.errors import CADDataError
from deepspeed_cad.forecast.packing import NAMED

BATCH = 256
"""Texts that are tokenized at a time."""
LIST = re.compile(r"\s*\[\s*\[?\s*[\d.+-]")
"""How a JSON list of lengths begins."""
MOST_DRAWN = 20_000_000
"""Documents of a named distribution: about a gigabyte of numbers."""
BEGIN = 4096
"""Characters that are looked at to tell a file of lengths from text."""


def read_lengths(
    places: Sequence[str],
    needed: int,
    tokenizer: str | None,
    field: str | None,
    limit: int,
    skipped: list[str],
    tell: Callable[[str], None],
) -> list[int]:
    """Lengths of the first `limit` documents that are not empty; of a named distribution at least `needed` tokens.

    `skipped` gets a line for each file of a folder that cannot be read; `tell` hears how far it is. Raises CADDataError
    naming what is missing or unreadable, or line by line what is no length.
    """
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
    lengths = _count_documents(documents(places, field, skipped), tokenizer, limit, tell)
    if not lengths:
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

        tokenizer: Callable[..., Any] = AutoTokenizer.from_pretrained(name)
    except ImportError as error:
        raise CADDataError(f"reading text needs transformers: {REMEDY}") from error
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or ["no message"])[0]
        raise CADDataError(f"the tokenizer {name!r} cannot be loaded: {reason}") from error
    return tokenizer
