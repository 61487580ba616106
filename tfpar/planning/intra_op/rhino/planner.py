"""Rhino's planner (§4): all ops of the graph are decided together, without names or layers.

For every shape of the mesh that may be the best (`branch_and_bound`), its axes are decided one
after another (`mesh_search`): along each, every op has a few strategies (`growth`), what they cost
and what moves between them is a cost network (`axis_space`), and chains of it are merged (`cones`).
The rest is an integer linear program (`ilp`). Level 2 relaxes it, and where that is not integer
goes through the segments between critical nodes by dynamic programming (`segments`); level 3 goes
on from there, and solves the programs of meshes that may still be the fastest. Where the plan
stores too much, the largest parameters have to be split, as few as will do (§4.4).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

from tfpar.cost.cost import Cost
from tfpar.cost.evaluation import evaluate
from tfpar.cost.pricer import Pricer
from tfpar.ir.collection import collection_paused
from tfpar.ir.graph import Variable
from tfpar.planning.deadline import Deadline
from tfpar.planning.folding.folded_model import FoldedModel, folded_model
from tfpar.planning.folding.folded_plan import FoldedPlan, offer_folded_plan, unfold_plan
from tfpar.planning.intra_op.incremental.incremental import IncrementalPricer
from tfpar.planning.intra_op.rhino.branch_and_bound import MeshTree, side_by_side
from tfpar.planning.intra_op.rhino.mesh_search import (
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
from tfpar.plans import Candidate, Plan, SpecOption
from tfpar.propagation.engine import propagate
from tfpar.propagation.partitioned_graph import Anchors
from tfpar.spec import Mesh, PlanError, Replicate, Shard, Spec, SpecError, TimeLimitError
from tfpar.spec.arguments import check_choice

LEVELS = (2, 3)

ALTERNATIVES_S = 5.0
"""Time limit, in seconds, for pricing the other options of each weight, once the plan is found."""


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
        made: list[MeshShapeSearch] = []

        def make(mesh: Mesh, batch_axes: Sequence[int] | None) -> MeshShapeSearch:
            made.append(MeshShapeSearch(problem, model, mesh, batch_axes, 2, offer=offer))
            return made[-1]

        tree = MeshTree(problem, make, list(baselines(problem, model)), deadline)
        tree.search()
        if self.level == 3:
            tree.tighten_bound()
            tree.solve()
        found = [result for result in tree.results if result is not None]
        if not found and deadline.cut_short:
            raise TimeLimitError(
                "No plan was found in time. Give the search more search_seconds, or use "
                "planner='tap'."
            )
        if not found:
            raise PlanError("No plan satisfies the constraints: they leave some op no way to run.")
        best = fastest(found, problem)
        self.report = best.report
        candidates: list[FoldedPlan] = [*found, *tree.plain, *_as_ops_come(problem, model, best)]
        more_s = collective_penalty(best, problem)
        if more_s and not deadline.over():
            search = tree.searches[tree.results.index(best)].counting(more_s)
            (simpler,) = side_by_side([search.run], deadline)
            candidates += [] if simpler is None else [simpler]
        self.work = sum((search.work for search in made), SolverCounters())
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
                *tree.skipped,
                *(
                    Candidate(str(f.mesh), f.cost.seconds, f.cost.memory_bytes)
                    for f in found
                    if f.mesh.shape != taken.mesh.shape
                ),
            ],
            preferred_to=fastest(candidates, problem),
            cut_short=deadline.cut_short,
            bound_s=min(tree.bound_s, *(plan.cost.seconds for plan in candidates)),
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
