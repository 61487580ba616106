"""What a pipeline promises before plans that fit are searched for.

The fastest plan of all for the ranks of a stage is found quickly, and says about what a step takes
at least if its stages share the work by their speeds and send each other nothing. What is small
costs more in microbatches: as many ops run for each of them. So the plan is priced in them, on each
kind of machines; of the folded graph, which is quick.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from tfpar.cluster.description import Cluster
from tfpar.cost.microbatches import microbatched_cost
from tfpar.ir.collection import collection_paused
from tfpar.ir.roles import BACKWARD, FORWARD, UPDATE
from tfpar.pipeline import Pipeline
from tfpar.plans import Plan
from tfpar.propagation.engine import propagate
from tfpar.search.at_peak import AtPeak
from tfpar.search.folded_plan import folded_anchors
from tfpar.search.model.folded_model import folded_model
from tfpar.search.parts import StepInParts
from tfpar.search.problem import Planner, Problem
from tfpar.search.within_memory import fastest_plan, fastest_with_split_slots


@dataclasses.dataclass(frozen=True)
class Promise:
    """What a step would take in so many stages if memory were no matter.

    Attributes:
        seconds: about what the fastest plan for the ranks of a stage takes at least, if all stages
            take equally long and send each other nothing.
        stored: about what that plan stores, as a part of what there is.
    """

    seconds: float
    stored: float

    @property
    def fits(self) -> bool:
        """Whether that plan does, about."""
        return self.stored <= 1


def promise(
    problem: Problem, planner: Planner, pipeline: Pipeline | None, kinds: Mapping[Cluster, int]
) -> Promise | None:
    """What the fastest plan of all promises; None if its planner does not price it.

    Optimizer slots are split, and forward passes run twice, if it does not fit else.

    Args:
        problem: of the ranks of a stage.
        kinds: how many sets of ranks have such machines.

    Raises:
        PlanError: no plan satisfies the constraints.
    """
    plan = fastest_plan(problem, planner)
    cost = plan.cost
    if cost is None:
        return None
    stored = problem.stored_bytes(cost, AtPeak.of(cost)) / problem.memory_limit
    more = 0.0
    if stored > 1:
        split = fastest_with_split_slots(problem, planner)
        if split is not None and split.cost is not None:
            stored = problem.stored_bytes(split.cost, AtPeak.of(split.cost)) / problem.memory_limit
            more = split.cost.seconds - cost.seconds
    recompute = stored > 1 or (pipeline is not None and pipeline.recompute)
    if pipeline is None:
        again = cost.compute_s[FORWARD] + cost.communication_s[FORWARD]
        return Promise(cost.seconds + more + recompute * again, stored)
    order = pipeline.order
    seconds = _seconds_of_passes(plan, problem, kinds, order.num_microbatches, recompute)
    fill = (order.num_stages - 1) / order.num_microbatches
    once = cost.compute_s[UPDATE] + cost.communication_s[UPDATE] + cost.exposed_s + more
    return Promise(seconds * (1 + fill) + once / order.num_actors, stored)


def _seconds_of_passes(
    plan: Plan, problem: Problem, kinds: Mapping[Cluster, int], parts: int, recompute: bool
) -> float:
    """What all passes of a step take in so many microbatches, if sets of ranks share them by their
    speeds."""
    assert plan.cost is not None, "it is priced"
    with collection_paused():
        step = _folded_step(plan, problem)
        cut = step.cut(parts)
        own = step.statistics(cut)
        shared = 0.0
        for machines, count in kinds.items():
            cost = microbatched_cost(plan.cost, cut, plan.mesh, machines, step.roles, own)
            forward, backward = (
                cost.compute_s[phase] + cost.communication_s[phase] for phase in (FORWARD, BACKWARD)
            )
            seconds = forward + backward + recompute * forward
            if not seconds:
                return 0.0
            shared += count / seconds
    return 1 / shared


def _folded_step(plan: Plan, problem: Problem) -> StepInParts:
    """The folded graph under a plan of the whole."""
    model = folded_model(problem, 2)
    anchors = folded_anchors(plan, problem, model)
    batched = model.batched(problem)
    folded = dataclasses.replace(problem, graph=model.prepared.graph, batched=batched)
    return StepInParts(folded, anchors, propagate(model.prepared, plan.mesh, anchors), model.roles)
