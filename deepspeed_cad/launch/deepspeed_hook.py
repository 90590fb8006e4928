"""Makes the "cad" block of a DeepSpeed JSON work: wraps `deepspeed.initialize`, and adds one line to `ds_report`.

In: the module `deepspeed`, `deepspeed.env_report`, or one of Accelerate's that reads the JSON, right after its import.
Out: the same module, its function wrapped. A call without a "cad" block goes straight through; a block that nobody
would read is an error. Imports neither torch nor deepspeed by itself.
"""

import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any

from _deepspeed_cad_waiter import AUTOLOAD, WAITED_FOR, only_warn, wait_for
from deepspeed_cad.config import CADConfig
from deepspeed_cad.errors import CADConfigError
from deepspeed_cad.integrations.deepspeed.block import ABSENT, block_of, find_cad_block, read_config

logger = logging.getLogger(__name__)

_MARK = "__deepspeed_cad_autoload__"
"""Of our wrappers; integrations, which wrap some of the same functions, have a mark of their own."""


def after_import(module: ModuleType) -> None:
    """Wraps what is to be wrapped in one of the modules that the hook waits for. Doing so twice changes nothing."""
    if module.__name__ == "deepspeed":
        _wrap(module, "initialize", _initialize)
    elif module.__name__ == "deepspeed.env_report":
        _wrap(module, "main", _report)
    elif module.__name__ == "accelerate.accelerator":
        _wrap(module.Accelerator, "__init__", _make_accelerator)
    elif module.__name__ == "accelerate.utils.deepspeed":
        _wrap(module.HfDeepSpeedConfig, "__init__", _make_json)


def install() -> None:
    """Wraps `deepspeed.initialize` now, or as soon as deepspeed is imported.

    The explicit way to what the installed .pth file does by itself; for `DEEPSPEED_CAD_AUTOLOAD=0`, `pip install
    --target` and `python -S`. Idempotent."""
    for module in (sys.modules[name] for name in WAITED_FOR if name in sys.modules):
        after_import(module)
    if missing := [name for name in WAITED_FOR if name not in sys.modules]:
        wait_for(missing, only_warn(after_import), AUTOLOAD)


def _wrap(owner: ModuleType | type, name: str, run: Callable[..., Any]) -> None:
    """Put `run(original, …)` in the place of a function or method, if that was not done yet."""
    if (original := getattr(owner, name, None)) is None:
        logger.warning("%s has no %r to attach deepspeed_cad to; use deepspeed_cad.apply(model)", owner.__name__, name)
    elif not hasattr(original, _MARK):  # which whoever wraps it by functools.wraps takes over
        wrapped = functools.wraps(original)(lambda *args, **kwargs: run(original, *args, **kwargs))
        setattr(wrapped, _MARK, True)
        setattr(owner, name, wrapped)


def _initialize(original: Callable, *args: Any, **kwargs: Any) -> Any:
    block = find_cad_block(original, args, kwargs)
    if block is ABSENT or not CADConfig.from_dict(block).enabled:
        return original(*args, **kwargs)
    return import_module("deepspeed_cad.integrations.deepspeed.initialize").initialize(original, block, args, kwargs)


def _report(original: Callable, *args: Any, **kwargs: Any) -> Any:
    result = original(*args, **kwargs)
    from deepspeed_cad.cli.doctor import examine, summarise

    sys.stdout.write(f"{summarise(examine())}\n")
    return result


def _make_accelerator(original: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
    """Raise where an Accelerator leaves DeepSpeed out, and with its JSON the "cad" block, or adds what CAD refuses."""
    original(self, *args, **kwargs)
    given = inspect.signature(original).bind(self, *args, **kwargs).arguments
    if not _asks_for_cad(given.get("deepspeed_plugins") or given.get("deepspeed_plugin")):
        return
    if self.distributed_type == "DEEPSPEED":
        import_module("deepspeed_cad.integrations.prepared").refuse_accelerator(self)
        return
    raise CADConfigError(
        'the DeepSpeed JSON has a "cad" block, but Accelerate trains without DeepSpeed and reads neither: it '
        f"found {self.distributed_type.value}, as on a CPU (ACCELERATE_USE_CPU, use_cpu, cpu=True). Train on "
        "GPUs, or take the block out and ask for CAD by -m deepspeed_cad.run, which needs no DeepSpeed"
    )


def _make_json(original: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
    """Check the "cad" block where Accelerate and transformers read the JSON, before they complain in their words."""
    original(self, *args, **kwargs)
    block = block_of(self.config)
    if block is not ABSENT:
        CADConfig.from_dict(block)
        # They refuse an "auto" that they do not know. To leave the key out means the same.
        self.config["cad"] = {key: value for key, value in block.items() if value != "auto"}


def _asks_for_cad(plugins: Any) -> bool:
    """Whether one of Accelerate's DeepSpeed plugins, or the file that its launcher names, turns CAD on."""
    if plugins is None and os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        plugins = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    each = plugins.values() if isinstance(plugins, Mapping) else [plugins]
    blocks = [read_config(getattr(one, "deepspeed_config", one)).get("cad", {"enabled": False}) for one in each]
    return any(not isinstance(block, Mapping) or block.get("enabled") is not False for block in blocks)
