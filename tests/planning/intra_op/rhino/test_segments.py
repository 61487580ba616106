"""Level 2: tables of small networks, segments between critical nodes, the way through them."""

import dataclasses
import itertools

import numpy as np
import pytest

from tests.cases import seeds
from tests.planning.intra_op.rhino.test_cost_network import drawn
from tests.planning.problems import Captured, price, within
from tfpar.planning.deadline import Deadline
from tfpar.planning.folding.folded_model import FoldedModel
from tfpar.planning.intra_op.rhino import RhinoPlanner, mesh_search, tables
from tfpar.planning.intra_op.rhino.axis_space import Chosen
from tfpar.planning.intra_op.rhino.cones import eliminate_chains
from tfpar.planning.intra_op.rhino.cost_network import CostNetwork, DecisionNode, ReshardCosts
from tfpar.planning.intra_op.rhino.ilp import NoSolution, Solution
from tfpar.planning.intra_op.rhino.mesh_search import MeshShapeSearch
from tfpar.planning.intra_op.rhino.segments import (
    Segment,
    critical_ops,
    depths,
    depths_when_read,
    neighbourhoods,
    segments,
    solve_by_segments,
    top_level,
)
from tfpar.planning.intra_op.rhino.tables import TooLarge, solve_by_elimination
from tfpar.spec import Mesh, TfparError, TimeLimitError


def small_network(seed):
    """A drawn network without late work."""
    network = drawn(seed)
    parts = [
        dataclasses.replace(part, late=np.zeros_like(part.late))
        for part in (*network.nodes, *network.moves)
    ]
    count = len(network.nodes)
    return CostNetwork(parts[:count], parts[count:])


def costs(network):
    """All picks and what they cost."""
    for picks in itertools.product(*(range(node.size) for node in network.nodes)):
        yield picks, network.cost(picks)


@pytest.mark.parametrize("seed", seeds(8, 20))
def test_a_table_has_the_least_for_each_choice(seed):
    network = small_network(seed)
    least: dict[int, float] = {}
    for picks, cost in costs(network):
        least[picks[-1]] = min(least.get(picks[-1], np.inf), cost)
    for choice, (seconds, picks) in enumerate(
        solve_by_elimination(network, len(network.nodes) - 1)
    ):
        assert seconds == pytest.approx(least[choice])
        if np.isfinite(seconds):
            assert network.cost(picks) == pytest.approx(seconds) and picks[-1] == choice


@pytest.mark.parametrize("seed", seeds(8, 20))
@pytest.mark.parametrize("small_tables", [False, True])
def test_one_segment_is_solved_exactly(seed, small_tables, monkeypatch):
    """By tables, and by the program that takes over where tables grow too large."""
    if small_tables:
        monkeypatch.setattr(tables, "MAX_ENTRIES", 8)
    network = small_network(seed)
    best, least = min(costs(network), key=lambda item: item[1])
    whole = [Segment(tuple(range(len(network.nodes))), None)]
    start = [int(np.argmin(node.seconds)) for node in network.nodes]
    if np.isfinite(least):
        assert network.cost(top_level(network, [whole], 0.0, start)) == pytest.approx(least)
    else:
        with pytest.raises(NoSolution):
            top_level(network, [whole], 0.0, start)


@pytest.mark.parametrize("seed", seeds(8, 30))
def test_a_way_through_segments_is_never_below_the_optimum_nor_above_its_start(seed):
    network = small_network(seed)
    best, least = min(costs(network), key=lambda item: item[1])
    cuts = segments(list(range(len(network.nodes))), {1, 3})
    assert [s.end for s in cuts] == [1, 3, None]
    if np.isfinite(least):
        assert network.cost(top_level(network, [cuts], 0.0, best)) == pytest.approx(least)
    else:
        with pytest.raises(NoSolution):
            top_level(network, [cuts], 0.0, best)


def node(*seconds, late=None):
    return DecisionNode("", np.array(seconds), np.array(late or [0.0] * len(seconds)))


def alike(one, other, seconds):
    """Two nodes that should choose alike."""
    table = np.where(np.eye(2, dtype=bool), 0.0, seconds)
    states = np.arange(2)
    return ReshardCosts(one, states, ((other, states),), table, np.zeros((2, 2)))


def test_nodes_far_apart_are_improved_together():
    """A weight and its update, segments apart: either alone had better stay as it is."""
    nodes = [node(1.0, 1.1), *[node(0.0, 0.0)] * 5, node(5.0, 1.0)]
    network = CostNetwork(nodes, [alike(0, 6, 9.0)])
    cuts = segments(list(range(7)), {2, 4})
    stuck, start = top_level(network, [cuts], 0.0, [0] * 7), [0] * 7
    assert network.cost(stuck) == network.cost(start) == 6.0
    found = top_level(network, [cuts], 0.0, start, together=[[0, 6]])
    assert network.cost(found) == pytest.approx(2.1)


