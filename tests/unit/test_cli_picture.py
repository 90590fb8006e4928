"""Pictures of `deepspeed-cad plan`: what is drawn are its numbers (how it looks is for eyes to judge)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_compare_modes import made

from deepspeed_cad.cli import picture
from deepspeed_cad.cost import PAIRS
from deepspeed_cad.errors import CADError
from deepspeed_cad.forecast.compare import Comparison
from deepspeed_cad.layout import Layout
from deepspeed_cad.planner import HeadShape, PlanInput, make_plan

pytest.importorskip("matplotlib")


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Figures instead of files."""
    kept: list[Any] = []
    monkeypatch.setattr(picture, "_save", lambda figure, path: kept.append(figure))
    return kept


def test_a_plan(figures: list[Any]) -> None:
    tick = Layout.from_stream([40000, 300, 9000], 4, 12400).tick()
    problem = PlanInput(tick, HeadShape(8, 4, 16, 16, 2), PAIRS, tolerance=0.02)
    plan = make_plan(problem)
    picture.draw_plan(problem, plan, "unused", [7, 8, 9])
    axes = figures[0].axes
    assert [bar.get_height() for bar in axes[0].patches] == [*plan.load_before, *plan.load]
    assert axes[0].lines[0].get_ydata()[0] == pytest.approx(plan.load.mean()) and axes[0].get_ylabel() == "pairs"
    table = np.asarray(axes[1].images[0].get_array()) * 2**20
    np.testing.assert_allclose([table.sum(0), table.sum(1)], [plan.received_bytes, plan.sent_bytes])
    assert axes[1].get_title() == f"Moved in one layer's forward: {table.sum() / 2**20:.0f} MiB"
    # The documents that were cut most come first; the meshes' colours are servers.
    titles = [axis.get_title() for axis in axes[2:] if axis.get_title()]
    assert titles[0].startswith("Document 7, at home on 0, 1, 2, 3") and len(titles) == 3
    mesh = axes[2].collections[0]
    assert mesh.get_array().shape[0] == 4 and set(np.unique(mesh.get_array())) <= {0, 1, 2, 3}
    assert mesh.get_array()[plan.tasks[0][3], 0] == plan.tasks[0][5]
    assert mesh.get_coordinates()[0, -1].tolist() == [40000, 0] and mesh.get_clim() == (0, 3)
    assert len(axes[2].lines) == 3, "borders between home ranks"


def test_a_step_in_files(tmp_path: Path) -> None:
    found = Comparison((made("plain", 1.0), made("cad", 0.5, waiting=0.1)), {})
    picture.draw_step(found, str(tmp_path / "step.png"))
    assert (tmp_path / "step.png").read_bytes()[:4] == b"\x89PNG"
    for wrong in (tmp_path / "none" / "step.png", tmp_path / "step.nosuch"):
        with pytest.raises(CADError, match=f"picture {wrong} cannot be written"):
            picture.draw_step(found, str(wrong))
