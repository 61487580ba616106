"""In how many chunks a rank computes its part of the batch (ATP §4.1), once the plan is found."""

from __future__ import annotations

import dataclasses

from tfpar.cost.overlap import chunked_cost
from tfpar.ir.collection import collection_paused
from tfpar.plans import Plan
from tfpar.propagation.partitioned import Anchors
from tfpar.rewrite.chunks import CHUNKS
from tfpar.search.parts import StepInParts
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
        step = StepInParts.of(plan, problem, anchors)
        for chunks in CHUNKS[1:]:
            if step is None or samples < chunks:
                break
            cut = step.cut(chunks)
            cost = chunked_cost(plan.cost, cut, plan.mesh, problem.cluster, step.roles)
            if cost.seconds < (1 - MIN_SAVING) * least:
                best, least = dataclasses.replace(plan, chunks=chunks, cost=cost), cost.seconds
    return best


def _hideable(plan: Plan, problem: Problem) -> float:
    """Seconds of collectives that chunks could hide at the most."""
    assert plan.cost is not None
    compute, waiting = sum(plan.cost.compute_s), sum(plan.cost.communication_s)
    return min(problem.cluster.overlap * compute, waiting)
