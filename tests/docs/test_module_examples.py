"""The numbers of the examples that open modules: they are what the modules do."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tests.cost import test_memory
from tests.partitioned import devices
from tests.planning.tiny import Step, chain, problem
from tests.propagation.by_hand import PAIR, ByHand, specs
from tfpar.cost import hidden_by_chunks
from tfpar.ir import parse_graph
from tfpar.planning.folding import FoldedModel
from tfpar.planning.intra_op.rhino.axis_space import AxisStrategySpace, Chosen
from tfpar.planning.intra_op.rhino.costs import Costs
from tfpar.planning.intra_op.rhino.mesh_search import MeshShapeSearch
from tfpar.planning.intra_op.rhino.segments import Segment, segments
from tfpar.planning.meshes import shapes
from tfpar.propagation import WHOLE, Anchors, decide, prepare, propagate
from tfpar.propagation.decide import OperandState, choose_strategy
from tfpar.rules import PLAIN
from tfpar.spec import Shard, format_spec
from tfpar.tf.runtime import Ranks
from tfpar.tf.variables import ParallelVariable

# --- propagation --------------------------------------------------------------------------------


def test_a_product_moves_the_smaller_of_its_inputs():
    """Of `propagation.decide`."""
    build = ByHand()
    y = build.product(build.fed("x", 8, 4), build.fed("w", 4, 6))
    rule, operands = prepare(build.graph).rules[y.op], [OperandState.of(t) for t in y.op.inputs]
    arriving = specs("S(0)", "S(1)")
    placements = [spec[0] for spec in arriving]
    placed = [(rule.factor("i"), PLAIN), (rule.factor("j"), PLAIN)]

    def moved(split):
        costs = decide._split_cost(rule, operands, placements, placed, rule.sizes, split, 2)
        return costs[0]

    assert decide._replicate_cost(operands, placements) == 128 + 96
    assert [moved(split) for split in placed] == [96, 128]
    chosen = choose_strategy(rule, operands, arriving, y.num_bytes, PAIR)
    assert (chosen.in_specs, chosen.out_specs) == (specs("S(0)", "R"), specs("S(0)"))
    assert chosen.splits[0] == placed[0] != WHOLE


def test_an_open_table_is_laid_for_the_product_behind_the_lookup():
    """Of `propagation.open_weights` and `propagation.roots`."""
    graph = parse_graph("""
    graph(%ids) {
      variable "table": float32[100,8] = %t, trainable
      variable "kernel": float32[8,4] = %k, trainable
      %ids: int32[6] = Placeholder {dtype = int32}
      %t: resource[100,8] = Placeholder {dtype = resource}
      %k: resource[8,4] = Placeholder {dtype = resource}
      %axis: int32[] = Const {dtype = int32, value = dense<int32[]: 0>}
      %read: float32[100,8] = ReadVariableOp(%t) {dtype = float32}
      %w: float32[8,4] = ReadVariableOp(%k) {dtype = float32}
      %rows: float32[6,8] = GatherV2(%read, %ids, %axis) {batch_dims = 0}
      %y: float32[6,4] = MatMul(%rows, %w) {transpose_a = false, transpose_b = false}
      return(%y)
    }
    """)
    rows, whole = specs("S(0)", "R")
    laid = propagate(prepare(graph), PAIR, Anchors(variables={"kernel": rows}, inputs=[whole]))
    assert laid.variable_specs[graph.variables[0]] == specs("S(1)")[0]


# --- Rhino --------------------------------------------------------------------------------------


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


# --- models, and what is rewritten --------------------------------------------------------------


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


def test_half_of_what_is_waited_for_hides_behind_two_chunks():
    """Of `cost.overlap`."""
    assert hidden_by_chunks(10e-3, 4e-3, 2, 1.0) == pytest.approx(2e-3)
    assert hidden_by_chunks(10e-3, 4e-3, 4, 1.0) == pytest.approx(3e-3)
    assert hidden_by_chunks(10e-3, 4e-3, 2, 0.2) == pytest.approx(1e-3)


def test_a_chain_of_ops_stores_two_tensors_at_once():
    """Of `cost.liveness`."""
    most = test_memory.peak_of(test_memory.chain("MatMul", "Relu", "MatMul"))
    assert (most.num_bytes, most.op) == (2048, "op0/MatMul")


def test_a_variable_changes_from_state_to_state():
    """Of `tf.variables.parallel_variable`."""
    v = ParallelVariable(shape=(4, 6), dtype="float32", initial_value=lambda: tf.zeros((4, 6)))
    states = [type(v.state).__name__]
    v.shard(PAIR, (Shard(0),), Ranks(devices(PAIR)))
    states.append(type(v.state).__name__)
    assert [tuple(shard.shape) for shard in v.shards.values()] == [(2, 6), (2, 6)]
    v.assign_add(tf.ones((4, 6)))
    assert v.numpy().tolist() == [[1.0] * 6] * 4
    with v.whole():
        states.append(type(v.state).__name__)
    assert [*states, type(v.state).__name__] == ["Pending", "Sharded", "Whole", "Sharded"]
