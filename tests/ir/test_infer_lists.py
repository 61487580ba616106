"""Shapes of lists that TensorFlow does not tell."""

from __future__ import annotations

from tfpar.ir.builder import GraphBuilder
from tfpar.ir.graph import DType, Graph
from tfpar.ir.passes.infer_lists import infer_lists


def test_a_list_is_as_long_as_what_it_is_added_to_and_is_told_so():
    build = GraphBuilder(Graph(functions={}))
    attrs = {"element_dtype": DType("float32")}
    x = build.one("Placeholder", (), (5, 4), "float32")
    popped = build.one("Placeholder", (), (), "int32")
    shape = build.one("Placeholder", (), (1,), "int32")
    given = build.one("TensorListFromTensor", (x, shape), (5, 4), "variant", attrs)
    made = build.emit("TensorListReserve", (shape, popped), [((None, 4), "variant")], attrs)
    index = build.const(0, "int32")
    item = build.one("Placeholder", (), (4,), "float32")
    put = build.emit(
        "TensorListSetItem", (made.outputs[0], index, item), [(None, "variant")], attrs
    )
    total = build.emit("AddN", (given, put.outputs[0]), [(None, "variant")], {})
    graph = infer_lists(build.graph)
    assert total.outputs[0].shape == put.outputs[0].shape == made.outputs[0].shape == (5, 4)
    assert [t.op.attrs["value"].tolist() for t in made.inputs] == [[4], 5]
    order = [*graph.ops]
    assert all(order.index(t.op) < order.index(made) for t in made.inputs)
