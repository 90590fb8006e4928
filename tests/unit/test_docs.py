"""The documentation against the code: every key, command, target, file and link that it names exists."""

import ast
import dataclasses
import importlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from scripts import ROOT, load_script

import deepspeed_cad
from deepspeed_cad.cli import SUBCOMMANDS, main
from deepspeed_cad.config import CADConfig
from deepspeed_cad.forecast.bytes_held import WHOLE_LOGITS
from deepspeed_cad.forecast.setting import ModelShape
from deepspeed_cad.report.statistics import Statistics

PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
README = (ROOT / "README.md").read_text()
CONFIG = (ROOT / "docs" / "config.md").read_text()


def _linked(page: Path) -> list[Path]:
    """Files of the checkout that a page has links to."""
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    return [page.parent / link for link in links if "://" not in link]


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
    linked = {file.resolve() for page in PAGES for file in _linked(page)}
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
    assert set(deepspeed_cad.__all__) - {"__version__"} <= set(re.findall(r"\w+", section))
    for name in re.findall(r"deepspeed_cad\.(\w+)\(", README):
        assert hasattr(deepspeed_cad, name), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page: Path) -> None:
    text = "\n".join(re.findall(r"```.*?```|`[^`\n]+`", page.read_text(), re.DOTALL))  # code
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)", text)) <= targets
    assert set(re.findall(r"\bdeepspeed-cad ([a-z]+)", text)) <= set(SUBCOMMANDS)
    for module in re.findall(r"-m (deepspeed_cad[\w.]*)", text):
        assert (ROOT / Path(*module.split("."))).with_suffix(".py").is_file(), module


