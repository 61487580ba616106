"""A searched plan in stages that fits into the memory of its devices.

A search knows of no stages: it prices the whole model on the ranks of one. So it is given the
memory of all of them, and what it finds is priced in its stages. Where that does not fit (stages
that store more than others, microbatches in flight), the search gets as much less.
"""

from __future__ import annotations

from collections.abc import Callable

from tfpar.cluster.description import Cluster
from tfpar.cost.staged import StagedCost
from tfpar.plans import Plan
from tfpar.search.problem import Problem
from tfpar.search.stages.priced import priced_plan
from tfpar.spec import MemoryLimitError
from tfpar.spec.quantities import format_bytes

ATTEMPTS = 3
"""How many limits of memory are searched with."""


def find_in_stages(
    find: Callable[[Problem], Plan],
    in_stages: Callable[[Plan], Plan],
    problem: Problem,
    cluster: Cluster,
    price: Callable[[Plan, Problem, Cluster], Plan | None] = priced_plan,
) -> Plan:
    """The plan that is found for `problem`, in stages, with what it costs so.

    Args:
        find: finds a plan for the ranks of a stage.
        in_stages: gives it stages.
        problem: of the ranks of one stage.
        cluster: the machines of all ranks.
        price: gives a plan in stages what it costs; None for a step that does not train.

    Raises:
        MemoryLimitError: no plan was found that fits; says which stage stores most.
        PlanError, ScheduleError: as of `find` and `in_stages`.
    """
    limit, asked = cluster.device.memory_bytes, problem
    error: MemoryLimitError | None = None
    for _ in range(ATTEMPTS):
        try:
            found = find(asked)
        except MemoryLimitError:
            if error is None:
                raise
            break
        plan = in_stages(found)
        if found.cost is None or plan.stages is None:
            return plan
        priced = price(plan, problem, cluster)
        if priced is None:
            return plan
        assert priced.cost is not None and priced.stages is not None and priced.stages.cost
        needed = priced.cost.memory_bytes
        if needed <= limit:
            return priced
        error = error or _too_large(priced, priced.stages.cost, limit)
        less = min(asked.memory_limit, found.cost.memory_bytes) * limit / needed
        asked = problem.aiming(memory_limit=less)
    assert error is not None, "a plan that fits is returned"
    raise error


def _too_large(plan: Plan, staged: StagedCost, limit: float) -> MemoryLimitError:
    stage, most = max(enumerate(staged.stages), key=lambda share: share[1].peak_bytes)
    cluster = "" if plan.cluster is None else f" of {plan.cluster.name!r}"
    return MemoryLimitError(
        f"No plan fits into the memory of a device{cluster} in {len(staged.stages)} stages: a rank "
        f"of stage {stage} stores {format_bytes(most.peak_bytes)} of {format_bytes(limit)} that it "
        f"may, {format_bytes(most.fixed_bytes)} of them all the time and "
        f"{format_bytes(most.kept_bytes)} for each of {most.in_flight} microbatches in flight. Use "
        f"more stages or microbatches, another schedule, recompute=True of the pipeline, or put "
        f"fewer layers into that stage (tap.stage).",
        most.peak_bytes,
    )
