"""Waits for the real import of deepspeed and then lets deepspeed_cad.autoload wrap it.

Started by deepspeed_cad_autoload.pth in every Python process, so it imports nothing that is not loaded already, and
lies beside the package instead of inside it. In: the imports of the process. Out: a call of
`deepspeed_cad.autoload.after_import(module)` once a module of `WAITED_FOR` has run, and, where DEEPSPEED_CAD_CONFIG
asks for CAD, of `deepspeed_cad.asked.after_import(module)` for `ASKED_FOR`. Without that request it must never make an
import fail. It never acts on `find_spec` alone: transformers and accelerate call that to see whether deepspeed is
there.
"""

import os
import sys
from _thread import get_ident

WAITED_FOR = ("deepspeed", "deepspeed.env_report", "accelerate.accelerator")
ASKED_FOR = ("torch", "accelerate", "deepspeed")


class Waiter:
    """A meta-path finder that lets the others find a module and stands in for its loader until it is executed."""

    def __init__(self, names=WAITED_FOR, act=None) -> None:
        self.waiting = set(names)
        self.act = act  # called with the module after its import; None: deepspeed_cad.autoload.after_import
        self._searching = set()  # (name, thread): another hook may come back to us for the same name

    def find_spec(self, name, path=None, target=None):
        if name not in self.waiting or (name, get_ident()) in self._searching:
            return None
        self._searching.add((name, get_ident()))
        try:
            spec = self._ask_others(name, path, target)
        finally:
            self._searching.discard((name, get_ident()))
        if hasattr(getattr(spec, "loader", None), "exec_module"):
            spec.loader = StandIn(spec.loader, self)
        return spec

    def _ask_others(self, name, path, target):
        for finder in list(sys.meta_path):
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    return spec
        return None

    def done(self, name) -> None:
        """Called after the real import; with nothing left to wait for the finder goes."""
        self.waiting.discard(name)
        if not self.waiting and self in sys.meta_path:
            sys.meta_path.remove(self)


class StandIn:
    """A loader that puts the real one back into the module before running it, so that no trace of this one is left."""

    def __init__(self, loader, finder) -> None:
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name):
        if name.startswith("__") or name in ("_loader", "_finder"):  # while being copied or unpickled
            raise AttributeError(name)
        return getattr(self._loader, name)

    def create_module(self, spec):
        return self._loader.create_module(spec) if hasattr(self._loader, "create_module") else None

    def exec_module(self, module) -> None:
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)  # when this raises, the next try is waited for again
        self._finder.done(module.__name__)
        if self._finder.act is not None:
            self._finder.act(module)
            return
        try:
            from deepspeed_cad.autoload import after_import

            after_import(module)
        except Exception as error:
            import warnings

            warnings.warn(
                f"deepspeed_cad could not attach itself to {module.__name__}: {error!r}. A 'cad' block in a DeepSpeed "
                'JSON will have no effect; run "deepspeed-cad doctor".',
                RuntimeWarning,
                stacklevel=2,
            )


def tell_asked(module) -> None:
    """Arms CAD that was asked for; an error goes on to who imports, because the run must not go on without CAD."""
    from deepspeed_cad.asked import after_import

    after_import(module)


def waiter():
    """The armed finder of this process, or None."""
    return next((finder for finder in sys.meta_path if isinstance(finder, Waiter) and finder.act is None), None)


def arm_asked() -> None:
    """Starts waiting for what trains, once per process."""
    if not any(isinstance(finder, Waiter) and finder.act is tell_asked for finder in sys.meta_path):
        sys.meta_path.insert(0, Waiter(ASKED_FOR, tell_asked))


def arm() -> None:
    """Starts waiting, once per process, unless DEEPSPEED_CAD_AUTOLOAD=0. Called by the .pth file.

    A request in DEEPSPEED_CAD_CONFIG is waited for in any case.
    """
    if os.environ.get("DEEPSPEED_CAD_AUTOLOAD", "1").lower() not in ("0", "false", "off", "no") and waiter() is None:
        sys.meta_path.insert(0, Waiter())
    if os.environ.get("DEEPSPEED_CAD_CONFIG"):
        arm_asked()
