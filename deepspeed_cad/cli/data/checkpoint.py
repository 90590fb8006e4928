"""What of a model decides how much of a step is attention, from its config.json.

In: a config.json, a folder with one, the name of a checkpoint, or of a shape. Out: a `ModelShape`. Where transformers
is installed it reads the file, because models name their sizes differently; what CAD refuses is refused here too.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from deepspeed_cad.cli.data.documents import REMEDY
from deepspeed_cad.config import read_json
from deepspeed_cad.errors import CADConfigError, CADUnsupportedError, in_one_line
from deepspeed_cad.forecast.setting import SHAPES, ModelShape, StateLayers

MLP_NAMES = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
"""Names of the width of the MLP; where a model has none of them or no value, it is four times the hidden size."""
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names of how many experts a layer has."""


def read_model_shape(where: str | None) -> ModelShape:
    """The shape of a checkpoint's model; of an 8B Llama where `where` is None.

    An MLP counts as three matrices, as gated ones have: for models with two, such as GPT-2, the gain comes out a
    little too low. Raises CADConfigError where the file cannot be read or is not of a decoder model, and
    CADUnsupportedError where CAD refuses the model."""
    from deepspeed_cad.ahead.step import batch_rope  # brings torch

    if where is None:
        return ModelShape()
    if where in SHAPES and not Path(where).exists():
        return SHAPES[where]
    path = Path(where) / "config.json" if Path(where).is_dir() else Path(where)
    if not path.exists() and path.suffix != ".json":
        path = _cached(where)
    fields = read_json(path, f"--model: {path}")
    if not isinstance(fields, dict):
        raise CADConfigError(f"--model: {path} holds a {type(fields).__name__}; expected the config.json of a model")
    config, read_by = _resolve(fields)
    _refuse(fields)
    state = _state_layers(config)
    try:
        heads, hidden = int(config.num_attention_heads), int(config.hidden_size)
        return ModelShape(
            layers=int(config.num_hidden_layers),
            hidden=hidden,
            intermediate=int(next(filter(None, (getattr(config, name, None) for name in MLP_NAMES)), 4 * hidden)),
            vocabulary=int(config.vocab_size),
            heads=heads,
            kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(config, "head_dim", None) or hidden // heads),
            not_counted=_not_counted(config, state),
            state=state,
            batch_rope=batch_rope(config),
        )
    except (ValueError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise CADConfigError(
            f"--model: {path} is not the config.json of a decoder model: {error} ({read_by})"
        ) from error


def _state_layers(config: Any) -> StateLayers | None:
    """Those of the model that transformers builds; None where there are none, or where nothing builds it."""
    try:
        import torch
        from transformers import AutoModelForCausalLM

        from deepspeed_cad.integrations.recurrent import CARRYING, find_recurrent
        from deepspeed_cad.integrations.structure import decoder_layers, find_decoder, has_attention

        if not CARRYING & set(_kinds(config)):
            return None
        with _quiet(), torch.device("meta"):
            decoder = find_decoder(AutoModelForCausalLM.from_config(config))
    except Exception:  # not installed, or a model that this transformers does not know
        return None
    carrying, layers = list(find_recurrent(decoder).values()), decoder_layers(decoder)
    if not carrying or not layers:
        return None
    return StateLayers(len(carrying), sum(map(has_attention, layers)), *_sizes(carrying[0], int(config.hidden_size)))


def _sizes(module: Any, hidden: int) -> tuple[int, int, int, bool]:
    """Weights of the matrices of a layer that carries state, elements that its kernel takes and gives, and whether the
    kernel takes a state."""
    matrices = [tuple(one.weight.shape) for one in module.modules() if type(one).__name__ == "Linear"]
    weights = sum(rows * columns for rows, columns in matrices)
    decay = next((own for name, own in module.named_parameters() if name.endswith("A_log")), None)
    if decay is None:
        return weights, 0, 0, False
    given = [columns for rows, columns in matrices if rows == hidden][-1]
    taken = next(one.in_channels for one in module.children() if hasattr(one, "in_channels"))
    first_mamba = decay.ndim > 1  # which has as many steps and gates as channels
    return weights, taken * (3 if first_mamba else 1), given, not first_mamba


def _kinds(config: Any) -> list[str]:
    return list(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or [])


def _not_counted(config: Any, state: StateLayers | None) -> str:
    kinds = _kinds(config)
    if not kinds and getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        kinds = ["sliding_attention"] * int(config.num_hidden_layers)
    counted = {"full_attention", "attention"}
    if state:
        from deepspeed_cad.integrations.recurrent import CARRYING

        counted |= CARRYING
    others = [kind for kind in kinds if kind not in counted]
    said = [f"{len(others)} of {len(kinds)} layers ({', '.join(sorted(set(others)))})"] if others else []
    said += ["its experts"] * any(getattr(config, name, None) for name in EXPERTS)
    return " and ".join(said)


def _cached(name: str) -> Path:
    remedy = f"give a folder or config.json, or one of {', '.join(SHAPES)}"
    try:
        from transformers.utils import cached_file
    except ImportError as error:
        raise CADConfigError(
            f"--model: {name} is no file, and without transformers no name is known ({REMEDY}); {remedy}"
        ) from error
    try:
        with _quiet():
            return Path(str(cached_file(name, "config.json")))
    except (OSError, ValueError) as error:
        said = f"--model: {name} is no file and cannot be found as a checkpoint: {in_one_line(error)}; {remedy}"
        raise CADConfigError(said) from error


@contextmanager
def _quiet() -> Iterator[None]:
    # The error that ends the command is one line.
    disabled = logging.root.manager.disable
    logging.disable()
    try:
        yield
    finally:
        logging.disable(disabled)


def _refuse(fields: dict[str, Any]) -> None:
    """Raise what CAD raises at the start of training, but for dropout, which is a value that one sets to 0."""
    try:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

        from deepspeed_cad.integrations.models import refuse_model
    except ImportError:
        return
    refused = None
    # A few layers say all there is to say, where layers of no other kind come later.
    for kind, layers in product((AutoModelForCausalLM, AutoModelForImageTextToText), (2, None)):
        try:
            config = AutoConfig.for_model(**fields)
            text = config.get_text_config()
            for name, value in vars(text).items():
                if "drop" in name and isinstance(value, float):
                    setattr(text, name, 0.0)
            text.num_hidden_layers = min(layers or text.num_hidden_layers, text.num_hidden_layers)
            with _quiet(), torch.device("meta"):
                model = kind.from_config(config)
        except Exception:  # another kind of model, with code of its own, or none that this transformers knows
            continue
        try:
            return refuse_model(model)
        except CADUnsupportedError as error:
            refused = error
    if refused is not None:
        raise refused


def _resolve(fields: dict[str, Any]) -> tuple[Any, str]:
    """The part of the file that is of the text decoder, as attributes; and what read it."""
    plain = SimpleNamespace(**fields.get("text_config", fields))
    try:
        from transformers import CONFIG_MAPPING

        config = CONFIG_MAPPING[fields["model_type"]].from_dict(fields)
    except ImportError:
        return plain, "read without transformers, which knows more models' names"
    except Exception:  # a model with code of its own, or none that this transformers knows
        return plain, f"model_type {fields.get('model_type')!r} is not known here"
    return config.get_text_config(), f"model_type {fields['model_type']!r}"
