"""OpenRLHF: a worker that has run its last micro-batch attends for workers of its role that have more.

In: the module of its workers, in a process that was asked for CAD. Out: `execute_batch` of all of them, with which its
experience maker runs forwards without backward, and which is the only place that knows where a worker's own end.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

from deepspeed_cad.session import current_session

_MARK = "__deepspeed_cad__"


def install_worker_hooks(module: ModuleType) -> None:
    """Wrap workers of the module `openrlhf.trainer.ray.launcher`. Idempotent."""
    workers = [one.__ray_metadata__.modified_class for one in vars(module).values() if hasattr(one, "__ray_metadata__")]
    for cls in (module.BaseModelActor, *workers):  # Ray gave these copies of what they inherit
        if not hasattr(cls.execute_batch, _MARK):
            cls.execute_batch = _follow_after(cls.execute_batch)


def _follow_after(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def execute_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        results = original(self, *args, **kwargs)
        session = current_session()
        binding = None if session is None else next(iter(session.bindings.values()), None)
        if binding is not None:  # of whichever model: it follows all
            binding.follow()
        return results

    setattr(execute_batch, _MARK, True)
    return execute_batch
