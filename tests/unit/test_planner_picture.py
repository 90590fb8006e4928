"""Pictures of plans: what is drawn are the plan's numbers (how it looks is for eyes to judge)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepspeed_cad.cost import PAIRS
from deepspeed_cad.errors import CADError
from deepspeed_cad.layout import Layout
from deepspeed_cad.planner import HeadShape, PlanInput, make_plan, picture
from deepspeed_cad.planner.traffic import traffic_matrix

pytest.importorskip("matplotlib")

SHAPE = HeadShape(8, 4, 16, 16, 2)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Figures instead of files."""
    kept: list[Any] = []
    monkeypatch.setattr(picture, "_save", lambda figure, pyplot, path: kept.append(figure))
    return kept


def test_a_plan(figures: list[Any]) -> None:
    tick = Layout.from_stream([40000, 300, 9000], 4, 12400).tick()
    problem = PlanInput(tick, SHAPE, PAIRS, tolerance=0.02)
    plan = make_plan(problem)
    picture.draw_plan(problem, plan, "unused", numbers=[7, 8, 9])
    axes = figures[0].axes
    heights = [bar.get_height() for bar in axes[0].patches]
    assert heights == [*plan.load_before, *plan.load]
    assert axes[0].lines[0].get_ydata()[0] == pytest.approx(plan.load.mean()) and axes[0].get_ylabel() == "pairs"
    table = np.zeros((4, 4))
    for pair, amount in traffic_matrix(plan.tasks, tick, SHAPE).items():
        table[pair] = amount / 2**20
    assert np.array_equal(axes[1].images[0].get_array(), table)
    assert axes[1].get_title() == f"Moved in one layer's forward: {table.sum():.0f} MiB"
    # The documents that were cut most come first; the meshes' colours are servers.
    titles = [axis.get_title() for axis in axes[2:] if axis.get_title()]
    assert titles[0].startswith("Document 7, at home on 0, 1, 2, 3") and len(titles) == 3
    mesh = axes[2].collections[0]
    assert mesh.get_array().shape[0] == 4 and set(np.unique(mesh.get_array())) <= {0, 1, 2, 3}
    first = plan.tasks[0]
    assert mesh.get_array()[first[3], 0] == first[5]
    assert mesh.get_coordinates()[0, -1].tolist() == [40000, 0] and mesh.get_clim() == (0, 3)
    assert len(axes[2].lines) == 3, "borders between home ranks"


def test_an_outlook(figures: list[Any]) -> None:
    picture.draw_outlook([2.0, 3.0], [1.0, 1.1], [1.5, 1.75], "unused")
    left, right = figures[0].axes
    assert [line.get_ydata().tolist() for line in left.lines] == [[2.0, 3.0], [1.0, 1.1]]
    assert left.lines[0].get_xdata().tolist() == [0, 1]
    assert [text.get_text() for text in left.get_legend().get_texts()] == ["without CAD", "with CAD"]
    assert left.get_ylim()[0] == 0 and [bar.get_height() for bar in right.patches] == [1.5, 1.75]


def test_files(tmp_path: Path) -> None:
    picture.draw_outlook([2.0], [1.0], [1.5], str(tmp_path / "a.png"))
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(CADError, match=r"picture .*none/a.png cannot be written"):
        picture.draw_outlook([2.0], [1.0], [1.5], str(tmp_path / "none" / "a.png"))
    with pytest.raises(CADError, match="cannot be written"):
        picture.draw_outlook([2.0], [1.0], [1.5], str(tmp_path / "a.nosuch"))
