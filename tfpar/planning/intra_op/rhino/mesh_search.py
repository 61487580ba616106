"""Search on one mesh shape: its axes are decided one after another, each by a cost network; if the
plan exceeds the memory, the search is repeated with the largest weights split (Rhino §4.4)."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence

from tfpar.cost.evaluation import evaluate
from tfpar.ir.graph import Op
from tfpar.planning.deadline import Deadline
from tfpar.planning.folding.folded_model import FoldedModel
from tfpar.planning.folding.folded_plan import FoldedPlan, count_split
from tfpar.planning.intra_op.rhino.axis_space import (
    AxisConstraints,
    AxisStrategySpace,
    Chosen,
    op_plans,
)
from tfpar.planning.intra_op.rhino.cones import ReducedNetwork, eliminate_chains
from tfpar.planning.intra_op.rhino.cost_network import CostNetwork
from tfpar.planning.intra_op.rhino.costs import Costs, Gradients, gradient_models, with_split
from tfpar.planning.intra_op.rhino.explicit_ops import find_explicit_ops
from tfpar.planning.intra_op.rhino.growth import is_compute_intensive
from tfpar.planning.intra_op.rhino.ilp import NoSolution, Solution, solve_nearly, solve_network
from tfpar.planning.intra_op.rhino.relaxation import least_seconds
from tfpar.planning.intra_op.rhino.segments import (
    critical_ops,
    depths,
    depths_when_read,
    neighbourhoods,
    segments,
    solve_by_segments,
)
from tfpar.planning.intra_op.rhino.solver_counters import SolverCounters
from tfpar.planning.problem import Problem
from tfpar.planning.solver import RELATIVE_GAP
from tfpar.propagation.partitioned_graph import Anchors
from tfpar.spec import Mesh, Shard, replicated_spec

EXPOSED_RATIO = 1.005
"""If a step takes this many times as long as its network says, late work is taken to be exposed
instead of hidden."""

PROMISING_RATIO = 1.25
"""The search also goes on from decisions along an axis that take up to this many times as long as
the best of them (empirical: those that made the faster plan took up to 1.2 times as long)."""


@dataclasses.dataclass(frozen=True)
class SearchStatistics:
    """Size of a search (Rhino, Table 5), and its gap to the optimum.

    Attributes:
        instructions: ops of the whole step.
        critical_nodes, subgraphs: of the whole step, blocks that repeat counted as often.
        nodes: to decide along a mesh axis, blocks that repeat counted once; cones: what is left
            of them when chains are merged.
        gap: how far the decisions along the last mesh axis are from the best, at most, relative to
            these; infinite if that is not known.
    """

    instructions: int = 0
    critical_nodes: int = 0
    subgraphs: int = 0
    nodes: int = 0
    cones: int = 0
    gap: float = 0.0


@dataclasses.dataclass(frozen=True, eq=False)
class MeshShapePlan(FoldedPlan):
    """Plan on one mesh shape, with the specs of all variables.

    Attributes:
        report: see `SearchStatistics`.
    """

    report: SearchStatistics


class Networks:
    """The networks of a space, one for each way to count gradients (`Gradients`)."""

    def __init__(self, space: AxisStrategySpace) -> None:
        self.space = space
        self._made: dict[tuple[Gradients, float], CostNetwork] = {}
        self._kinds = gradient_models(space)

    @functools.cached_property
    def _costs(self) -> Costs:
        return Costs(self.space)

    def first(self, surcharge_s: float = 0.0) -> CostNetwork:
        """Return the likeliest of `those`."""
        return next(self.those(surcharge_s))[1]

    def those(self, surcharge_s: float) -> Iterator[tuple[Gradients, CostNetwork]]:
        """Yield the networks that may be right, the likeliest first.

        Args:
            surcharge_s: penalty of each collective, in seconds.
        """
        for kind in self._kinds:
            key = kind, surcharge_s
            if key not in self._made:
                self._made[key] = self._costs.network(kind, surcharge_s)
            yield kind, self._made[key]

    def settle(self, kind: Gradients) -> None:
        """Restrict the networks to `kind` from now on."""
        self._kinds = [kind]


class MeshShapeSearch:
    """The search on one shape of the mesh.

    Args:
        batch_axes: those that split the batch; None leaves that open.
        level: 2 relaxes programs, and goes through segments where that is not enough; 3 solves
            them.
        offer: is called with each plan that is found.
    """

    def __init__(
        self,
        problem: Problem,
        model: FoldedModel,
        mesh: Mesh,
        batch_axes: Sequence[int] | None,
        level: int,
        offer: Callable[[FoldedPlan], None] | None = None,
    ) -> None:
        self.problem, self.model, self.mesh, self.level = problem, model, mesh, level
        self.batch_axes, self.offer = batch_axes, offer
        prepared = model.prepared
        self.critical = critical_ops(prepared.graph, self._is_intensive)
        count = sum(model.roles.times.get(op, 1) for op in self.critical)
        self.report = SearchStatistics(len(problem.step.graph.ops), count, max(count - 1, 1))
        self.deadline = Deadline()
        self.work = SolverCounters()
        self.surcharge_s = problem.aim.objective.surcharge_s
        # What was found out, which searches with another surcharge share.
        self._networks: list[tuple[int, Chosen, Networks]] = []
        self._roots: dict[CostNetwork, ReducedNetwork] = {}
        self._nearly: dict[CostNetwork, list[Solution]] = {}
        self._found: dict[tuple[CostNetwork, int], Solution] = {}

    def on_level(self, level: int) -> MeshShapeSearch:
        """Return the search on another level; what this one has found out, it knows."""
        other = copy.copy(self)
        other.level = level
        return other

    def counting(self, surcharge_s: float) -> MeshShapeSearch:
        """Return the search with a penalty of so many seconds on each collective; what this one has
        found out, it knows."""
        other = copy.copy(self)
        other.surcharge_s, other.offer = surcharge_s, None
        return other

    def run(self, deadline: Deadline) -> MeshShapePlan | None:
        """Find the fastest plan that fits, splitting as few of the largest parameters as will do;
        None if there is none, or none was found in time (then the deadline has cut the search
        short).

        Args:
            deadline: when the best found so far is to be returned.
        """
        self.deadline = deadline
        if self.mesh.size == 1:
            return self.found(self._whole_from(0, Chosen()))
        try:
            networks = self._last_networks()
            best = self._with_split(networks, ())
        except NoSolution as error:
            deadline.cut_short |= error.timed_out
            return None
        excess = self.problem.excess_in_parts
        if not excess(best.cost):
            return best
        weights = self._by_size()
        try:
            found = self._with_split(networks, weights)
        except NoSolution:  # not all of these weights can be split
            return best
        if excess(found.cost):
            return min(best, found, key=lambda f: excess(f.cost))
        few, many = 0, len(weights)
        while few + 1 < many and not deadline.over():
            middle = (few + many) // 2
            tried = self._with_split(networks, weights[:middle])
            if not excess(tried.cost):
                found, many = tried, middle
            else:
                few = middle
        return found

    def least_seconds(self, deadline: Deadline, num_axes: int = 1) -> float:
        """Bound all plans on this mesh from below (`relaxation`); 0 if no bound is known.

        Args:
            num_axes: how many of its first axes that have several ranks are looked at; along those
                behind all is as good as it can be.
        """
        self.deadline = deadline
        spaces: list[AxisStrategySpace] = []
        for axis in [axis for axis, parts in enumerate(self.mesh.shape) if parts > 1][:num_axes]:
            whole = spaces[0].unsplit(axis) if spaces else self._whole_before(axis)
            spaces.append(self._known_networks(axis, whole).space)
        try:
            return least_seconds(spaces, deadline) if spaces else 0.0
        except NoSolution:
            return math.inf

    def _whole_before(self, axis: int) -> Chosen:
        """Return what is chosen along the axes of one rank that come before `axis`."""
        chosen = Chosen()
        for before in range(axis):
            chosen = self._known_networks(before, chosen).space.nothing_split()
        return chosen

    def _is_intensive(self, op: Op) -> bool:
        return is_compute_intensive(op, self.model.prepared)

    def _by_size(self) -> list[str]:
        """The names of the weights, the largest first."""
        weights = [v for v in self.model.prepared.graph.variables if v.trainable]
        return [v.name for v in sorted(weights, key=lambda v: -v.num_bytes)]

    def _last_networks(self) -> Networks:
        """Those along the last axis that has several ranks, and those before it decided.

        The best along one axis need not be where the best of all begins: see `_starts`. The search
        goes on from what it makes the fastest plan of along the next.
        """
        networks = self._known_networks(0, Chosen())
        last = max(axis for axis, parts in enumerate(self.mesh.shape) if parts > 1)
        for axis in range(last):
            space = networks.space
            if self.mesh.shape[axis] == 1:
                networks = self._known_networks(axis + 1, space.nothing_split())
                continue
            roots = self._merged(networks.first(self.surcharge_s))
            starts = [space.chosen(roots.all_picks(p)) for p in self._starts(space, roots)]
            self._tell(space)
            found = [self._known_networks(axis + 1, start) for start in starts]
            networks = found[0] if len(found) == 1 else min(found, key=self._seconds)
        return networks

    def _starts(self, space: AxisStrategySpace, roots: ReducedNetwork) -> list[Sequence[int]]:
        """The decisions along an axis that are worth going on from, the best first, none twice:
        what costs least, as near as is easily found, and data parallelism."""
        found: dict[tuple[int, ...], float] = {}
        near = (solution.picks for solution in self._near(space, roots))
        for picks in (*near, _start(space, roots)):
            found.setdefault(tuple(picks), roots.network.cost(picks))
        best, *others = sorted(found, key=lambda picks: found[picks])
        if self.deadline.over():
            return [best]
        return [best, *(o for o in others if found[o] <= PROMISING_RATIO * found[best])]

    def _near(self, space: AxisStrategySpace, roots: ReducedNetwork) -> list[Solution]:
        """Return solutions along an axis that cost least, or nearly so."""
        network = roots.network
        if network not in self._nearly:
            if self.deadline.over():
                return [self._without_time(space, roots)]
            try:
                self._count(network)
                self._nearly[network] = solve_nearly(network, self.deadline)
            except NoSolution as error:
                if not error.timed_out:
                    raise
                self._nearly[network] = [self._by_segments(space, roots)]
        return self._nearly[network]

    def _seconds(self, networks: Networks) -> float:
        """Estimate the seconds of the solution along the axis of `networks`, by the likeliest of
        them; infinite if there is none."""
        roots = self._merged(networks.first(self.surcharge_s))
        try:
            return min(solution.seconds for solution in self._near(networks.space, roots))
        except NoSolution:
            return math.inf

    def networks(self, axis: int, before: Chosen) -> Networks:
        """Return the networks along mesh axis `axis`, the axes before it being decided."""
        given = self._given(axis)
        space = AxisStrategySpace(
            self.problem, self.model, self.mesh, axis, before, given, self.deadline
        )
        return Networks(space)

    def _known_networks(self, axis: int, before: Chosen) -> Networks:
        """The same, made once."""
        for known_axis, known_before, networks in self._networks:
            if (known_axis, known_before) == (axis, before):
                return networks
        networks = self.networks(axis, before)
        self.work.spaces += 1
        self.work.strategies += sum(map(len, networks.space.strategies))
        self._networks.append((axis, before, networks))
        return networks

    def _merged(self, network: CostNetwork) -> ReducedNetwork:
        if network not in self._roots:
            self._roots[network] = eliminate_chains(network)
        return self._roots[network]

    def _tell(self, space: AxisStrategySpace) -> None:
        if self.problem.aim.progress is not None:
            along = f"{self.mesh}, along {self.mesh.axis_names[space.axis]}"
            self.problem.aim.progress(along, len(space.nodes))

    def _with_split(self, networks: Networks, split: Sequence[str]) -> MeshShapePlan:
        """The fastest plan that splits the weights called so along the axis of the networks.

        Raises:
            NoSolution: the constraints leave none.
        """
        best: MeshShapePlan | None = None
        for kind, network in networks.those(self.surcharge_s):
            narrowed = with_split(networks.space, network, split)
            found, seconds = self._along_last(networks.space, narrowed)
            if self.offer is not None:
                self.offer(found)
            if best is None or found.cost.seconds < best.cost.seconds:
                best, by = found, kind
            expected = seconds + self.problem.cluster.step_s
            if found.cost.seconds <= EXPOSED_RATIO * expected or self.deadline.over():
                break
        assert best is not None
        networks.settle(by)
        return best

    def _along_last(
        self, space: AxisStrategySpace, network: CostNetwork
    ) -> tuple[MeshShapePlan, float]:
        """Return the plan with the last axis decided by `network`, and the seconds that this
        predicts."""
        roots = self._merged(network)
        solution = self._solved(space, roots)
        self._tell(space)
        report = dataclasses.replace(
            self.report, nodes=len(space.nodes), cones=len(roots.nodes), gap=solution.gap
        )
        chosen = space.chosen(roots.all_picks(solution.picks))
        return self.found(self._whole_from(space.axis + 1, chosen), report), solution.seconds

    def _whole_from(self, first: int, chosen: Chosen) -> Chosen:
        """`chosen`, nothing split along axis `first` and those behind."""
        for axis in range(first, self.mesh.num_axes):
            chosen = self._known_networks(axis, chosen).space.nothing_split()
        return chosen

    def _solved(self, space: AxisStrategySpace, roots: ReducedNetwork) -> Solution:
        """Choices of the roots, and the gap that they leave."""
        key = roots.network, self.level
        if key not in self._found:
            self._found[key] = self._solution(space, roots)
        return self._found[key]

    def _solution(self, space: AxisStrategySpace, roots: ReducedNetwork) -> Solution:
        near = min(self._near(space, roots), key=lambda solution: solution.seconds)
        if near.gap <= RELATIVE_GAP or self.deadline.over():
            return near
        if self.level == 2:
            return self._by_segments(space, roots, near)
        try:
            self._count(roots.network)
            solution = solve_network(roots.network, self.deadline)
        except NoSolution as error:
            if not error.timed_out:
                raise
            return self._by_segments(space, roots, near)
        if solution.gap > RELATIVE_GAP:  # it was stopped: what level 2 makes of it is no worse
            return self._by_segments(space, roots, solution)
        return solution

    def _count(self, network: CostNetwork) -> None:
        """Count a program."""
        self.work.programs += 1
        self.work.choices += sum(node.size for node in network.nodes)

    def _without_time(self, space: AxisStrategySpace, roots: ReducedNetwork) -> Solution:
        """Data parallelism, if it can be, when the time is over."""
        start = _start(space, roots)
        if math.isfinite(roots.network.cost(start)):
            return Solution(tuple(start), roots.network.cost(start), math.inf)
        return self._by_segments(space, roots)

    def _by_segments(
        self, space: AxisStrategySpace, roots: ReducedNetwork, known: Solution | None = None
    ) -> Solution:
        """The dynamic program over segments, from what costs least of data parallelism, nothing
        split and a `known` solution."""
        critical = set(self.critical)
        pivots = {
            at for at, i in enumerate(roots.nodes) if any(op in critical for op in space.nodes[i])
        }
        cuts = [
            segments([min(depth[op] for op in space.nodes[i]) for i in roots.nodes], pivots)
            for depth in (depths(space.graph), depths_when_read(space.graph))
        ]
        together = neighbourhoods(
            roots.network,
            [at for at, i in enumerate(roots.nodes) if space.nodes[i][0] in space.variables],
            {at for at, i in enumerate(roots.nodes) if self._is_intensive(space.nodes[i][0])},
        )
        self.work.by_segments += 1
        starts = [_start(space, roots), [0] * len(roots.nodes)]
        starts += [] if known is None else [list(known.picks)]
        start = min(starts, key=roots.network.cost)
        try:
            picks = solve_by_segments(roots.network, cuts, start, self.deadline, together)
        except NoSolution:
            patient = self.deadline.without_end()  # however late it is, there has to be a plan
            found = solve_network(roots.network, patient)
            self.deadline.cut_short |= patient.cut_short
            return found
        seconds, gap = roots.network.cost(picks), math.inf
        if known is not None:
            gap = max(0.0, 1.0 - (1.0 - known.gap) * known.seconds / max(seconds, 1e-300))
        return Solution(tuple(picks), seconds, gap)

    def found(self, chosen: Chosen, report: SearchStatistics | None = None) -> MeshShapePlan:
        """Return the plan in which ops run as `chosen` along all axes."""
        graph = self.model.prepared.graph
        whole = replicated_spec(self.mesh.num_axes)
        specs = {
            op: tuple(strategy.kept[0] for strategy in strategies)
            for op, strategies in chosen.items()
            if not op.inputs and op.outputs
        }
        variables = {v.name: specs[v.handle.op] for v in graph.variables}
        # These differ from what was decided along axes of one rank: see `_given`.
        given = {name: fixed.spec for name, fixed in self.problem.given.variables.items()}
        variables |= {name: given[name] for name in variables.keys() & given.keys()}
        inputs = [specs.get(t.op, whole) for t in graph.inputs]
        anchors = Anchors(
            variables=variables,
            inputs=inputs,
            tensors={name: fixed.spec for name, fixed in self.problem.given.tensors.items()},
            outputs=[whole] * len(graph.outputs),
            ops=op_plans(chosen, self.model.prepared),
        )
        ops, laid = find_explicit_ops(self.model.prepared, self.mesh, anchors)
        cost = evaluate(laid, self.problem.cluster, self.model.roles, self.problem.step.state_ratio)
        batch = [
            name
            for axis, name in enumerate(self.mesh.axis_names)
            if (self.batch_axes is not None and axis in self.batch_axes)
            or any(isinstance(spec[axis], Shard) for spec in inputs)
        ]
        anchors, mesh = dataclasses.replace(anchors, ops=ops), self.mesh
        if self.batch_axes is None and not batch and mesh.size > 1 and mesh.shape[1:] == (1,):
            mesh = Mesh(mesh.axis_names[::-1], mesh.shape)  # what splits weights alone is "model"
        num_split = count_split(anchors.variables, given)
        return MeshShapePlan(mesh, tuple(batch), anchors, cost, num_split, report or self.report)

    def _given(self, axis: int) -> AxisConstraints:
        """Return the constraints along `axis`. With one rank there, a weight is whole also where a
        constraint splits it: no op along such an axis is asked whether it reads split weights."""
        fixed = {} if self.mesh.shape[axis] == 1 else self.problem.given.variables
        tensors = self.problem.given.tensors
        return AxisConstraints(
            batch=None if self.batch_axes is None else axis in self.batch_axes,
            variables={name: given.spec[axis] for name, given in fixed.items()},
            tensors={n: given.spec[axis] for n, given in tensors.items() if axis < len(given.spec)},
        )


def _start(space: AxisStrategySpace, roots: ReducedNetwork) -> list[int]:
    """Data parallelism, as choices of the roots."""
    picks = space.data_parallel_picks()
    return [picks[i] for i in roots.nodes]
