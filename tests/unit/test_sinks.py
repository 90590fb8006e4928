"""The gradient of attention sinks: of this rank's own rows, without its rows of padding."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from deepspeed_cad.attention.backward import sinks_gradient


@pytest.mark.parametrize("padding", [[], [1], [0, 3]])
def test_rows_of_padding_do_not_count(padding: list[int]) -> None:
    """dsink = −Σ exp(sink − LSE) · (dO · O) over rows of documents, also where O and LSE of padding are not zero."""
    generator = torch.Generator().manual_seed(0)
    o_THV, do_THV = torch.randn(2, 4, 3, 5, generator=generator, dtype=torch.float64)
    lse_TH = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    sinks_H = torch.randn(3, generator=generator, dtype=torch.float64)
    setup: Any = SimpleNamespace(schedule=SimpleNamespace(padding=np.array(padding, np.int64)))
    kept: Any = SimpleNamespace(sinks_H=sinks_H, o_THV=o_THV, lse_TH=lse_TH)
    rows = [row for row in range(4) if row not in padding]
    wanted = -sum((sinks_H - lse_TH[row]).exp() * (do_THV[row] * o_THV[row]).sum(-1) for row in rows)
    found = sinks_gradient(setup, kept, do_THV)
    assert found is not None and torch.allclose(found, wanted)
    assert sinks_gradient(setup, SimpleNamespace(sinks_H=None), do_THV) is None  # type: ignore[arg-type]
