"""From a captured step to its plan in several stages, on the machines that suit each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING

from tfpar.cluster.description import Cluster, Device
from tfpar.cluster.network import likeness
from tfpar.constraints import PutInStage
from tfpar.ir.step import StepGraph
from tfpar.plans import Plan
from tfpar.search.deadline import Deadline
from tfpar.search.price import price_plan
from tfpar.search.problem import Problem
from tfpar.search.stages.fitting import find_in_stages
from tfpar.search.stages.kinds import fastest_of_kinds, worth_searching
from tfpar.search.stages.placement import Order, Places, Work, best_placed
from tfpar.search.stages.planned import in_stages
from tfpar.search.stages.priced import scheduled_plan

if TYPE_CHECKING:
    from tfpar.planning import Request


def plan_in_stages(
    find: Callable[[Problem], Plan],
    seconds: Callable[[Cluster], float],
    problem: Problem,
    step: StepGraph,
    request: Request,
    part: bool,
) -> tuple[Plan, Problem]:
    """The fastest plan in the stages of the request's pipeline, and its problem.

    Machines that differ take stages in the order that is best, unless the request says in which, or
    constraints put layers into stages.

    Args:
        find: finds a plan for the ranks of a stage.
        seconds: what the step takes on one device of a part of the cluster, without its update.
        part: the step is part of what the constraints speak of.

    Raises:
        MemoryLimitError, PlanError, ScheduleError: as of `search.stages.fitting.find_in_stages`.
        SearchInterrupted: Ctrl-C; knows the best plan so far.
    """
    pipeline, cluster = request.pipeline, request.cluster
    assert pipeline is not None, "a request for stages"
    found: dict[Hashable, Plan] = {}
    taken: dict[Device, float] = {}

    def find_once(asked: Problem) -> Plan:
        """One search for machines that are alike, wherever they are."""
        key = likeness(asked.cluster), asked.memory_limit
        if key not in found:
            found[key] = find(asked)
        return found[key]

    def seconds_on(part: Cluster) -> float:
        if part.device not in taken:
            taken[part.device] = seconds(part)
        return taken[part.device]

    def staged(ranks: Order, plan: Plan, before: Plan | None, deadline: Deadline | None) -> Plan:
        return in_stages(
            plan,
            step,
            pipeline,
            cluster,
            request.constraints,
            owners=request.owners,
            part=part,
            ranks=ranks,
            before=before,
            deadline=deadline or request.budget.start(),
            known=None if part else problem.of_graphs,
            jit_compile=request.jit_compile,
        )

    def placed(ranks: Order) -> tuple[Plan, Problem]:
        price = scheduled_plan if pipeline.picks_schedule else price_plan

        def find_staged(asked: Problem) -> Plan:
            return find_in_stages(
                find_once, functools.partial(staged, ranks), asked, cluster, price
            )

        kinds = worth_searching(request.kinds(ranks))
        return fastest_of_kinds(find_once, find_staged, problem, kinds[:1] if part else kinds)

    by_hand = any(isinstance(c, PutInStage) for c in request.constraints)
    if request.ranks is not None or part or by_hand:
        return placed(request.ranks or ())
    places = Places(cluster, request.mesh.size, pipeline.order.num_actors)

    def work(plan: Plan | None) -> Work:
        cost = None if plan is None or plan.stages is None else plan.stages.cost
        sent = 0.0 if cost is None else sum(share.sent_bytes for share in cost.stages)
        weights = sum(v.num_bytes for v in problem.variables if v.trainable)
        links = max(1, 2 * (pipeline.order.num_stages - 1))
        return Work(seconds_on, weights, sent / links, pipeline.order.num_microbatches)

    return best_placed(placed, places.orders(), work, places)
