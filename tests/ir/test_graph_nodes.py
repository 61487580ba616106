"""Ops become GraphNodes by name scope (TAP §IV-B)."""

import pytest

from tests.ir.blocks import block, chain, named, parts_of, saved_parts
from tfpar.ir.builder import GraphBuilder
from tfpar.ir.roles import BACKWARD, FORWARD


@pytest.fixture(scope="module")
def vit():
    return saved_parts("vit_4_layers")


@pytest.fixture(scope="module")
def t5():
    return saved_parts("t5_4_layers")


def test_a_scope_that_reads_weights_is_one_node():
    parts = parts_of(chain(["m/one", "m/two"]))
    node = parts.node("m/one/dense")
    assert [op.type for op in node.ops] == ["ReadVariableOp", "MatMul", "ReadVariableOp", "AddV2"]
    assert [w.name for w in node.weights] == ["m/one/kernel", "m/one/bias"]


def test_ops_between_are_a_node_for_each_scope():
    parts = parts_of(chain(["m/one", "m/two"]))
    between = [n for n in parts.nodes.nodes if not n.weights and n.ops[0].type != "Placeholder"]
    types = [[op.type for op in n.ops] for n in between]
    assert types == [["Relu"], ["AddV2"], ["Relu"], ["AddV2"]]


def test_constant_operands_cut_no_run():
    build = GraphBuilder(chain(["m/one"]))
    x = build.graph.outputs[0]
    for name in ("m/Reshape", "m/Reshape_1"):
        build.name = name
        shape = build.const([2, 4])
        op = build.emit("Reshape", (x, shape), [((2, 4), "float32")], name=name)
        x = op.outputs[0]
    build.graph.outputs = [x]
    parts = parts_of(build.graph)
    last = parts.nodes.node_of[x.op]
    assert [op.type for op in last.ops] == ["AddV2", "Const", "Reshape", "Const", "Reshape"]


def test_nodes_know_their_sources_and_readers():
    parts = parts_of(chain(["m/one", "m/two"]))
    node = parts.node("m/two/dense")
    added = parts.nodes.node_of[named(parts.graph, "m/AddV2")]
    assert added in parts.nodes.graph.predecessors(node)
    assert node in parts.nodes.graph.successors(added)


def test_backward_ops_join_the_node_of_the_forward_op_they_are_named_after():
    build = GraphBuilder()
    x = build.const([[1.0] * 4], "float32")
    y = block(build, "m/one", x)
    grad = build.emit(
        "MatMul", (y, y), [((4, 4), "float32")], name="gradient_tape/m/one/dense/MatMul/MatMul"
    )
    build.graph.outputs.append(grad.outputs[0])
    parts = parts_of(build.graph)
    assert parts.roles.phase[grad] == BACKWARD
    assert parts.nodes.node_of[grad] is parts.node("m/one/dense")


@pytest.mark.slow
def test_sums_of_gradients_join_what_they_sum(vit):
    sums = [op for op in vit.graph.ops if op.type == "AddN"]
    assert sums
    for op in sums:
        owners = {vit.nodes.node_of[t.op] for t in op.inputs}
        assert vit.nodes.node_of[op] in owners


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit", "t5"])
def test_every_weight_belongs_to_a_node(name, request):
    parts = request.getfixturevalue(name)
    owned = {w for node in parts.nodes.nodes for w in node.weights}
    assert owned == {v for v in parts.graph.variables if v.trainable}


@pytest.mark.parametrize("name", ["vit", "t5"])
def test_every_backward_op_of_a_layer_joins_its_node(name, request):
    parts = request.getfixturevalue(name)
    weighted = {node.name: node for node in parts.nodes.weighted()}
    seen = 0
    for op in parts.graph.ops:
        scope = op.name.removeprefix("gradient_tape/")
        owner = max((s for s in weighted if scope.startswith(s + "/")), key=len, default=None)
        if parts.roles.phase[op] == BACKWARD and scope != op.name and owner is not None:
            seen += 1
            assert parts.nodes.node_of[op] is weighted[owner], op.name
    assert seen > 100


def test_nodes_are_in_the_order_of_the_data(vit):
    place = {n: i for i, n in enumerate(vit.nodes.nodes)}
    for node in vit.nodes.weighted():
        assert all(place[s] < place[node] for s in vit.nodes.graph.predecessors(node))


def test_segments_are_the_graph_in_order(vit):
    segments = vit.nodes.segments(vit.graph, vit.roles)
    assert [op for segment in segments for op in segment] == vit.graph.ops
    for segment in segments:
        nodes = {vit.nodes.node_of.get(op) for op in segment}
        assert sum(node is not None and bool(node.weights) for node in nodes) <= 1
        assert len({vit.roles.phase[op] for op in segment}) == 1


def test_a_tied_table_belongs_to_all_that_read_it(t5):
    readers = [n for n in t5.nodes.weighted() if any("tokens" in w.name for w in n.weights)]
    assert len(readers) == 3  # both inputs and the logits


def test_forward_ops_lead_each_node(vit):
    for node in vit.nodes.weighted():
        assert vit.roles.phase[node.ops[0]] == FORWARD
