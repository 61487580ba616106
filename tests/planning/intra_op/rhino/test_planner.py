"""Rhino's planner: its network costs what the evaluator says, and its plans are good and valid."""

from __future__ import annotations

import functools
import itertools
import math

import pytest

import tfpar as tap
from tests.cases import some_first
from tests.clusters import device, two_levels
from tests.planning.changes import changed
from tests.planning.intra_op.tap.test_planner import EXHAUSTIVE, FOLDED
from tests.planning.problems import Captured, assert_priced_as_a_whole, laid, partition, price
from tfpar.cluster import Link
from tfpar.cost import evaluate
from tfpar.planning.deadline import Deadline
from tfpar.planning.folding.folded_model import FoldedModel
from tfpar.planning.intra_op.rhino import RhinoPlanner
from tfpar.planning.intra_op.rhino.axis_space import AxisConstraints, AxisStrategySpace, op_plans
from tfpar.planning.intra_op.rhino.cones import eliminate_chains
from tfpar.planning.intra_op.rhino.costs import Costs
from tfpar.planning.intra_op.rhino.explicit_ops import find_explicit_ops
from tfpar.planning.intra_op.rhino.ilp import solve_network
from tfpar.planning.intra_op.rhino.mesh_search import MeshShapeSearch
from tfpar.planning.intra_op.tap.planner import TapPlanner
from tfpar.planning.memory.peak_model import PeakMemoryModel
from tfpar.propagation import Anchors, propagate
from tfpar.spec import Mesh, Replicate, Shard, format_spec, replicated_spec

CLUSTERS = ["rhino-m8", "v100-ethernet", "cpu"]
# Fast devices that no update keeps busy, on slow links.
SLOW_LINKS = two_levels(
    "slow links", 1, 4, device(1e12, 1e12, 1e12, 1e13, 0.0), Link(1e7, 1e-3), Link(1e7, 1e-3)
)


def solve(problem):
    return RhinoPlanner().solve(problem)


@pytest.fixture(scope="module")
def two_layers() -> Captured:
    return Captured.saved("two_layers")


@functools.cache
def small(case):
    return Captured.saved(case)


# --- what the network costs -----------------------------------------------------------


NETWORKS = (
    ("mlp", (2, 2), "v100-ethernet", False),
    ("mlp", (2,), "rhino-m8", False),
    ("embedded", (2, 2), "cpu", True),
    ("convolutions", (2,), "cpu", True),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "ranks", "cluster", "jit_compile"),
    some_first(NETWORKS, itertools.product(EXHAUSTIVE, [(2,), (2, 2)], CLUSTERS, [False, True])),
)
def test_the_network_costs_what_the_evaluator_says_of_the_plan(case, ranks, cluster, jit_compile):
    problem = small(case).problem([1, *ranks], cluster)
    problem = changed(problem, jit_compile=jit_compile)
    model, mesh, chosen = FoldedModel.of(problem, 2), Mesh.of([*ranks]), {}
    for axis in range(len(ranks)):
        space = AxisStrategySpace(problem, model, mesh, axis, chosen, AxisConstraints())
        network = Costs(space).network()
        roots = eliminate_chains(network)
        picks = roots.all_picks(solve_network(roots.network).picks)
        assert network.cost(picks) == pytest.approx(solve_network(network).seconds, rel=1e-5)
        chosen = space.chosen(picks)
    seconds, late = network.seconds_and_late(picks)
    fed = {space.place[op] for op in space.fed}  # what breaks ties is no part of a step
    seconds -= sum(network.nodes[i].seconds[picks[i]] for i in fed)
    anchors = anchors_of(chosen, model.prepared)
    by_all = propagate(model.prepared, mesh, anchors)
    needed, by_needed = find_explicit_ops(model.prepared, mesh, anchors)
    assert len(needed) < len(anchors.ops) / 2
    for laid_out in (by_all, by_needed):
        cost = evaluate(laid_out, problem.cluster, model.roles, problem.step.state_ratio)
        assert sum(cost.compute_s) + sum(cost.communication_s) == pytest.approx(seconds, rel=1e-3)
        # The last bucket of gradients is full when nothing is left to hide it.
        assert cost.exposed_s >= max(0.0, late) * (1 - 1e-3)
        assert cost.exposed_s <= max(0.0, late) + cost.gradients_s


