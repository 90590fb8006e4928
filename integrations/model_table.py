"""The models that were tried: tested ones, and ones that no structural check of models.py can recognise."""

from __future__ import annotations

from typing import Final

SUPPORTED: Final[frozenset[str]] = frozenset({"llama"})
"""`model_type` of every model that tests/test_models.py compares with its documents run alone."""

REFUSED: Final[dict[str, str]] = {}
"""`model_type` to reason, for models whose config and modules do not show why CAD cannot reproduce them."""
