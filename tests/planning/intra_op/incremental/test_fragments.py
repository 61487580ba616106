"""How a graph is cut into segments that stand on their own, and what lies between them."""

from tests.propagation.by_hand import ByHand
from tfpar.planning.intra_op.incremental.fragments import (
    border_tensors,
    closed_segments,
    first_reader,
    weight_of_values,
)


def two_products():
    """relu(x @ transpose(w)) @ v"""
    build = ByHand()
    handle = build.variable("w", 8, 6)
    turned = build.transpose(build.read(handle), (1, 0))
    hidden = build.unary("Relu", build.product(build.fed("x", 4, 6), turned))
    y = build.product(hidden, build.weight("v", 8, 5))
    return build.prepared(y), handle, turned, hidden, y


def one_by_one(prepared):
    return [[op] for op in prepared.graph.ops]


def types(segments):
    return [[op.type for op in ops] for ops in segments]


def test_a_weight_is_settled_where_it_is_opened():
    prepared, handle, turned, *_ = two_products()
    product = next(op for op in prepared.graph.ops if turned in op.inputs)
    segments = closed_segments(one_by_one(prepared), prepared, {handle})
    (joined,) = (ops for ops in segments if len(ops) > 1)
    read, *_ = prepared.consumers[handle]
    assert joined == [read, turned.op, product], "what lies between them stays apart"
    ops = [op for ops in segments for op in ops]
    assert sorted(ops, key=prepared.position.__getitem__) == prepared.graph.ops, "each once"
    assert all(ops.index(t.op) < ops.index(op) for op in ops for t in op.inputs)


def test_segments_stay_as_they_are_cut_where_nothing_is_open():
    prepared, *_ = two_products()
    segments = one_by_one(prepared)
    assert closed_segments(segments, prepared, set()) == segments


def test_a_draw_is_settled_with_what_scales_it():
    build = ByHand()
    drawn = build.draw(4, 6)
    mask = build.binary("Mul", drawn, build.const(2.0, "float32"))
    y = build.reduce("Mean", mask, [1])
    prepared = build.prepared(y)
    assert first_reader(drawn.op, prepared) is y.op
    segments = closed_segments(one_by_one(prepared), prepared, set())
    (joined,) = (ops for ops in segments if len(ops) > 1)
    assert joined[0] is drawn.op and joined[-1] is y.op


def test_the_first_reader_is_the_first_in_the_graph_that_does_more_than_relabel():
    build = ByHand()
    read = build.weight("w", 6, 6)
    turned = build.transpose(read, (1, 0))
    early = build.unary("Relu", read)
    late = build.unary("Tanh", turned)
    prepared = build.prepared(early, late)
    assert first_reader(read.op, prepared) is early.op
    assert first_reader(turned.op, prepared) is late.op
    assert first_reader(late.op, prepared) is None


def test_the_border_is_what_several_segments_may_ask_for():
    prepared, handle, turned, hidden, y = two_products()
    ops = prepared.graph.ops
    cut = ops.index(hidden.op) + 1
    segment_of = {op: int(i >= cut) for i, op in enumerate(ops)}
    border = border_tensors(prepared, segment_of)
    assert {hidden, y, handle} <= border and turned not in border


def test_what_a_list_is_made_of_is_on_the_border_with_the_list():
    """In another segment it may be made anew, in another spec, of its elements."""
    build = ByHand()
    x = build.unary("Relu", build.fed("x", 4, 6))
    made = build.emit("TensorListFromTensor", (x, build.shape_const([6])), [((), "variant")])
    taken = build.emit("TensorListStack", made.outputs, [((4, 6), "float32")])
    prepared = build.prepared(*taken.outputs)
    segment_of = {op: int(op is taken) for op in prepared.graph.ops}
    assert x in border_tensors(prepared, segment_of)
    assert x not in border_tensors(prepared, dict.fromkeys(prepared.graph.ops, 0))


def test_values_of_a_weight_are_what_holds_all_of_it_and_nothing_else():
    build = ByHand()
    handle, slot = build.variable("w", 6, 8), build.variable("m", 6, 8, trainable=False)
    read = build.read(handle)
    turned = build.transpose(read, (1, 0))
    rows = build.slice(read, [0, 0], [3, 8])
    doubled = build.binary("AddV2", read, read)
    prepared = build.prepared(turned, rows, doubled, build.read(slot))
    (weight, _) = prepared.graph.variables
    assert weight_of_values(prepared) == dict.fromkeys((handle, read, turned), weight)
