"""What a plan that is in force costs on machines other than those that it was made for."""

from __future__ import annotations

import dataclasses

from tfpar.cluster.description import Cluster
from tfpar.planning import Request, StepSearch
from tfpar.planning_priced import step_by_rank
from tfpar.plans import Plan
from tfpar.search.as_planned import as_planned
from tfpar.search.chunks import in_chunks
from tfpar.search.laid import price_whole
from tfpar.search.microbatches import in_microbatches
from tfpar.search.problem import Problem, step_anchors
from tfpar.search.shares import in_own_shares
from tfpar.search.stages.priced import priced_plan
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
    priced = _priced(plan, problem, asked.cluster)
    if priced is None:
        return dataclasses.replace(plan, cost=None)
    priced = dataclasses.replace(priced, cluster=asked.cluster)
    if not priced.uneven_meshes(batch_size):
        return priced
    machines = problem.cluster if stages is None else asked.cluster
    step = step_by_rank(priced, problem, machines)
    return priced if step is None else in_own_shares(step, priced, machines, batch_size)


def _priced(plan: Plan, problem: Problem, cluster: Cluster) -> Plan | None:
    """In equal shares of the batch."""
    if plan.stages is not None:
        return priced_plan(plan, problem, cluster)
    cost, _ = price_whole(plan, problem)
    whole, again = dataclasses.replace(plan, cost=cost), as_planned(problem, plan)
    if plan.microbatches > 1:
        return in_microbatches(whole, again, step_anchors(whole, again))
    return in_chunks(whole, again, step_anchors(whole, again)) if plan.chunks > 1 else whole
