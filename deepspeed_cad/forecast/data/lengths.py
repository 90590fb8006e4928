"""Document lengths in tokens, from a data set.

In: files and folders as `data.py` reads them; a tokenizer where the data is text. Out: a list of lengths in the order
of the data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from deepspeed_cad.errors import CADDataError
from deepspeed_cad.forecast.data.documents import documents

BATCH = 256


def read_lengths(places: Sequence[str], tokenizer: str | None, field: str | None, limit: int) -> list[int]:
    """Lengths of the first `limit` documents that are not empty.

    Raises CADDataError naming what is missing or unreadable.
    """
    lengths: list[int] = []
    texts: list[str] = []
    tools = _Texts(tokenizer)
    for document in documents(places, field):
        if len(lengths) + len(texts) >= limit:
            break
        if isinstance(document, list) and document and isinstance(document[0], int):
            lengths.append(len(document))
            continue
        if document:
            texts.append(document if isinstance(document, str) else tools.joined(document))
        if len(texts) == BATCH:
            lengths += tools.lengths(texts)
            texts = []
    lengths += tools.lengths(texts)
    lengths = [length for length in lengths if length]
    if not lengths:
        raise CADDataError(f"{' '.join(places)} holds no documents")
    return lengths


class _Texts:
    """A tokenizer that is loaded when the first text is met."""

    def __init__(self, name: str | None) -> None:
        self._name = name
        self._loaded: Callable[..., Any] | None = None

    def lengths(self, texts: list[str]) -> list[int]:
        """Tokens of each text."""
        if not texts:
            return []
        found = self._tokenizer()(texts, verbose=False)["input_ids"]
        return [len(ids) for ids in found]

    def joined(self, messages: list[dict[str, Any]]) -> str:
        """A chat as the tokenizer's template writes it; without a template, its contents one after the other."""
        tokenizer: Any = self._tokenizer()
        if getattr(tokenizer, "chat_template", None):
            return str(tokenizer.apply_chat_template(messages, tokenize=False))
        return "\n".join(str(message.get("content", "")) for message in messages)

    def _tokenizer(self) -> Callable[..., Any]:
        if self._loaded is None:
            self._loaded = _load_tokenizer(self._name)
        return self._loaded


def _load_tokenizer(name: str | None) -> Callable[..., Any]:
    if name is None:
        raise CADDataError("the data is text: give the model's tokenizer with --tokenizer")
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise CADDataError("reading text needs transformers: pip install transformers") from error
    try:
        tokenizer: Callable[..., Any] = AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or ["no message"])[0]
        raise CADDataError(f"the tokenizer {name!r} cannot be loaded: {reason}") from error
    return tokenizer