def test_so_much_late_work_counts_that_it_just_hides():
    """Three pieces that can be late or done at once; the backward pass hides one and a bit."""
    nodes = [node(0.0, seconds, late=[4.0, 0.0]) for seconds in (1.0, 2.5, 3.0)]
    network = CostNetwork([*nodes, node(0.0, late=[-5.0])], [])
    whole = [Segment((0, 1, 2, 3), None)]
    for part, least in ((0.0, 7.0), (1.0, 6.5)):
        assert network.cost(top_level(network, [whole], part, [0, 0, 0, 0])) == least
    found = solve_by_segments(network, [whole], [0, 0, 0, 0])
    assert found == [1, 1, 0, 0] and network.cost(found) == pytest.approx(3.5)


def test_a_family_ends_at_ops_that_compute_much(monkeypatch):
    # A weight 0, the product 1 that reads it, its update 2 from the gradient 3, and others.
    network = CostNetwork(
        [node(0.0, 0.0)] * 7,
        [alike(0, 1, 1.0), alike(0, 2, 1.0), alike(3, 2, 1.0), alike(1, 4, 1.0), alike(5, 3, 1.0)],
    )
    assert neighbourhoods(network, [0], {1, 3}) == [[0, 1, 2, 3]]
    assert neighbourhoods(network, [0, 6], {1}) == [[0, 1, 2, 3, 5], [6]]
    monkeypatch.setattr("tfpar.planning.intra_op.rhino.segments.MAX_GROUP", 3)
    assert neighbourhoods(network, [0], {1, 3}) == [[0, 1, 2]]


@pytest.mark.nightly
def test_where_links_are_slow_level_2_comes_near_level_3():
    """All-reduces of gradients hide in part, and weights had better be split with their updates."""
    problem = Captured.saved("gpt_50257_words").problem([2, 1], "rhino-s1")
    second, third = (RhinoPlanner(level).solve(problem).cost.seconds for level in (2, 3))
    assert third * (1 - 1e-4) <= second <= 1.02 * third


@pytest.mark.slow
def test_the_search_goes_on_from_the_start_that_turns_out_better(monkeypatch):
    """However good what it chose along the first axis looks there."""
    problem = Captured.saved("wide").problem([2, 2], "v100-ethernet")
    model, mesh = FoldedModel.of(problem, 2), Mesh(("data", "model"), (2, 2))

    def seconds():
        return MeshShapeSearch(problem, model, mesh, None, 3).run(Deadline()).cost.seconds

    best, starts = seconds(), MeshShapeSearch._starts

    def badly(self, space, roots):
        found = starts(self, space, roots)
        picks = space.data_parallel_picks()
        return [[picks[i] for i in roots.nodes], *found]

    monkeypatch.setattr(MeshShapeSearch, "_starts", badly)
    assert seconds() <= best * (1 + 1e-4)
    monkeypatch.setattr(
        MeshShapeSearch, "_seconds", lambda search, networks: 0.0
    )  # takes the first
    assert seconds() > best * 1.1


