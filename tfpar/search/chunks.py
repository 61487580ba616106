"""In how many chunks a rank computes its part of the batch (ATP §4.1), once the plan is found."""

from __future__ import annotations

import dataclasses

from tfpar.cost.overlap import chunked_cost
from tfpar.ir.collection import collection_paused
from tfpar.ir.roles import BACKWARD, Roles
from tfpar.plans import Plan
from tfpar.propagation.engine import propagate
from tfpar.propagation.partitioned import Anchors
from tfpar.propagation.prepared import prepare
from tfpar.rewrite.chunks import CHUNKS, chunked_anchors, with_chunks
from tfpar.search.problem import Problem

MIN_SAVING = 0.02
"""The part of a step that chunks have to save (empirical). It is less than `Objective.uncertainty`:
what is compared is one plan with itself, whose predictions are off alike."""


def in_chunks(plan: Plan, problem: Problem, anchors: Anchors) -> Plan:
    """`plan` with the number of chunks that costs least.

    Args:
        anchors: what `plan` fixes of the problem's graph.
    """
    if plan.cost is None or _hideable(plan, problem) < MIN_SAVING * plan.cost.seconds:
        return plan
    ranks = plan.mesh.group_size(tuple(plan.mesh.axis(n) for n in plan.batch_axes))
    samples = min((t.shape[0] for t in problem.batched), default=0) // ranks
    best, least = plan, plan.cost.seconds
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
        for chunks in CHUNKS[1:]:
            if samples < chunks:
                break
            started = chunked_anchors(laid, anchors, problem.batched)
            cut = propagate(laid.prepared, with_chunks(plan.mesh, chunks), started)
            cost = chunked_cost(plan.cost, cut, plan.mesh, problem.cluster, roles)
            if cost.seconds < (1 - MIN_SAVING) * least:
                best, least = dataclasses.replace(plan, chunks=chunks, cost=cost), cost.seconds
    return best


def _hideable(plan: Plan, problem: Problem) -> float:
    """Seconds of collectives that chunks could hide at the most."""
    assert plan.cost is not None
    compute, waiting = sum(plan.cost.compute_s), sum(plan.cost.communication_s)
    return min(problem.cluster.overlap * compute, waiting)
