"""What a plan that is in force costs on machines other than those that it was made for."""

from __future__ import annotations

import dataclasses

from tfpar.planning import Request, StepSearch
from tfpar.plans import Plan
from tfpar.search.price import price_plan
from tfpar.spec import Mesh


def priced_again(
    plan: Plan, search: StepSearch, request: Request, everyone: Mesh, batch_size: int | None
) -> Plan:
    """`plan` with what it costs on the machines of `request`; without a cost if it does not train.

    Args:
        search: of the step that the plan is for.
        request: of the same step; stages and microbatches are the plan's.
        everyone: all ranks, in their physical shape.
        batch_size: of the step.
    """
    stages = plan.stages
    asked = dataclasses.replace(
        request,
        base=None,
        mesh=everyone.divided(1 if stages is None else stages.num_actors),
        pipeline=plan.pipeline,
        ranks=None if stages is None else stages.ranks,
    )
    problem = search.problem(asked)
    priced = price_plan(plan, problem, asked.cluster, batch_size)
    if priced is None:
        return dataclasses.replace(plan, cost=None)
    return dataclasses.replace(priced, cluster=asked.cluster)