def anchors_of(chosen, prepared):
    graph = prepared.graph
    whole = replicated_spec(len(next(iter(chosen.values()))))
    specs = {op: tuple(s.kept[0] for s in made) for op, made in chosen.items() if op.outputs}
    return Anchors(
        variables={v.name: specs[v.handle.op] for v in graph.variables},
        inputs=[specs.get(t.op, whole) for t in graph.inputs],
        outputs=[whole] * len(graph.outputs),
        ops=op_plans(chosen, prepared),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "cluster"),
    some_first(zip(EXHAUSTIVE, CLUSTERS, strict=True), itertools.product(EXHAUSTIVE, CLUSTERS)),
)
def test_no_plan_of_weights_alone_is_faster(case, cluster):
    """Where there is one axis, TAP's plans are among those that Rhino chooses from."""
    problem = small(case).problem([1, 2], cluster)
    assert price(problem, solve(problem)).seconds <= solve_tap(problem).cost.seconds * (1 + 1e-3)


def solve_tap(problem):
    return TapPlanner().solve(problem)


@pytest.mark.slow
def test_one_large_image_is_cut_into_bands():
    """A batch of one cannot be split, and the channels are few: of a band only the edges move."""
    link = Link(1e10, 1e-6)
    busy = two_levels("busy", 1, 4, device(1e12, 1e12, 1e12, 1e12, 0.0), link, link)
    problem = Captured.saved("large_image").problem([1, 4], busy)
    plan = solve(problem)
    partitioned = partition(problem, plan)
    edges = 4 * 2 * 512 * 32 * 4  # of four blocks a row each way
    for op, decision in partitioned.decisions.items():
        if op.type.startswith("Conv2D") and ("conv_1" in op.name or "conv_2" in op.name):
            rule = partitioned.prepared.rules[op]
            cut = {rule.names[f] for f, _ in decision.strategy.splits if f >= 0}
            assert cut and cut <= {"h", "w"}, op.name
            moved = [(kind, size) for kind, _, size in decision.expansion.collectives()]
            assert moved == [("all_gather", edges)], op.name
    assert price(problem, plan).seconds == pytest.approx(plan.cost.seconds, rel=1e-3)
    assert plan.cost.seconds < 0.8 * solve_tap(problem).cost.seconds


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh"),
    some_first([("gpt", (1, 2))], [(name, (2, 2)) for name in ("gpt", "t5", "resnet")]),
)
def test_what_the_plan_costs_is_what_the_evaluator_says_of_the_whole_model(name, mesh):
    problem = Captured.saved(FOLDED[name]).problem(mesh, "rhino-m8")
    assert_priced_as_a_whole(problem, solve(problem))


# --- constraints ------------------------------------------------------------------------


def along(plan, ending, axis):
    """How the variables whose names end so lie along one mesh axis."""
    at = plan.mesh.axis(axis)
    return {str(v.spec[at]) for n, v in plan.variables.items() if v.spec and n.endswith(ending)}


