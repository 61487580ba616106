"""What XLA is to compile: whole stretches between collectives, that run when they did before."""

from __future__ import annotations

from collections.abc import Mapping

from tfpar.compile.local.local_graph import LocalProgram
from tfpar.compile.local.rank_dependence import DIFFERS, Axes, find_rank_dependent_axes
from tfpar.compile.local.reshard import all_reduce
from tfpar.compile.local.transfers import recv, send
from tfpar.compile.local.xla_regions import MUST_COMPILE, compile_regions, find_uncompiled_ops
from tfpar.ir import DType, Graph, GraphBuilder, Op, Tensor, Variable
from tfpar.spec import Mesh, Replicate, Shard

LARGE = (1024, 512)  # 2 MiB
FLOAT = DType("float32")


def compiles(op: Op) -> bool:
    return op.type not in ("AllReduce", "Cosh")


class Step:
    """A step by hand."""

    def __init__(self) -> None:
        self.build = GraphBuilder(Graph(functions={}))

    def input(self, *shape: int) -> Tensor:
        made = self.build.emit("Placeholder", (), [(shape or LARGE, "float32")], {}, name="in")
        return made.outputs[0]

    def variable(self, name: str, *shape: int) -> Tensor:
        shape = shape or LARGE
        handle = self.build.emit("Placeholder", (), [(shape, "resource")], {}, name=name).outputs[0]
        self.build.graph.variables.append(Variable(name, shape, "float32", True, handle))
        return handle

    def read(self, handle: Tensor) -> Tensor:
        attrs = {"dtype": FLOAT}
        outputs = [(handle.shape, "float32")]
        return self.build.emit(
            "ReadVariableOp", [handle], outputs, attrs, stateful=True, name="read"
        ).outputs[0]

    def assign(self, handle: Tensor, value: Tensor, after: Op | None = None) -> Op:
        control = () if after is None else [after]
        attrs = {"dtype": FLOAT}
        op = self.build.emit(
            "AssignVariableOp", [handle, value], [], attrs, "assign", control, stateful=True
        )
        self.build.graph.effects.append(op)
        return op

    def chain(self, x: Tensor, length: int = 4, name: str = "chain") -> Tensor:
        self.build.name = name
        for _ in range(length):
            x = self.build.unary("Tanh", x)
        return x

    def summed(self, x: Tensor) -> Tensor:
        return all_reduce(self.build, x, (0,), "sum")

    def returns(self, *tensors: Tensor) -> None:
        self.build.graph.outputs += tensors

    def compiled(self, differing: Mapping[Op, Axes] | None = None) -> Graph:
        graph = compile_regions(self.build.graph, compiles, differing=differing)
        seen: set[Op] = set()
        for op in graph.ops:
            assert all(b in seen for b in (*(t.op for t in op.inputs), *op.control)), op
            seen.add(op)
        return graph


def calls(graph: Graph) -> list[Op]:
    return [op for op in graph.ops if op.attrs.get(MUST_COMPILE)]


def inside(graph: Graph, call: Op) -> list[str]:
    return [op.type for op in graph.functions[call.attrs["f"]].ops if op.type != "Placeholder"]


def test_a_collective_cuts_and_what_repeats_is_one_function():
    step = Step()
    x = step.chain(step.input())
    for _ in range(3):
        x = step.chain(step.summed(x))
    step.returns(x)
    graph = step.compiled()
    found = calls(graph)
    assert [op.type for op in graph.ops][1:] == ["PartitionedCall", "AllReduce"] * 3 + [
        "PartitionedCall"
    ]
    assert len({call.attrs["f"] for call in found}) == 1
    assert inside(graph, found[0]) == ["Tanh"] * 4
    assert graph.outputs == found[-1].outputs


def test_what_runs_while_a_large_tensor_is_summed_is_a_region_of_its_own():
    def regions(*shape: int) -> list[list[str]]:
        step = Step()
        x = step.input(*shape)
        gradient = step.chain(x, name="gradient")
        beside = step.chain(step.build.unary("Exp", gradient), name="beside")
        step.returns(step.chain(step.summed(gradient), name="after"), beside)
        graph = step.compiled()
        return [inside(graph, call) for call in calls(graph)]

    assert sorted(regions(*LARGE)) == [["Exp", *["Tanh"] * 4], ["Tanh"] * 4, ["Tanh"] * 4]
    # What is small is summed before a region of its own would have begun.
    assert sorted(regions(4, 4)) == [["Tanh"] * 4, [*["Tanh"] * 4, "Exp", *["Tanh"] * 4]]


