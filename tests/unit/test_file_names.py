"""Test files have names of their own: pytest imports them by name, and refuses the second of two that share one.

A run of one folder does not see that, only one of all tests. `--import-mode=importlib` would allow it, but then test
files could not import cases from each other, as many do.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def _imported_as(file: Path) -> str:
    """The name of a test file's module: with its package, where it is in one."""
    name, folder = file.stem, file.parent
    while (folder / "__init__.py").is_file():
        name, folder = f"{folder.name}.{name}", folder.parent
    return name


def _find_shared(folder: Path) -> list[list[str]]:
    """Test files below a folder that would be imported by the same name."""
    found: dict[str, list[str]] = defaultdict(list)
    for file in sorted({*folder.rglob("test_*.py"), *folder.rglob("*_test.py")}):
        found[_imported_as(file)].append(file.relative_to(folder).as_posix())
    return [files for files in found.values() if len(files) > 1]


def test_no_two_test_files_share_a_name() -> None:
    assert _find_shared(TESTS) == [], "rename one of each: pytest cannot collect both in one run"
