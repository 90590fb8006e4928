"""Copies of the checkout: plain ones for mutants, and one in which every statement says that it ran.

In: the checkout. Out: folders beside it. The checkout itself is never changed.
"""

from __future__ import annotations

import ast
import json
import shutil
from pathlib import Path

from mutation.mutants import is_text

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("deepspeed_cad", "integrations")
MARKS = "_mutation_marks"
"""The module through which instrumented statements mark themselves."""


def copy_checkout(target: Path) -> None:
    """A copy that imports its own package, whatever is installed."""
    skip = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info")
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(ROOT, target, ignore=skip)
    (target / "deepspeed_cad" / "integrations").symlink_to(target / "integrations")


def instrument(copy: Path) -> int:
    """Let every statement in functions mark itself; returns how many there are, and writes which is which."""
    places: list[str] = []
    for path in source_files():
        tree = ast.parse((ROOT / path).read_text())
        _mark(tree.body, str(path), places, False)
        at = next((i for i, one in enumerate(tree.body) if not _comes_first(one)), len(tree.body))
        tree.body.insert(at, ast.parse(f"from {MARKS} import marks as mutation_marks").body[0])
        (copy / path).write_text(ast.unparse(ast.fix_missing_locations(tree)))
    (copy / f"{MARKS}.py").write_text(
        "import mmap\n"
        f"with open({str(copy / 'marks')!r}, 'r+b') as file:\n    marks = mmap.mmap(file.fileno(), {len(places)})\n"
    )
    (copy / "marks").write_bytes(bytes(len(places)))
    (copy / "places.json").write_text(json.dumps(places))
    return len(places)


def _comes_first(node: ast.stmt) -> bool:
    return is_text(node) or (isinstance(node, ast.ImportFrom) and node.module == "__future__")


def _mark(body: list[ast.stmt], path: str, places: list[str], inside: bool) -> None:
    for node in list(body):
        if inside and not is_text(node) and not isinstance(node, ast.Global | ast.Nonlocal):
            mark = ast.parse(f"mutation_marks[{len(places)}] = 1").body[0]
            places.append(f"{path}:{node.lineno}:{node.col_offset}")
            body.insert(body.index(node), ast.copy_location(mark, node))
        within = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        within = within and not isinstance(node, ast.ClassDef)
        for field in ("body", "orelse", "finalbody"):
            _mark(getattr(node, field, []), path, places, within)
        for handler in getattr(node, "handlers", []):
            _mark(handler.body, path, places, within)


def source_files() -> list[Path]:
    """Every file of the package, from the root."""
    return sorted(path.relative_to(ROOT) for folder in SOURCES for path in (ROOT / folder).rglob("*.py")
                  if "deepspeed_cad/integrations" not in str(path))  # fmt: skip


def room_of(path: str) -> str:
    """A folder of the package, or a module on its ground floor."""
    parts = Path(path).parts
    return "integrations" if parts[0] == "integrations" else parts[1].removesuffix(".py")
