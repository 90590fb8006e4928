"""`deepspeed-cad doctor`: what is installed, what works here (each tried), and how to get what is missing.

In: this machine. Out: a report for people, or JSON; exit code 0 where the core works: torch and numpy, the compiled
library, one kernel and one transport. `ds_report` prints the same last line.
"""

import argparse
import json
import logging
import platform
import sys
from dataclasses import asdict, dataclass, fields
from typing import Any

from deepspeed_cad.cli import probes
from deepspeed_cad.cli.probes import CORE_PACKAGES, Finding
from deepspeed_cad.cli.progress import Progress
from deepspeed_cad.version import __version__

_WIDTH = 16


@dataclass(frozen=True)
class Report:
    packages: list[Finding]
    native: Finding
    kernels: list[Finding]
    transports: list[Finding]
    devices: list[Finding]
    autoload: Finding

    @property
    def core_works(self) -> bool:
        """Whether CAD can train here at all."""
        core = [self.native, *(found for found in self.packages if found.name in CORE_PACKAGES)]
        return all(found.ok for found in core) and bool(_working(self.kernels) and _working(self.transports))

    @property
    def missing(self) -> list[Finding]:
        """What does not work although something can be done about it."""
        every = [*self.packages, self.native, *self.kernels, *self.transports, *self.devices, self.autoload]
        return [found for found in every if not found.ok and found.remedy]

    def to_dict(self) -> dict[str, Any]:
        return {
            "deepspeed_cad": __version__,
            "python": platform.python_version(),
            "platform": platform.platform(),
            "core_works": self.core_works,
            **asdict(self),
            "summary": _summarise(self),
        }


def examine() -> Report:
    """Tries everything; takes some seconds, most of them for importing torch. What it is at stands on stderr."""
    logger = logging.getLogger("deepspeed_cad")
    level = logger.level
    logger.setLevel(logging.ERROR)  # the report says what the warnings would say
    with Progress() as progress:

        def trying(name: str) -> Any:
            progress.tell(f"trying {name}")
            return getattr(probes, f"try_{name}")()

        report = Report(**{field.name: trying(field.name) for field in fields(Report)})
    logger.setLevel(level)
    return report


def summary_line() -> str:
    return _summarise(examine())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the report as JSON")


def main(args: argparse.Namespace) -> int:
    """Prints the report; 0 where the core works, else 1."""
    report = examine()
    print(json.dumps(report.to_dict(), indent=2) if args.json else _format(report))
    return 0 if report.core_works else 1


def _format(report: Report) -> str:
    lines = [f"deepspeed_cad {__version__}, Python {platform.python_version()} ({sys.executable})"]
    for title, findings in (
        ("packages", [*report.packages, report.native]),
        ("kernels, each run forward and backward", report.kernels),
        ("transports, each tried", report.transports),
        ("devices", report.devices),
        ("autoload", [report.autoload]),
    ):
        lines += ["", title]
        lines += [f"  {'ok' if found.ok else '--'}  {found.name:{_WIDTH}} {found.detail}" for found in findings]
    return "\n".join([*lines, "", _summarise(report)])


def _working(findings: list[Finding]) -> list[str]:
    return [found.name for found in findings if found.ok]


def _summarise(report: Report) -> str:
    kernels, transports = (", ".join(_working(one)) or "none" for one in (report.kernels, report.transports))
    line = (
        f"deepspeed_cad {__version__} {'works' if report.core_works else 'DOES NOT WORK'} here: kernels {kernels}; "
        f"transports {transports}; autoload {'active' if report.autoload.ok else 'not active'}"
    )
    if report.missing:
        line += "; to get what is missing: " + "; ".join(f"{found.name}: {found.remedy}" for found in report.missing)
    return line
