"""Where XLA compiles a step, what it fuses is one kernel: it starts, reads and writes once.

Rows of 8 entries, 4 bytes each, on devices that move a byte a second and start an op in 1000 s:
arithmetic takes no time.
"""

from __future__ import annotations

import dataclasses

import pytest

import tfpar.rules  # noqa: F401 - registers the rules
from tests.clusters import device, two_levels
from tests.plan.graphs import mlp
from tfpar.cluster import Link
from tfpar.cost.cost import Cost
from tfpar.cost.evaluation import evaluate
from tfpar.ir import FORWARD, DType, Graph, GraphBuilder, Roles, Tensor, Variable
from tfpar.observability.report import build_report
from tfpar.plans import plan_from_constraints
from tfpar.propagation import prepare, propagate
from tfpar.spec import Mesh, Replicate, Shard

START, BATCH, WIDTH = 1000.0, 4, 8
ROWS, ROW = 4 * BATCH * WIDTH, 4 * WIDTH
SLOW = device(2.0**100, 2.0**100, 1e9, 1.0, START)
FREE = Link(2.0**100, 0.0)
CLUSTER = two_levels("slow memory", 1, 2, SLOW, FREE, FREE)


class Layers:
    """A graph of products and what is between them."""

    def __init__(self) -> None:
        self.build = GraphBuilder()
        self.x = self.fed("x", (BATCH, WIDTH))

    def fed(self, name: str, shape: tuple[int, ...]) -> Tensor:
        attrs = {"dtype": DType("float32")}
        fed = self.build.emit("Placeholder", (), [(shape, "float32")], attrs, name).outputs[0]
        self.build.graph.inputs.append(fed)
        return fed

    def weight(self, name: str, shape: tuple[int, ...]) -> Tensor:
        attrs = {"dtype": DType("float32")}
        handle = self.build.emit("Placeholder", (), [(shape, "resource")], attrs, f"handle/{name}")
        graph, (tensor,) = self.build.graph, handle.outputs
        graph.variables.append(Variable(name, shape, "float32", True, tensor))
        return self.build.one("ReadVariableOp", (tensor,), shape, "float32", attrs)

    def product(self, x: Tensor, name: str) -> Tensor:
        attrs = {"T": DType("float32"), "transpose_a": False, "transpose_b": False}
        kernel = self.weight(name, (WIDTH, WIDTH))
        return self.build.one("MatMul", (x, kernel), (BATCH, WIDTH), "float32", attrs)

    def biased(self, x: Tensor) -> Tensor:
        return self.build.binary("AddV2", x, self.weight("bias", (WIDTH,)))

    def giving(self, *outputs: Tensor) -> Graph:
        self.build.graph.outputs.extend(outputs)
        return self.build.graph


def price(graph: Graph, jit_compile: bool = True, ranks: int = 1, **anchors: object) -> Cost:
    mesh, prepared = Mesh.of([ranks]), prepare(graph)
    given = dataclasses.replace(plan_from_constraints(graph, mesh).anchors(), **anchors)
    laid = propagate(prepared, mesh, given)
    return evaluate(laid, CLUSTER, Roles.of(laid.graph, jit_compile=jit_compile))


def products(count: int) -> float:
    """What products take: each reads two matrices and writes one."""
    return count * (START + 2 * ROWS + 4 * WIDTH * WIDTH)


# --- kernels ----------------------------------------------------------------------------------


def test_a_chain_between_two_products_starts_once_reads_what_enters_and_writes_what_leaves():
    layers = Layers()
    build = layers.build
    summed = layers.biased(layers.product(layers.x, "first"))
    gated = build.binary("Mul", summed, build.unary("Sigmoid", summed))  # two readers, one kernel
    graph = layers.giving(layers.product(build.reshape(gated, (BATCH, WIDTH)), "second"))
    compiled, plain = price(graph), price(graph, jit_compile=False)
    enters, leaves = ROWS + ROW, ROWS
    assert compiled.compute_s == (products(2) + START + enters + leaves, 0, 0)
    by_ops = (enters + ROWS) + 2 * ROWS + 3 * ROWS
    assert plain.compute_s == (products(2) + 3 * START + by_ops, 0, 0)
    assert compiled.memory_bytes == plain.memory_bytes, "what is stored is priced as without XLA"


