"""Memory moves that search again: the fastest layout with sharded slots; layouts for a limit of
memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from tfpar.cost.cost import Cost
from tfpar.planning.incumbent import IncumbentCallback, MakePlan
from tfpar.planning.memory.fit import MemoryFit, MoveEstimate, is_near
from tfpar.planning.memory.move_estimates import estimate_change
from tfpar.planning.memory.offload_moves import offload_slots_to_fit
from tfpar.planning.memory.plan_transforms import apply_memory_transforms
from tfpar.planning.memory.recompute import is_selective
from tfpar.planning.memory.shard_slots import may_fit_with_sharded_slots, with_sharded_slots
from tfpar.planning.meshes import LogicalMesh
from tfpar.planning.pricing.price import price_whole
from tfpar.planning.problem import Planner, Problem
from tfpar.plans import OffloadPlan, Plan


@dataclasses.dataclass(frozen=True)
class Relayout:
    """Layouts that the planner finds for the memory that there is, with blocks recomputed.

    The layout found for the limit is compared with others where it is not the fastest of all: a
    planner splits weights for what slots take, while the fastest layout may fit with its slots
    sharded or offloaded instead. And a planner that looks for fast layouts may miss one that just
    fits: then the one that it finds to store least is tried.

    Attributes:
        recompute: the blocks, by name.
        offloaded: what lies in host memory.
    """

    problem: Problem
    planner: Planner
    recompute: tuple[str, ...]
    offloaded: OffloadPlan

    @property
    def name(self) -> str:
        if not self.recompute:
            return "another layout"
        how = " selectively" if all(map(is_selective, self.recompute)) else ""
        return f"another layout, {len(self.recompute)} blocks recomputed{how}"

    def estimate(self, fit: MemoryFit) -> MoveEstimate:
        """Estimate what recomputing the blocks adds; what a layout does, its search alone tells."""
        if not self.recompute:
            return MoveEstimate()
        before = apply_memory_transforms(self.problem, (), self.offloaded)
        return estimate_change(before, self._changed_problem())

    def plans(self, fit: MemoryFit) -> Iterator[Plan]:
        return map(self._as_run, self._layouts(fit))

    def _changed_problem(self) -> Problem:
        return apply_memory_transforms(self.problem, self.recompute, self.offloaded)

    def _layouts(self, fit: MemoryFit) -> Iterator[Plan]:
        problem = self._changed_problem()
        if self.problem.aim.offer is not None:
            problem = problem.with_incumbent_callback(self._offer_as_run(self.problem.aim.offer))
        plan = with_given_slots(self.planner.solve(problem), problem)
        yield plan
        fastest = fastest_plan(problem, self.planner)
        if fit.fits(plan) and is_near(plan, fastest):
            return
        found = [fastest_with_sharded_slots(problem, self.planner)]
        if may_fit_with_sharded_slots(plan, problem):
            found.append(with_sharded_slots(plan, problem))
        found.append(offload_slots_to_fit(fastest, problem))
        lighter = [one for one in found if one is not None]
        yield from lighter
        if not any(map(fit.fits, [plan, *lighter])):
            lowest = problem.with_objective(memory_limit=0.0)
            least = with_given_slots(self.planner.solve(lowest), problem)
            for one in (
                least,
                with_sharded_slots(least, problem),
                offload_slots_to_fit(least, problem),
            ):
                if one is not None:  # also where it is only nearer to what fits
                    yield one

    def _as_run(self, plan: Plan) -> Plan:
        slots = plan.offloaded.slots or self.offloaded.slots
        offloaded = dataclasses.replace(self.offloaded, slots=slots)
        return dataclasses.replace(plan, recompute=self.recompute, offloaded=offloaded)

    def _offer_as_run(self, offer: IncumbentCallback) -> IncumbentCallback:
        """`offer` for plans that recompute and offload so."""

        def offered(make: MakePlan, cost: Cost | None) -> None:
            def made() -> Plan | None:
                plan = make()
                return plan and self._as_run(plan)

            offer(made, cost)

        return offered


@dataclasses.dataclass(frozen=True)
class ShardSlots:
    """The fastest layout with its optimizer slots sharded, where that may be enough.

    Attributes:
        offloaded: what lies in host memory.
    """

    problem: Problem
    planner: Planner
    offloaded: OffloadPlan
    name: str = "shard slots"

    def estimate(self, fit: MemoryFit) -> MoveEstimate:
        """Estimate that nothing is added: gradients are scattered as they are summed, and what
        comes of them is gathered, which moves as many bytes as their sum alone."""
        return MoveEstimate()

    def plans(self, fit: MemoryFit) -> Iterator[Plan]:
        found = fastest_with_sharded_slots(self.problem, self.planner)
        if found is not None:
            yield dataclasses.replace(found, offloaded=self.offloaded)


class FastestPlans(dict[tuple[Planner, tuple[LogicalMesh, ...]], Plan]):
    """The fastest plans of planners, by meshes."""


class ShardedFastestPlans(dict[tuple[Planner, tuple[LogicalMesh, ...]], Plan | None]):
    """The same with their slots sharded; None: there are none to shard."""


def fastest_plan(problem: Problem, planner: Planner) -> Plan:
    """Return the planner's fastest plan of all, whatever it stores; it is searched once."""
    known, key = problem.memo.of(FastestPlans), (planner, tuple(problem.meshes))
    if key not in known:
        plan = planner.solve(problem.with_objective(memory_limit=math.inf))
        known[key] = with_given_slots(plan, problem)
    return known[key]


def with_given_slots(plan: Plan, problem: Problem) -> Plan:
    """Return a planner's plan with its price where specs of optimizer slots are given: planners
    take slots to be as their weights are."""
    if plan.cost is None or not any(given.slots for given in problem.given.variables.values()):
        return plan
    cost, laid = price_whole(plan, problem)
    return plan.with_findings(cost=cost).with_partitioned(laid)


def fastest_with_sharded_slots(problem: Problem, planner: Planner) -> Plan | None:
    """Shard the optimizer slots of the fastest plan, where that may be what makes it fit; it is
    priced once."""
    plan = fastest_plan(problem, planner)
    if not may_fit_with_sharded_slots(plan, problem):
        return None
    known, key = problem.memo.of(ShardedFastestPlans), (planner, tuple(problem.meshes))
    if key not in known:
        known[key] = with_sharded_slots(plan, problem)
    return known[key]
