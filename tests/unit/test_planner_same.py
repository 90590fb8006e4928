"""Plans are the same on every machine and by every compiler: ranks make them for themselves."""

from __future__ import annotations

import json
from pathlib import Path

from plan_checks import fingerprint

PLANS = Path(__file__).with_name("plans.json")


def test_plans_are_those_that_other_compilers_gave() -> None:
    """Where plans change on purpose: `python tests/plan_checks.py > tests/unit/plans.json`."""
    wanted = json.loads(PLANS.read_text())
    assert [fingerprint(seed) for seed in range(len(wanted))] == wanted