def test_command_lines_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of deepspeed-cad that have arguments, by its own parser; nothing runs."""
    lines = {
        line.partition("#")[0].strip()
        for page in [*PAGES, ROOT / "examples" / "README.md"]
        for line in re.findall(r"(?:^ *|`)deepspeed-cad (\w+ [^`\n…]+)(?:`|$)", page.read_text(), re.MULTILINE)
    }
    for name in SUBCOMMANDS:
        monkeypatch.setattr(importlib.import_module(f"deepspeed_cad.cli.{name}"), "main", lambda args: 0)
    complete = [line for line in sorted(lines) if not line.split()[-1].startswith("--")]
    assert len(complete) > 10
    for line in complete:
        assert main(shlex.split(line)) == 0, line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_exist(page: Path) -> None:
    named = re.findall(r"\b((?:examples|tests|benchmarks|docs|csrc)/[\w/.-]*\w\.\w+)", page.read_text())
    for path in [*_linked(page), *(ROOT / one for one in named)]:
        assert path.exists(), path


def test_options_of_the_example_exist() -> None:
    known = re.findall(r'"(--[a-z_-]+)"', (ROOT / "examples" / "finetune_deepspeed.py").read_text())
    for page in PAGES:
        for command in re.findall(r"finetune_deepspeed\.py((?:[^\n`]|\\\n)*)", page.read_text()):
            assert set(re.findall(r"--[a-z_-]+", command)) <= {*known, "--layers", "--hidden"}, page.name


def test_every_statistic_is_documented() -> None:
    text = (ROOT / "docs" / "statistics.md").read_text()
    fields = [field.name for field in dataclasses.fields(Statistics) if not field.name.startswith("_")]
    for name in (*Statistics().as_events(), *fields):
        assert f"`{name}`" in text, name


def test_json_in_the_documentation_is_valid() -> None:
    for page in PAGES:
        for block in re.findall(r"```json\n(.*?)```", page.read_text(), re.DOTALL):
            CADConfig.from_dict(json.loads(block).get("cad", {}))
    for path in (ROOT / "examples").glob("*.json"):
        CADConfig.from_dict(json.loads(path.read_text())["cad"])


def test_messages_of_troubleshooting_are_those_of_the_code() -> None:
    """What stands between backquotes in a first column; … is for anything, and stands wherever a value is put in."""
    value = "\0"
    sources = [ROOT / "_deepspeed_cad_autoload.py"]
    sources += [path for folder in ("deepspeed_cad", "integrations") for path in (ROOT / folder).rglob("*.py")]
    said = "\n".join(
        re.sub(r"%[-\d.]*[a-z]", value, node.value)
        if isinstance(node, ast.Constant)
        else "".join(str(part.value) if isinstance(part, ast.Constant) else value for part in node.values)
        for source in sources
        for node in ast.walk(ast.parse(source.read_text()))
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))
    )
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = [one for cell in re.findall(r"^\| (.*?) \|", page, re.MULTILINE) for one in re.findall(r"`([^`]+)`", cell)]
    no_messages = ("deepspeed-cad doctor", '"verify": 2', '"enabled": false')
    messages = [text for text in quoted if " " in text and text not in no_messages]
    assert len(messages) > 80
    for message in messages:
        assert re.search(".*".join(map(re.escape, message.split("…"))), said), message


@pytest.mark.parametrize(("page", "base"), [("compare.md", "ulysses"), ("is-it-for-me.md", "dp")])
def test_measured_ratios_are_those_of_the_runs(page: str, base: str) -> None:
    """CAD over a mode as measured, and over the same with attention kept: measured too or, with a star where a page has
    both, without what its slowest rank spent on repeating attention."""
    text = (ROOT / "docs" / page).read_text()
    rows = re.findall(r"^\| \[.*?\]\(\.\./(benchmarks/results/.*?\.json)\).*? \| (.*) \|$", text, re.MULTILINE)
    assert len(rows) >= 4
    for path, cells in rows:
        modes = json.loads((ROOT / path).read_text())["modes"]
        other, kept, seconds = modes.get(base), modes.get(f"{base}:kept"), modes["cad"]["seconds"]
        expected = ["–" if other is None else f"{other['seconds'] / seconds:.3f}"]
        if kept is not None:
            expected.append(f"{kept['seconds'] / seconds:.3f}")
        else:
            repeated = other["attention_s_mean"] - other["attention_s_mean_without_recompute"]
            without = other["seconds"] - repeated * other["attention_max_over_mean"]
            expected.append(f"{without / seconds:.3f}" + (" *" if base == "ulysses" else ""))
        if base == "ulysses":
            peaks = ["–" if mode is None else f"{mode['peak_GiB']:.1f}" for mode in (other, kept, modes["cad"])]
            expected.append(", ".join(peaks))
        assert cells.split(" | ")[1:] == expected, path


def test_memory_of_a_whole_model_is_what_plan_says(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "memory.md").read_text()
    (command,) = re.findall(r"^    deepspeed-cad (plan .*)$", page, re.MULTILINE)
    row = r"^\| (plain|plain, attention kept|`.*?`) \| (.*?) ?\| ([\d.]+) \| ([\d.]+) \|$"
    rows = re.findall(row, page, re.MULTILINE)
    assert len(rows) == 5
    needed = []
    for name, option, memory, speed in rows:
        assert main([*command.split(), *option.strip("`").split(), "--modes", "plain,plain kept,cad", "--json"]) == 0
        modes = {mode["mode"]: mode for mode in json.loads(capsys.readouterr().out)["modes"]}
        found = modes[{"plain": "plain", "plain, attention kept": "plain kept"}.get(name, "cad")]
        ratio = found["tokens_per_second_per_gpu"] / modes["plain"]["tokens_per_second_per_gpu"]
        assert (memory, speed) == (f"{found['peak'] / 2**30:.1f}", f"{ratio:.2f}"), name
        needed.append(f"{found['needed'] / 2**30:.1f}")
    assert f"{', '.join(needed[:-1])} and {needed[-1]} here" in " ".join(page.split())
    whole = 65536 * ModelShape().vocabulary * WHOLE_LOGITS / 2**30
    assert f"{WHOLE_LOGITS:.0f} bytes of each logit, {whole:.0f} GiB" in page


def test_scripts_for_several_nodes_are_those_of_the_page() -> None:
    """Each command names a script and variables that it reads. tests/processes/test_nodes.py runs them."""
    page = (ROOT / "docs" / "nodes.md").read_text()
    scripts = set(re.findall(r"examples/nodes/[\w.]+", page))
    assert {path.relative_to(ROOT).as_posix() for path in (ROOT / "examples" / "nodes").iterdir()} == scripts
    for variables, script in re.findall(r"`((?:[A-Z_]+=\S+ )+)sh (examples/nodes/\S+)", page):
        text = (ROOT / script).read_text()
        for name in re.findall(r"([A-Z_]+)=", variables):
            assert f"${name}" in text or f"${{{name}" in text, f"{script}: {name}"
        for line in re.findall(r"(?<=#     ).*?(?=sh examples)", text):
            assert set(re.findall(r"([A-Z_]+)=", line)) <= set(re.findall(r"\$\{?([A-Z_]+)", text)), line
