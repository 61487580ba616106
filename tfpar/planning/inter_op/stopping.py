"""Stopping criteria of the search of pipelines."""

from __future__ import annotations

from collections.abc import Callable

from tfpar.cost.cost import Cost
from tfpar.pipeline import Pipeline
from tfpar.planning.candidates import SolvedCandidate
from tfpar.planning.folding.folded_model import folded_model
from tfpar.planning.inter_op.enumerate_pipelines import numbers_of_stages
from tfpar.planning.inter_op.relaxed_estimate import largest_op_part
from tfpar.planning.intra_op.gain import LEAST_SECONDS, rhino_seconds
from tfpar.planning.lower_bound import (
    cost_on_one_device,
    shared_seconds,
    single_device_seconds,
)
from tfpar.planning.memory.memory_errors import LeastMemory
from tfpar.planning.memory.plan_transforms import apply_memory_transforms
from tfpar.planning.objective import UNCERTAINTY
from tfpar.planning.problem import Problem
from tfpar.planning.request import PlanRequest

Enough = Callable[[SolvedCandidate, PlanRequest], bool]
"""Whether a candidate is good enough to search no more stages."""


def reaches_compute_bound(candidate: SolvedCandidate, request: PlanRequest) -> bool:
    """Whether a step is as fast as its compute alone would be, spread over all ranks by their
    speeds, as near as predictions can tell."""
    limit = compute_bound_seconds(_as_asked(candidate), request) * (1 + UNCERTAINTY)
    return candidate.seconds <= limit


def _as_asked(candidate: SolvedCandidate) -> Problem:
    """Return the candidate's problem, with those blocks recomputed that the user asks for: they
    cost a second forward pass in any stages."""
    problem = candidate.problem
    if not problem.storage.recompute:
        return problem
    return apply_memory_transforms(problem, candidate.plan.recompute, candidate.plan.offloaded)


def compute_bound_seconds(problem: Problem, request: PlanRequest) -> float:
    """Lower bound of a step's seconds: each rank computes as much as it is fast, and none waits for
    another."""
    return shared_seconds(single_device_seconds(problem, request.cluster, request.mesh.size))


def compute_bound(problem: Problem, request: PlanRequest, pipeline: Pipeline | None) -> Cost:
    """Return what a pipeline costs at least: its work, spread evenly over all ranks by their
    speeds, but no op over more than the ranks of a stage, the bubble of one that takes no turns,
    and what all ranks store together, spread evenly.

    Args:
        problem: of all ranks.
    """
    alone = cost_on_one_device(problem, request.cluster.part([0]))
    least = LeastMemory.of(problem)
    computed, size = sum(alone.compute_s), request.mesh.size
    seconds = compute_bound_seconds(problem, request)
    if pipeline is not None:
        fastest = min(single_device_seconds(problem, request.cluster, request.mesh.size))
        largest = largest_op_part(problem) * fastest * pipeline.num_actors / size
        seconds = max(seconds, largest)
    forward, backward, update = (
        seconds / computed * s if computed else 0.0 for s in alone.compute_s
    )
    bubble = 0.0
    if pipeline is not None:
        fill = (pipeline.num_stages - 1) / pipeline.num_microbatches
        bubble = (forward + backward) * fill
    nothing = (0.0, 0.0, 0.0)
    return Cost(
        seconds + bubble,
        (forward, backward, update),
        nothing,
        0.0,
        0.0,
        1,
        weight_bytes=least.weight_bytes / size,
        state_bytes=least.state_bytes / size,
        gradient_bytes=least.gradient_bytes / size,
        bubble_s=bubble,
    )


def _share_seconds(problem: Problem, request: PlanRequest) -> float:
    """Seconds that a rank computes its share of each op: all are launched, whatever is split."""
    alone = single_device_seconds(problem, request.cluster, request.mesh.size)
    running = single_device_seconds(
        problem, request.cluster.with_device(launch_s=0.0), request.mesh.size
    )
    starting = max(one - other for one, other in zip(alone, running, strict=True))
    return starting + shared_seconds(running)


def needs_no_stages(candidate: SolvedCandidate, request: PlanRequest) -> bool:
    """Whether ranks wait little for links, or training gains less by stages, at most, than it takes
    to search them."""
    if is_compute_bound(candidate, request):
        return True
    steps = request.budget.steps
    if steps is None or request.budget.seconds is not None:
        return False
    problem = candidate.problem
    search_s = max(LEAST_SECONDS, rhino_seconds(problem, folded_model(problem, 2)))
    searches = len(numbers_of_stages(request.mesh)) - 1
    least_s = compute_bound_seconds(_as_asked(candidate), request)
    gained_s = steps * (candidate.seconds - least_s)
    return gained_s <= searches * search_s


def is_compute_bound(candidate: SolvedCandidate, request: PlanRequest) -> bool:
    """Whether ranks are on one machine, or wait for links less than half as long as they compute.

    Where links are slow, or devices unequal, ranks may compute more than their share for not having
    to wait: that counts as waiting.

    Between devices of one machine, what a step sums over ranks seldom takes longer than the bubble
    of a pipeline, and devices that share a processor work no less for it.
    """
    if len({*request.cluster.machines[: request.mesh.size]}) == 1:
        return True
    cost = candidate.plan.cost
    assert cost is not None, "a candidate with a price"
    waited = sum(cost.communication_s) - cost.hidden_s + cost.exposed_s
    waited += cost.transfer_s + cost.bubble_s
    computed = sum(cost.compute_s)
    if waited > computed / 2:
        return False
    most = min(computed, _share_seconds(_as_asked(candidate), request))
    return waited + computed - most <= most / 2
