"""Lower bound of a step.

Every plan computes each op on some ranks, in parts that together are the op at least: so none takes
less than all compute spread over all ranks by their speeds. It waits for no link and no other rank.
But some ops are priced for less in parts (a loss over split classes, which then is several ops): so
no bound is above a plan that was found.

Of plans without stages that run the batch in one piece a search may know more: Rhino's planner has
the relaxations of its programs (`intra_op.rhino.relaxation`), an exhaustive one the best plan. All
are priced by the terms that plans are priced by.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfpar.cluster.description import Cluster, Device
from tfpar.cost.cost import Cost
from tfpar.cost.evaluation import evaluate
from tfpar.ir.collection import collection_paused
from tfpar.planning.folding.folded_model import folded_model
from tfpar.planning.problem import Problem
from tfpar.plans import Plan


class SingleDeviceSeconds(dict[Device, float]):
    """Seconds that the whole step computes, by device."""


def cost_on_one_device(problem: Problem, cluster: Cluster) -> Cost:
    """Price the step on one device of `cluster`, with nothing split."""
    with collection_paused():
        model = folded_model(problem, 2)
        return evaluate(model.on_one_device(), cluster, model.roles, problem.step.state_ratio)


def single_device_seconds(problem: Problem, cluster: Cluster, num_ranks: int) -> list[float]:
    """Seconds that the whole step computes on each of the first `num_ranks` devices alone."""
    known = problem.memo.of(SingleDeviceSeconds)
    devices = cluster.devices[:num_ranks]
    for rank, device in enumerate(devices):
        if device not in known:
            cost = cost_on_one_device(problem, cluster.part([rank]))
            known[device] = sum(cost.compute_s)
    return [known[device] for device in devices]


def shared_seconds(alone: Sequence[float]) -> float:
    """Seconds of work that takes so long on each device alone, shared by their speeds."""
    return 1 / sum(1 / seconds for seconds in alone) if all(alone) else 0.0


def attach_bound(plan: Plan, problem: Problem, cluster: Cluster) -> Plan:
    """Return a priced plan with the seconds that no plan for as many ranks of `cluster` is below.

    Args:
        plan: as its search has found it; where stages were searched too, without a bound.
        problem: that it solves; blocks that are recomputed count once, since others need not be.
        cluster: of all ranks.
    """
    if plan.cost is None:
        return plan
    least_s = shared_seconds(single_device_seconds(problem, cluster, plan.num_ranks))
    least_s += cluster.step_s
    equal = len(set(cluster.devices[: plan.num_ranks])) == 1  # else shares may be unequal
    if plan.findings.bound_s and equal and plan.stages is None and plan.chunks == 1:
        least_s = plan.findings.bound_s
    searched = [one.seconds for one in plan.findings.layouts if one.memory_bytes is not None]
    return plan.with_findings(bound_s=min(least_s, plan.cost.seconds, *searched))