def test_what_a_kernel_needs_twice_it_reads_once():
    layers = Layers()
    x, y = layers.x, layers.fed("y", (BATCH, WIDTH))
    build = layers.build
    graph = layers.giving(build.binary("Mul", x, build.binary("Sub", y, x)))
    assert price(graph).compute_s[FORWARD] == START + 3 * ROWS
    assert price(graph, jit_compile=False).compute_s[FORWARD] == 2 * START + 6 * ROWS


def test_what_leaves_is_written_and_read_again():
    layers = Layers()
    summed = layers.biased(layers.product(layers.x, "first"))
    last = layers.build.unary("Relu", layers.build.unary("Exp", summed))
    graph = layers.giving(last, summed)
    two_kernels = 2 * START + (ROWS + ROW + ROWS) + 2 * ROWS
    assert price(graph).compute_s[FORWARD] == products(1) + two_kernels


def test_what_two_kernels_read_is_written():
    """A softmax by hand: the exponentials go into a sum, and are divided by it."""
    layers = Layers()
    build = layers.build
    exps = build.unary("Exp", build.unary("Neg", layers.x))
    total = build.expand_dims(build.reduce("Sum", exps, [1]), 1)
    graph = layers.giving(build.binary("RealDiv", exps, total))
    sums, axis = 4 * BATCH, 4
    expected = 3 * START + 2 * ROWS + (ROWS + axis + sums) + (2 * ROWS + sums)
    assert price(graph).compute_s[FORWARD] == expected


@pytest.mark.parametrize("end", ["Sum", "L2Loss"])
def test_a_reduction_ends_the_kernel_of_what_it_reads(end):
    layers = Layers()
    build = layers.build
    x = build.unary("Exp", build.unary("Neg", layers.x))
    if end == "Sum":
        last, axes = build.reduce("Sum", x, [0, 1]), 8
    else:
        last, axes = build.one("L2Loss", (x,), (), "float32", {"T": DType("float32")}), 0
    graph = layers.giving(build.unary("Sqrt", last))
    one, root = START + ROWS + axes + 4, START + 8
    assert price(graph).compute_s[FORWARD] == one + root


def test_what_waits_for_other_ops_is_no_part_of_a_kernel():
    """A block that is computed again begins with Identities that wait, which are barriers."""
    layers = Layers()
    build = layers.build
    first = build.unary("Exp", layers.x)
    barrier = build.unary("Identity", first)
    barrier.op.control.append(layers.product(layers.x, "other").op)
    graph = layers.giving(build.unary("Neg", barrier))
    assert price(graph).compute_s[FORWARD] == products(1) + 2 * (START + 2 * ROWS)


def test_an_assignment_ends_the_kernel_of_what_it_writes():
    """m = m + 2 w: the slot and the weight are read, the slot is written."""
    layers = Layers()
    build, matrix = layers.build, 4 * WIDTH * WIDTH
    weight = layers.weight("kernel", (WIDTH, WIDTH))
    slot = layers.weight("slot", (WIDTH, WIDTH))
    doubled = build.binary("Mul", weight, build.const(2.0, "float32"))
    added = build.binary("AddV2", slot, doubled)
    attrs = {"dtype": DType("float32")}
    handle = slot.op.inputs[0]
    build.graph.effects.append(
        build.emit("AssignVariableOp", (handle, added), [], attrs, stateful=True)
    )
    compiled, plain = price(build.graph), price(build.graph, jit_compile=False)
    assert sum(compiled.compute_s) == START + 3 * matrix + 4
    assert sum(plain.compute_s) == 3 * START + 7 * matrix + 4


