"""One short table of training steps over pretended hosts.

    python benchmarks/hosts_table.py sockets=results/sockets host=results/host

In: for each link a folder with JSON files of train_step.py. Out: a Markdown table on stdout, a line per link and
workload: every mode over plain training, CAD over the bound, how long exchanges were waited for, and what CAD took the
links for.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

COLUMNS = ("link", "workload", "plain tokens/s/GPU", "cad ÷ plain", "bound_qkv ÷ plain", "cad ÷ bound_qkv",
           "ulysses ÷ plain", "allgather_cp ÷ plain", "exposed", "CAD found")  # fmt: skip


def row(link: str, results: dict[str, Any]) -> list[str]:
    """One line; empty where a mode did not run."""
    modes = results["modes"]
    rates = {name: mode["tokens_per_s_per_gpu"]["median"] for name, mode in modes.items()}
    rates |= {name: bound["tokens_per_s_per_gpu"] for name, bound in results["bounds"].items()}

    def over(one: str, other: str) -> str:
        return f"{rates[one] / rates[other]:.3f}" if one in rates and other in rates else ""

    exposed = (modes.get("cad", {}).get("exposed_exchange_share") or {}).get("mean")
    return [
        link, results["workload"], f"{rates['dp']:,.0f}" if "dp" in rates else "", over("cad", "dp"),
        over("bound_qkv", "dp"), over("cad", "bound_qkv"), over("ulysses", "dp"), over("allgather_cp", "dp"),
        "" if exposed is None else f"{exposed:.1%}", results.get("links", {}).get("cad", ""),
    ]  # fmt: skip


def main(arguments: list[str]) -> None:
    """Print the table."""
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    for argument in arguments:
        link, _, folder = argument.partition("=")
        for path in sorted(Path(folder).glob("train_*.json")):
            lines.append("| " + " | ".join(row(link, json.loads(path.read_text()))) + " |")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