def test_small_things_are_computed_where_they_are_needed():
    step = Step()
    rate = step.chain(step.input(1), 2, "rate")
    x = step.summed(step.chain(step.input()))
    step.returns(step.build.binary("Mul", step.chain(x), rate))
    graph = step.compiled()
    assert [len(inside(graph, call)) for call in calls(graph)] == [4, 7]


def test_what_is_received_may_be_made_of_what_was_sent_before():
    """A norm over two stages: here goes a part of it, and the whole comes back."""
    step = Step()
    gradient = step.chain(step.summed(step.chain(step.input())))
    send(step.build, step.chain(gradient, name="part"), "part", [1])
    norm = recv(step.build, LARGE, "float32", "norm", [1])
    step.returns(step.chain(step.build.binary("Mul", gradient, norm), name="clipped"))
    graph = step.compiled()
    assert [inside(graph, call) for call in calls(graph)] == [
        ["Tanh"] * 4,
        ["Tanh"] * 8,
        ["Mul", *["Tanh"] * 4],
    ]


def test_few_ops_stay_as_they_are_but_for_draws():
    step = Step()
    step.returns(step.chain(step.input(), 3))
    assert not calls(step.compiled())
    step = Step()
    shape = step.build.const([8, 8], "int32")
    key = step.build.emit("Placeholder", (), [((1,), "uint64")], {}, name="key").outputs[0]
    counter = step.build.emit("Placeholder", (), [((2,), "uint64")], {}, name="counter").outputs[0]
    algorithm = step.build.const(1, "int32")
    inputs = [shape, key, counter, algorithm]
    step.returns(
        *step.build.emit("StatelessRandomUniformV2", inputs, [((8, 8), "float32")]).outputs
    )
    graph = step.compiled()
    (call,) = calls(graph)
    assert inside(graph, call) == ["Const", "Const", "StatelessRandomUniformV2"]
    assert not any(op.type == "Const" for op in graph.ops)


def test_each_region_reads_variables_for_itself_and_the_update_waits_for_all():
    step = Step()
    weight = step.variable("weight")
    value = step.read(weight)
    x = step.chain(step.build.binary("Mul", step.input(), value))
    x = step.summed(x)
    last = step.chain(step.build.binary("Mul", x, value))
    new = step.chain(step.build.binary("Mul", x, step.input()), name="update")
    step.assign(weight, step.build.binary("AddV2", new, value))
    step.returns(last)
    graph = step.compiled()
    assert all(op.type != "ReadVariableOp" for op in graph.ops)
    first, second = calls(graph)
    assert inside(graph, first).count("ReadVariableOp") == 1
    body = graph.functions[second.attrs["f"]]
    (read,) = (op for op in body.ops if op.type == "ReadVariableOp")
    (assign,) = (op for op in body.ops if op.type == "AssignVariableOp")
    assert read in assign.control and body.effects == [assign]
    assert first in second.control and graph.effects == [second]


def test_a_value_that_is_used_after_a_write_stays_what_it_was():
    step = Step()
    weight = step.variable("weight")
    value = step.read(weight)
    new = step.chain(step.input())
    written = step.assign(weight, new, after=value.op)
    used = step.build.binary("Sub", step.summed(new), value)
    used.op.control.append(written)
    step.returns(step.chain(used))
    graph = step.compiled()
    (read,) = (op for op in graph.ops if op.type == "ReadVariableOp")
    (assign,) = graph.effects
    _, last = calls(graph)
    assert read in assign.control and assign in last.control
    assert read.outputs[0] in last.inputs and "ReadVariableOp" not in inside(graph, last)


