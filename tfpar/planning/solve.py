"""Solution of one problem: from the cache, from a planner and the moves that make its plan fit, or
the incumbent where Ctrl-C ended the search."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, MutableMapping

from tfpar.cost.cost import Cost
from tfpar.planning.cache import PlanCache, problem_digest
from tfpar.planning.conflicts import Conflict, Relaxed, conflict_error, find_conflict
from tfpar.planning.incumbent import Incumbent, MakePlan, SearchInterrupted
from tfpar.planning.intra_op.batch_axes import infer_batch_axes
from tfpar.planning.memory.fit import MemoryFit
from tfpar.planning.memory.limit import solve_under_memory_limit
from tfpar.planning.memory.lower_limit import LimitedLayout, LowerLimit
from tfpar.planning.memory.memory_errors import check_room, memory_error
from tfpar.planning.memory.peak_model import PeakMemoryModel
from tfpar.planning.memory.plan_transforms import apply_plan_transforms
from tfpar.planning.pricing.chunks import choose_num_chunks
from tfpar.planning.pricing.plan_propagation import propagate_transformed
from tfpar.planning.pricing.price import price_whole
from tfpar.planning.pricing.repricing import price_in_microbatches
from tfpar.planning.problem import Planner, Problem
from tfpar.plans import Plan
from tfpar.spec import PlanError, TimeLimitError

logger = logging.getLogger("tfpar")

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
    """Return the planner's plan, or the one that it found for the same problem before.

    Args:
        relaxed: by which to find out what conflicts where no plan satisfies the constraints or
            fits under them; without it the error is the planner's.
        interrupted: searches that Ctrl-C ended, which a further one is added to: for the same
            problem their best plan is used.
        missed: is called with a problem that the cache has no plan for.

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
        plan = reuse_interrupted(interrupted[digest])
    if plan is not None:
        return plan
    sets, size = problem.batch.num_actors, problem.meshes[0].mesh.size
    check_room(problem, [problem.memory_limit / sets] * (sets * size))
    with interruptible(problem, planner, interrupted) as asked:
        try:
            plan = _find_best(asked, planner)
            if asked.excess(plan.cost):
                partitioned = propagate_transformed(plan, apply_plan_transforms(asked, plan))
                raise memory_error(plan, partitioned, asked)
        except TimeLimitError:
            raise
        except PlanError as error:
            conflict = None if relaxed is None else _find_conflict(asked, planner, relaxed)
            if conflict is None:
                raise
            raise conflict_error(conflict, error, asked) from error
    if cache is not None and not plan.findings.cut_short:
        cache.put(problem, planner, plan)
    return plan


@contextlib.contextmanager
def interruptible(
    problem: Problem, planner: Planner, interrupted: Interrupted | None
) -> Iterator[Problem]:
    """Yield the same problem, whose incumbent is kept for when Ctrl-C ends the search within.

    Raises:
        SearchInterrupted: Ctrl-C; knows the best plan so far, and is added to `interrupted`.
    """
    incumbent = Incumbent(problem.excess_in_parts)

    def offer(make: MakePlan, cost: Cost | None) -> None:
        incumbent.report_incumbent(make, cost)
        if problem.aim.offer is not None:
            problem.aim.offer(make, cost)

    try:
        yield problem.with_incumbent_callback(offer)
    except KeyboardInterrupt:
        stopped = SearchInterrupted(functools.partial(_best_so_far, incumbent, problem))
        if interrupted is not None:
            interrupted[problem_digest(problem, planner)] = stopped
        raise stopped from None


def reuse_interrupted(stopped: SearchInterrupted) -> Plan | None:
    """Return the plan of a search that Ctrl-C ended, and log that it is used."""
    if stopped.plan is not None:
        logger.warning(
            "The search for a plan was interrupted before: the best plan that it had found is "
            "used, and there may be better ones. A new tap.auto_parallel searches to the end."
        )
    return stopped.plan


def _best_so_far(incumbent: Incumbent, problem: Problem) -> Plan | None:
    """The best plan of an interrupted search, with its price as it runs; None if none fits.

    Planners price what they offer by what is quick to know of it, in one piece.
    """
    plan = incumbent.plan()
    if plan is None:
        return None
    cost, partitioned = price_whole(plan, problem)
    if problem.excess_in_parts(cost):
        return None
    plan = dataclasses.replace(plan, cluster=problem.cluster)
    plan = plan.with_findings(cost=cost, cut_short=True)
    return price_in_microbatches(plan, problem).with_partitioned(partitioned)


def _find_conflict(problem: Problem, planner: Planner, relaxed: Relaxed) -> Conflict | None:
    return find_conflict(problem, relaxed, functools.partial(_find_best, planner=planner))


def _find_best(problem: Problem, planner: Planner) -> Plan:
    """The planner's plan, fitting or not, as it runs: in microbatches, or in chunks if it fits."""
    if problem.batch.microbatches == 1:
        plan = infer_batch_axes(solve_under_memory_limit(problem, planner), problem)
        if plan.cost is None or problem.excess(plan.cost):
            return plan
        return choose_num_chunks(plan, problem)
    layout = infer_batch_axes(solve_under_memory_limit(problem, planner), problem)
    source = MicrobatchLayouts(problem, planner)
    first = source.price(layout, problem)
    fit = MemoryFit(lambda plan: problem.excess(plan.cost))
    return fit.run(first.plan, [LowerLimit(source, first)])


@dataclasses.dataclass(frozen=True)
class MicrobatchLayouts:
    """Layouts priced in microbatches, whose memory planners estimate."""

    problem: Problem
    planner: Planner

    @property
    def limit(self) -> float:
        return self.problem.memory_limit

    def find(self, limit: float) -> LimitedLayout:
        asked = self.problem.with_objective(memory_limit=limit)
        plan = infer_batch_axes(solve_under_memory_limit(asked, self.planner), asked)
        return self.price(plan, asked)

    def price(self, layout: Plan, asked: Problem) -> LimitedLayout:
        """Price a layout in microbatches.

        Args:
            asked: with the limit that it was found for.
        """
        cost = layout.cost
        expected = 0.0 if cost is None else asked.stored_bytes(cost, PeakMemoryModel.of(cost))
        return LimitedLayout(price_in_microbatches(layout, self.problem), expected)

    def room(self, plan: Plan) -> float:
        assert plan.cost is not None, "a plan that does not fit was priced"
        return self.problem.memory_limit / plan.cost.memory_bytes

    def lighter(self, plan: Plan, fit: MemoryFit) -> Plan:
        return plan
