"""What a plan costs in the microbatches that were asked for."""

from __future__ import annotations

import dataclasses

from tfpar.plans import Plan
from tfpar.search.price import WholeStep
from tfpar.search.problem import Problem


def in_microbatches(plan: Plan, problem: Problem) -> Plan:
    """`plan` in the microbatches of the problem, with what it costs so."""
    plan = dataclasses.replace(
        plan, microbatches=problem.microbatches, batch_statistics=problem.batch_statistics
    )
    if plan.cost is None:
        return plan
    return WholeStep.of(plan, problem, problem.cluster).price(plan)
