"""The planner: a tick and costs in, a plan out. Pure: the same question gets the same answer on every rank."""

from deepspeed_cad.planner import native, reference
from deepspeed_cad.planner.answer import answer
from deepspeed_cad.planner.plan import HeadShape, Plan, PlanInput

__all__ = ["HeadShape", "Plan", "PlanInput", "make_plan"]


def make_plan(problem: PlanInput) -> Plan:
    """Make a plan, natively where the compiled library is there; both ways give the same tasks.

    Raises CADConfigError for impossible input, CADError where memory cannot hold any plan.
    """
    return answer(problem, native.solve if native.is_available() else reference.solve)
