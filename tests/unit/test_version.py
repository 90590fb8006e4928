"""The oldest versions of other packages: one table that pages and packaging agree with, and what older ones meet."""

import re
import sys
from types import SimpleNamespace

import pytest
import training
from scripts import ROOT

import deepspeed_cad
from deepspeed_cad.errors import CADUnsupportedError
from deepspeed_cad.version import OLDEST, is_too_old, refuse_old_packages


@pytest.mark.parametrize("version, old", [
    ("4.55.4", True), ("4.9", True), ("3.99.1", True), ("4.57.0", False), ("4.57.0.dev0", False), ("5.0.0rc1", False),
])  # fmt: skip
def test_versions_are_compared_by_number(version: str, old: bool, monkeypatch) -> None:
    monkeypatch.setitem(OLDEST, "transformers", "4.57")
    assert is_too_old("transformers", version) is old


@pytest.mark.parametrize("package", OLDEST)
def test_an_old_package_is_refused_by_name(package: str, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, package, SimpleNamespace(__version__="0.1.2"))
    with pytest.raises(CADUnsupportedError, match=rf"{package} 0\.1\.2 is installed.*needs {OLDEST[package]} or newer"):
        refuse_old_packages()


def test_an_old_transformers_is_refused_when_cad_is_turned_on(monkeypatch) -> None:
    monkeypatch.setattr("transformers.__version__", "4.55.4")
    with pytest.raises(CADUnsupportedError, match="transformers 4.55.4 is installed"):
        deepspeed_cad.apply(training.tiny_llama())
    deepspeed_cad.apply(training.tiny_llama(), {"enabled": False})


def test_packaging_and_pages_say_the_same() -> None:
    declared = dict(re.findall(r'"(\w+)>=([\d.]+)"', (ROOT / "pyproject.toml").read_text()))
    assert {package: declared[package] for package in OLDEST} == OLDEST
    readme = (ROOT / "README.md").read_text().split("## Environment")[1].split("\n## ")[0]
    stated = {name.lower(): version for name, version in re.findall(r"(\w+) (\d+\.\d+)(?:\+| and newer)", readme)}
    assert {package: stated[package] for package in OLDEST} == OLDEST
    models = (ROOT / "docs" / "models.md").read_text()
    assert re.search(rf"`AttentionMaskInterface`; {re.escape(OLDEST['transformers'])} or\s+newer", models)
    tried = re.search(r"^TRANSFORMERS \?= ([\d.]+)\.\*", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert tried and tried[1] == OLDEST["transformers"]
