"""Relaxed estimate of a pipeline: its step time without memory limits and transfers.

The fastest plan for the ranks of one stage is cheap to find. With the work shared among stages by
speed, it gives an optimistic step time, by which numbers of stages are ordered and pruned before
plans that fit are searched. The plan is priced in microbatches, since every microbatch launches all
ops anew, on each machine type, and on the folded graph, which is fast.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from tfpar.cluster.description import Cluster
from tfpar.ir.collection import collection_paused
from tfpar.ir.roles import BACKWARD, FORWARD, UPDATE
from tfpar.pipeline import Pipeline
from tfpar.planning.memory.peak_model import PeakMemoryModel
from tfpar.planning.memory.relayout import fastest_plan, fastest_with_sharded_slots
from tfpar.planning.pricing.price import SingleStagePricer
from tfpar.planning.problem import Planner, Problem
from tfpar.plans import Plan


@dataclasses.dataclass(frozen=True)
class RelaxedEstimate:
    """Seconds and memory of a step in so many stages if memory were no limit.

    Attributes:
        seconds: of a step, if all stages take equally long and send each other nothing.
        memory_fraction: what that plan stores over what there is; feasible if at most 1.
    """

    seconds: float
    memory_fraction: float

    @property
    def fits(self) -> bool:
        """Whether that plan does, by estimate."""
        return self.memory_fraction <= 1


def estimate_relaxed(
    problem: Problem, planner: Planner, pipeline: Pipeline | None, kinds: Mapping[Cluster, int]
) -> RelaxedEstimate | None:
    """Return the relaxed estimate of a pipeline; None if the planner does not price its plans.

    Optimizer slots are split, and forward passes run twice, if it does not fit else.

    Args:
        problem: of the ranks of a stage.
        kinds: how many actors have such machines.

    Raises:
        PlanError: no plan satisfies the constraints.
    """
    plan = fastest_plan(problem, planner)
    cost = plan.cost
    if cost is None:
        return None
    stored = problem.stored_bytes(cost, PeakMemoryModel.of(cost)) / problem.memory_limit
    more = 0.0
    if stored > 1:
        split = fastest_with_sharded_slots(problem, planner)
        if split is not None and split.cost is not None:
            stored = (
                problem.stored_bytes(split.cost, PeakMemoryModel.of(split.cost))
                / problem.memory_limit
            )
            more = split.cost.seconds - cost.seconds
    recompute = stored > 1 or (pipeline is not None and pipeline.recompute)
    if pipeline is None:
        again = cost.compute_s[FORWARD] + cost.communication_s[FORWARD]
        return RelaxedEstimate(cost.seconds + more + recompute * again, stored)
    order = pipeline.order
    seconds = _seconds_of_passes(plan, problem, kinds, order.num_microbatches, recompute)
    fill = (order.num_stages - 1) / order.num_microbatches
    once = cost.compute_s[UPDATE] + cost.communication_s[UPDATE] + cost.exposed_s + more
    return RelaxedEstimate(seconds * (1 + fill) + once / order.num_actors, stored)


def _seconds_of_passes(
    plan: Plan, problem: Problem, kinds: Mapping[Cluster, int], parts: int, recompute: bool
) -> float:
    """Return the seconds of all passes of a step in so many microbatches, if actors share them by
    their speeds."""
    plan = dataclasses.replace(plan, microbatches=parts)
    with collection_paused():
        step = SingleStagePricer.folded(plan, problem)
        shared = 0.0
        for machines, count in kinds.items():
            cost = step.on(machines).price(plan).cost
            assert cost is not None, "what a pricer says"
            forward, backward = (
                cost.compute_s[phase] + cost.communication_s[phase] for phase in (FORWARD, BACKWARD)
            )
            seconds = forward + backward + recompute * forward
            if not seconds:
                return 0.0
            shared += count / seconds
    return 1 / shared
