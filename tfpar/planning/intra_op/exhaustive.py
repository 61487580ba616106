"""Exhaustive planner, whose optimum other planners are measured by.

On every mesh candidate every weight takes every spec that some op can use
(`planning.intra_op.weights`), in all combinations; each is propagated as a whole and priced by the
evaluator. Nothing is folded, nothing is looked up, and no plan is refused but those that
propagation refuses, and those that leave ranks computing the same along an axis that is there for
weights (`LogicalMesh.used_axes`). So no planner that decides weights alone finds a faster plan.

With `decides="ops"` every op runs in every way that Rhino's planner chooses from
(`planning.intra_op.rhino.axis_space`), in all combinations, along one mesh axis after the other.

Both grow exponentially: the limit is for graphs of a few ops.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping

from tfpar.cost.evaluation import evaluate
from tfpar.ir.collection import collection_paused
from tfpar.planning.deadline import Deadline
from tfpar.planning.folding.folded_model import FoldedModel
from tfpar.planning.folding.folded_plan import FoldedPlan, count_split, unfold_plan
from tfpar.planning.intra_op.rhino.axis_space import Chosen
from tfpar.planning.intra_op.rhino.mesh_search import MeshShapeSearch
from tfpar.planning.intra_op.tie_breaking import fastest, pick_simplest
from tfpar.planning.intra_op.weights import weight_groups
from tfpar.planning.meshes import LogicalMesh, idle_mesh, shapes
from tfpar.planning.problem import Problem
from tfpar.plans import Plan
from tfpar.propagation.engine import propagate
from tfpar.spec import PlanError, Shard, Spec, SpecError, TimeLimitError
from tfpar.spec.arguments import check_choice

MAX_PLANS = 20_000
"""Largest number of plans that are tried: some minutes of a core."""

UNFOLDED = 10**9
"""So many instances of a block that none is folded."""


@dataclasses.dataclass(eq=False)
class ExhaustivePlanner:
    """See the module.

    Args:
        decides: `"weights"`, or `"ops"`.

    Attributes:
        tried: how many plans the last search priced.

    Raises:
        ArgumentError: it decides something else.
    """

    decides: str = "weights"
    tried: int = 0

    def __post_init__(self) -> None:
        self.decides = check_choice("decides", self.decides, ("weights", "ops"))

    @property
    def name(self) -> str:
        return "exhaustive" if self.decides == "weights" else f"exhaustive by {self.decides}"

    def solve(self, problem: Problem) -> Plan:
        """Return the best plan of all.

        Raises:
            PlanError: there are more plans than can be tried, or none satisfies the constraints. If
                none was tried in time, a TimeLimitError.
        """
        deadline = problem.aim.budget.start()
        self.tried = 0
        with collection_paused():
            model = FoldedModel.of(problem, UNFOLDED)
            found = []
            for plan in self._plans(problem, model, deadline):
                found.append(plan)
                self.tried += 1
                if self.tried > MAX_PLANS:
                    raise _too_many("more", self.decides)
                if problem.aim.progress is not None:
                    problem.aim.progress(str(plan.mesh), self.tried)
                if deadline.over():
                    break
            if not found:
                kind = TimeLimitError if deadline.cut_short else PlanError
                raise kind("No plan satisfies the constraints.")
            best = fastest(found, problem)
            fits = not problem.excess_in_parts(best.cost)
            knows_all = self.decides == "ops" and fits and not deadline.cut_short
            return unfold_plan(
                problem,
                model,
                pick_simplest(found, problem),
                self.name,
                preferred_to=best,
                cut_short=deadline.cut_short,
                bound_s=best.cost.seconds if knows_all else None,
            )

    def _plans(
        self, problem: Problem, model: FoldedModel, deadline: Deadline
    ) -> Iterator[FoldedPlan]:
        if self.decides == "weights":
            yield from _of_weights(problem, model)
            return
        for mesh, batch_axes in shapes(problem.meshes):
            search = MeshShapeSearch(problem, model, mesh, batch_axes, level=3)
            yield from (search.found(chosen) for chosen in _plans_of_ops(search, 0, Chosen()))


# --- weights ---------------------------------------------------------------------------


def _of_weights(problem: Problem, model: FoldedModel) -> Iterator[FoldedPlan]:
    """Yield every plan in which each weight takes one of its options."""
    idle = idle_mesh(problem.meshes)
    meshes = [*problem.meshes, *([idle] if idle is not None else [])]
    groups = {logical: weight_groups(problem, model, logical) for logical in meshes}
    _check(sum(math.prod(len(g.options) for g in found) for found in groups.values()), "weights")
    for logical in meshes:
        for specs in itertools.product(*(g.options for g in groups[logical])):
            laid = {
                v.name: spec
                for group, spec in zip(groups[logical], specs, strict=True)
                for v in group.variables
            }
            found = _laid(problem, model, logical, laid)
            if found is not None:
                yield found


def _laid(
    problem: Problem, model: FoldedModel, logical: LogicalMesh, weights: Mapping[str, Spec]
) -> FoldedPlan | None:
    """Return the plan with these specs of `weights`; None if some op cannot run then, or an axis
    has no use."""
    given = {name: fixed.spec for name, fixed in problem.given.variables.items()}
    known = {v.name for v in model.prepared.graph.variables}
    laid = {**weights, **{n: spec for n, spec in given.items() if n in known}}
    anchors = model.anchors(problem, logical, laid)
    try:
        partitioned = propagate(model.prepared, logical.mesh, anchors)
    except SpecError:  # strides that do not go together
        return None
    split = {
        axis
        for variable, spec in partitioned.variable_specs.items()
        for axis, placement in enumerate(spec)
        if variable.trainable and isinstance(placement, Shard)
    }
    if not split.issuperset(logical.used_axes):
        return None
    cost = evaluate(partitioned, problem.cluster, model.roles, problem.step.state_ratio)
    return FoldedPlan(logical.mesh, logical.batch_names, anchors, cost, count_split(laid, given))


# --- ops -------------------------------------------------------------------------------


def _plans_of_ops(search: MeshShapeSearch, axis: int, before: Chosen) -> Iterator[Chosen]:
    """Every choice of strategies along mesh axis `axis` and those behind, after `before`."""
    if axis == search.mesh.num_axes:
        yield before
        return
    networks = search.networks(axis, before)
    space = networks.space
    if search.mesh.shape[axis] == 1:
        yield from _plans_of_ops(search, axis + 1, space.nothing_split())
        return
    network = networks.first()
    _check(math.prod(node.size for node in network.nodes), "ops")
    for picks in itertools.product(*(range(node.size) for node in network.nodes)):
        if math.isfinite(network.cost(picks)):  # else something cannot be moved so
            yield from _plans_of_ops(search, axis + 1, space.chosen(picks))


def _check(count: int, of: str) -> None:
    if count > MAX_PLANS:
        raise _too_many(str(count), of)


def _too_many(count: str, of: str) -> PlanError:
    return PlanError(
        f"planner='exhaustive' tries at most {MAX_PLANS} plans, and this step has {count}: every "
        f"way for each of its {of}, with each of the others. Use planner='tap' or 'rhino', a "
        f"smaller model, fewer ranks, or constraints that leave less open."
    )
