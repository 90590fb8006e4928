"""How far documents in a packed row are from what they give alone: transformers as it is, and with CAD.

    python benchmarks/state_leaks.py [MODEL_TYPE …]

Tiny random models of the tests, one row of documents of 80, 3 and 39 tokens, fp64, on the CPU of this machine and with
the packages that are installed here. Prints a Markdown table: the largest difference of a logit and of a parameter's
gradient, as a share of the largest logit and gradient.

    positions   position_ids that start again at 0, all that a packing collator needs to give for attention
    borders     cu_seq_lens_q and seq_idx besides, as `DataCollatorWithFlattening` gives them when asked for
    CAD         deepspeed_cad.apply(model), position_ids only
"""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]

from deepspeed_cad.integrations.recurrent import find_recurrent  # noqa: E402
from hybrids import alone, difference, packed, run  # noqa: E402
from model_cases import FAMILIES, Family, known_kind, tiny_model  # noqa: E402

import deepspeed_cad  # noqa: E402
from deepspeed_cad.errors import CADUnsupportedError  # noqa: E402
from deepspeed_cad.session import close_session  # noqa: E402

ROW = [[80, 3, 39]]


def measure(family: Family) -> list[str] | None:
    """A row of the table; None for a model without layers that carry state."""
    model = _model(family)
    if not find_recurrent(model):
        return None
    batch = packed(ROW)
    ends = torch.tensor([0, *ROW[0]]).cumsum(0).to(torch.int32)
    numbers = torch.repeat_interleave(torch.arange(len(ROW[0])), torch.tensor(ROW[0]))[None].to(torch.int32)
    longest = {"max_length_q": max(ROW[0]), "max_length_k": max(ROW[0])}
    borders = {**batch, "cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "seq_idx": numbers, **longest}
    expected = alone(model, batch, ROW)
    cells = [f"`{family.kind}`", _compare(model, batch, expected), _compare(model, borders, expected)]
    try:
        deepspeed_cad.apply(model, {"overlap": "local_first"})
        cells.append(_compare(model, batch, expected))
    except CADUnsupportedError as error:
        cells.append(str(error).split(":")[0])
    close_session()
    return cells


def _model(family: Family) -> Any:
    return tiny_model(family.kind, torch.float64, **family.changes).train()


def _compare(model: Any, batch: dict[str, Any], expected: tuple[torch.Tensor, dict[str, Any]]) -> str:
    try:
        logits, gradients = run(model, {**batch, "use_cache": False}, ROW)
    except Exception as error:  # packages and models refuse borders in many ways
        return f"raises {type(error).__name__}"
    largest = max(float(gradient.abs().max()) for gradient in expected[1].values())
    worst = max(float((gradients[name] - value).abs().max()) for name, value in expected[1].items()) / largest
    return f"{difference(logits, expected[0]):.0e} / {worst:.0e}"


def main() -> None:
    """Print the table."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    rows = ["| model | positions | borders | CAD |", "|---|---|---|---|"]
    for family in FAMILIES:
        if (not sys.argv[1:] or family.kind in sys.argv[1:]) and known_kind(family.kind):
            cells = measure(family)
            if cells is not None:
                rows.append(f"| {' | '.join(cells)} |")
    sys.stdout.write("\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
