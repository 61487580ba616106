"""Conflicting accesses wait for each other by edges of their own."""

from __future__ import annotations

from tfpar.ir.builder import GraphBuilder
from tfpar.ir.graph import DType, FunctionRef, Graph, Op, Tensor
from tfpar.ir.passes.inline_calls import inline_calls
from tfpar.ir.passes.order_effects import order_effects

FLOAT = {"dtype": DType("float32")}


def handle(build: GraphBuilder, name: str = "v") -> Tensor:
    op = build.emit("Placeholder", (), [((), "resource")], {"dtype": DType("resource")}, name)
    build.graph.inputs.append(op.outputs[0])
    return op.outputs[0]


def read(build: GraphBuilder, variable: Tensor, name: str, control: tuple[Op, ...] = ()) -> Op:
    outputs = [((), "float32")]
    return build.emit("ReadVariableOp", (variable,), outputs, FLOAT, name, control, True)


def add(build: GraphBuilder, variable: Tensor, value: Tensor, name: str, *control: Op) -> Op:
    op = build.emit(
        "AssignAddVariableOp", (variable, value), (), FLOAT, name, control, stateful=True
    )
    build.graph.effects.append(op)
    return op


def constant(build: GraphBuilder, *control: Op) -> Op:
    op = build.const(1.0, "float32").op
    op.control = [*control]
    return op


def test_a_path_through_a_constant_becomes_an_edge():
    build = GraphBuilder()
    variable, other = handle(build), handle(build, "w")
    first = read(build, variable, "first")
    used = add(build, other, first.outputs[0], "used")
    one = constant(build, used)
    count = add(build, variable, one.outputs[0], "count")
    last = read(build, variable, "last", (build.unary("Neg", one.outputs[0]).op, count))
    build.graph.outputs = [*last.outputs]
    order_effects(build.graph)
    assert (count.control, last.control, one.control) == ([first], [count], [])
    assert used.control == [], "nothing else touches it"


def test_what_is_in_no_order_is_read_first_and_in_the_order_of_depth():
    build = GraphBuilder()
    variable = handle(build)
    one = constant(build).outputs[0]
    early = add(build, variable, one, "early")
    late = add(build, variable, build.unary("Neg", build.unary("Neg", one)), "late")
    value = read(build, variable, "value")
    build.graph.outputs = [*value.outputs]
    order_effects(build.graph)
    assert (value.control, early.control, late.control) == ([], [value], [early])
    assert build.graph.ops.index(value) < build.graph.ops.index(early)


def test_what_a_read_waited_for_runs_all_the_same():
    build = GraphBuilder()
    variable, other = handle(build), handle(build, "w")
    counted = add(build, other, constant(build).outputs[0], "counted")
    value = read(build, variable, "value", (counted,))
    build.graph.effects, build.graph.outputs = [], [*value.outputs]
    order_effects(build.graph)
    assert (value.control, build.graph.effects) == ([], [counted])


def test_what_does_not_run_orders_nothing():
    build = GraphBuilder()
    variable = handle(build)
    dead = add(build, variable, constant(build).outputs[0], "dead")
    alive = add(build, variable, constant(build).outputs[0], "alive")
    build.graph.effects = [alive]
    order_effects(build.graph)
    assert dead not in alive.control


def test_an_assignment_behind_a_call_waits_for_what_is_read_in_it():
    inner = GraphBuilder()
    taken, told = handle(inner), handle(inner, "w")
    value = read(inner, taken, "value")
    noted = add(inner, told, constant(inner).outputs[0], "noted")
    inner.graph.outputs = [*value.outputs]
    build = GraphBuilder(Graph(functions={"f": inner.graph}))
    variable, other = handle(build), handle(build, "w")
    call = build.emit(
        "StatefulPartitionedCall",
        (variable, other),
        [((), "float32")],
        {"f": FunctionRef("f")},
        "call",
        stateful=True,
    )
    count = add(build, variable, constant(build).outputs[0], "count")
    build.graph.outputs = [*call.outputs]
    inline_calls(order_effects(build.graph))
    assert value in count.control and noted in build.graph.ops
