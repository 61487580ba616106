"""What a plan costs in the microbatches that were asked for."""

from __future__ import annotations

import dataclasses

from tfpar.cost.microbatches import microbatched_cost
from tfpar.ir.collection import collection_paused
from tfpar.ir.roles import BACKWARD, Roles
from tfpar.plans import Plan
from tfpar.propagation.engine import propagate
from tfpar.propagation.partitioned import Anchors
from tfpar.propagation.prepared import prepare
from tfpar.rewrite.chunks import chunked_anchors, with_chunks
from tfpar.search.problem import Problem


def in_microbatches(plan: Plan, problem: Problem, anchors: Anchors) -> Plan:
    """`plan` in the microbatches of the problem, with what it costs so.

    Args:
        anchors: what `plan` fixes of the problem's graph.
    """
    plan = dataclasses.replace(plan, microbatches=problem.microbatches)
    if plan.cost is None:
        return plan
    with collection_paused():
        prepared = prepare(problem.graph)  # which has ops of its own: roles are those of its graph
        roles = Roles.of(
            prepared.graph,
            times=dict.fromkeys(problem.stand_ins, 0),
            compression=problem.compression,
        )
        if BACKWARD not in roles.phase.values():
            return plan
        laid = propagate(prepared, plan.mesh, anchors)
        started = chunked_anchors(laid, anchors, problem.batched)
        mesh = with_chunks(plan.mesh, problem.microbatches)
        cut = propagate(laid.prepared, mesh, started)
        cost = microbatched_cost(plan.cost, cut, plan.mesh, problem.cluster, roles)
    return dataclasses.replace(plan, cost=cost)