@pytest.mark.slow
def test_weights_and_outputs_lie_as_constraints_say_in_the_blocks_that_they_name():
    constraints = [
        tap.batch("data"),
        *(tap.shard(f"block_{i}_fc1/kernel", i, "model") for i in (0, 1)),
        tap.shard("head/kernel", 1, "data"),
        tap.replicate("tokens/embeddings"),
        tap.replicate("query/kernel", "model"),
        tap.shard_output("block_1_ln2", 2, "model"),
    ]
    problem = small("gpt").problem([2, 2], "cpu", constraints)
    plan = solve(problem)
    assert plan.mesh == tap.split([2, 2]) and plan.batch_axes == ("data",)
    assert plan.planner.startswith("rhino")
    for i in (0, 1):
        assert along(plan, f"block_{i}_fc1/kernel", "model") == {f"S({i})"}
    assert along(plan, "head/kernel", "data") == {"S(1)"}
    assert laid(plan, "tokens/embeddings") == {"R,R"}
    assert along(plan, "query/kernel", "model") == {"R"}
    assert "fc1" in plan.variables["block_0_fc1/kernel"].why
    assert "by the rhino" in plan.variables["block_0_fc2/kernel"].why
    laid_out = partition(problem, plan)
    for variable, spec in laid_out.variable_specs.items():
        given = plan.variables[variable.name].spec
        assert given is None or given == spec, variable.name
    (given,) = plan.tensors
    specs = {t.name: spec for t, spec in laid_out.specs.items()}
    assert specs[given][1] == Shard(2)
    assert price(problem, plan).seconds == pytest.approx(plan.cost.seconds, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "dim"),
    some_first(
        [((), 2), (("data", "model"), None)],
        [(("data",), 1), (("data",), 2), (("data",), None), (("model",), 1)],
    ),
)
def test_the_batch_and_outputs_are_split_as_constraints_say(axes, dim):
    constraints = [
        tap.batch(*axes),
        tap.shard(".*fc1/kernel", 1, "model"),
        tap.shard_output("block_0_fc1", dim, "model"),
    ]
    problem = small("gpt_one_layer").problem([2, 2], "cpu", constraints)
    plan = solve(problem)
    assert plan.batch_axes == axes
    assert set(plan.tensors) == set(problem.given.tensors) and plan.tensors
    found = partition(problem, plan)
    for tensor in problem.step.batched:
        expected = tuple(Shard(0) if name in axes else Replicate() for name in plan.mesh.axis_names)
        assert found.specs[tensor] == expected
    specs = {t.name: spec for t, spec in found.specs.items() if t.name in plan.tensors}
    expected = "R" if dim is None else f"S({dim})"
    assert {format_spec(spec[1:]) for spec in specs.values()} == {expected}
    assert len(specs) == len(plan.tensors)
    assert price(problem, plan).seconds == pytest.approx(plan.cost.seconds, rel=1e-4)


@pytest.mark.parametrize("mesh", [[1, 2], [2, 1]])
@pytest.mark.parametrize(
    "constraint",
    [tap.shard("first/kernel", 1, "a"), tap.shard_output("first", 1, "a"), tap.batch("a", "b")],
    ids=["weight", "output", "batch"],
)
def test_a_constraint_may_name_an_axis_of_one_rank(two_layers, constraint, mesh):
    problem = two_layers.problem(Mesh(("a", "b"), tuple(mesh)), "cpu", (constraint,))
    plan = solve(problem)
    lies = {tensor.name: spec for tensor, spec in partition(problem, plan).specs.items()}
    (logical,) = problem.meshes
    assert plan.mesh == logical.mesh
    assert plan.batch_axes == tuple(logical.mesh.axis_names[at] for at in logical.batch_axes)
    assert all(
        plan.variables[name].spec == given.spec for name, given in problem.given.variables.items()
    )
    assert all(lies[name] == given.spec for name, given in problem.given.tensors.items())
    assert_priced_as_a_whole(problem, plan)


def test_constraints_cost_time():
    free, bound = (
        solve(small("three_layers").problem([2, 2], "cpu", [tap.batch("data"), *given]))
        for given in ((), [tap.shard(".*kernel", 0, "model")])
    )
    assert bound.cost.seconds > free.cost.seconds


@pytest.mark.slow
def test_on_one_device_nothing_is_split():
    problem = Captured.saved("gpt").problem([1], "rhino-m8")
    for level in (2, 3):
        plan, plain = RhinoPlanner(level).solve(problem), TapPlanner().solve(problem)
        assert not plan.ops
        assert {p for v in plan.variables.values() for p in v.spec or ()} == {Replicate()}
        assert plan.cost.seconds == pytest.approx(plain.cost.seconds)
        assert plan.cost.memory_bytes == plain.cost.memory_bytes


# --- memory -------------------------------------------------------------------------------