def test_what_is_recomputed_is_not_taken_for_what_it_repeats():
    step = Step()
    x = step.input()
    forward = step.chain(x)
    gradient = step.chain(step.build.binary("Mul", forward, x), name="gradient")
    again = step.build.emit("Identity", [x], [(LARGE, "float32")], {"T": FLOAT}, "enter").outputs[0]
    again.op.control.append(gradient.op)
    step.returns(step.build.binary("Mul", gradient, step.chain(again, name="again")))
    graph = step.compiled()
    (call,) = calls(graph)
    body = graph.functions[call.attrs["f"]]
    (barrier,) = (op for op in body.ops if op.type == "XlaOptimizationBarrier")
    assert [t.op.type for t in barrier.inputs] == ["Placeholder", "Tanh"]


def test_a_loss_waits_for_the_update_without_a_barrier():
    """It would keep the weights that were read beside those that are written."""
    step = Step()
    weight = step.variable("weight")
    value = step.read(weight)
    loss = step.chain(step.build.binary("Mul", step.input(), value))
    written = step.assign(weight, loss, after=value.op)
    told = step.build.emit("Identity", [loss], [(LARGE, "float32")], {"T": FLOAT}, "told")
    told.control += [value.op, written]
    step.returns(told.outputs[0])
    graph = step.compiled()
    (call,) = calls(graph)
    body = graph.functions[call.attrs["f"]]
    (last,) = (op for op in body.ops if op.type == "Identity")
    assert [op.type for op in last.control] == ["ReadVariableOp", "AssignVariableOp"]


def test_what_xla_cannot_take_is_left_out_and_named():
    step = Step()
    x = step.build.unary("Cosh", step.chain(step.input()))
    step.returns(step.chain(x))
    assert [op.type for op in find_uncompiled_ops(step.build.graph, compiles)] == ["Cosh"]
    graph = step.compiled()
    assert len(calls(graph)) == 2
    assert [op.type for op in find_uncompiled_ops(graph, compiles)] == ["Cosh"]


def test_what_ranks_in_one_memory_share_is_a_region_of_its_own():
    step = Step()
    weight = step.variable("weight")
    value = step.read(weight)
    decayed = step.chain(value)
    x = step.input()
    own = step.chain(step.build.binary("Mul", x, decayed))
    update = step.chain(decayed)
    # The write waits for what each rank reads; with it the first region would wait for the second.
    write = step.assign(weight, step.chain(update), after=own.op)
    step.returns(own)
    graph = step.build.graph
    graph.inputs = [x]
    program = LocalProgram(
        graph, Mesh.of([2]), [(2, *LARGE)], [(Shard(0),)], [(Shard(0),)], {"weight": (Replicate(),)}
    )
    differing = find_rank_dependent_axes(program)
    assert not differing[decayed.op] and differing[own.op] == {0}
    assert not differing[write] and write.inputs[0] is weight
    step.compiled(differing)
    assert [(call.attrs[DIFFERS], inside(graph, call)) for call in calls(graph)] == [
        ([], ["ReadVariableOp", *["Tanh"] * 12]),
        ([0], ["Mul", *["Tanh"] * 4]),
    ]
    assert [op.type for op in graph.effects] == ["AssignVariableOp"]


def test_lists_are_compiled_with_all_that_takes_them_or_not_at_all():
    def lists(between: bool, length: int = 3) -> list[set[str]]:
        step = Step()
        x = step.summed(step.chain(step.input()))
        shape, size = step.build.const([4, 4], "int32"), step.build.const(length, "int32")
        variant = [((None, 4, 4), "variant")]
        attrs = {"element_dtype": FLOAT}
        (empty,) = step.build.emit("EmptyTensorList", [shape, size], variant, attrs).outputs
        (full,) = step.build.emit("TensorListPushBack", [empty, x], variant, attrs).outputs
        y = step.chain(x)
        if between:
            y = step.chain(step.summed(y))
        popped = [variant[0], (LARGE, "float32")]
        _, last = step.build.emit("TensorListPopBack", [full, shape], popped, attrs).outputs
        step.returns(step.chain(step.build.binary("Mul", y, last)))
        graph = step.compiled()
        outside = {op.type for op in find_uncompiled_ops(graph, compiles)}
        return [outside, {t for call in calls(graph) for t in inside(graph, call)}]

    names = {"EmptyTensorList", "TensorListPushBack", "TensorListPopBack"}
    outside, within = lists(between=False)
    assert not outside and names <= within
    for outside, within in (lists(between=True), lists(between=False, length=-1)):
        assert outside == names and within == {"Tanh", "Mul"}