def test_a_kernel_ends_with_the_pass_of_the_step():
    """What the forward pass hands to the backward pass lies in memory, whoever reads it."""
    layers = Layers()
    build = layers.build
    kept = build.unary("Exp", layers.x)
    build.name = "gradient_tape/model"
    graph = layers.giving(build.unary("Neg", build.unary("Sqrt", kept)))
    assert price(graph).compute_s == (START + 2 * ROWS, START + 2 * ROWS, 0)


def test_what_lists_and_strings_hold_is_not_fused():
    layers = Layers()
    build = layers.build
    listed = build.one("ZerosLike", (layers.x,), (BATCH,), "variant", {"T": DType("variant")})
    words = build.one("Cast", (layers.x,), (BATCH, WIDTH), "string")
    graph = layers.giving(listed, words, build.unary("Neg", layers.x))
    (only,) = Roles.of(graph, jit_compile=True).kernels
    assert only.type == "Neg"


# --- collectives ------------------------------------------------------------------------------


def test_a_collective_cuts_a_kernel():
    """The sum is gathered: each rank writes its half, and a kernel starts that reads the whole."""
    layers = Layers()
    columns = layers.product(layers.x, "first")
    summed = layers.biased(columns)
    graph = layers.giving(layers.build.unary("Relu", layers.build.unary("Neg", summed)))
    variables = {"first": (Shard(1),), "bias": (Shard(0),)}
    whole, half = price(graph), ROWS / 2
    gathered = price(
        graph, ranks=2, variables=variables, tensors={summed.op.name + ":0": (Replicate(),)}
    )
    product = START + ROWS + (4 * WIDTH * WIDTH + ROWS) / 2
    cut = START + half + ROWS
    assert whole.compute_s[FORWARD] == products(1) + START + ROWS + ROW + ROWS
    assert gathered.collectives == 1
    assert gathered.compute_s[FORWARD] == pytest.approx(
        product + START + half + ROW / 2 + cut + ROWS
    )


def test_a_part_that_a_rank_takes_of_what_it_has_cuts_nothing():
    layers = Layers()
    first = layers.build.unary("Exp", layers.x)
    graph = layers.giving(layers.build.unary("Neg", first))
    tensors, outputs = {first.op.name + ":0": (Shard(0),)}, [(Shard(0),)]
    sliced = price(graph, ranks=2, inputs=[(Replicate(),)], tensors=tensors, outputs=outputs)
    assert sliced.collectives == 0
    assert sliced.compute_s[FORWARD] == pytest.approx(START + ROWS + ROWS / 2)


# --- the step ---------------------------------------------------------------------------------


def test_an_update_that_the_graph_lacks_is_fused_too():
    graph = mlp(hidden=WIDTH)
    weights = sum(v.num_bytes for v in graph.variables)
    for jit_compile in (False, True):
        mesh = Mesh.of([1])
        laid = propagate(prepare(graph), mesh, plan_from_constraints(graph, mesh).anchors())
        roles = Roles.of(laid.graph, jit_compile=jit_compile)
        without = evaluate(laid, CLUSTER, roles).seconds
        adam = evaluate(laid, CLUSTER, roles, state_ratio=2.0).seconds
        assert adam - without == pytest.approx((12 if jit_compile else 30) * weights)


def test_layers_are_priced_as_the_step_is():
    graph, mesh = mlp(hidden=WIDTH), Mesh.of([1])
    plan = dataclasses.replace(plan_from_constraints(graph, mesh), cluster=CLUSTER)
    laid = propagate(prepare(graph), mesh, plan.anchors())
    for jit_compile in (False, True):
        laid.jit_compile = jit_compile
        cost = evaluate(laid, CLUSTER, Roles.of(graph, jit_compile=jit_compile))
        seconds = sum(layer.total_s for layer in build_report(plan, laid).layers)
        assert seconds == pytest.approx(cost.seconds)
