"""The rules of docs/architecture.md about who imports whom, read from the sources: also imports inside functions.

Imports for type checkers only are left out. A module is told by its installed name, so what lies in integrations/ is
`deepspeed_cad.integrations`."""

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from scripts import ROOT

HOSTS = ("transformers", "deepspeed", "accelerate", "trl", "peft", "axolotl", "torchtitan")
RUNNING = ("ahead", "attention", "exchange", "server", "session", "pipeline.step", "integrations")
"""Rooms that take part in training; those that only compute are tested without processes."""
NEVER: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("layout", "shares", "stream", "cost", "pipeline.rounds", "schedule"), ("torch", *HOSTS, *RUNNING)),
    "planner": ("torch.distributed", *HOSTS, *RUNNING), "profiles": ("torch.distributed", *HOSTS, *RUNNING),
    "forecast": ("torch", "profiles", "cli", *HOSTS, *RUNNING),
    "exchange": (*HOSTS, "attention", "ahead", "server", "session", "planner", "kernels", "integrations"),
    "kernels": ("torch.distributed", *HOSTS), "attention": (*HOSTS, "ahead", "server", "session", "integrations"),
    "feedback": (*HOSTS, "ahead", "attention", "server", "session", "integrations"),
    "ahead": (*HOSTS, "server", "session", "integrations"), "server": (*HOSTS, "session", "integrations"),
    "session": (*HOSTS, "integrations"), "groups": (*HOSTS, "session", "integrations"),
    "function": (*HOSTS, "integrations"), "report": (*HOSTS, "torch", *RUNNING),
    "config": ("torch", "numpy", *HOSTS), "server.launch": ("torch", "numpy"), "launch": ("torch",),
}  # fmt: skip
"""By room: rooms and other packages that none of its modules imports."""
THROUGH = {
    "api", "config", "errors", "function", "version", "notice", "request", "launch.deepspeed_hook", "layout", "session",
    "shares", "kernels.interface", "exchange.failure.roll_call",
    "ahead.loader", "ahead.step", "ahead.feed", "ahead.documents", "attention.microbatch", "attention.nano_batches",
    "attention.layer", "attention.spanning", "pipeline.engine",
}  # fmt: skip
"""All that `integrations` may import of the rest."""
STARTS = {"pipeline", "cli", "api", "run", "launch"}
"""Who may import `integrations`, beside itself."""


@cache
def modules() -> dict[str, Path]:
    """The source of every module that is installed."""
    found = {path.stem: path for path in ROOT.glob("_deepspeed_cad_*.py")}
    for folder, package in (("deepspeed_cad", "deepspeed_cad"), ("integrations", "deepspeed_cad.integrations")):
        for path in (ROOT / folder).rglob("*.py"):
            words = [package, *path.relative_to(ROOT / folder).with_suffix("").parts]
            found[".".join(words[:-1] if words[-1] == "__init__" else words)] = path
    return found


@cache
def imports(module: str) -> frozenset[str]:
    """What a module imports, by full names; of packages that are not ours `a.b` for `from a import b` too."""
    return frozenset(_imports(ast.parse(modules()[module].read_text()), set(modules()))) - {module}


def _imports(node: ast.AST, ours: set[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (name.name for name in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.module and not node.level, f"line {node.lineno}: a relative import"
        parts = {f"{node.module}.{name.name}" for name in node.names}
        # `from package import module` needs the module; `from package import name` what the package offers.
        yield from parts & ours if node.module in ours else parts
        if not parts <= ours:
            yield node.module
    elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "import_module":
        yield from (word.value for word in node.args[:1] if isinstance(word, ast.Constant))
    for child in ast.iter_child_nodes(node):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and child in node.body:
            continue
        yield from _imports(child, ours)


def is_in(name: str, room: str) -> bool:
    """Whether a module belongs to a room, which may be one of its modules or another package."""
    name = name.removeprefix("deepspeed_cad.") if name in modules() else name
    return name == room or name.startswith(f"{room}.")


def of(*rooms: str) -> list[str]:
    """The modules of rooms."""
    found = [name for name in modules() if any(is_in(name, room) for room in rooms)]
    assert found, f"no modules in {rooms}"
    return found


def crossings(inside: Iterable[str], rooms: Iterable[str]) -> list[str]:
    """Imports that lead from these modules into rooms."""
    found = [(module, name) for module in sorted(inside) for name in sorted(imports(module))]
    return [f"{module} -> {name}" for module, name in found if any(is_in(name, room) for room in rooms)]


def test_no_circle_of_modules() -> None:
    """Raises CycleError with the names of a circle."""
    TopologicalSorter({name: imports(name) & set(modules()) for name in modules()}).prepare()


@pytest.mark.parametrize("room", NEVER)
def test_what_a_room_must_not_know(room: str) -> None:
    assert not crossings(of(room), NEVER[room])


@pytest.mark.parametrize("room", ["layout", "stream", "cost", "planner", "schedule", "forecast"])
def test_what_a_pure_room_imports_does_not_know_it_either(room: str) -> None:
    reached = set(of(room))
    while more := {name for module in reached for name in imports(module) & set(modules())} - reached:
        reached |= more
    assert not crossings(reached, ("torch.distributed", *HOSTS, *RUNNING))


def test_kernels_import_nothing_else_of_ours() -> None:
    ours = {name for module in of("kernels") for name in imports(module) & set(modules())}
    assert ours <= {*of("kernels"), *of("errors")}


def test_attention_takes_plans_and_makes_none() -> None:
    ours = {name for module in of("attention") for name in imports(module) if is_in(name, "planner")}
    assert ours == {"deepspeed_cad.planner.plan"}


@pytest.mark.parametrize(("room", "others"), [("integrations", STARTS), ("forecast", {"cli"})])
def test_who_imports_a_room(room: str, others: set[str]) -> None:
    assert not crossings(set(modules()) - set(of(*others, room)), [room])


def test_host_frameworks_reach_the_core_through_these_only() -> None:
    here = set(of("integrations"))
    ours = {name for module in here for name in imports(module) & set(modules())} - here
    assert ours - {"_deepspeed_cad_waiter"} == {f"deepspeed_cad.{name}" for name in THROUGH}
