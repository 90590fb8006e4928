"""What `deepspeed-cad plan` says and answers to questions of many kinds, as unit/plans_said.json holds it.

Where it changes on purpose: `python tests/plans_said.py`. A new question is a new key there.
"""

import io
import json
import re
import shlex
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from deepspeed_cad.cli import main

FILE = Path(__file__).with_name("unit") / "plans_said.json"
SAID: dict[str, Any] = json.loads(FILE.read_text())


def said(question: str) -> dict[str, Any]:
    """The lines, and the JSON with what times nothing here, to seven digits; or the exit code of what is refused."""
    out, lines, words = io.StringIO(), io.StringIO(), shlex.split(question)
    with redirect_stdout(out), redirect_stderr(lines):
        code = main(["plan", *words, *(() if "--steps" in words else ("--steps", "3")), "--json"])
    shown = re.sub(r"planned in \d+ ms", "planned in … ms", lines.getvalue())
    shown = re.sub(r"^… .*\n", "", shown, flags=re.MULTILINE)  # what a slow machine is at
    return {"says": shown.splitlines(), "answers": code or _rounded(json.loads(out.getvalue()))}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items() if name != "planning_ms"}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value


if __name__ == "__main__":
    FILE.write_text(json.dumps({question: said(question) for question in SAID}, indent=0, ensure_ascii=False))
