"""Waits for the real import of deepspeed and then lets deepspeed_cad.autoload wrap it.

Started by deepspeed_cad_autoload.pth in every Python process, so it imports nothing that is not loaded already, and
lies beside the package instead of inside it. In: the imports of the process. Out: a call of
`deepspeed_cad.autoload.after_import(module)` once a module of `WAITED_FOR` has run. It must never make an import of
deepspeed fail, and never act on `find_spec` alone: transformers and accelerate call that to look whether deepspeed exists.
"""

import os
import sys
from _thread import get_ident

WAITED_FOR = ("deepspeed", "deepspeed.env_report")


class Waiter:
    """A meta-path finder that lets the others find a module and hooks the moment it is executed."""

    def __init__(self) -> None:
        self.waiting = set(WAITED_FOR)
        self._searching = set()  # (name, thread): another hook may come back to us for the same name

    def find_spec(self, name, path=None, target=None):
        if name not in self.waiting or (name, get_ident()) in self._searching:
            return None
        self._searching.add((name, get_ident()))
        try:
            spec = self._ask_others(name, path, target)
        finally:
            self._searching.discard((name, get_ident()))
        if spec is not None and hasattr(spec.loader, "exec_module"):
            self._hook(spec.loader, name)
        return spec

    def _ask_others(self, name, path, target):
        for finder in list(sys.meta_path):
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    return spec
        return None

    def _hook(self, loader, name) -> None:
        """Replaces `exec_module` on this one loader object; its class, `__spec__` and `__loader__` stay what they were."""
        original = loader.exec_module
        if getattr(original, "deepspeed_cad_hook", None) == name:
            return

        def exec_module(module):
            if module.__name__ != name:  # a loader shared by several modules, as in a zip file
                return original(module)
            loader.__dict__.pop("exec_module", None)
            original(module)  # when this raises, the next try is hooked again
            self._done(name)
            try:
                from deepspeed_cad.autoload import after_import

                after_import(module)
            except Exception as error:
                import warnings

                warnings.warn(
                    f"deepspeed_cad could not attach itself to {name}: {error!r}. A 'cad' block in a DeepSpeed "
                    'JSON will have no effect; run "deepspeed-cad doctor".',
                    RuntimeWarning,
                    stacklevel=2,
                )

        exec_module.deepspeed_cad_hook = name
        try:
            loader.exec_module = exec_module
        except AttributeError:  # a loader without attributes of its own: deepspeed_cad.install() is the way then
            pass

    def _done(self, name) -> None:
        self.waiting.discard(name)
        if not self.waiting and self in sys.meta_path:
            sys.meta_path.remove(self)


def waiter():
    """The armed finder of this process, or None."""
    return next((finder for finder in sys.meta_path if isinstance(finder, Waiter)), None)


def arm() -> None:
    """Starts waiting, once per process, unless DEEPSPEED_CAD_AUTOLOAD=0. Called by the .pth file."""
    if os.environ.get("DEEPSPEED_CAD_AUTOLOAD", "1").lower() not in ("0", "false", "off", "no") and waiter() is None:
        sys.meta_path.insert(0, Waiter())
