"""What a plan costs in the microbatches that were asked for."""

from __future__ import annotations

import dataclasses

from tfpar.cost.microbatches import microbatched_cost
from tfpar.ir.collection import collection_paused
from tfpar.plans import Plan
from tfpar.propagation.partitioned import Anchors
from tfpar.search.parts import StepInParts
from tfpar.search.problem import Problem


def in_microbatches(plan: Plan, problem: Problem, anchors: Anchors) -> Plan:
    """`plan` in the microbatches of the problem, with what it costs so.

    Args:
        anchors: what `plan` fixes of the problem's graph.
    """
    plan = dataclasses.replace(
        plan, microbatches=problem.microbatches, batch_statistics=problem.batch_statistics
    )
    if plan.cost is None:
        return plan
    with collection_paused():
        step = StepInParts.of(plan, problem, anchors)
        if step is None:
            return plan
        cut = step.cut(problem.microbatches)
        cost = microbatched_cost(
            plan.cost, cut, plan.mesh, problem.cluster, step.roles, step.statistics(cut)
        )
    return dataclasses.replace(plan, cost=cost)
