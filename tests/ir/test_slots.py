"""Slots in host memory, on graphs by hand: what is read and written there, and what is refused."""

from __future__ import annotations

import pytest

from tfpar.ir.graph import DType, Gradient, Graph, Op, Variable
from tfpar.ir.passes.slots import offload_slots
from tfpar.ir.text import format_graph, parse_graph
from tfpar.ir.traits import GIVES, ON_HOST, TAKES
from tfpar.spec import PlanError


class Sketch:
    """A graph that grows op by op."""

    def __init__(self):
        self.graph = Graph()

    def op(self, name, op_type, *inputs, control=(), outputs=1, dtype="float32"):
        stateful = "Variable" in op_type or op_type.startswith("Resource")
        op = Op(name, op_type, inputs, {"dtype": DType("float32")}, control, stateful)
        for _ in range(outputs):
            op.add_output((4, 2), dtype)
        self.graph.ops.append(op)
        if not outputs:
            self.graph.effects.append(op)
        return op if not outputs else op.outputs[0]

    def variable(self, name, trainable=False):
        handle = self.op(f"handle/{name}", "Placeholder", dtype="resource")
        self.graph.variables.append(Variable(name, (4, 2), "float32", trainable, handle))
        return handle

    def gradient(self, name):
        made = self.op(f"gradient_tape/{name}", "Placeholder")
        self.graph.inputs.append(made)
        return made


def momentum(count: int = 1) -> tuple[Graph, dict[str, str], list[Gradient]]:
    """`m += g - m; w -= m` for some weights."""
    s, slots, gradients = Sketch(), {}, []
    for i in range(count):
        w, m, g = s.variable(f"w{i}", True), s.variable(f"m{i}"), s.gradient(f"g{i}")
        before = s.op(f"{i}/before", "ReadVariableOp", m)
        change = s.op(f"{i}/change", "Sub", g, before)
        added = s.op(f"{i}/add", "AssignAddVariableOp", m, change, control=[before.op], outputs=0)
        after = s.op(f"{i}/after", "ReadVariableOp", m, control=[added])
        s.op(f"{i}/update", "AssignSubVariableOp", w, after, outputs=0)
        slots[f"m{i}"] = f"w{i}"
        gradients.append(Gradient(f"w{i}", g))
    return s.graph, slots, gradients


def offloaded(graph, slots, gradients=()):
    return offload_slots(graph, {*slots.values()}, slots, gradients)


def named(graph):
    return {op.name: op for op in graph.ops}


def test_a_slot_is_read_once_and_written_once():
    graph, slots, gradients = momentum()
    found = offloaded(graph, slots, gradients)
    ops = named(found)
    on_host = {op.name: (op.type, op.attrs[ON_HOST]) for op in found.ops if ON_HOST in op.attrs}
    assert on_host == {
        "0/before": ("ReadVariableOp", GIVES),
        "0/add/store": ("AssignVariableOp", TAKES),
    }
    value = ops["0/add/value"]
    assert value.type == "AddV2" and [t.name for t in value.inputs] == ["0/before:0", "0/change:0"]
    assert ops["0/update"].inputs[1] is value.outputs[0] is ops["0/add/store"].inputs[1]
    assert "0/after" not in ops and "0/add" not in ops
    assert [op.name for op in ops["0/before"].control] == ["gradient_tape/g0"]
    assert found.effects == [ops["0/add/store"], ops["0/update"]]
    marked = {v.name: (v.offloaded, v.on_host) for v in found.variables}
    assert marked == {"w0": (True, False), "m0": (True, True)}
    assert not any(v.offloaded for v in graph.variables) and "0/after" in named(graph)
    assert str(parse_graph(format_graph(found))) == str(found)


def test_two_weights_at_a_time():
    found = named(offloaded(*momentum(4)))
    waits = [{op.name for op in found[f"{i}/before"].control} for i in range(4)]
    assert waits == [
        {"gradient_tape/g0"},
        {"gradient_tape/g1"},
        {"gradient_tape/g2", "0/add/store"},
        {"gradient_tape/g3", "1/add/store"},
    ]


def test_what_is_set_without_being_read_is_only_written():
    s = Sketch()
    s.variable("w", True)
    m, g = s.variable("m"), s.gradient("g")
    s.op("set", "AssignVariableOp", m, g, outputs=0)
    found = offloaded(s.graph, {"m": "w"})
    (store,) = [op for op in found.ops if ON_HOST in op.attrs]
    assert (store.type, store.control, found.effects) == ("AssignVariableOp", [], [store])


def test_what_changes_rows_runs_where_they_lie():
    s = Sketch()
    s.variable("w", True)
    m, g = s.variable("m"), s.gradient("g")
    read = s.op("read", "ReadVariableOp", m)
    scatter = s.op("rows", "ResourceScatterAdd", m, g, g, control=[read.op], outputs=0)
    s.op("again", "ReadVariableOp", m, control=[scatter])
    found = offloaded(s.graph, {"m": "w"})
    sides = {op.name: op.attrs.get(ON_HOST) for op in found.ops if op.name in ("read", "rows")}
    assert sides == {"read": GIVES, "rows": TAKES}
    assert named(found)["again"].attrs[ON_HOST] == GIVES
    assert named(found)["again"].control == [named(found)["rows"]]


@pytest.mark.parametrize(
    "op_type, why", [("ResourceApplyMomentum", "other variables"), ("While", "runs a body")]
)
def test_what_needs_a_slot_on_the_device_is_refused(op_type, why):
    s = Sketch()
    w, m, g = s.variable("w", True), s.variable("m"), s.gradient("g")
    s.op("apply", op_type, *([w] if "Resource" in op_type else []), m, g, outputs=0)
    with pytest.raises(PlanError, match=f"slot 'm' cannot .* {op_type} 'apply' .*{why}.* 'w' out"):
        offloaded(s.graph, {"m": "w"})


def test_a_graph_without_its_optimizer_is_marked_alone():
    graph, _, _ = momentum()
    found = offload_slots(graph, {"w0"}, {})
    assert [v.name for v in found.variables if v.offloaded] == ["w0"]
    assert not [op for op in found.ops if ON_HOST in op.attrs]
