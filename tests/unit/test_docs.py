"""The documentation against the code: every key, command, target, file and link that it names exists."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import load_script

import deepspeed_cad
from deepspeed_cad.cli import SUBCOMMANDS
from deepspeed_cad.config import CADConfig
from deepspeed_cad.report.statistics import Statistics

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
README = (ROOT / "README.md").read_text()
CONFIG = (ROOT / "docs" / "config.md").read_text()


def _code(text: str) -> str:
    """What stands in code blocks and between backquotes."""
    return "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL))


def _table_below(page: str, heading: str) -> dict[str, str]:
    """First column, without backquotes, to second column."""
    section = page.split(f"# {heading}\n")[1].split("\n## ")[0].split("\n### ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    return {row[0].strip("`"): row[1] for row in rows}


def test_every_key_is_documented_with_its_default() -> None:
    documented = _table_below(CONFIG, "All keys")
    fields = {field.name: json.dumps(field.default) for field in dataclasses.fields(CADConfig)}
    assert {key: value.strip("`") for key, value in documented.items()} == fields


def test_the_readme_names_the_keys_that_users_change() -> None:
    named = _table_below(README, 'The "cad" block')
    assert len(named) == 5 and named.items() <= _table_below(CONFIG, "All keys").items()


def test_the_package_page_needs_no_file_beside_it() -> None:
    words = [sys.executable, "setup.py", "-q", "--long-description"]
    page = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "## Quick start" in page and "docs/config.md" in page and "<!--" not in page
    assert not re.search(r"\]\((?!https?://|#)", page), "a relative link, or a picture"


def test_every_page_is_linked_from_another() -> None:
    linked = {
        (page.parent / link).resolve()
        for page in PAGES
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
        if "://" not in link
    }
    assert {page.name for page in PAGES if page not in linked} == {"README.md"}


def test_the_pictures_show_what_the_pages_say() -> None:
    """Run `python docs/pictures.py` after a change of the table of docs/is-it-for-me.md."""
    pictures = load_script("docs/pictures.py")
    for name, draw in pictures.PICTURES.items():
        assert (ROOT / "docs" / name).read_text() == draw().text_of_file(), name
        assert f"](docs/{name})" in README, name
    _, shares = pictures.work()
    assert len({round(sum(column), 6) for column in shares}) == 1, "the plan in the picture is even"
    measured = load_script("benchmarks/is_it_for_me.py")
    assert (pictures.MEDIAN, pictures.SIGMAS) == (measured.MEDIAN, measured.SIGMAS)


def test_public_names_are_documented() -> None:
    section = README.split("# Python\n")[1].split("\n### ")[0]
    for name in set(deepspeed_cad.__all__) - {"__version__"}:
        assert re.search(rf"\b{name}\b", section), name
    for name in re.findall(r"deepspeed_cad\.(\w+)\(", README):
        assert hasattr(deepspeed_cad, name), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page: Path) -> None:
    text = _code(page.read_text())
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for target in re.findall(r"\bmake ([a-z-]+)", text):
        assert target in targets, f"make {target}"
    for name in re.findall(r"\bdeepspeed-cad ([a-z]+)", text):
        assert name in SUBCOMMANDS, f"deepspeed-cad {name}"
    for module in re.findall(r"-m (deepspeed_cad[\w.]*)", text):
        assert (ROOT / Path(*module.split("."))).with_suffix(".py").is_file(), module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_exist(page: Path) -> None:
    text = page.read_text()
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        if "://" not in link:
            assert (page.parent / link).exists(), link
    for path in re.findall(r"\b((?:examples|tests|benchmarks|docs|csrc)/[\w/.-]*\w\.\w+)", text):
        assert (ROOT / path).exists(), path


def test_options_of_the_example_exist() -> None:
    source = (ROOT / "examples" / "finetune_deepspeed.py").read_text()
    for page in PAGES:
        for command in re.findall(r"finetune_deepspeed\.py((?:[^\n`]|\\\n)*)", page.read_text()):
            for option in re.findall(r"--[a-z_-]+", command):
                sizes = ("--layers", "--hidden")
                assert f'"{option}"' in source or option in sizes, f"{page.name}: {option}"


def test_every_statistic_is_documented() -> None:
    text = (ROOT / "docs" / "statistics.md").read_text()
    for name in Statistics().as_events():
        assert f"`{name}`" in text, name
    for field in dataclasses.fields(Statistics):
        if not field.name.startswith("_"):
            assert f"`{field.name}`" in text, field.name


def test_json_in_the_documentation_is_valid() -> None:
    for page in PAGES:
        for block in re.findall(r"```json\n(.*?)```", page.read_text(), re.DOTALL):
            config = json.loads(block)
            CADConfig.from_dict(config.get("cad", {}))
    for path in (ROOT / "examples").glob("*.json"):
        CADConfig.from_dict(json.loads(path.read_text())["cad"])
