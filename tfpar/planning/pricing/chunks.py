"""Choice of the number of chunks in which a rank computes its part of the batch (ATP §4.1), once
the plan is found."""

from __future__ import annotations

import dataclasses

from tfpar.compile.local.chunks import CHUNKS
from tfpar.ir.collection import collection_paused
from tfpar.planning.pricing.price import SingleStagePricer, seconds_of
from tfpar.planning.problem import Problem
from tfpar.plans import Plan

MIN_SAVING = 0.02
"""The part of a step that chunks have to save (empirical). It is less than `Objective.uncertainty`:
what is compared is one plan with itself, whose predictions are off alike."""


def choose_num_chunks(plan: Plan, problem: Problem) -> Plan:
    """Choose the number of chunks in which `plan` costs least."""
    if plan.cost is None or _hideable(plan, problem) < MIN_SAVING * plan.cost.seconds:
        return plan
    ranks = plan.mesh.group_size(tuple(plan.mesh.axis(n) for n in plan.batch_axes))
    samples = min((t.shape[0] for t in problem.step.batched), default=0) // ranks
    step = SingleStagePricer.of(plan, problem, problem.cluster)
    best, least = plan, plan.cost.seconds
    with collection_paused():
        for chunks in CHUNKS[1:]:
            if step.pieces is None or samples < chunks:
                break
            found = step.price(dataclasses.replace(plan, chunks=chunks))
            if seconds_of(found) < (1 - MIN_SAVING) * least:
                best, least = found, seconds_of(found)
    return best


def _hideable(plan: Plan, problem: Problem) -> float:
    """Seconds of collectives that chunks could hide at the most."""
    assert plan.cost is not None
    compute, waiting = sum(plan.cost.compute_s), sum(plan.cost.communication_s)
    return min(problem.cluster.overlap * compute, waiting)
