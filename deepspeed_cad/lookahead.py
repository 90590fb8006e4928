"""Look-ahead: read a loader one micro-batch ahead and announce it, so that plans are ready when the forward starts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from deepspeed_cad.documents import read_documents
from deepspeed_cad.errors import CADError
from deepspeed_cad.session import Feed


class LookAheadLoader:
    """A loader that behaves like the one it wraps and announces each micro-batch while the one before it trains."""

    def __init__(self, loader: Any, feed: Feed) -> None:
        self._loader, self._feed = loader, feed

    def __iter__(self) -> Iterator[Any]:
        self._feed.forget()
        batches = iter(self._loader)
        ahead: list[Any] = []
        for batch in batches:
            announce(self._feed, batch)
            ahead.append(batch)
            if len(ahead) > 1:
                yield ahead.pop(0)
        yield from ahead

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)


def announce(feed: Feed, batch: Any) -> None:
    """Announce a micro-batch if it is a dict that says where its documents are; otherwise its forward will."""
    if not isinstance(batch, Mapping) or not ("input_ids" in batch or "inputs_embeds" in batch):
        return
    try:
        mine = read_documents(batch)
    except CADError as error:
        feed.fail(error)
    feed.announce(mine)
