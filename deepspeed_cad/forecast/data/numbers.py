"""Token lengths where the data is lengths already: a JSON list of numbers, one number a line, or a named distribution.

In: what was given as input. Out: lengths, or None where it is something else, which `lengths.py` reads as a data set.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from deepspeed_cad.errors import CADDataError
from deepspeed_cad.forecast.distributions import NAMED

NUMBERS = re.compile(r"[\s\[\],\d.eE+-]*\d[\s\[\],\d.eE+-]*")
"""What a file of lengths consists of."""
LIST = re.compile(r"\s*\[\s*[\d.+-]")
"""How a JSON list of lengths begins."""
MOST_DRAWN = 20_000_000
"""Documents of a named distribution: about a gigabyte of numbers."""
MEAN_OF = 100_000_000
"""Tokens by which the mean length of a distribution is found."""
BEGIN = 4096
"""Bytes that are looked at to tell such a file from text."""


def draw_named(places: Sequence[str], tokens: int) -> list[int] | None:
    """Lengths of a distribution that ships with the project, at least so many tokens; None where none is named.

    Raises CADDataError where these would be more documents than a laptop has memory for.
    """
    if len(places) != 1 or places[0] not in NAMED or Path(places[0]).exists():
        return None
    some = NAMED[places[0]].draw(MEAN_OF)
    count = tokens * len(some) / sum(some)
    if count > MOST_DRAWN:
        raise CADDataError(
            f"{places[0]}: {count:.1e} documents would be drawn, more than {MOST_DRAWN:.0e}: ask for fewer --ranks, "
            "--steps or --micro-batches, or a smaller --context"
        )
    return NAMED[places[0]].draw(tokens)


def read_numbers(places: Sequence[str], limit: int) -> list[int] | None:
    """The first `limit` lengths of files of numbers; None where the first file is something else.

    Raises CADDataError that names file and line for what is no length.
    """
    found: list[int] = []
    for place in places:
        path = Path(place)
        if not path.is_file() or not _is_numbers(path):
            return None
        found += _parse(path)
    if not found:
        return None
    return found[:limit]


def _is_numbers(path: Path) -> bool:
    """Whether a file holds lengths. Raises CADDataError where it holds nothing."""
    with path.open("rb") as file:
        begin = file.read(BEGIN)
    if begin.strip() in (b"", b"[]"):
        raise CADDataError(f"{path} is empty: it holds neither documents nor lengths")
    if LIST.match(begin.decode("ascii", errors="replace")):
        return True
    try:
        if NUMBERS.fullmatch(begin.decode("ascii")):
            return True
    except UnicodeDecodeError:
        return False
    # Where every second line is a length the others are mistakes, which are to be named.
    lines = [line.strip() for line in begin.splitlines() if line.strip()]
    return 2 * sum(line.isdigit() for line in lines) >= len(lines)


def _parse(path: Path) -> list[int]:
    text = path.read_text(encoding="utf-8", errors="replace")
    if text.lstrip().startswith("["):
        try:
            values = json.loads(text)
        except ValueError as error:
            raise CADDataError(f"{path} is not a JSON list of lengths: {error}") from error
        where = [f"entry {number}" for number in range(len(values))]
    else:
        lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
        where = [f"line {number}" for number, _ in lines]
        values = [int(line) if line.isdigit() else line for _, line in lines]
    for place, value in zip(where, values, strict=True):
        if type(value) is not int or not 0 < value < 1 << 31:
            raise CADDataError(f"{path}, {place}: {value!r}; expected the tokens of a document, a whole number above 0")
    return list(values)
