"""What importing the package costs and offers."""

import shutil
import subprocess
import sys

import pytest

import deepspeed_cad
from deepspeed_cad import errors, native

HEAVY = ("torch", "numpy", "transformers", "deepspeed", "accelerate", "greenlet")


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "statement",
    [
        "import deepspeed_cad",
        "import deepspeed_cad; deepspeed_cad.CADConfig.from_dict({}); deepspeed_cad.CADError; dir(deepspeed_cad)",
        "import deepspeed_cad; deepspeed_cad.install()",
        "import deepspeed_cad.autoload, deepspeed_cad.cli",
    ],
)
def test_imports_nothing_heavy(statement: str) -> None:
    loaded = run_python(f"{statement}; import sys; print([name for name in {HEAVY} if name in sys.modules])")
    assert loaded == "[]"


def test_public_names_that_need_no_torch() -> None:
    for name in ("CADError", "CADConfigError", "CADUnsupportedError", "CADDataError", "CADPeerError"):
        assert getattr(deepspeed_cad, name) is getattr(errors, name)
    assert set(deepspeed_cad.__all__) <= set(dir(deepspeed_cad))
    assert deepspeed_cad.__version__.count(".") == 2
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = deepspeed_cad.no_such_name


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "does not exist"), (b"not a library", "cannot be loaded")], ids=["missing", "broken"]
)
def test_a_library_that_cannot_be_used_is_refused_with_the_reason(tmp_path, content, reason) -> None:
    path = tmp_path / "_native.so"
    if content is not None:
        path.write_bytes(content)
    library, why = native._open(path)
    assert library is None and reason in why and "install g++" in why


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (f'extern "C" int cad_abi_version() {{ return {native.ABI_VERSION}; }}', ""),
        ('extern "C" int cad_abi_version() { return 999; }', "stale: its ABI version is 999"),
        ('extern "C" int another() { return 1; }', "not of this package"),
    ],
    ids=["fits", "stale", "foreign"],
)
def test_the_abi_version_decides(tmp_path, source, reason) -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    (tmp_path / "library.cpp").write_text(source)
    path = tmp_path / "_native.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", path, tmp_path / "library.cpp"], check=True)
    library, why = native._open(path)
    assert (library is not None) == (reason == "") and reason in why
