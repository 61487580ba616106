"""The plan that a planner finds for one problem: one that fits, from the cache if it is known, or
the best so far where Ctrl-C ended the search."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, MutableMapping
from typing import TypeVar

from tfpar.cost.cost import Cost
from tfpar.plans import Plan
from tfpar.search.as_planned import as_planned
from tfpar.search.at_peak import AtPeak
from tfpar.search.batch import with_batch_split
from tfpar.search.cache import PlanCache, problem_digest
from tfpar.search.chunks import choose_num_chunks
from tfpar.search.conflicts import Relaxed, conflict_error, find_conflict
from tfpar.search.laid import laid_graph, price_whole
from tfpar.search.memory_errors import check_room, memory_error
from tfpar.search.microbatches import price_in_microbatches
from tfpar.search.problem import Planner, Problem
from tfpar.search.so_far import MakePlan, SearchInterrupted, SoFar
from tfpar.search.within_memory import solve_within_memory
from tfpar.spec import PlanError, TimeLimitError

logger = logging.getLogger("tfpar")

T = TypeVar("T")

ATTEMPTS = 3
"""How many limits of memory are searched with for a step in microbatches."""

Interrupted = MutableMapping[str, SearchInterrupted]
"""Searches that Ctrl-C ended, by the digest of their problem."""


def find_plan(
    problem: Problem,
    planner: Planner,
    cache: PlanCache | None = None,
    relaxed: Relaxed | None = None,
    interrupted: Interrupted | None = None,
    missed: Callable[[Problem], object] | None = None,
) -> Plan:
    """The planner's plan, or the one that it found for the same problem before.

    Args:
        relaxed: by which to find out what conflicts where no plan satisfies the constraints or
            fits under them; without it the error is the planner's.
        interrupted: searches that Ctrl-C ended, which a further one is added to: for the same
            problem their best plan is used.
        missed: is told of a problem that the cache has no plan for.

    Raises:
        PlanError: no plan satisfies the constraints; if one does but none fits into the memory of
            a device, it is a MemoryLimitError.
        SearchInterrupted: Ctrl-C; knows the best plan so far.
    """
    plan = cache.get(problem, planner) if cache is not None else None
    if plan is None and cache is not None and missed is not None:
        missed(problem)
    digest = problem_digest(problem, planner)
    if plan is None and interrupted is not None and digest in interrupted:
        plan = found_before(interrupted[digest])
    if plan is None:
        plan = until_interrupted(
            problem, planner, interrupted, lambda asked: _fitting(asked, planner, relaxed)
        )
        if cache is not None and not plan.cut_short:
            cache.put(problem, planner, plan)
    return plan


def until_interrupted(
    problem: Problem,
    planner: Planner,
    interrupted: Interrupted | None,
    find: Callable[[Problem], T],
) -> T:
    """What `find` finds for the problem, which tells of plans on the way.

    Raises:
        SearchInterrupted: Ctrl-C; knows the best plan so far, and is added to `interrupted`.
    """
    so_far = SoFar(problem.excess_in_parts)

    def offer(make: MakePlan, cost: Cost | None) -> None:
        so_far.offer(make, cost)
        if problem.offer is not None:
            problem.offer(make, cost)

    try:
        return find(problem.telling(offer))
    except KeyboardInterrupt:
        stopped = SearchInterrupted(functools.partial(_best_so_far, so_far, problem))
        if interrupted is not None:
            interrupted[problem_digest(problem, planner)] = stopped
        raise stopped from None


def found_before(stopped: SearchInterrupted) -> Plan | None:
    """The plan of a search that Ctrl-C ended, with a line in the log that it is used."""
    if stopped.plan is not None:
        logger.warning(
            "The search for a plan was interrupted before: the best plan that it had found is "
            "used, and there may be better ones. A new tap.auto_parallel searches to the end."
        )
    return stopped.plan


def _best_so_far(so_far: SoFar, problem: Problem) -> Plan | None:
    """The best plan of an interrupted search, with its price as it runs; None if none fits.

    Planners price what they offer by what is quick to know of it, in one piece.
    """
    plan = so_far.plan()
    if plan is None:
        return None
    cost, laid = price_whole(plan, problem)
    if problem.excess_in_parts(cost):
        return None
    plan = dataclasses.replace(plan, cluster=problem.cluster, cost=cost, cut_short=True)
    return price_in_microbatches(plan, problem).with_partitioned(laid)


def _fitting(problem: Problem, planner: Planner, relaxed: Relaxed | None) -> Plan:
    """The planner's plan, which fits; arguments and errors as of `find_plan`."""
    solve_any = functools.partial(_best, planner=planner)
    sets, size = problem.sets_of_ranks, problem.meshes[0].mesh.size
    check_room(problem, [problem.memory_limit / sets] * (sets * size))
    try:
        plan = solve_any(problem)
        if problem.excess(plan.cost):
            again = as_planned(problem, plan)
            raise memory_error(plan, laid_graph(plan, again), problem)
    except TimeLimitError:
        raise
    except PlanError as error:
        if relaxed is None:
            raise
        conflict = find_conflict(problem, relaxed, solve_any)
        if conflict is None:
            raise
        raise conflict_error(conflict, error, problem) from error
    return plan


def _best(problem: Problem, planner: Planner) -> Plan:
    """The planner's plan, fitting or not, as it runs: in microbatches, or in chunks if it fits."""
    if problem.microbatches > 1:
        return _best_in_microbatches(problem, planner)
    plan = with_batch_split(solve_within_memory(problem, planner), problem)
    if plan.cost is None or problem.excess(plan.cost):
        return plan
    return choose_num_chunks(plan, problem)


def _best_in_microbatches(problem: Problem, planner: Planner) -> Plan:
    """A plan that fits so; what searches take for the memory of microbatches is a little off."""
    plans: list[Plan] = []
    asked = problem
    for _ in range(ATTEMPTS):
        plan = with_batch_split(solve_within_memory(asked, planner), asked)
        plans.append(price_in_microbatches(plan, problem))
        expected, cost = plan.cost, plans[-1].cost
        if expected is None or cost is None or not problem.excess(cost):
            break
        taken = min(asked.memory_limit, problem.stored_bytes(expected, AtPeak.of(expected)))
        less = taken * problem.memory_limit / cost.memory_bytes
        asked = problem.aiming(memory_limit=less)
    return min(plans, key=lambda p: problem.excess(p.cost))
