"""The package's version, and the oldest versions of others that it works with. Imports none of them.

setuptools reads `__version__` from here without running this file.
"""

import re
import sys

from deepspeed_cad.errors import CADUnsupportedError

__version__ = "0.1.0"

OLDEST = {
    "torch": "2.8",
    "transformers": "4.57",
    "deepspeed": "0.17",
    "accelerate": "1.10",
    "trl": "0.24",
    "peft": "0.17",
}
"""The oldest version of each package that CAD was tried with; pyproject.toml and README say the same."""


def is_too_old(package: str, version: str) -> bool:
    """Whether `version` comes before the oldest that CAD works with; builds of one (.dev0, +cu128) count as it."""
    numbers = [[int(part) for part in re.findall(r"\d+", one)[:2]] for one in (version, OLDEST[package])]
    return numbers[0] < numbers[1]


def refuse_old_packages() -> None:
    """Raise CADUnsupportedError where a package that this process has imported is too old."""
    for package in OLDEST:
        version = str(getattr(sys.modules.get(package), "__version__", OLDEST[package]))
        if is_too_old(package, version):
            raise CADUnsupportedError(
                f"{package} {version} is installed, and CAD needs {OLDEST[package]} or newer: "
                f'pip install --upgrade "{package}>={OLDEST[package]}", or train without CAD'
            )
