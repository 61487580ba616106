"""A searched plan in stages that fits into the memory of its devices.

A search knows of no stages: it prices the whole model on the ranks of one. So it is given the
memory of all of them, and what it finds is priced in its stages. Where that does not fit (stages
that store more than others, microbatches in flight), the search gets as much less.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tfpar.cluster.description import Cluster
from tfpar.plans import Plan
from tfpar.search.deadline import Deadline
from tfpar.search.problem import Problem
from tfpar.search.so_far import SearchInterrupted
from tfpar.search.stages.priced import priced_plan
from tfpar.spec import MemoryLimitError, PlanError
from tfpar.spec.quantities import format_bytes

ATTEMPTS = 3
"""How many limits of memory are searched with."""


STAGES_SECONDS = 1.0
"""What stages may take to be found for the plan of an interrupted search, in seconds."""

InStages = Callable[[Plan, Deadline | None], Plan]
"""Gives a plan stages, by a deadline; None: whatever the search has for it."""

Price = Callable[[Plan, Problem, Cluster], Plan | None]
"""Gives a plan with stages its cost; None if the step does not train."""


def find_in_stages(
    find: Callable[[Problem], Plan],
    in_stages: InStages,
    problem: Problem,
    cluster: Cluster,
    price: Price = priced_plan,
) -> Plan:
    """The plan that is found for `problem`, in stages, with what it costs so.

    Args:
        find: finds a plan for the ranks of a stage.
        in_stages: gives it stages.
        problem: of the ranks of one stage.
        cluster: the machines of all ranks.
        price: gives it its cost.

    Raises:
        MemoryLimitError: no plan was found that fits; says which stage stores most.
        PlanError, ScheduleError: as of `find` and `in_stages`.
        SearchInterrupted: Ctrl-C, in the search or while stages are found; its plan has stages.
    """
    limit, asked = cluster.device.memory_bytes, problem
    found: Plan | None = None
    error: MemoryLimitError | None = None
    try:
        for _ in range(ATTEMPTS):
            try:
                found = find(asked)
            except MemoryLimitError:
                if error is None:
                    raise
                break
            plan = in_stages(found, None)
            priced = None if found.cost is None else price(plan, problem, cluster)
            if priced is None:
                return plan
            needed = stored_bytes(priced)
            if needed <= limit:
                return priced
            error = error or _too_large(priced, limit, "No plan fits")
            assert found.cost is not None, "it was priced"
            less = min(asked.memory_limit, found.cost.memory_bytes) * limit / needed
            asked = problem.aiming(memory_limit=less)
    except KeyboardInterrupt as caught:
        stopped = caught if isinstance(caught, SearchInterrupted) else None

        def so_far() -> Plan | None:
            """What had been found, in stages that are found quickly, if it fits."""
            best = found if stopped is None else stopped.plan
            if best is None:
                return None
            best = dataclasses.replace(best, cut_short=True)
            plan = in_stages(best, Deadline(STAGES_SECONDS))
            priced = price(plan, problem, cluster)
            if priced is None:
                return plan
            return priced if stored_bytes(priced) <= limit else None

        raise SearchInterrupted(so_far) from None
    assert error is not None, "a plan that fits is returned"
    raise error


def with_prices(plan: Plan, problem: Problem, cluster: Cluster) -> Plan:
    """A plan with stages that was not searched, with what it costs.

    It stays without where it does not train, or where a set of ranks has nothing to do that takes
    time: such a plan runs, though nobody would find it.

    Args: as of `find_in_stages`.
    """
    try:
        priced = priced_plan(plan, problem, cluster)
    except PlanError:
        return plan
    return plan if priced is None else dataclasses.replace(priced, cluster=cluster)


def check_given(plan: Plan) -> None:
    """Check that a plan that was not searched fits into the memory of its devices, if priced.

    Raises:
        MemoryLimitError: it does not; says which stage stores most.
    """
    if plan.cost is None:
        return
    assert plan.cluster is not None, "a plan with prices"
    limit = plan.cluster.device.memory_bytes
    if stored_bytes(plan) > limit:
        raise _too_large(plan, limit, "What the constraints give does not fit")


def stored_bytes(plan: Plan) -> float:
    """What a rank of the stage that stores most does, of a priced plan."""
    assert plan.cost is not None, "a plan with prices"
    return plan.cost.memory_bytes


def _too_large(plan: Plan, limit: float, what: str) -> MemoryLimitError:
    """The error that a priced plan in stages does not fit, which begins with `what`."""
    assert plan.stages is not None and plan.stages.cost is not None, "a plan with prices"
    staged = plan.stages.cost
    stage, most = max(enumerate(staged.stages), key=lambda share: share[1].peak_bytes)
    cluster = "" if plan.cluster is None else f" of {plan.cluster.name!r}"
    return MemoryLimitError(
        f"{what} into the memory of a device{cluster} in {len(staged.stages)} stages: a rank "
        f"of stage {stage} stores {format_bytes(most.peak_bytes)} of {format_bytes(limit)} that it "
        f"may, {format_bytes(most.fixed_bytes)} of them all the time and "
        f"{format_bytes(most.kept_bytes)} for each of {most.in_flight} microbatches in flight. Use "
        f"more stages or microbatches, another schedule, recompute=True of the pipeline, or put "
        f"fewer layers into that stage (tap.stage).",
        most.peak_bytes,
    )
