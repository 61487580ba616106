"""Which plans are no candidates, and what is said of them."""

import networkx as nx
import pytest

from tests.planning.changes import changed
from tests.planning.problems import Captured
from tfpar.ir import GraphNode, NodeGraph
from tfpar.planning.folding.folded_model import FoldedModel
from tfpar.planning.intra_op.tap.mesh_search import MeshSearch
from tfpar.planning.intra_op.tap.planner import TapPlanner
from tfpar.planning.intra_op.tap.routing import pattern_routing
from tfpar.planning.problem import ConstrainedSpec
from tfpar.spec import PlanError, Replicate, Shard


@pytest.fixture(scope="module")
def problem():
    return Captured.saved("convnet").problem([1, 2], "cpu")


@pytest.fixture
def search(problem):
    """On ranks that all have the whole batch."""
    return MeshSearch(problem, FoldedModel.of(problem, 2), problem.meshes[-1])


def test_a_split_that_shares_no_work_is_refused_with_weight_op_and_axis(search):
    """A filter cut within its window is gathered, and every rank does the whole convolution."""
    (kernel,) = (v for g in search.groups for v in g.variables if v.name == "conv/kernel")
    assert not search.plans.broken()
    search.plans.lay(kernel, (Replicate(), Shard(0)))
    routing = pattern_routing(search.model.nodes, search.plans.broken())
    assert not routing.valid
    for part in ("GraphNode 'functional", "conv/kernel is R,S(0)", "Conv2D", "along 'model'"):
        assert part in routing.reason
    search.plans.lay(kernel, (Replicate(), Shard(3)))
    assert pattern_routing(search.model.nodes, search.plans.broken()).valid


def test_the_first_node_on_the_way_that_refuses_is_named():
    nodes = [GraphNode(name) for name in ("stem", "left", "right", "loss")]
    stem, left, right, loss = nodes
    flow = nx.DiGraph([(stem, left), (stem, right), (left, loss), (right, loss)])
    graph = NodeGraph(flow, {node: node for node in nodes})  # an op of each, by the same name
    assert pattern_routing(graph, {}).valid
    routing = pattern_routing(graph, {loss: "too late", right: "no pattern"})
    assert routing.reason == "GraphNode 'right': no pattern"


def test_what_lies_behind_a_cycle_comes_last():
    first, back, forth, last = nodes = [GraphNode(n) for n in ("first", "back", "forth", "last")]
    flow = nx.DiGraph([(first, last), (back, forth), (forth, back)])
    graph = NodeGraph(flow, {node: node for node in nodes})
    routing = pattern_routing(graph, {forth: "on a cycle", last: "no pattern"})
    assert routing.reason == "GraphNode 'last': no pattern"
    assert not pattern_routing(graph, {forth: "on a cycle"}).valid


def test_ranks_that_would_all_compute_the_same_are_no_plan(problem):
    whole = [logical for logical in problem.meshes if logical.used_axes]
    fixed = {
        v.name: ConstrainedSpec((Replicate(), Replicate()), "the test")
        for v in problem.step.graph.variables
    }
    with pytest.raises(PlanError, match="all ranks along 'model' would compute the same"):
        TapPlanner().solve(changed(problem, meshes=whole, fixed=fixed))
