"""The planner: a tick and costs in, a plan out. Pure: the same question gets the same answer on every rank."""

from deepspeed_cad.planner.plan import HeadShape, Plan, PlanInput
from deepspeed_cad.planner.reference import make_reference

__all__ = ["HeadShape", "Plan", "PlanInput", "make_plan"]


def make_plan(problem: PlanInput) -> Plan:
    """Make a plan, natively where the compiled library is there; both ways give the same tasks."""
    return make_reference(problem)
