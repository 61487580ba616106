"""Figures of the examples that open modules: they are what the modules do."""

from __future__ import annotations

import pytest

from tests.planning.tiny import Step, chain, problem
from tfpar.planning.folding.folded_model import FoldedModel
from tfpar.planning.intra_op.rhino.axis_space import AxisStrategySpace, Chosen
from tfpar.planning.intra_op.rhino.costs import Costs
from tfpar.planning.intra_op.rhino.mesh_search import MeshShapeSearch
from tfpar.planning.intra_op.rhino.segments import Segment, segments
from tfpar.planning.meshes import shapes
from tfpar.spec import format_spec


@pytest.fixture(scope="module")
def space() -> AxisStrategySpace:
    """`relu(x @ kernel)` on two slow devices."""
    step = Step(64, 1024)
    asked = problem(step.forward(step.dense("layer", step.x, 1024, "Relu")), [2])
    ((mesh, batch_axes),) = shapes(asked.meshes)
    search = MeshShapeSearch(asked, FoldedModel.of(asked, 2), mesh, batch_axes, level=3)
    return search.networks(0, Chosen()).space


def node_of(space: AxisStrategySpace, name: str) -> int:
    return next(i for i, ops in enumerate(space.nodes) if ops[0].name == name)


def test_a_product_has_four_strategies(space):
    """Of `planning.intra_op.rhino.axis_space`."""

    def shown(name):
        return [
            f"{format_spec(s.needs)} -> {format_spec(s.made)}"
            for s in space.strategies[node_of(space, name)]
        ]

    product = ["R,R -> R", "S(0),R -> S(0)", "S(1),S(0) -> P(sum)", "R,S(1) -> S(1)"]
    assert shown("layer/MatMul") == product
    assert shown("layer/Relu") == ["R -> R", "S(0) -> S(0)", "S(1) -> S(1)"]


def test_what_a_product_and_its_result_cost(space):
    """Of `planning.intra_op.rhino.costs`."""
    network = Costs(space).network()
    product = node_of(space, "layer/MatMul")
    milliseconds = [1e3 * s for s in network.nodes[product].seconds]
    assert milliseconds == pytest.approx([134.2, 67.1, 67.1, 67.1], abs=0.05)
    (moves,) = (m for m in network.moves if m.source == product)
    assert list(moves.made) == [0, 1, 2, 3]
    assert [list(needs) for _, needs in moves.readers] == [[0, 1, 2]]
    microseconds = [[round(1e6 * s) for s in row] for row in moves.seconds]
    assert microseconds == [[0, 0, 0], [132, 0, 67], [264, 132, 132], [132, 67, 0]]


def test_critical_nodes_cut_a_chain():
    """Of `planning.intra_op.rhino.segments`."""
    cut = [Segment((0, 1), 2), Segment((3, 4), 5), Segment((6,), None)]
    assert segments([0, 1, 2, 3, 3, 4, 5], {2, 5}) == cut


def test_six_layers_fold_to_three():
    """Of `planning.folding.fold`."""
    folded = FoldedModel.of(problem(chain(8, *[16] * 7, activation="Tanh", train=False), [2]), 2)
    graph = folded.prepared.graph
    assert [v.name for v in graph.variables] == [f"layer_{i}/kernel" for i in (1, 2, 5, 6)]
    ops = {op.name: op for op in graph.ops}
    assert folded.roles.times[ops["layer_2/MatMul"]] == 3
    assert ops["layer_5/MatMul"].inputs[0].op.name == "layer_2/Tanh"
    (twins,) = (ts for v, ts in folded.folded.twins.items() if v.name == "layer_2/kernel")
    assert [v.name for v in twins] == [f"layer_{i}/kernel" for i in (2, 3, 4)]
