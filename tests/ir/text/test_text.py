"""Graphs as text: they read back the same, and malformed text is refused by line."""

from __future__ import annotations

import numpy as np
import pytest

from tests.ir.text.same import assert_same, assert_same_step
from tfpar.ir.builder import GraphBuilder
from tfpar.ir.fingerprint import fingerprint
from tfpar.ir.graph import DType, FunctionRef, Gradient, Graph, Op, Variable
from tfpar.ir.step import StepGraph
from tfpar.ir.text import format_graph, format_step, parse_graph, parse_step
from tfpar.spec import GraphTextError

DENSE = """\
graph(%x) {
  variable "dense/kernel": float32[4,2] = %kernel, trainable, place "net/dense/kernel"
  %x: float32[8,4] = Placeholder {dtype = float32}
  %kernel: resource[4,2] = Placeholder {dtype = resource}
  %read: float32[4,2] = ReadVariableOp(%kernel) {dtype = float32}
  %dense/MatMul: float32[8,2] = MatMul(%x, %read) {T = float32, transpose_a = false}
  return(%dense/MatMul)
}
"""


def dense() -> Graph:
    build = GraphBuilder()

    def fed(name: str, shape: tuple[int, ...], dtype: str):
        attrs = {"dtype": DType(dtype)}
        return build.emit("Placeholder", (), [(shape, dtype)], attrs, name).outputs[0]

    x, handle = fed("x", (8, 4), "float32"), fed("kernel", (4, 2), "resource")
    attrs = {"dtype": DType("float32")}
    read = build.emit("ReadVariableOp", (handle,), [((4, 2), "float32")], attrs, "read").outputs
    attrs = {"T": DType("float32"), "transpose_a": False}
    y = build.emit("MatMul", (x, *read), [((8, 2), "float32")], attrs, "dense/MatMul").outputs
    place = "net/dense/kernel"
    build.graph.variables = [Variable("dense/kernel", (4, 2), "float32", True, handle, place)]
    build.graph.inputs, build.graph.outputs = [x], list(y)
    return build.graph


def everything() -> StepGraph:
    """Bodies in bodies, odd names, several results, effects, control edges, unknown shapes."""
    graph = dense()
    (y,) = graph.outputs
    split = Op("odd name: %1", "Split", [y, y], {"num_split": 2})
    split.add_output((4, None), "float32")
    split.add_output(None, "variant")
    debug = Op("print//it", "PrintV2", [split.outputs[1]], {}, [split], stateful=True)
    late = Op("late", "Identity", [], {"refs": [FunctionRef("body"), FunctionRef("")]}, [debug])
    late.add_output((), "string")
    late.inputs = [late.outputs[0]]  # as the back edge of a loop that is no function
    body, inner = dense(), dense()
    inner.functions = body.functions = graph.functions
    graph.functions |= {"body": body, "body#2": inner}
    own = dense()  # with bodies that nobody else knows
    own.functions = {"private": dense()}
    own.functions["private"].functions = own.functions
    graph.functions["own"] = own
    graph.ops += [split, debug, late]
    graph.effects = [debug, late]
    graph.inputs = [*graph.inputs, graph.variables[0].handle]
    marks = [Gradient("dense/kernel", y), Gradient("rows", y, split.outputs[0])]
    return StepGraph(graph, 1, gradients=marks)


def test_the_text_is_as_the_description_has_it():
    assert format_graph(dense()) == DENSE
    assert str(dense()) == DENSE


def test_a_graph_reads_back():
    graph = parse_graph(DENSE)
    assert_same(graph, dense())
    assert fingerprint(graph) == fingerprint(dense())


def test_whatever_a_graph_has_reads_back():
    step = everything()
    text = format_step(step)
    read = parse_step(text)
    assert_same_step(read, step)
    assert format_step(read) == text
    functions = read.graph.functions
    assert functions["body"].functions is functions
    assert functions["own"].functions is not functions


def test_a_graph_may_be_empty():
    assert_same(parse_graph(format_graph(Graph())), Graph())


def test_notes_are_comments():
    graph = dense()
    notes = {op: f"{op.name}, seen" for op in graph.ops}
    text = format_graph(graph, notes)
    assert "// read, seen" in text
    assert_same(parse_graph(f"// first\n\n{text}"), graph)


def test_waiting_for_what_is_not_there_is_left_out():
    graph = dense()
    graph.ops[-1].control = [Op("elsewhere", "NoOp")]
    assert parse_graph(format_graph(graph)).ops[-1].control == []


def test_text_may_be_written_by_hand():
    graph = parse_graph(
        """
        graph() {
          %sum: int32[2] = AddV2(%two, %two:0) {T = int32}   // before what it reads
          %two: int32[2] = Const {value = dense<int32[2]: all 2>, dtype = int32}
          return(%sum)
        }
        """
    )
    assert [op.name for op in graph.ops] == ["sum", "two"]
    assert graph.ops[0].inputs == [graph.ops[1].outputs[0]] * 2
    np.testing.assert_array_equal(graph.ops[1].attrs["value"], [2, 2])


@pytest.mark.parametrize(
    "old, new, line, what",
    [
        ("graph(%x) {", "grph(%x) {", 1, "expected 'graph'"),
        ("graph(%x) {", "graph(%x)", 1, "expected '{', found its end"),
        ("graph(%x) {", "graph(%z) {", 1, "there is no op 'z'"),
        ("= %kernel, trainable", "= %colonel, trainable", 2, "there is no op 'colonel'"),
        ("trainable", "trained", 2, "expected 'place', found 'trained"),
        ("float32[8,4] =", "float32[8,four] =", 3, "expected a size"),
        ("{dtype = resource}", "{dtype = resource", 4, "expected '}', found its end"),
        ("ReadVariableOp(%kernel)", "ReadVariableOp(%kernel:2)", 5, "has 1 results"),
        ("%dense/MatMul: ", "%read: ", 6, "there is an op 'read' already"),
        ("false}", "false} at once", 6, "expected the end of the line, found 'at once'"),
        ("false}", "dense<float32[3]: 1.0 2.0>}", 6, "no array of float32"),
        ("false}", "dense<float33[1]: 1.0>}", 6, "no array of float33"),
        ("false}", 'dense<int8[1]: zlib "!">}', 6, "no array of int8"),
        ("  return(%dense/MatMul)\n", "", 7, "expected 'return(...)'"),
        ("return(%dense/MatMul)", "%dense", 7, "expected ':'"),
        ("}\n", "", 8, "expected an op, a variable"),
        ("\n}\n", "\n}\n}\n", 9, "expected nothing more"),
    ],
)
def test_malformed_text_is_refused_by_its_line(old, new, line, what):
    position = DENSE.rindex(old) if old in ("}\n", "\n}\n") else DENSE.index(old)
    text = DENSE[:position] + new + DENSE[position + len(old) :]
    with pytest.raises(GraphTextError) as error:
        parse_graph(text)
    assert str(error.value).startswith(f"Line {line} ")
    assert what in str(error.value)