@pytest.mark.parametrize("level", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_search_goes_on_from_data_parallelism_where_it_is_not_far_behind(level, monkeypatch):
    problem = Captured.saved("wide").problem([2, 2], "v100-ethernet")
    model, mesh = FoldedModel.of(problem, 2), Mesh(("data", "model"), (2, 2))
    search = MeshShapeSearch(problem, model, mesh, None, level)
    networks = search.networks(0, Chosen())
    space, roots = networks.space, eliminate_chains(networks.first())
    picks = [space.data_parallel_picks()[i] for i in roots.nodes]
    parallel, slow = tuple(picks), roots.network.cost(picks)
    monkeypatch.setattr(mesh_search, "PROMISING_RATIO", 1e9)
    found = search._starts(space, roots)
    costs = [roots.network.cost(start) for start in found]
    assert costs == sorted(costs) and costs[0] < slow and parallel in found
    assert len(set(found)) == len(found)
    monkeypatch.setattr(mesh_search, "PROMISING_RATIO", slow / costs[0] * 0.99)
    assert parallel not in search._starts(space, roots)
    only = Solution(parallel, slow)
    monkeypatch.setattr(MeshShapeSearch, "_near", lambda search, space, roots: [only])
    assert search._starts(space, roots) == [parallel]


@pytest.mark.slow
@pytest.mark.parametrize("links", ["v100-ethernet", "rhino-m8"])
def test_level_2_begins_where_nothing_is_split_if_that_is_best(links):
    """A small model on slow links is not worth the gradients of data parallelism."""
    problem = Captured.saved("wide").problem([4, 1], links)
    model, mesh = FoldedModel.of(problem, 2), Mesh(("data", "model"), (4, 1))
    second, third = (
        MeshShapeSearch(problem, model, mesh, None, level).run(Deadline()).cost.seconds
        for level in (2, 3)
    )
    assert third * (1 - 1e-4) <= second <= 1.01 * third


def test_tables_have_bounds(monkeypatch):
    monkeypatch.setattr(tables, "MAX_ENTRIES", 2)
    with pytest.raises(TooLarge):
        for seed in range(10):
            network = small_network(seed)
            solve_by_elimination(network, len(network.nodes) - 1)


@pytest.fixture(scope="module")
def small_gpt():
    return Captured.saved("gpt")


def test_critical_nodes_are_products_on_the_longest_path(small_gpt):
    graph = small_gpt.problem([1, 2], "cpu").step.graph
    critical = critical_ops(graph, lambda op: "MatMul" in op.type)
    depth = depths(graph)
    assert [depth[op] for op in critical] == sorted(depth[op] for op in critical)
    names = " ".join(op.name for op in critical)
    # Both layers of each block's MLP; not all of its projections of Q, K and V.
    for layer in (0, 1):
        assert f"block_{layer}_fc1" in names and f"block_{layer}_fc2" in names
    assert len(critical) < sum("MatMul" in op.type for op in graph.ops)


def test_weights_are_decided_where_they_are_first_read(small_gpt):
    graph = small_gpt.problem([1, 2], "cpu").step.graph
    depth, decided = depths(graph), depths_when_read(graph)
    readers = graph.consumers()
    handles = {v.handle for v in graph.variables}
    for op in graph.ops:
        reads = [decided[r] for t in op.outputs for r in readers.get(t, ())]
        assert all(decided[op] < at for at in reads)
        if handles.intersection(op.outputs) and reads:
            assert decided[op] == min(reads) - 1
        elif handles.intersection(op.inputs) and len(op.inputs) > 1:  # updated: with its gradient
            assert decided[op] == depth[op]
    late = [decided[v.handle.op] for v in graph.variables if "block_1" in v.name]
    assert late and min(late) > max(depth[t.op] for t in graph.inputs)


@pytest.mark.slow
def test_both_levels_find_plans_and_report_what_they_saw():
    planners = {level: RhinoPlanner(level=level) for level in (2, 3)}
    problem = Captured.saved("gpt_one_layer").problem([1, 2], "v100-ethernet")
    plans = {level: planner.solve(problem) for level, planner in planners.items()}
    for level, plan in plans.items():
        report = planners[level].report
        assert plan.planner == f"rhino level {level}"
        assert price(problem, plan).seconds == pytest.approx(plan.cost.seconds, rel=1e-4)
        assert report.instructions == len(problem.step.graph.ops)
        assert 0 < report.subgraphs < report.cones < report.nodes < report.instructions
    assert planners[3].report.gap < 1e-3 and planners[2].report.gap < 0.2
    assert plans[2].cost.seconds <= 1.1 * plans[3].cost.seconds


def over():
    deadline = Deadline(0.0)
    assert deadline.over()
    return deadline


def test_past_the_deadline_the_start_is_what_there_is():
    network = small_network(1)
    best, least = min(costs(network), key=lambda item: item[1])
    worse = max((picks for picks, cost in costs(network) if np.isfinite(cost)), key=network.cost)
    cuts = segments(list(range(len(network.nodes))), {1, 3})
    assert network.cost(worse) > network.cost(best)
    assert top_level(network, [cuts], 0.0, worse, over()) == list(worse)
    assert network.cost(top_level(network, [cuts], 0.0, worse)) < network.cost(worse)


@pytest.mark.slow
def test_a_shape_without_a_plan_in_time_leaves_those_of_others(monkeypatch):
    problem = Captured.saved("gpt_one_layer").problem([1, 4], "v100-ethernet")
    last_networks = MeshShapeSearch._last_networks

    def slow_on_grids(search):
        if min(search.mesh.shape) > 1:
            raise NoSolution(True)
        return last_networks(search)

    monkeypatch.setattr(MeshShapeSearch, "_last_networks", slow_on_grids)
    plan = RhinoPlanner(level=2).solve(problem)
    assert plan.findings.cut_short and plan.mesh.shape == (4, 1) and not plan.findings.layouts

    def slow(search):
        raise NoSolution(True)

    monkeypatch.setattr(MeshShapeSearch, "_last_networks", slow)
    with pytest.raises(TimeLimitError, match="No plan was found in time"):
        RhinoPlanner().solve(problem)


@pytest.mark.slow
def test_a_search_ends_when_its_time_is_over():
    problem = Captured.saved("gpt_one_layer").problem([1, 2], "v100-ethernet")
    hurried = RhinoPlanner().solve(within(1e-3, problem))
    assert hurried.findings.cut_short
    assert not any(v.alternatives for v in hurried.variables.values())
    assert price(problem, hurried).seconds == pytest.approx(hurried.cost.seconds, rel=1e-4)


def test_what_a_planner_cannot_do_is_refused():
    with pytest.raises(TfparError, match="level"):
        RhinoPlanner(level=4)
