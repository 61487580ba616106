"""Rhino's planner (§4): all ops of the graph are decided together, without names or layers.

For every shape of the mesh, its axes are decided one after another: along each, every op has a few
candidates (`candidates`), what they cost and what moves between them is a cost network (`space`),
and chains of it are merged (`cones`). Level 3 finds the rest by one integer linear program (`ilp`),
level 2 by dynamic programming over the segments between critical nodes (`segments`). Where the plan
stores too much, the largest parameters have to be split, as few as will do (§4.4).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

from tfpar.cost.evaluate import BUCKET_SIZES, Cost, evaluate
from tfpar.ir.collection import collection_paused
from tfpar.ir.graph import Op
from tfpar.plans import Plan, PlannedVariable
from tfpar.propagation.engine import propagate
from tfpar.propagation.partitioned import Anchors
from tfpar.search.deadline import Deadline, check_search_seconds
from tfpar.search.folded_model import FoldedModel
from tfpar.search.problem import Problem
from tfpar.search.rhino.alternatives import alternatives
from tfpar.search.rhino.candidates import is_compute_intensive
from tfpar.search.rhino.cones import Roots, merge
from tfpar.search.rhino.costs import Costs, Gradients, with_split
from tfpar.search.rhino.ilp import GAP, NoSolution, solve
from tfpar.search.rhino.needed import needed_ops
from tfpar.search.rhino.network import Network
from tfpar.search.rhino.segments import (
    critical_ops,
    depths,
    depths_when_read,
    families,
    segments,
    solve_by_segments,
)
from tfpar.search.rhino.space import Chosen, Given, Space, op_plans
from tfpar.search.simplest import baselines, fastest, simplest, surcharge
from tfpar.spec import Mesh, PlanError, Shard, TimeLimitError, replicated
from tfpar.spec.arguments import one_of

LEVELS = (2, 3)

SURPRISE = 1.005
"""How much longer than the network says a step may take before late work is taken to be exposed."""


WORTHWHILE = 1.25
"""How many times as long as what is found along an axis other choices may take that the search goes
on from (empirical: those that made the faster plan took up to 1.2 times as long)."""


ALTERNATIVES_S = 5.0
"""What it may take, in seconds, to price what else each weight could be, once the plan is found."""


LOOK_S = 0.2
"""How often, in seconds, whoever waits for a search looks whether Ctrl-C came."""


@dataclasses.dataclass(frozen=True)
class Report:
    """What a search had before it (Rhino, Table 5), and how near to the optimum it came.

    Attributes:
        instructions: ops of the whole step.
        critical_nodes, subgraphs: of the whole step, blocks that repeat counted as often.
        nodes: to decide along a mesh axis, blocks that repeat counted once; cones: what is left
            of them when chains are merged.
        gap: of the integer programs behind the plan, the largest that they left; infinite at
            level 2, which knows none.
    """

    instructions: int = 0
    critical_nodes: int = 0
    subgraphs: int = 0
    nodes: int = 0
    cones: int = 0
    gap: float = 0.0


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    """The plan found on one shape of the mesh.

    Attributes:
        anchors: of the folded graph; of the ops those that would not run so by themselves.
        report: see `Report`.
        given: the names of variables that constraints lay.
    """

    mesh: Mesh
    batch_axes: tuple[str, ...]
    anchors: Anchors
    cost: Cost
    report: Report = dataclasses.field(default_factory=Report)
    given: frozenset[str] = frozenset()

    @property
    def num_split(self) -> int:
        return sum(
            any(isinstance(p, Shard) for p in spec)
            for name, spec in self.anchors.variables.items()
            if name not in self.given
        )


@dataclasses.dataclass(eq=False)
class RhinoPlanner:
    """See the module.

    Args:
        level: 3 decides the whole graph at once; 2 segment by segment, which is faster where there
            is much to decide, and may find slower plans.
        search_seconds: what the search may take, about; the best plan found by then is returned.

    Attributes:
        report: of the last search.

    Raises:
        ArgumentError: another level, or no time at all.
    """

    level: int = 3
    search_seconds: float | None = None
    report: Report = dataclasses.field(default_factory=Report)

    def __post_init__(self) -> None:
        self.level = one_of("level", self.level, LEVELS)
        check_search_seconds(self.search_seconds)

    @property
    def name(self) -> str:
        return f"rhino level {self.level}"

    def solve(self, problem: Problem) -> Plan:
        """The best plan of all shapes of the mesh.

        Raises:
            PlanError: nothing satisfies the constraints. If nothing was found in time, a
                TimeLimitError.
        """
        deadline = Deadline(self.search_seconds)
        with collection_paused():
            return self.search(problem, FoldedModel.of(problem, 2), deadline)

    def search(self, problem: Problem, model: FoldedModel, deadline: Deadline) -> Plan:
        """As `solve`, where the model is folded already."""
        offer = None
        if problem.offer is not None:
            problem.offer(functools.partial(self._first, problem, model), None)
            offer = functools.partial(self._offer, problem, model)
        searches = [
            Search(problem, model, *shape, self.level, offer=offer) for shape in shapes(problem)
        ]
        results = _side_by_side(searches, deadline)
        found = [result for result in results if result is not None]
        if not found and deadline.cut_short:
            raise TimeLimitError(
                "No plan was found in time. Give the search more search_seconds, or use "
                "planner='tap'."
            )
        if not found:
            raise PlanError("No plan satisfies the constraints: they leave some op no way to run.")
        best = fastest(found, problem)
        self.report = best.report
        candidates = [*found, *_plainer(problem, model, best)]
        more_s = surcharge(best, problem)
        if more_s and not deadline.over():
            shape = next(s for s, r in zip(shapes(problem), results, strict=True) if r is best)
            search = Search(problem, model, *shape, self.level, more_s)
            (simpler,) = _side_by_side([search], deadline)
            if simpler is not None:
                candidates.append(simpler)
        taken = simplest(candidates, problem)
        others = sorted(
            (f.cost.seconds, str(f.mesh)) for f in found if f.mesh.shape != taken.mesh.shape
        )
        plan = _plan(problem, model, taken, others, self.name, deadline)
        passed_over = None if taken is best else (best.cost.seconds, best.cost.collectives)
        return dataclasses.replace(plan, cut_short=deadline.cut_short, passed_over=passed_over)

    def _offer(self, problem: Problem, model: FoldedModel, found: Found) -> None:
        assert problem.offer is not None
        make = functools.partial(_plan, problem, model, found, (), self.name, Deadline(0.0))
        problem.offer(make, found.cost)

    def _first(self, problem: Problem, model: FoldedModel) -> Plan | None:
        """What there is before anything is found: data parallelism, or near it."""
        no_time = Deadline(0.0)
        found = Search(problem, model, *next(shapes(problem)), self.level).run(no_time)
        return None if found is None else _plan(problem, model, found, (), self.name, no_time)


def _plainer(problem: Problem, model: FoldedModel, best: Found) -> Iterator[Found]:
    """Plans that take no search: without splits, and with the weights of `best`, the ops as they
    come."""
    given = frozenset(problem.fixed)
    for plain in baselines(problem, model):
        axes = tuple(plain.layout.mesh.axis_names[a] for a in plain.layout.batch_axes)
        yield Found(plain.layout.mesh, axes, plain.anchors, plain.cost, given=given)
    if best.anchors.ops:
        anchors = dataclasses.replace(best.anchors, ops={})
        laid = propagate(model.prepared, best.mesh, anchors)
        cost = evaluate(laid, problem.cluster, model.roles, problem.state_ratio)
        yield dataclasses.replace(best, anchors=anchors, cost=cost)


def _side_by_side(searches: Sequence[Search], deadline: Deadline) -> list[Found | None]:
    """What the searches find, in threads: the solver works beside Python; all else takes turns.

    If one fails, or Ctrl-C comes, nobody waits for the others: they see soon that they are given
    up.
    """
    pool = ThreadPoolExecutor(min(len(searches), os.cpu_count() or 1))
    try:
        running = [pool.submit(search.run, deadline) for search in searches]
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


def shapes(problem: Problem) -> Iterator[tuple[Mesh, tuple[int, ...] | None]]:
    """The meshes to search, with the axes that split the batch where that is given."""
    if len(problem.layouts) == 1:
        yield problem.layouts[0].mesh, problem.layouts[0].batch_axes
        return
    size = problem.layouts[0].mesh.size
    for inner in (n for n in range(1, size) if size % n == 0) if size > 1 else (1,):
        yield Mesh(("data", "model"), (size // inner, inner)), None


class Networks:
    """The networks of a space, by what they take gradients for; iterates over those that may be
    right, the likeliest first. Once the best one is known (`settle`), that is the only one."""

    def __init__(self, space: Space, surcharge_s: float) -> None:
        self.space, self.surcharge_s = space, surcharge_s
        self._made: dict[Gradients, Network] = {}
        times = space.model.roles.times
        weights = [v for v in space.graph.variables if v.trainable]
        num_bytes = sum(v.num_bytes * times.get(v.handle.op, 1) for v in weights)
        kinds = list(Gradients)
        self._kinds = kinds[1:] if num_bytes <= BUCKET_SIZES[0] else kinds

    def first(self) -> Network:
        return next(iter(self))

    def settle(self, best: Network) -> None:
        self._kinds = [kind for kind in self._kinds if self._made.get(kind) is best]

    def __iter__(self) -> Iterator[Network]:
        for kind in self._kinds:
            if kind not in self._made:
                self._made[kind] = Costs(self.space, kind, self.surcharge_s).network()
            yield self._made[kind]


class Search:
    """The search on one shape of the mesh.

    Args:
        batch_axes: those that split the batch; None leaves that open.
        surcharge_s: seconds that each collective counts beside what it takes.
        offer: is told of each plan that is found.
    """

    def __init__(
        self, problem: Problem, model: FoldedModel, mesh: Mesh, batch_axes: Sequence[int] | None,
        level: int, surcharge_s: float = 0.0, offer: Callable[[Found], None] | None = None,
    ) -> None:  # fmt: skip
        self.problem, self.model, self.mesh, self.level = problem, model, mesh, level
        self.batch_axes, self.surcharge_s = batch_axes, surcharge_s
        self.offer = offer
        prepared = model.prepared
        self.critical = critical_ops(prepared.graph, self._is_intensive)
        count = sum(model.roles.times.get(op, 1) for op in self.critical)
        self.report = Report(len(problem.graph.ops), count, max(count - 1, 1))
        self.deadline = Deadline()

    def run(self, deadline: Deadline) -> Found | None:
        """The fastest plan that fits, splitting as few of the largest parameters as will do; None
        if there is none, or none was found in time (then the deadline has cut the search short).

        Args:
            deadline: when the best found so far is to be returned.
        """
        self.deadline = deadline
        if self.mesh.size == 1:
            return self._found(self._whole_from(0, Chosen()), self.report)
        try:
            networks, report = self._last_networks()
            best = self._with_split(networks, (), report)
        except NoSolution as error:
            deadline.cut_short |= error.timed_out
            return None
        limit = self.problem.cluster.device.memory_bytes
        if best.cost.memory_bytes <= limit:
            return best
        weights = self._by_size()
        try:
            found = self._with_split(networks, weights, report)
        except NoSolution:  # in this network, whole weights are the only ones that can be
            return best
        if found.cost.memory_bytes > limit:
            return min(best, found, key=lambda f: f.cost.memory_bytes)
        few, many = 0, len(weights)
        while few + 1 < many and not deadline.over():
            middle = (few + many) // 2
            tried = self._with_split(networks, weights[:middle], report)
            if tried.cost.memory_bytes <= limit:
                found, many = tried, middle
            else:
                few = middle
        return found

    def _is_intensive(self, op: Op) -> bool:
        return is_compute_intensive(op, self.model.prepared)

    def _by_size(self) -> list[str]:
        """The names of the weights, the largest first."""
        weights = [v for v in self.model.prepared.graph.variables if v.trainable]
        return [v.name for v in sorted(weights, key=lambda v: -v.num_bytes)]

    def _last_networks(self) -> tuple[Networks, Report]:
        """Those along the last axis that has several ranks, and those before it decided.

        The best along one axis need not be where the best of all begins: see `_ways`. The search
        goes on from what it makes the fastest plan of along the next.
        """
        report, networks = self.report, self._networks(0, Chosen())
        last = max(axis for axis, parts in enumerate(self.mesh.shape) if parts > 1)
        for axis in range(last):
            space = networks.space
            if self.mesh.shape[axis] == 1:
                networks = self._networks(axis + 1, space.whole())
                continue
            roots = merge(networks.first())
            chosen, report, seconds = self._decided(space, roots, report)
            ways = [chosen] if self.deadline.over() else self._ways(space, roots, chosen, seconds)
            found = [self._networks(axis + 1, way) for way in ways]
            networks = found[0] if len(found) == 1 else min(found, key=self._seconds)
        return networks, report

    def _ways(self, space: Space, roots: Roots, chosen: Chosen, seconds: float) -> list[Chosen]:
        """The choices along an axis that are worth going on from, none twice: `chosen`, which
        costs `seconds`; data parallelism; and at level 3 also what level 2 finds."""
        others = [_start(space, roots)]
        if self.level == 3:
            others.append(list(self._by_segments(space, roots)))
        ways = [chosen]
        for picks in others:
            way = space.chosen(roots.whole(picks))
            if roots.network.cost(picks) <= WORTHWHILE * seconds and way not in ways:
                ways.append(way)
        return ways

    def _seconds(self, networks: Networks) -> float:
        """What is found along the axis of `networks` takes, by the likeliest of them; infinite if
        there is nothing."""
        roots = merge(networks.first())
        try:
            return roots.network.cost(self._solved(networks.space, roots)[0])
        except NoSolution:
            return math.inf

    def _networks(self, axis: int, before: Chosen) -> Networks:
        given = self._given(axis)
        space = Space(self.problem, self.model, self.mesh, axis, before, given, self.deadline)
        return Networks(space, self.surcharge_s)

    def _decided(self, space: Space, roots: Roots, report: Report) -> tuple[Chosen, Report, float]:
        """The axis of `space` decided too, `report` with what that was like, and the seconds."""
        picks, gap = self._solved(space, roots)
        report = dataclasses.replace(
            report, nodes=len(space.nodes), cones=len(roots.kept), gap=max(gap, report.gap)
        )
        if self.problem.progress is not None:
            along = f"{self.mesh}, along {self.mesh.axis_names[space.axis]}"
            self.problem.progress(along, len(space.nodes))
        return space.chosen(roots.whole(picks)), report, roots.network.cost(picks)

    def _with_split(self, networks: Networks, split: Sequence[str], report: Report) -> Found:
        """The fastest plan that splits the weights called so along the axis of the networks.

        Raises:
            NoSolution: the constraints leave none.
        """
        best: Found | None = None
        for network in networks:
            narrowed = with_split(networks.space, network, split)
            found, seconds = self._along_last(networks.space, narrowed, report)
            if self.offer is not None:
                self.offer(found)
            if best is None or found.cost.seconds < best.cost.seconds:
                best, by = found, network
            expected = seconds + self.problem.cluster.step_s
            if found.cost.seconds <= SURPRISE * expected or self.deadline.over():
                break
        assert best is not None
        networks.settle(by)
        return best

    def _along_last(self, space: Space, network: Network, report: Report) -> tuple[Found, float]:
        """The plan with the last axis decided by `network`, and what that says it takes."""
        chosen, report, seconds = self._decided(space, merge(network), report)
        return self._found(self._whole_from(space.axis + 1, chosen), report), seconds

    def _whole_from(self, first: int, chosen: Chosen) -> Chosen:
        """`chosen`, nothing split along axis `first` and those behind."""
        for axis in range(first, self.mesh.num_axes):
            chosen = self._networks(axis, chosen).space.whole()
        return chosen

    def _solved(self, space: Space, roots: Roots) -> tuple[Sequence[int], float]:
        """Choices of the roots, and the gap that they leave."""
        is_over = self.deadline.over()
        if is_over:
            start = _start(space, roots)
            if math.isfinite(roots.network.cost(start)):
                return start, math.inf
        if self.level == 2 or is_over:
            return self._by_segments(space, roots), math.inf
        try:
            solution = solve(roots.network, self.deadline)
        except NoSolution as error:
            if not error.timed_out:
                raise
            return self._by_segments(space, roots), math.inf
        if solution.gap > GAP:  # it was stopped: what level 2 makes of it is no worse
            return self._by_segments(space, roots, solution.picks), solution.gap
        return solution.picks, solution.gap

    def _by_segments(
        self, space: Space, roots: Roots, known: Sequence[int] | None = None
    ) -> Sequence[int]:  # fmt: skip
        """Level 2, from what costs least of data parallelism, nothing split and `known` choices."""
        critical = set(self.critical)
        pivots = {
            at for at, i in enumerate(roots.kept) if any(op in critical for op in space.nodes[i])
        }
        cuts = [
            segments([min(depth[op] for op in space.nodes[i]) for i in roots.kept], pivots)
            for depth in (depths(space.graph), depths_when_read(space.graph))
        ]
        together = families(
            roots.network,
            [at for at, i in enumerate(roots.kept) if space.nodes[i][0] in space.variables],
            {at for at, i in enumerate(roots.kept) if self._is_intensive(space.nodes[i][0])},
        )
        starts = [_start(space, roots), [0] * len(roots.kept), *([] if known is None else [known])]
        start = min(starts, key=roots.network.cost)
        try:
            return solve_by_segments(roots.network, cuts, start, self.deadline, together)
        except NoSolution:
            patient = self.deadline.without_end()  # however late it is, there has to be a plan
            picks = solve(roots.network, patient).picks
            self.deadline.cut_short |= patient.cut_short
            return picks

    def _found(self, chosen: Chosen, report: Report) -> Found:
        graph = self.model.prepared.graph
        whole = replicated(self.mesh.num_axes)
        specs = {
            op: tuple(way.kept[0] for way in ways)
            for op, ways in chosen.items()
            if not op.inputs and op.outputs
        }
        variables = {v.name: specs[v.handle.op] for v in graph.variables}
        # These differ from what was decided along axes of one rank: see `_given`.
        given = {name: fixed.spec for name, fixed in self.problem.fixed.items()}
        variables |= {name: given[name] for name in variables.keys() & given.keys()}
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
        anchors, mesh = dataclasses.replace(anchors, ops=ops), self.mesh
        if self.batch_axes is None and not batch and mesh.size > 1 and mesh.shape[1:] == (1,):
            mesh = Mesh(mesh.axis_names[::-1], mesh.shape)  # what splits weights alone is "model"
        return Found(mesh, tuple(batch), anchors, cost, report, frozenset(self.problem.fixed))

    def _given(self, axis: int) -> Given:
        """What is given along `axis`. With one rank there, a weight is whole also where it is said
        to be split: no op along such an axis is asked whether it reads split weights."""
        fixed = {} if self.mesh.shape[axis] == 1 else self.problem.fixed
        tensors = self.problem.tensors
        return Given(
            batch=None if self.batch_axes is None else axis in self.batch_axes,
            variables={name: given.spec[axis] for name, given in fixed.items()},
            tensors={n: given.spec[axis] for n, given in tensors.items() if axis < len(given.spec)},
        )


def _start(space: Space, roots: Roots) -> list[int]:
    """Data parallelism, as choices of the roots."""
    picks = space.data_parallel_picks()
    return [picks[i] for i in roots.kept]


def _plan(
    problem: Problem, model: FoldedModel, best: Found, others: Sequence[tuple[float, str]],
    planner: str, deadline: Deadline,
) -> Plan:  # fmt: skip
    """The plan of the whole model: what is chosen for a block serves all its instances.

    Args:
        others: seconds of the best plan on other meshes, and the mesh.
    """
    twins = {v.name: [t.name for t in ts] for v, ts in model.folded.twins.items()}
    laid = {twin: spec for name, spec in best.anchors.variables.items() for twin in twins[name]}
    until = Deadline(min(ALTERNATIVES_S, deadline.left))
    priced = alternatives(problem, model, best.mesh, best.anchors, best.cost, until)
    options = {twin: found for name, found in priced.items() for twin in twins[name]}
    variables = {}
    for variable in problem.variables:
        spec, why = laid.get(variable.name), f"chosen by the {planner} planner"
        if variable.name in problem.fixed:
            spec, why = problem.fixed[variable.name].spec, problem.fixed[variable.name].why
        variables[variable.name] = PlannedVariable(
            tuple(variable.shape), variable.dtype, variable.trainable, spec,
            why if spec is not None else "", tuple(options.get(variable.name, ())),
        )  # fmt: skip
    return problem.plan(
        mesh=best.mesh,
        batch_axes=best.batch_axes,
        variables=variables,
        planner=planner,
        cost=best.cost,
        layouts=tuple((mesh, seconds) for seconds, mesh in others),
        ops={
            name: op
            for stand_in, op in best.anchors.ops.items()
            for name in model.folded.stands_for.get(stand_in, (stand_in,))
        },
    )