@pytest.mark.slow
def test_as_few_weights_are_split_as_memory_asks_for():
    problem = Captured.saved("hourglass").problem([1, 2], SLOW_LINKS)
    plans = [solve(problem)]
    needed = plans[0].cost.memory_bytes
    for part in (0.95, 0.8, 0.7):
        limit = part * needed
        plan = solve(problem.with_cluster(problem.cluster.with_memory(limit)))
        assert plan.cost.memory_bytes <= limit, part
        assert price(problem, plan).memory_bytes <= limit * 1.05
        plans.append(plan)
    for looser, tighter in zip(plans, plans[1:], strict=False):
        assert tighter.cost.seconds >= looser.cost.seconds * (1 - 1e-6)
        assert stored(tighter) <= stored(looser)
    # Nothing is split where all fits; then the largest, and all only where there is need.
    assert stored(plans[0]) == 1.0 > stored(plans[1]) > stored(plans[3])
    assert along(plans[1], "wide_2048/kernel", plans[1].mesh.axis_names[0]) == {"S(1)"}
    assert along(plans[1], "wide_256/kernel", plans[1].mesh.axis_names[0]) == {"R"}


def test_where_nothing_fits_the_plan_is_the_one_that_stores_least():
    problem = Captured.saved("hourglass").problem([1, 2], SLOW_LINKS)
    whole = solve(problem)
    problem = problem.with_cluster(problem.cluster.with_memory(1.0))
    assert solve(problem).cost.memory_bytes < 0.7 * whole.cost.memory_bytes


def stored(plan):
    """The part of all weights that is whole on every rank."""
    weights = [v for v in plan.variables.values() if v.trainable]
    size = lambda v: functools.reduce(lambda a, b: a * b, v.shape, 1)  # noqa: E731
    used = [axis for axis, parts in enumerate(plan.mesh.shape) if parts > 1]
    whole = [v for v in weights if not any(isinstance(v.spec[axis], Shard) for axis in used)]
    return sum(map(size, whole)) / sum(map(size, weights))


# --- microbatches -----------------------------------------------------------------------


@pytest.mark.parametrize("microbatches, parts", [(2, 4), (4, 2), (8, 1)])
def test_ops_cut_each_microbatch_of_stages_in_parts_alike(microbatches, parts):
    asked = small("gpt").problem([4], "cpu").in_pipeline(tap.Pipeline(2, microbatches))
    assert asked.batch.samples == 8 // microbatches
    model, mesh, chosen = FoldedModel.of(asked, 2), Mesh.of([2, 2]), {}
    for axis in range(2):  # the batch is split wherever it can be
        space = AxisStrategySpace(asked, model, mesh, axis, chosen, AxisConstraints())
        chosen = space.chosen(space.data_parallel_picks())
    for op in chosen.keys() & space.data_parallel.keys():
        factor, _ = space.data_parallel[op].strategy.splits[0]
        along = [s.axis_split.split[0] == factor for s in chosen[op] if factor >= 0]
        assert not along or 2 ** sum(along) == parts, op
    for fed in space.fed:
        assert 2 ** [s.made[0] for s in chosen[fed]].count(Shard(0)) == parts


@pytest.mark.slow
def test_what_microbatches_store_is_held_against_the_limit_not_what_one_piece_would():
    problem = small("gpt_one_layer").problem([2], "v100-ethernet")
    model = FoldedModel.of(problem, 2)

    def found(asked):
        search = MeshShapeSearch(asked, model, Mesh.of([2]), (0,), level=2)
        return search.run(Deadline())

    fastest = found(problem.with_objective(memory_limit=math.inf))
    parts = changed(problem, microbatches=4, kept_part=0.25)
    stored = parts.stored_bytes(fastest.cost, PeakMemoryModel.of(fastest.cost))
    limit = (stored + fastest.cost.memory_bytes) / 2
    assert stored < limit < fastest.cost.memory_bytes
    assert found(parts.with_objective(memory_limit=limit)).num_split == fastest.num_split
    assert found(problem.with_objective(memory_limit=limit)).num_split > fastest.num_split, (
        "in one piece"
    )
