"""Waits for the import of a module, and acts once it has run.

In: names of modules, and what to call with each of them. Out: a finder in `sys.meta_path` until all were imported.
Imports nothing that is not loaded already, because every Python process loads it; knows nothing of the package. Never
acts on `find_spec` alone: transformers and accelerate call that to see whether deepspeed is there.
"""

import sys
from _thread import get_ident

AUTOLOAD = "autoload"
"""Role of the finder by which the "cad" block of a DeepSpeed JSON has its effect."""
WAITED_FOR = ("deepspeed", "deepspeed.env_report", "accelerate.accelerator", "accelerate.utils.deepspeed")
ASKED = "asked"
"""Role of the finder by which CAD that was asked for in the environment is armed."""
ASKED_FOR = ("torch", "accelerate", "deepspeed")


class Waiter:
    """A meta-path finder that lets the others find a module and stands in for its loader until it is executed."""

    def __init__(self, names, act, role="") -> None:
        self.waiting = set(names)
        self.act = act  # called with the module after its import
        self.role = role
        self._searching = set()  # (name, thread): another hook may come back to us for the same name

    def find_spec(self, name, path=None, target=None):
        if name not in self.waiting or (name, get_ident()) in self._searching:
            return None
        self._searching.add((name, get_ident()))
        try:
            others = [finder for finder in sys.meta_path if finder is not self and hasattr(finder, "find_spec")]
            found = (finder.find_spec(name, path, target) for finder in others)
            spec = next((spec for spec in found if spec is not None), None)
        finally:
            self._searching.discard((name, get_ident()))
        if hasattr(getattr(spec, "loader", None), "exec_module"):
            spec.loader = StandIn(spec.loader, self)
        return spec

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
        self._finder.act(module)


def find_waiter(role):
    """The armed finder with a role in this process, or None."""
    return next((finder for finder in sys.meta_path if isinstance(finder, Waiter) and finder.role == role), None)


def wait_for(names, act, role) -> None:
    """Start waiting, unless a finder with this role does already."""
    if find_waiter(role) is None:
        sys.meta_path.insert(0, Waiter(names, act, role))


def when_imported(name, act) -> None:
    """Call `act` with the module of that name: now if it is loaded, else right after its import. While it is being
    imported it is too late for either."""
    module = sys.modules.get(name)
    if module is None:
        sys.meta_path.insert(0, Waiter((name,), act))
    elif not getattr(module.__spec__, "_initializing", False):
        act(module)


def only_warn(act):
    """`act` for imports that must not fail: what it raises becomes a warning."""

    def attach(module) -> None:
        try:
            act(module)
        except Exception as error:
            import warnings

            warnings.warn(
                f"deepspeed_cad could not attach itself to {module.__name__}: {error!r}. A 'cad' block in a DeepSpeed "
                'JSON will have no effect; run "deepspeed-cad doctor".',
                RuntimeWarning,
                stacklevel=3,
            )

    return attach
