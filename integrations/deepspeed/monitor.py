"""Statistics of CAD in DeepSpeed's monitor: TensorBoard, WandB, CSV, Comet, whatever the JSON turned on."""

from functools import wraps
from typing import Any

from deepspeed_cad.session import Session


def report_statistics(engine: Any, session: Session) -> None:
    """Write CAD's figures after every optimizer step, beside the engine's own."""
    step = engine.step

    @wraps(step)
    def step_and_report(*args: Any, **kwargs: Any) -> Any:
        boundary = engine.is_gradient_accumulation_boundary()
        result = step(*args, **kwargs)
        if boundary:
            write_statistics(engine, session)
        return result

    engine.step = step_and_report


def write_statistics(engine: Any, session: Session) -> None:
    """Write what happened since the last time, on rank 0, where a monitor is on."""
    monitor = getattr(engine, "monitor", None)
    if monitor is not None and monitor.enabled and engine.global_rank == 0:
        figures = session.take_statistics("monitor").as_events()
        monitor.write_events([(f"Train/{name}", value, engine.global_samples) for name, value in figures.items()])
