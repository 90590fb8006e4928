"""Core attention disaggregation (CAD): attention is cut into tasks and balanced over all ranks, with the same results.

This is the whole public interface. Importing it costs nothing: no torch, no GPU, no compiled library, no DeepSpeed;
each name is imported when it is first used.

    deepspeed_cad.apply(model, config=None)    turn CAD on for one model in any torch.distributed loop
    deepspeed_cad.open(config=None)            core attention as a function, for a model of your own
    deepspeed_cad.CADConfig                    the "cad" block as a frozen dataclass
    deepspeed_cad.current_session()            the running session and its statistics
    deepspeed_cad.shard_stream(batch, r, w)    cut a packed stream into rank parts
    deepspeed_cad.to_pipeline(model, stages)   a transformers decoder as a DeepSpeed PipelineModule
    deepspeed_cad.to_hf(engine, path)          write such a pipeline as a checkpoint of transformers
    deepspeed_cad.install()                    wrap deepspeed.initialize where the autoload file is not active
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from deepspeed_cad.version import __version__

if TYPE_CHECKING:
    from deepspeed_cad.api import apply as apply
    from deepspeed_cad.config import CADConfig as CADConfig
    from deepspeed_cad.errors import CADConfigError as CADConfigError
    from deepspeed_cad.errors import CADDataError as CADDataError
    from deepspeed_cad.errors import CADError as CADError
    from deepspeed_cad.errors import CADPeerError as CADPeerError
    from deepspeed_cad.errors import CADUnsupportedError as CADUnsupportedError
    from deepspeed_cad.function import open as open
    from deepspeed_cad.integrations.pipeline_model import to_hf as to_hf
    from deepspeed_cad.integrations.pipeline_model import to_pipeline as to_pipeline
    from deepspeed_cad.launch.deepspeed_hook import install as install
    from deepspeed_cad.session import current_session as current_session
    from deepspeed_cad.stream import shard_stream as shard_stream

# integrations/ lies at the top of the source tree and is installed as deepspeed_cad.integrations. A checkout that is
# only on PYTHONPATH finds it there too.
_TREE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
if all(os.path.isfile(os.path.join(_TREE, name)) for name in ("pyproject.toml", "integrations/__init__.py")):
    __path__.append(_TREE)

_HOME = {
    "CADConfig": "config",
    **dict.fromkeys(("CADConfigError", "CADDataError", "CADError", "CADPeerError", "CADUnsupportedError"), "errors"),
    "apply": "api",
    "current_session": "session",
    "install": "launch.deepspeed_hook",
    "open": "function",
    "shard_stream": "stream",
    "to_hf": "integrations.pipeline_model",
    "to_pipeline": "integrations.pipeline_model",
}
__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'deepspeed_cad' has no attribute {name!r}")
    value = getattr(import_module(f"deepspeed_cad.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
