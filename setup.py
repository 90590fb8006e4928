"""Build steps that pyproject.toml cannot express.

In: csrc/*.cpp, integrations/, the text of the autoload .pth file. Out: deepspeed_cad/_native.so, which
_deepspeed_cad_build.py compiles (loaded through ctypes, so one wheel serves every Python and every torch); the package
deepspeed_cad.integrations; deepspeed_cad_autoload.pth beside the packages in site-packages, which arms the wait for
`import deepspeed`; and the page that a package index shows.
"""

import re
from pathlib import Path

from setuptools import Command, Distribution, find_namespace_packages, setup
from setuptools.command.build import build
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel
from setuptools.errors import CompileError

from _deepspeed_cad_build import ROOT, compile_native

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools < 70.1
    from wheel.bdist_wheel import bdist_wheel

NATIVE = Path("deepspeed_cad", "_native.so")
PTH_NAME = "deepspeed_cad_autoload.pth"
# Python runs only those lines of a .pth file that start with `import`.
PTH_TEXT = (
    '# deepspeed_cad waits for "import deepspeed", importing nothing until then; DEEPSPEED_CAD_AUTOLOAD=0: not at all\n'
    'import os; exec("try:\\n import _deepspeed_cad_autoload as w\\n w.arm()\\nexcept ImportError:\\n pass")\n'
)


class BuildNative(Command):
    """`python setup.py build_native --inplace` compiles csrc/ into the checkout; `build` into its own folder."""

    description = "compile csrc/*.cpp into deepspeed_cad/_native.so"
    user_options = [("inplace", "i", "put the library into the checkout"), ("build-lib=", None, "where to build")]
    boolean_options = ["inplace"]

    def initialize_options(self) -> None:
        self.inplace = False
        self.editable_mode = False
        self.build_lib: str | None = None

    def finalize_options(self) -> None:
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    @property
    def target(self) -> Path:
        return (ROOT if self.inplace or self.editable_mode else Path(self.build_lib or "build/lib")) / NATIVE

    def run(self) -> None:
        if reason := compile_native(self.target):
            raise CompileError(f"deepspeed_cad cannot be built, {reason}")

    def get_source_files(self) -> list[str]:
        return [str(f.relative_to(ROOT)) for f in sorted((ROOT / "csrc").glob("*")) if f.is_file()]

    def get_outputs(self) -> list[str]:
        return [] if self.editable_mode else [str(self.target)]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class BuildPy(build_py):
    """Also writes the .pth file to the root of what is built, which is site-packages once installed."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            Path(self.build_lib, PTH_NAME).write_text(PTH_TEXT)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        pth = [] if self.editable_mode else [str(Path(self.build_lib, PTH_NAME))]
        return super().get_outputs(include_bytecode) + pth


class EditableWheel(editable_wheel):
    """An editable install gets the .pth file too."""

    def _run_build_commands(self, dist_name, unpacked_wheel, build_lib, tmp_dir):
        Path(unpacked_wheel, PTH_NAME).write_text(PTH_TEXT)
        return super()._run_build_commands(dist_name, unpacked_wheel, build_lib, tmp_dir)


def platform_of(library: Path, platform: str) -> str:
    """The tag of a wheel with this library: manylinux with the glibc that it needs (PEP 600), if it needs no more.

    `platform` is the tag of this machine, such as linux_x86_64, and stays where the C++ runtime is not inside. The
    versions of symbols that a library needs from others stand in it as plain text; names of libraries do too, but also
    of those that it only looks for at run time.
    """
    content = library.read_bytes()
    versions = [(int(major), int(minor)) for major, minor in re.findall(rb"GLIBC_(\d+)\.(\d+)", content)]
    if (
        not versions
        or not platform.startswith("linux_")
        or re.search(rb"\0(GLIBCXX|CXXABI|GCC)_\d|libc\+\+\.so", content)
    ):
        return platform
    major, minor = max(versions)
    return platform.replace("linux_", f"manylinux_{major}_{minor}_", 1)


class BdistWheel(bdist_wheel):
    """One wheel for every Python of one platform."""

    def get_tag(self) -> tuple[str, str, str]:
        platform = super().get_tag()[2]
        library = Path(self.get_finalized_command("build_py").build_lib, NATIVE)
        # An editable install puts the library into the checkout, after it has asked for the tag.
        return "py3", "none", platform_of(library, platform) if library.exists() else platform


class BinaryDistribution(Distribution):
    """Installs to where compiled packages go, although setuptools compiles nothing itself."""

    def has_ext_modules(self) -> bool:
        return True


def package_page() -> str:
    """README.md for a package index, which has none of the files that it links to: pictures go, links become names."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"<!--.*?-->\n*", "", re.sub(r"!\[[^\]]*\]\([^)]*\)\n*", "", text), flags=re.DOTALL)

    def name(link: re.Match[str]) -> str:
        words, target = link.groups()
        if "://" in target or target.startswith("#"):
            return link[0]
        return f"`{words}`" if words == target else f"{words} (`{target}`)"

    text = re.sub(r"\[([^\]]*)\]\(([^)]*)\)", name, text)
    return f"{text}\nThe files that are named here lie in the source distribution, the .tar.gz beside the wheel.\n"


build.sub_commands = [*build.sub_commands, ("build_native", None)]

NO_PACKAGES = ("*__pycache__*",)
packages = find_namespace_packages(include=["deepspeed_cad", "deepspeed_cad.*"], exclude=NO_PACKAGES)
if (ROOT / "integrations" / "__init__.py").exists():
    inner = find_namespace_packages("integrations", exclude=NO_PACKAGES)
    packages += ["deepspeed_cad.integrations", *(f"deepspeed_cad.integrations.{name}" for name in inner)]

setup(
    long_description=package_page(),
    long_description_content_type="text/markdown",
    packages=packages,
    package_dir={"deepspeed_cad.integrations": "integrations"},
    package_data={"deepspeed_cad": ["py.typed", "profiles/*.json", "**/*.json"]},
    exclude_package_data={"deepspeed_cad": ["_native.so"]},
    distclass=BinaryDistribution,
    cmdclass={
        "build_native": BuildNative,
        "build_py": BuildPy,
        "editable_wheel": EditableWheel,
        "bdist_wheel": BdistWheel,
    },
)
