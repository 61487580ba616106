"""Rhino's planner (§4): all ops of the graph are decided together, without names or layers.

For every shape of the mesh, its axes are decided one after another (`mesh_search`): along each,
every op has a few strategies (`growth`), what they cost and what moves between them is a cost
network (`axis_space`), and chains of it are merged (`cones`). The rest is an integer linear program
(`ilp`). Level 2 relaxes it, and where that is not integer goes through the segments between
critical nodes by dynamic programming (`segments`); level 3 goes on from there, and solves the
programs of meshes that may still be the fastest. Where the plan stores too much, the largest
parameters have to be split, as few as will do (§4.4).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

from tfpar.cost.cost import Cost
from tfpar.cost.evaluation import evaluate
from tfpar.cost.pricer import Pricer
from tfpar.ir.collection import collection_paused
from tfpar.ir.graph import Variable
from tfpar.planning.deadline import Deadline
from tfpar.planning.folding.folded_model import FoldedModel, folded_model
from tfpar.planning.folding.folded_plan import FoldedPlan, offer_folded_plan, unfold_plan
from tfpar.planning.intra_op.incremental.incremental import IncrementalPricer
from tfpar.planning.intra_op.rhino.mesh_search import (
    MeshShapePlan,
    MeshShapeSearch,
    SearchStatistics,
)
from tfpar.planning.intra_op.rhino.solver_counters import SolverCounters
from tfpar.planning.intra_op.tie_breaking import (
    baselines,
    collective_penalty,
    fastest,
    pick_simplest,
)
from tfpar.planning.meshes import shapes
from tfpar.planning.problem import Problem
from tfpar.planning.solver import RELATIVE_GAP
from tfpar.plans import Candidate, Plan, SpecOption
from tfpar.propagation.engine import propagate
from tfpar.propagation.partitioned_graph import Anchors
from tfpar.spec import Mesh, PlanError, Replicate, Shard, Spec, SpecError, TimeLimitError
from tfpar.spec.arguments import check_choice

R = TypeVar("R")

LEVELS = (2, 3)

WORTH_A_SEARCH = 0.02
"""The part of a step that a mesh has to save at best to be searched: predictions do not tell plans
apart that are so near to each other (`Objective.uncertainty` is more)."""

ALTERNATIVES_S = 5.0
"""Time limit, in seconds, for pricing the other options of each weight, once the plan is found."""

LOOK_S = 0.2
"""Interval, in seconds, at which whoever waits for a search looks whether Ctrl-C came."""


@dataclasses.dataclass(eq=False)
class RhinoPlanner:
    """See the module.

    Args:
        level: 3 solves the programs of the whole graph; 2 leaves it at their relaxations, and at
            segments where these are not integer, which is faster and may find slower plans.

    Attributes:
        report: of the last search; work: what it did.

    Raises:
        ArgumentError: another level.
    """

    level: int = 3
    report: SearchStatistics = dataclasses.field(default_factory=SearchStatistics)
    work: SolverCounters = dataclasses.field(default_factory=SolverCounters)

    def __post_init__(self) -> None:
        self.level = check_choice("level", self.level, LEVELS)

    @property
    def name(self) -> str:
        return f"rhino level {self.level}"

    def solve(self, problem: Problem) -> Plan:
        """Return the best plan of all shapes of the mesh.

        Raises:
            PlanError: nothing satisfies the constraints. If nothing was found in time, a
                TimeLimitError.
        """
        deadline = problem.aim.budget.start()
        with collection_paused():
            return self.search(problem, folded_model(problem, 2), deadline)

    def search(self, problem: Problem, model: FoldedModel, deadline: Deadline) -> Plan:
        """Search as `solve` does, where the model is folded already."""
        offer = None
        if problem.aim.offer is not None:
            problem.aim.offer(functools.partial(self._first, problem, model), None)
            offer = functools.partial(offer_folded_plan, problem, model, self.name)
        shaped = shapes(problem.meshes)
        meshes = [MeshShapeSearch(problem, model, *mesh, 2, offer=offer) for mesh in shaped]
        plain = list(baselines(problem, model))
        least = _side_by_side([search.least_seconds for search in meshes], deadline)
        searches, results = _searched(meshes, least, plain, problem, deadline)
        skipped = [
            Candidate(str(search.mesh), bound_s)
            for search, bound_s in zip(meshes, least, strict=True)
            if search not in searches and math.isfinite(bound_s)
        ]
        if self.level == 3:
            results = _solved(searches, results, problem, deadline)
        found = [result for result in results if result is not None]
        if searches and not found and deadline.cut_short:
            raise TimeLimitError(
                "No plan was found in time. Give the search more search_seconds, or use "
                "planner='tap'."
            )
        if searches and not found:
            raise PlanError("No plan satisfies the constraints: they leave some op no way to run.")
        candidates: list[FoldedPlan] = [*found, *plain]
        if found:
            best = fastest(found, problem)
            self.report = best.report
            candidates += _as_ops_come(problem, model, best)
            more_s = collective_penalty(best, problem)
            if more_s and not deadline.over():
                search = searches[results.index(best)].counting(more_s)
                (simpler,) = _side_by_side([search.run], deadline)
                candidates += [] if simpler is None else [simpler]
        self.work = sum((search.work for search in searches), SolverCounters())
        taken = pick_simplest(candidates, problem)
        until = Deadline(min(ALTERNATIVES_S, deadline.left))
        return unfold_plan(
            problem,
            model,
            taken,
            self.name,
            alternatives=price_spec_options(
                problem, model, taken.mesh, taken.anchors, taken.cost, until
            ),
            elsewhere=[
                *skipped,
                *(
                    Candidate(str(f.mesh), f.cost.seconds, f.cost.memory_bytes)
                    for f in found
                    if f.mesh.shape != taken.mesh.shape
                ),
            ],
            preferred_to=fastest(candidates, problem),
            cut_short=deadline.cut_short,
            bound_s=min(*least, fastest(candidates, problem).cost.seconds),
        )

    def _first(self, problem: Problem, model: FoldedModel) -> Plan | None:
        """Return the plan that is there before a search: data parallelism, or near it."""
        mesh = shapes(problem.meshes)[0]
        found = MeshShapeSearch(problem, model, *mesh, self.level).run(Deadline(0.0))
        return None if found is None else unfold_plan(problem, model, found, self.name)


def _as_ops_come(problem: Problem, model: FoldedModel, best: FoldedPlan) -> Iterator[FoldedPlan]:
    """The weights of `best`, the ops as they come, which takes no search."""
    if best.anchors.ops:
        anchors = dataclasses.replace(best.anchors, ops={})
        laid = propagate(model.prepared, best.mesh, anchors)
        cost = evaluate(laid, problem.cluster, model.roles, problem.step.state_ratio)
        yield dataclasses.replace(best, anchors=anchors, cost=cost)


def _searched(
    meshes: Sequence[MeshShapeSearch],
    least: Sequence[float],
    plain: Sequence[FoldedPlan],
    problem: Problem,
    deadline: Deadline,
) -> tuple[list[MeshShapeSearch], list[MeshShapePlan | None]]:
    """Search the meshes on which there may be a faster plan than is known, and list them with what
    is found: first the most promising one, then all that may still be faster than that.

    Args:
        least: the seconds that a step takes on each mesh at least.
        plain: plans that take no search.
    """
    order = sorted(zip(least, range(len(meshes)), strict=True))
    known, searches, results = list(plain), [], []
    for some in (order[:1], order[1:]):
        waves = [meshes[at] for bound_s, at in some if _may_be_faster(bound_s, known, problem)]
        searches += waves
        results += _side_by_side([search.run for search in waves], deadline)
        known += [result for result in results if result is not None]
    return searches, results


def _may_be_faster(bound_s: float, known: Sequence[FoldedPlan], problem: Problem) -> bool:
    """Whether a plan that takes at least `bound_s` may be faster than all that are known, by more
    than is worth a search.

    A plan that leaves ranks computing the same has to be the fastest: see `tie_breaking`.
    """
    if not known:
        return True
    best = fastest(known, problem)
    margin = min(WORTH_A_SEARCH, problem.aim.objective.uncertainty) if best.cost.collectives else 0
    return problem.excess_in_parts(best.cost) > 0 or (1 + margin) * bound_s < best.cost.seconds


def _solved(
    searches: Sequence[MeshShapeSearch],
    results: Sequence[MeshShapePlan | None],
    problem: Problem,
    deadline: Deadline,
) -> list[MeshShapePlan | None]:
    """Search on level 3 the meshes that may become the fastest by it: where the gap of level 2 is
    larger than the mesh is behind the best. Those that look fastest come first."""
    solved = list(results)
    found = {at: result for at, result in enumerate(results) if result is not None}
    for at in sorted(found, key=lambda at: found[at].cost.seconds):
        best, result = fastest([r for r in solved if r is not None], problem), found[at]
        least = result.cost.seconds * (1.0 - result.report.gap)
        may_be = problem.excess_in_parts(best.cost) or least < best.cost.seconds
        if result.report.gap > RELATIVE_GAP and may_be and not deadline.over():
            (better,) = _side_by_side([searches[at].on_level(3).run], deadline)
            solved[at] = fastest([result, *([] if better is None else [better])], problem)
    return solved


def _side_by_side(runs: Sequence[Callable[[Deadline], R]], deadline: Deadline) -> list[R]:
    """Run parts of searches in threads: the solver works beside Python; all else takes turns.

    If one fails, or Ctrl-C comes, nobody waits for the others: they see soon that they are given
    up.
    """
    pool = ThreadPoolExecutor(max(1, min(len(runs), os.cpu_count() or 1)))
    try:
        running = [pool.submit(run, deadline) for run in runs]
        # A thread that waits without an end may not notice Ctrl-C.
        while wait(running, LOOK_S, FIRST_EXCEPTION).not_done:
            if any(future.done() and future.exception() for future in running):
                break
        return [future.result() for future in running if future.done()]
    except BaseException:
        deadline.stop()
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


# --- Options of each weight ---


def price_spec_options(
    problem: Problem,
    model: FoldedModel,
    mesh: Mesh,
    anchors: Anchors,
    cost: Cost,
    deadline: Deadline,
) -> dict[str, list[SpecOption]]:
    """Price the other options of each variable of the folded graph, by name: the spec and the
    step's seconds.

    The placement of a weight is changed along one mesh axis, together with that of the weights at
    the same place of its block. All other weights stay. Ops run as planned where they still can, or
    all as propagation has them, whichever takes less. The seconds are infinite where an op cannot
    run, or where weights and activations would not fit into memory.

    Args:
        anchors, cost: the plan and its price; what stores more than it has to fit the device.
        deadline: when to leave out the weights that are left; the largest come first.
    """
    graph = model.prepared.graph
    segments = model.nodes.segments(graph, model.roles)
    pricer = Pricer(mesh, problem.cluster, model.roles)
    plans = [
        IncrementalPricer(model.prepared, mesh, laid, segments, pricer, problem.step.state_ratio)
        for laid in (anchors, dataclasses.replace(anchors, ops={}))
    ]
    limit = max(problem.memory_limit, cost.memory_bytes)
    plans[0].settle()
    limit += plans[0].cost().memory_bytes - cost.memory_bytes

    def seconds(group: Sequence[Variable], spec: Spec) -> float:
        """Return the least seconds of a step in which the variables `group` have `spec`."""
        least = math.inf
        for laid in plans:
            try:
                for variable in group:
                    laid.lay(variable, spec)
                if not laid.settle() and laid.cost().memory_bytes <= limit:
                    least = min(least, laid.cost().seconds)
            except SpecError:  # a strided split does not go with it
                pass
            for variable in group:
                laid.lay(variable, anchors.variables[variable.name])
        return least

    found: dict[str, list[SpecOption]] = {}
    known = {v.name: v for v in graph.variables}
    for members in sorted(model.folded.groups, key=lambda group: -group[0].num_bytes):
        if deadline.over():
            break
        group = [known[variable.name] for variable in members]
        if not group[0].trainable or any(v.name in problem.given.variables for v in group):
            continue
        spec = anchors.variables[group[0].name]
        if any(anchors.variables[v.name] != spec for v in group):
            continue  # ends of a chain of blocks that lie otherwise
        others = _others(group[0], spec, mesh)
        priced = [SpecOption(other, seconds(group, other)) for other in others]
        found.update((v.name, priced) for v in group)
    return found


def _others(variable: Variable, spec: Spec, mesh: Mesh) -> Iterator[Spec]:
    """The specs that differ from `spec` along one mesh axis."""
    for axis, parts in enumerate(mesh.shape):
        if parts == 1:
            continue
        split = (Shard(dim) for dim, size in enumerate(variable.shape) if size >= parts)
        for placement in (Replicate(), *split):
            if placement != spec[axis]:
                yield (*spec[:axis], placement, *spec[axis + 1 :])
