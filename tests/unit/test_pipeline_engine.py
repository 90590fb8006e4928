"""What a pipeline's engine does around a step or an evaluation that fails: the other ranks must hear of it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("deepspeed")

from deepspeed_cad.pipeline.engine import _make_eval_batch, _make_train_batch


class Binding:
    """Stands for a PipelineBinding whose loader raises."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.stopped: list[BaseException] = []
        self.engine = SimpleNamespace(data_iterator=None, micro_batches=2, set_dataiterator=lambda data: None)

    def begin_step(self, look: Any) -> None:
        raise self.error

    def begin_evaluation(self, count: int) -> None:
        raise self.error

    def stop(self, error: BaseException) -> None:
        self.stopped.append(error)


@pytest.mark.parametrize("make", [_make_train_batch, _make_eval_batch], ids=["step", "evaluation"])
@pytest.mark.parametrize(
    ("error", "tells"), [(OSError("the disk is gone"), True), (StopIteration("the loader ended"), False)]
)
def test_a_loader_that_raises(make: Callable[..., Any], error: BaseException, tells: bool) -> None:
    """They wait for this rank's documents, unless all of them know that loaders ended."""
    binding = Binding(error)
    with pytest.raises(type(error)):
        make(binding, lambda *_, **__: None)(iter([]))
    assert binding.stopped == ([error] if tells else [])
