"""Rhino's planner (§4): all ops of the graph are decided together, without names or layers.

For every shape of the mesh, its axes are decided one after another: along each, every op has a few
candidates (`candidates`), what they cost and what moves between them is a cost network (`space`),
chains of which are merged (`cones`), and an integer linear program finds the rest (`ilp`). Where
the plan stores too much, the largest parameters have to be split, as few as will do (§4.4).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from tfpar.cost.evaluate import Cost, evaluate
from tfpar.ir.collection import collection_paused
from tfpar.plans import Plan, PlannedVariable
from tfpar.propagation.partitioned import Anchors, OpPlan
from tfpar.search.folded_model import FoldedModel
from tfpar.search.problem import Problem
from tfpar.search.rhino.cones import merge
from tfpar.search.rhino.ilp import solve
from tfpar.search.rhino.needed import needed_ops
from tfpar.search.rhino.space import Chosen, Given, Space, op_plans
from tfpar.spec import Mesh, Shard, Spec, replicated


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    """The plan found on one shape of the mesh."""

    mesh: Mesh
    batch_axes: tuple[str, ...]
    variables: Mapping[str, Spec]
    ops: Mapping[str, OpPlan]
    cost: Cost
    split: frozenset[str]


@dataclasses.dataclass(eq=False)
class RhinoPlanner:
    """See the module."""

    level: int = 3
    name: str = "rhino"

    def solve(self, problem: Problem) -> Plan:
        """The best plan of all shapes of the mesh.

        Raises:
            PlanError: nothing satisfies the constraints.
        """
        with collection_paused():
            model = FoldedModel.of(problem, 2)
            found = [
                Search(problem, model, mesh, axes, self.level).run()
                for mesh, axes in shapes(problem)
            ]
            limit = problem.cluster.device.memory_bytes
            found.sort(key=lambda f: (max(0.0, f.cost.memory_bytes - limit), f.cost.seconds))
            return _plan(problem, model, found, self.name)


def shapes(problem: Problem) -> Iterator[tuple[Mesh, tuple[int, ...] | None]]:
    """The meshes to search, with the axes that split the batch where that is given."""
    if len(problem.layouts) == 1:
        yield problem.layouts[0].mesh, problem.layouts[0].batch_axes
        return
    size = problem.layouts[0].mesh.size
    for inner in (n for n in range(1, size) if size % n == 0) if size > 1 else (1,):
        yield Mesh(("data", "model"), (size // inner, inner)), None


class Search:
    """The search on one shape of the mesh.

    Args:
        batch_axes: those that split the batch; None leaves that open.
    """

    def __init__(
        self, problem: Problem, model: FoldedModel, mesh: Mesh, batch_axes: Sequence[int] | None,
        level: int,
    ) -> None:  # fmt: skip
        self.problem, self.model, self.mesh, self.level = problem, model, mesh, level
        self.batch_axes = batch_axes

    def run(self) -> Found:
        """The fastest plan that fits, splitting as few of the largest parameters as will do."""
        best = self._with_split(frozenset())
        limit = self.problem.cluster.device.memory_bytes
        if best.cost.memory_bytes <= limit:
            return best
        weights = self._by_size()
        few, many = 0, len(weights)
        found = self._with_split(frozenset(weights))
        if found.cost.memory_bytes > limit:
            return min(best, found, key=lambda f: f.cost.memory_bytes)
        while few + 1 < many:
            middle = (few + many) // 2
            tried = self._with_split(frozenset(weights[:middle]))
            if tried.cost.memory_bytes <= limit:
                found, many = tried, middle
            else:
                few = middle
        return found

    def _by_size(self) -> list[str]:
        """The names of the weights, the largest first."""
        weights = [v for v in self.model.prepared.graph.variables if v.trainable]
        return [v.name for v in sorted(weights, key=lambda v: -v.num_bytes)]

    def _with_split(self, split: frozenset[str]) -> Found:
        chosen: Chosen = {}
        graph = self.model.prepared.graph
        last = max((a for a, n in enumerate(self.mesh.shape) if n > 1), default=0)
        for axis in range(self.mesh.num_axes):
            given = self._given(axis, split if axis == last else frozenset())
            space = Space(self.problem, self.model, self.mesh, axis, chosen, given)
            roots = merge(space.network())
            chosen = space.chosen(roots.whole(solve(roots.network).picks))
        specs = {
            op: tuple(way.kept[0] for way in ways) for op, ways in chosen.items() if not op.inputs
        }
        whole = replicated(self.mesh.num_axes)
        variables = {v.name: specs[v.handle.op] for v in graph.variables}
        inputs = [specs.get(t.op, whole) for t in graph.inputs]
        anchors = Anchors(
            variables=variables,
            inputs=inputs,
            tensors={name: fixed.spec for name, fixed in self.problem.tensors.items()},
            outputs=[whole] * len(graph.outputs),
            ops=op_plans(chosen, self.model.prepared),
        )
        ops, laid = needed_ops(self.model.prepared, self.mesh, anchors)
        cost = evaluate(laid, self.problem.cluster, self.model.roles, self.problem.state_ratio)
        batch = [
            name
            for axis, name in enumerate(self.mesh.axis_names)
            if (self.batch_axes is not None and axis in self.batch_axes)
            or any(isinstance(spec[axis], Shard) for spec in inputs)
        ]
        return Found(self.mesh, tuple(batch), variables, ops, cost, split)

    def _given(self, axis: int, split: frozenset[str]) -> Given:
        fixed, tensors = self.problem.fixed, self.problem.tensors
        return Given(
            batch=None if self.batch_axes is None else axis in self.batch_axes,
            variables={name: given.spec[axis] for name, given in fixed.items()},
            tensors={n: given.spec[axis] for n, given in tensors.items() if axis < len(given.spec)},
            split=split,
        )


def _plan(problem: Problem, model: FoldedModel, found: Sequence[Found], planner: str) -> Plan:
    """The plan of the whole model: what is chosen for a block serves all its instances."""
    best = found[0]
    twins = {v.name: [t.name for t in ts] for v, ts in model.folded.twins.items()}
    laid = {twin: spec for name, spec in best.variables.items() for twin in twins[name]}
    variables = {}
    for variable in problem.variables:
        spec, why = laid.get(variable.name), f"chosen by the {planner} planner"
        if variable.name in problem.fixed:
            spec, why = problem.fixed[variable.name].spec, problem.fixed[variable.name].why
        variables[variable.name] = PlannedVariable(
            tuple(variable.shape), variable.dtype, variable.trainable, spec,
            why if spec is not None else "",
        )  # fmt: skip
    return Plan(
        mesh=best.mesh,
        batch_axes=best.batch_axes,
        variables=variables,
        tensors={name: given.spec for name, given in problem.tensors.items()},
        constraints=problem.constraints,
        fingerprint=problem.fingerprint,
        planner=planner,
        cluster=problem.cluster,
        cost=best.cost,
        layouts=tuple((str(f.mesh), f.cost.seconds) for f in found[1:]),
        ops={
            name: op
            for stand_in, op in best.ops.items()
            for name in model.folded.stands_for.get(stand_in, (stand_in,))
        },
    )
