"""Price a plan in the microbatches that were asked for."""

from __future__ import annotations

import dataclasses

from tfpar.planning.pricing.price import SingleStagePricer
from tfpar.planning.problem import Problem
from tfpar.plans import Plan


def price_in_microbatches(plan: Plan, problem: Problem) -> Plan:
    """Price `plan` in the microbatches of the problem."""
    plan = dataclasses.replace(
        plan,
        microbatches=problem.batch.microbatches,
        batch_statistics=problem.batch.batch_statistics,
    )
    if plan.cost is None:
        return plan
    return SingleStagePricer.of(plan, problem, problem.cluster).price(plan)
