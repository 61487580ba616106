"""A searched plan in stages that fits into the memory of its devices.

A search knows of no stages: it prices the whole model on the ranks of one. So it is given the
memory of all of them, and what it finds is priced in its stages, each with the memory of its own
devices. Where that does not fit (stages that store more than others, microbatches in flight),
optimizer slots are split (`search.slots`), and layers go from stages that hold too much to others
(`rooms`). Where that is not enough, or makes a step slower, the search gets as much less.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from tfpar.cluster.description import Cluster
from tfpar.cost.staged import StagedCost
from tfpar.plans import Plan
from tfpar.search.deadline import Deadline
from tfpar.search.objective import UNCERTAINTY
from tfpar.search.offloaded_plans import with_slots_away
from tfpar.search.price import price_plan
from tfpar.search.problem import Problem
from tfpar.search.slots import split_slots
from tfpar.search.so_far import SearchInterrupted
from tfpar.spec import MemoryLimitError, PlanError
from tfpar.spec.quantities import format_bytes

ATTEMPTS = 3
"""How many limits of memory are searched with."""

STAGES_SECONDS = 1.0
"""What stages may take to be found for the plan of an interrupted search, in seconds."""

REASSIGNED = 4
"""How often layers are assigned anew for what one search has found."""

InStages = Callable[[Plan, Plan | None, Deadline | None], Plan]
"""Gives a plan stages: other ones than it has in a plan that does not fit, if given; by a deadline,
or None: whatever the search has for it."""

Price = Callable[[Plan, Problem, Cluster], Plan | None]
"""Gives a plan with stages its cost; None if the step does not train."""


def find_in_stages(
    find: Callable[[Problem], Plan],
    in_stages: InStages,
    problem: Problem,
    cluster: Cluster,
    price: Price = price_plan,
) -> Plan:
    """The plan that is found for `problem`, in stages, with what it costs so.

    Args:
        find: finds a plan for the ranks of a stage.
        in_stages: gives it stages.
        problem: of the ranks of one stage.
        cluster: the machines of all ranks.
        price: gives it its cost.

    Raises:
        MemoryLimitError: no plan was found that fits; says which stage lacks most.
        PlanError, ScheduleError: as of `find` and `in_stages`.
        SearchInterrupted: Ctrl-C, in the search or while stages are found; its plan has stages.
    """
    asked = problem
    found: Plan | None = None
    fitting: list[Plan] = []
    error: MemoryLimitError | None = None
    try:
        for _ in range(ATTEMPTS):
            try:
                found = find(asked)
            except MemoryLimitError:
                if error is None:
                    raise
                break
            plan = in_stages(found, None, None)
            first = None if found.cost is None else price(plan, problem, cluster)
            if first is None:
                return plan
            best = _lighter(first, problem, cluster, price)
            for _ in range(REASSIGNED):
                if _fits(best):
                    break
                try:
                    plan = in_stages(found, best, None)
                except PlanError:  # there is room for none
                    break
                other = price(plan, problem, cluster)
                other = other and _lighter(other, problem, cluster, price)
                if other is None or _excess(other) >= _excess(best):
                    break
                best = other
            if _fits(best):
                fitting.append(best)
                if _seconds(best) <= _seconds(first) * (1 + UNCERTAINTY):
                    break
            error = error or _too_large(best, "No plan fits")
            assert found.cost is not None, "it was priced"
            asked = problem.aiming(
                memory_limit=min(asked.memory_limit, found.cost.memory_bytes) * _part(first)
            )
    except KeyboardInterrupt as caught:
        stopped = caught if isinstance(caught, SearchInterrupted) else None

        def so_far() -> Plan | None:
            """What had been found, in stages that are found quickly, if it fits."""
            if fitting:
                return dataclasses.replace(min(fitting, key=_seconds), cut_short=True)
            best = found if stopped is None else stopped.plan
            if best is None:
                return None
            best = dataclasses.replace(best, cut_short=True)
            plan = in_stages(best, None, Deadline(STAGES_SECONDS))
            priced = price(plan, problem, cluster)
            priced = priced and _lighter(priced, problem, cluster, price)
            return plan if priced is None else priced if _fits(priced) else None

        raise SearchInterrupted(so_far) from None
    if fitting:
        return min(fitting, key=_seconds)
    assert error is not None, "a plan that fits is returned"
    raise error


def _lighter(plan: Plan, problem: Problem, cluster: Cluster, price: Price) -> Plan:
    """A priced plan with stages, with its optimizer slots split if it does not fit and stores less
    so; if that is not enough, with the slots in host memory too."""
    for lighter in (split_slots, with_slots_away):
        changed = None if _fits(plan) else lighter(plan, problem)
        less = None if changed is None else price(changed, problem, cluster)
        plan = plan if less is None or _excess(less) >= _excess(plan) else less
    return plan


def with_prices(plan: Plan, problem: Problem, cluster: Cluster) -> Plan:
    """A plan with stages that was not searched, with what it costs.

    It stays without where it does not train, or where a set of ranks has nothing to do that takes
    time: such a plan runs, though nobody would find it.

    Args: as of `find_in_stages`.
    """
    try:
        priced = price_plan(plan, problem, cluster)
    except PlanError:
        return plan
    return plan if priced is None else dataclasses.replace(priced, cluster=cluster)


def check_given(plan: Plan) -> None:
    """Check that a plan that was not searched fits into the memory of its devices, if priced.

    Raises:
        MemoryLimitError: it does not; says which stage lacks most.
    """
    if plan.cost is not None and not _fits(plan):
        raise _too_large(plan, "What the constraints give does not fit")


def _staged(plan: Plan) -> StagedCost:
    assert plan.stages is not None and plan.stages.cost is not None, "a plan with prices"
    return plan.stages.cost


def _fits(plan: Plan) -> bool:
    """Whether each stage of a priced plan fits into its own devices."""
    return _staged(plan).fits


def _excess(plan: Plan) -> float:
    """What a rank holds beyond what it may, of the stage that lacks most, host memory included."""
    return max(s.excess_bytes + s.host_excess_bytes for s in _staged(plan).stages)


def _part(plan: Plan) -> float:
    """What part of what it holds a rank may, of the stage where that is least."""
    shares = _staged(plan).stages
    return min(
        (s.limit_bytes / s.peak_bytes for s in shares if s.limit_bytes and s.peak_bytes),
        default=1.0,
    )


def _seconds(plan: Plan) -> float:
    return _staged(plan).seconds


def _too_large(plan: Plan, what: str) -> MemoryLimitError:
    """The error that a priced plan in stages does not fit, which begins with `what`."""
    staged = _staged(plan)
    full = max(staged.stages, key=lambda share: share.host_excess_bytes)
    if full.host_excess_bytes and all(share.excess_bytes <= 0 for share in staged.stages):
        room = full.host_limit_bytes or 0.0
        return MemoryLimitError(
            f"{what} into the memory of the hosts in {len(staged.stages)} stages: a rank of stage "
            f"{staged.stages.index(full)} has {format_bytes(full.host_bytes)} there of "
            f"{format_bytes(room)} that it may. Use more machines or an optimizer with fewer "
            f"slots, or offload less (offload=). If the host has more, say so with host_memory in "
            f"the cluster file.",
            full.host_bytes,
        )
    stage = staged.fullest
    most = staged.stages[stage]
    limit = most.limit_bytes
    assert limit is not None, "it is known where something does not fit"
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
