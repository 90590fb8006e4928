"""Where the "cad" block stands: reads the config of a call of `deepspeed.initialize` as DeepSpeed would. And CAD's
figures in DeepSpeed's monitor.

In: the arguments of the call. Out: the config as a mapping, and its "cad" block or `ABSENT`. Imports neither torch nor
deepspeed, and changes nothing.
"""

import base64
import binascii
import inspect
import json
import os
from collections.abc import Callable, Mapping
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

from deepspeed_cad.errors import CADConfigError

ABSENT = object()
"""In place of a "cad" block: the config has none."""
_MEANT = ("cad", "cads", "cadblock", "cadconfig", "deepspeedcad", "deepspeedcadconfig", "coreattentiondisaggregation")
"""Top-level keys, as lower-case letters, by which a user may have meant "cad". DeepSpeed passes over all of them."""


def find_config(original: Callable, args: tuple, kwargs: dict) -> Mapping:
    """The config that this call of `deepspeed.initialize` would use; empty where it cannot be read. DeepSpeed takes its
    config as `config`, `config_params` or `args.deepspeed_config`, each a dict, a path, or JSON in URL-safe base64.
    What cannot be read is left for DeepSpeed to complain about."""
    try:
        given = inspect.signature(original).bind_partial(*args, **kwargs).arguments
    except TypeError:
        return {}
    named = [getattr(given.get("args"), name, None) for name in ("deepspeed_config", "deepscale_config")]
    said = (one for one in (given.get("config"), given.get("config_params"), *named) if one is not None)
    return read_config(next(said, None))


def find_cad_block(original: Callable, args: tuple, kwargs: dict) -> Any:
    """The "cad" value of the config that this call of `deepspeed.initialize` would use, or `ABSENT`. Raises
    CADConfigError as `block_of` does."""
    return block_of(find_config(original, args, kwargs))


def block_of(config: Mapping) -> Any:
    """The "cad" value of a DeepSpeed config, or `ABSENT`. Raises CADConfigError where the block has a name that nobody
    reads, or stands inside another block."""
    for key in config:
        if key != "cad" and "".join(filter(str.isalpha, str(key).lower())) in _MEANT:
            raise CADConfigError(
                f'the DeepSpeed JSON has "{key}" at its top level, which neither DeepSpeed nor CAD reads. The block is '
                'called "cad"; take it out to train without CAD'
            )
    if place := _inside(config, ()):
        raise CADConfigError(
            f'the DeepSpeed JSON has "cad" inside "{place}", where nobody reads it. Move it to the top level, beside '
            f'"{place.split(".")[0]}"; take it out to train without CAD'
        )
    return config.get("cad", ABSENT)


def _inside(config: Mapping, path: tuple[str, ...]) -> str:
    """The keys, joined by dots, of a block with a "cad" in it; "" where there is none."""
    if path and "cad" in config:
        return ".".join(path)
    blocks = {str(key): value for key, value in config.items() if isinstance(value, Mapping) and key != "cad"}
    return next(filter(None, (_inside(value, (*path, key)) for key, value in blocks.items())), "")


def read_config(config: Any) -> Mapping:
    """What a dict, a path, or JSON in URL-safe base64 holds as a DeepSpeed config; empty where it holds none."""
    if isinstance(config, Mapping):
        return config
    if not isinstance(config, str | os.PathLike):
        return {}
    try:
        there = os.path.exists(config)
        text = (Path(config).read_bytes() if there else base64.urlsafe_b64decode(os.fspath(config))).decode()
        try:
            read = json.loads(text)
        except ValueError:
            read = import_module("hjson").loads(text)  # DeepSpeed reads comments and trailing commas too
    except (OSError, ValueError, binascii.Error, ImportError):
        return {}
    return read if isinstance(read, Mapping) else {}


def report_statistics(engine: Any, session: Any) -> None:
    """Write CAD's figures after every optimizer step, beside the engine's own."""
    step, managed = engine.step, getattr(engine, "managed_gradient_accumulation", lambda: True)

    @wraps(step)
    def step_and_report(*args: Any, **kwargs: Any) -> Any:
        boundary = not managed() or engine.is_gradient_accumulation_boundary()
        result = step(*args, **kwargs)
        if boundary:
            write_statistics(engine, session)
        return result

    engine.step = step_and_report


def write_statistics(engine: Any, session: Any) -> None:
    """Write what happened since the last time, on rank 0, where a monitor is on."""
    monitor = getattr(engine, "monitor", None)
    if monitor is not None and monitor.enabled and engine.global_rank == 0:
        figures = session.take_statistics("monitor").as_events()
        monitor.write_events([(f"Train/{name}", value, engine.global_samples) for name, value in figures.items()])
