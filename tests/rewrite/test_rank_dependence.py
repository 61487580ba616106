"""Along which axes ranks differ: what they hold, what collectives make alike, what they write."""

from __future__ import annotations

import numpy as np

from tfpar.compile.local.local_graph import LocalProgram
from tfpar.compile.local.rank_dependence import DIFFERS, find_body_inputs, find_rank_dependent_axes
from tfpar.compile.local.reshard import all_reduce
from tfpar.ir import DType, FunctionRef, Graph, GraphBuilder, Tensor, Variable
from tfpar.spec import Mesh, Replicate, Shard, Spec

WHOLE, ROWS, COLUMNS = (
    (Replicate(), Replicate()),
    (Shard(0), Replicate()),
    (Replicate(), Shard(1)),
)


class Program:
    """Of 2x3 ranks, whose one input is split along the first axis."""

    def __init__(self) -> None:
        self.build = GraphBuilder(Graph(functions={}))
        self.x = self.handle("float32")
        self.specs: dict[str, Spec] = {}

    def handle(self, dtype: str) -> Tensor:
        return self.build.emit("Placeholder", (), [((4, 4), dtype)], {}, name="given").outputs[0]

    def variable(self, name: str, spec: Spec) -> Tensor:
        handle = self.handle("resource")
        self.specs[name] = spec
        variable = Variable(name, (4, 4), "float32", True, handle)
        self.build.graph.variables.append(variable)
        return handle

    def read(self, handle: Tensor) -> Tensor:
        made = self.build.emit("ReadVariableOp", [handle], [((4, 4), "float32")], {}, name="read")
        return made.outputs[0]

    def axes(self, *tensors: Tensor) -> list[set[int]]:
        graph = self.build.graph
        graph.inputs = [self.x]
        program = LocalProgram(graph, Mesh.of([2, 3]), [(8, 4)], [ROWS], [], self.specs)
        found = find_rank_dependent_axes(program)
        return [{*found[t.op]} for t in tensors]


def test_ranks_differ_where_what_they_read_does():
    step = Program()
    weight = step.read(step.variable("weight", COLUMNS))
    both = step.build.binary("Mul", step.x, weight)
    summed = all_reduce(step.build, both, (0,), "sum")
    scattered = step.build.one("ReduceScatter", (weight,), (4, 4), "float32", {"axes": (0,)})
    constants = [np.int32(i) for i in (0, 1, 2, 0, 1, 2)]
    of_ranks = step.build.per_rank(constants)
    assert step.axes(both, weight, summed, scattered, of_ranks) == [{0, 1}, {1}, {1}, {0, 1}, {1}]


def test_what_ranks_share_they_write_once():
    step = Program()
    handle = step.variable("mean", WHOLE)
    attrs = {"dtype": DType("float32")}
    write = step.build.emit(
        "AssignVariableOp", [handle, step.x], [], attrs, name="w", stateful=True
    )
    step.axes(step.x)
    graph = step.build.graph
    program = LocalProgram(graph, Mesh.of([2, 3]), [(8, 4)], [ROWS], [], step.specs)
    assert find_rank_dependent_axes(program)[write] == frozenset()


def test_what_a_loop_takes_stays_with_each_rank():
    step = Program()
    handle = step.variable("state", WHOLE)
    read = step.read(handle)
    body = GraphBuilder(Graph(functions=step.build.graph.functions))
    inside = body.placeholder(handle, "given")
    body.unary("Tanh", inside)
    step.build.graph.functions["body"] = body.graph
    call = step.build.emit("While", [handle], [], {"body": FunctionRef("body")}, name="loop")
    assert step.axes(read) == [{0, 1}]
    assert find_body_inputs(step.build.graph) == {handle}
    # A region runs where the variable lies, and may share it.
    call.attrs[DIFFERS] = []
    assert find_body_inputs(step.build.graph) == set()
    assert step.axes(read) == [set()]
