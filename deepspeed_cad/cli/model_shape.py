"""What of a model decides how much of a step is attention, from its config.json.

In: a config.json, or a folder with one. Out: a `ModelShape`. Where transformers is installed it reads the file,
because models name their sizes differently (GPT-2: `n_head`, `n_embd`, `n_layer`) and its classes know all names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deepspeed_cad.errors import CADConfigError
from deepspeed_cad.planner.outlook import ModelShape

MLP_NAMES = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
"""Names of the width of the MLP; where a model has none of them or no value, it is four times the hidden size."""


def read_model_shape(where: str | None) -> ModelShape:
    """The shape of a checkpoint's model; of an 8B Llama where `where` is None.

    An MLP counts as three matrices, as gated ones have: for models with two, such as GPT-2, the gain comes out a
    little too low. Raises CADConfigError where the file cannot be read or is not of a decoder model.
    """
    if where is None:
        return ModelShape()
    path = Path(where) / "config.json" if Path(where).is_dir() else Path(where)
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CADConfigError(f"--model: {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise CADConfigError(f"--model: {path} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise CADConfigError(f"--model: {path} holds a {type(fields).__name__}; expected the config.json of a model")
    config, read_by = _resolve(fields)
    try:
        heads, hidden = int(_get(config, "num_attention_heads")), int(_get(config, "hidden_size"))
        widths = [getattr(config, name, None) for name in MLP_NAMES]
        return ModelShape(
            layers=int(_get(config, "num_hidden_layers")),
            hidden=hidden,
            intermediate=int(next((width for width in widths if width), 4 * hidden)),
            vocabulary=int(_get(config, "vocab_size")),
            heads=heads,
            kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(config, "head_dim", None) or hidden // heads),
        )
    except (ValueError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise CADConfigError(
            f"--model: {path} is not the config.json of a decoder model: {error} ({read_by})"
        ) from error


def _resolve(fields: dict[str, Any]) -> tuple[Any, str]:
    """The part of the file that is of the text decoder, as attributes; and what read it."""
    try:
        from transformers import CONFIG_MAPPING
    except ImportError:
        return _Plain(fields.get("text_config", fields)), "read without transformers, which knows more models' names"
    try:
        config = CONFIG_MAPPING[fields["model_type"]].from_dict(fields)
    except Exception:  # a model with code of its own, or none that this transformers knows
        return _Plain(fields.get("text_config", fields)), f"model_type {fields.get('model_type')!r} is not known here"
    return config.get_text_config(), f"model_type {fields['model_type']!r}"


class _Plain:
    """The keys of the file as attributes."""

    def __init__(self, fields: dict[str, Any]) -> None:
        vars(self).update(fields)


def _get(config: Any, name: str) -> Any:
    value = getattr(config, name, None)
    if value is None:
        raise AttributeError(f"it has no {name}")
    return value
