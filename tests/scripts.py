"""Scripts of the repository that are no part of a package, imported for tests, and what they print."""

import importlib.util
import json
import re
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]


@cache
def load_script(path: str) -> ModuleType:
    """The module of a script, by its path from the root of the checkout; loaded once."""
    file = ROOT / path
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def printed_losses(said: str) -> list[float]:
    """What scripts of examples print last, on rank 0."""
    (found,) = re.findall(r"^losses: (\[.*\])$", said, re.MULTILINE)
    return json.loads(found)
