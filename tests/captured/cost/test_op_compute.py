"""Single ops against numbers counted by hand: FLOPs and times."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from tests.clusters import device, two_levels
from tests.partitioned import Traced, trace
from tfpar.cluster import Link
from tfpar.cost import Pricer, flops, op_compute
from tfpar.cost.pricer import trips
from tfpar.ir import BACKWARD, DType, GraphBuilder, Op, Roles, traits
from tfpar.propagation import WHOLE, Anchors, Decision, OpStrategy, Reshard, prepare, propagate
from tfpar.rules import PLAIN
from tfpar.spec import Mesh, Partial, Replicate, Shard, replicated_spec
from tfpar.tf.interop import convert_func_graph


def all_flops(function, *shapes):
    """Op type -> FLOPs of its ops in `function`, of zeros of `shapes`."""
    args = [np.zeros(s, "float32") for s in shapes]
    prepared = prepare(convert_func_graph(trace(function, args).graph))
    found = {}
    for op in prepared.graph.ops:
        if count := flops(op, prepared.rules[op]):
            found.setdefault(op.type, []).append(count)
    return found


@pytest.mark.parametrize(
    "function, shapes, expected",
    [
        (tf.matmul, [(4, 5), (5, 6)], {"MatMul": [2 * 4 * 5 * 6]}),
        (functools.partial(tf.matmul, transpose_a=True), [(5, 4), (5, 6)], {"MatMul": [240]}),
        (functools.partial(tf.matmul, transpose_b=True), [(4, 5), (6, 5)], {"MatMul": [240]}),
        (tf.matmul, [(1, 5), (5, 1)], {"MatMul": [10]}),
        (tf.matmul, [(3, 4, 5), (3, 5, 6)], {"BatchMatMulV2": [3 * 240]}),
        # Batch dims broadcast: (2, 1) with (3) is (2, 3).
        (tf.matmul, [(2, 1, 4, 5), (3, 5, 6)], {"BatchMatMulV2": [6 * 240]}),
        (
            functools.partial(tf.matmul, adjoint_b=True),
            [(3, 4, 5), (1, 6, 5)],
            {"BatchMatMulV2": [3 * 240]},
        ),
        (
            lambda x, y: tf.einsum("bqhd,bkhd->bhqk", x, y),
            [(2, 3, 4, 5), (2, 6, 4, 5)],
            {"Einsum": [2 * (2 * 4 * 3 * 6 * 5)]},
        ),
        (
            lambda x, y: tf.einsum("...d,dhk->...hk", x, y),
            [(2, 3, 4), (4, 5, 6)],
            {"Einsum": [2 * (2 * 3 * 4 * 5 * 6)]},
        ),
        # What computes no products.
        (lambda x, y: tf.nn.relu(x) + tf.reduce_sum(y), [(4, 5), (5, 6)], {}),
    ],
    ids=[
        "plain",
        "transpose_a",
        "transpose_b",
        "vector",
        "batch",
        "broadcast",
        "adjoint",
        "attention",
        "ellipsis",
        "none",
    ],
)
def test_products(function, shapes, expected):
    assert all_flops(function, *shapes) == expected


def test_gradients_of_a_product_are_two_products():
    def step(x, y):
        z = tf.matmul(x, y)
        return z, *tf.gradients(z, [x, y])

    # z = x y, dx = dz yT (4 x 6 by 6 x 5), dy = xT dz (5 x 4 by 4 x 6).
    assert all_flops(step, (4, 5), (5, 6)) == {"MatMul": [240, 240, 240]}


@pytest.mark.parametrize(
    "layer, x, kernel, expected",
    [
        # Output 2 x 4 x 4 x 16, each entry from 3 x 3 x 3 inputs.
        (
            functools.partial(tf.nn.conv2d, strides=2, padding="SAME"),
            (2, 8, 8, 3),
            (3, 3, 3, 16),
            2 * (2 * 4 * 4 * 16) * 27,
        ),
        (
            functools.partial(tf.nn.conv2d, strides=1, padding="VALID"),
            (2, 8, 8, 3),
            (3, 3, 3, 16),
            2 * (2 * 6 * 6 * 16) * 27,
        ),
        (
            functools.partial(tf.nn.conv2d, strides=1, padding="SAME", dilations=2),
            (2, 8, 8, 3),
            (3, 3, 3, 16),
            2 * (2 * 8 * 8 * 16) * 27,
        ),
        # 3 groups: each of 12 channels reads 2 of 6.
        (
            functools.partial(tf.nn.conv2d, strides=1, padding="SAME"),
            (2, 8, 8, 6),
            (3, 3, 2, 12),
            2 * (2 * 8 * 8 * 12) * 18,
        ),
        # Each of 3 channels makes 4, each entry from 3 x 3 inputs.
        (
            functools.partial(tf.nn.depthwise_conv2d, strides=[1, 2, 2, 1], padding="SAME"),
            (2, 8, 8, 3),
            (3, 3, 3, 4),
            2 * (2 * 4 * 4 * 12) * 9,
        ),
        (
            functools.partial(tf.nn.conv3d, strides=[1, 1, 2, 2, 1], padding="SAME"),
            (2, 4, 8, 8, 3),
            (2, 3, 3, 3, 5),
            2 * (2 * 4 * 4 * 4 * 5) * 54,
        ),
    ],
    ids=["strides", "valid", "dilated", "groups", "depthwise", "3d"],
)
def test_convolutions_and_their_gradients(layer, x, kernel, expected):
    def step(x, w):
        y = layer(x, w)
        return y, *tf.gradients(y, [x, w])

    found = all_flops(step, x, kernel)
    assert sorted(c for counts in found.values() for c in counts) == [expected] * 3
    assert len(found) == 3, "forward, gradient of the input, gradient of the filter"


R, SUM = Replicate(), Partial("sum")
DEVICE = device(1e9, 4e9, 1e9, 1e9, 1e-6)
CLUSTER = two_levels("test", 1, 4, DEVICE, Link(1e9, 1e-6), Link(1e9, 1e-6))
FOUR, THREE = Mesh.of([4]), Mesh.of([3])


def pricer(mesh=FOUR, cluster=CLUSTER, roles=None):
    return Pricer(mesh, cluster, roles or Roles({}, frozenset(), frozenset()))


# --- single ops ---------------------------------------------------------------------


def product(rows=8, inner=16, columns=32, dtype="float32"):
    """(op, rule) of a MatMul."""
    build = GraphBuilder()
    x, w = (
        build.emit("Placeholder", (), [(s, dtype)], {"dtype": DType(dtype)}).outputs[0]
        for s in ((rows, inner), (inner, columns))
    )
    attrs = {"T": DType(dtype), "transpose_a": False, "transpose_b": False}
    build.one("MatMul", (x, w), (rows, columns), dtype, attrs)
    prepared = prepare(build.graph)
    op = build.graph.ops[-1]
    return op, prepared.rules[op]


ROWS = ((Shard(0),), (R,)), ((Shard(0),),)
INNER = ((Shard(1),), (Shard(0),)), ((SUM,),)
COLUMNS = ((R,), (Shard(1),)), ((Shard(1),),)
ALONE = ((R,), (R,)), ((R,),)


def as_split(rule, factor, specs):
    split = WHOLE if factor is None else (rule.factor(factor), PLAIN)
    return Decision(OpStrategy((split,), *specs))


@pytest.mark.parametrize(
    "mesh, factor, specs, seconds",
    [
        # 2 * 8 * 16 * 32 FLOPs at 1e9/s; (8 * 16 + 16 * 32 + 8 * 32) * 4 bytes are 3584.
        (FOUR, None, ALONE, 8.192e-6),
        # 2 rows: 2048 FLOPs, (2 * 16 + 16 * 32 + 2 * 32) * 4 bytes.
        (FOUR, "i", ROWS, 2.432e-6),
        # A quarter of the inner dim: 2048 FLOPs, (8 * 4 + 4 * 32 + 8 * 32) * 4 bytes.
        (FOUR, "k", INNER, 2.048e-6),
        (FOUR, "j", COLUMNS, 2.048e-6),
        # Uneven: 3 of 8 rows, 6 of 16, 11 of 32 columns on the larger ranks.
        (THREE, "i", ROWS, 2 * 3 * 16 * 32 * 1e-9),
        (THREE, "k", INNER, 2 * 8 * 6 * 32 * 1e-9),
        (THREE, "j", COLUMNS, 2 * 8 * 16 * 11 * 1e-9),
    ],
    ids=["whole", "rows", "inner", "columns", "3 rows", "6 inner", "11 columns"],
)
def test_a_product_takes_the_slower_of_arithmetic_and_memory(mesh, factor, specs, seconds):
    op, rule = product()
    found = pricer(mesh).op_seconds(op, rule, as_split(rule, factor, specs))
    assert found == pytest.approx(1e-6 + seconds, rel=1e-12)


def test_two_axes_divide_the_work_twice():
    op, rule = product()
    splits = (rule.factor("i"), PLAIN), (rule.factor("j"), PLAIN)
    strategy = OpStrategy(splits, ((Shard(0), R), (R, Shard(1))), ((Shard(0), Shard(1)),))
    found = pricer(Mesh.of([2, 2])).op_seconds(op, rule, Decision(strategy))
    assert found == pytest.approx(1e-6 + 2 * 4 * 16 * 16 * 1e-9)


def test_half_precision_is_faster_and_half_as_large():
    op, rule = product(dtype="bfloat16")
    found = pricer().op_seconds(op, rule, as_split(rule, None, ALONE))
    assert found == pytest.approx(1e-6 + 8192 / 4e9)
    slow = CLUSTER.with_device(memory_bandwidth=1e8)
    found = pricer(cluster=slow).op_seconds(op, rule, as_split(rule, None, ALONE))
    assert found == pytest.approx(1e-6 + 3584 / 2 / 1e8)


def op_of(function, *args, op_type):
    """(op, rule, prepared) of the one op of `op_type` in `function`."""
    prepared = prepare(convert_func_graph(trace(function, args).graph))
    (op,) = (op for op in prepared.graph.ops if op.type == op_type)
    return op, prepared.rules[op]


@pytest.mark.parametrize(
    "function, op_type, each",
    [(tf.exp, "Exp", 1), (tf.nn.relu, "Relu", 0), (tf.nn.softmax, "Softmax", 1)],
)
def test_exponentials_take_longer_than_what_they_move(function, op_type, each):
    op, rule = op_of(function, np.zeros((8, 32), "float32"), op_type=op_type)
    slow = CLUSTER.with_device(functions_per_s=1e6)
    moved = 1e-6 + 2 * 8 * 32 * 4 / 1e9
    assert pricer().op_seconds(op, rule, whole(op)) == pytest.approx(moved)
    found = pricer(cluster=slow).op_seconds(op, rule, whole(op))
    assert found == pytest.approx(1e-6 + 256e-6 * each if each else moved)
    split = Decision(OpStrategy(((0, PLAIN),), ((Shard(0),),), ((Shard(0),),)))
    found = pricer(cluster=slow).op_seconds(op, rule, split)
    assert found == pytest.approx(1e-6 + 64e-6 * each if each else 1e-6 + (moved - 1e-6) / 4)


@pytest.mark.parametrize(
    "function, shapes, op_type, entries",
    [
        (lambda x: tf.reduce_sum(x, 0), [(8, 32)], "Sum", 8 * 32),
        (lambda x: tf.reduce_mean(x, 0), [(8, 32)], "Mean", 8 * 32),  # as fast as a sum
        (tf.nn.relu, [(8, 32)], "Relu", 0),
        (lambda x, i: tf.gather(x, i), [(100, 32), (4,)], "GatherV2", 4 * 32),  # not the table
    ],
)
def test_ops_of_a_slow_type_take_what_their_entries_take(function, shapes, op_type, entries):
    args = [np.zeros(s, "int32" if len(s) == 1 else "float32") for s in shapes]
    op, rule = op_of(function, *args, op_type=op_type)
    slow = CLUSTER.with_device(entries_per_s={"Sum": 1e6, "GatherV2": 1e6})
    plain = pricer().op_seconds(op, rule, whole(op))
    found = pricer(cluster=slow).op_seconds(op, rule, whole(op))
    assert found == pytest.approx(1e-6 + entries * 1e-6 if entries else plain)


@pytest.mark.parametrize(
    "function, shapes, permuted",
    [
        (tf.matmul, [(4, 5), (5, 6)], 0),
        (functools.partial(tf.matmul, transpose_a=True), [(5, 4), (5, 6)], 0),
        (functools.partial(tf.matmul, transpose_b=True), [(4, 5), (6, 5)], 6 * 5),
        (functools.partial(tf.matmul, adjoint_b=True), [(3, 4, 5), (3, 6, 5)], 3 * 6 * 5),
        # Only keys and values come with the heads behind the length.
        (
            lambda x, y: tf.einsum("acbe,aecd->abcd", x, y),
            [(2, 4, 3, 5), (2, 5, 4, 6)],
            2 * 5 * 4 * 6 + 2 * 3 * 4 * 6,
        ),
        (lambda x, y: tf.einsum("abc,acd->abd", x, y), [(2, 3, 4), (2, 4, 5)], 0),
        (lambda x, y: tf.einsum("...d,dhk->...hk", x, y), [(2, 3, 4), (4, 5, 6)], 0),
    ],
)
def test_products_bring_what_is_transposed_into_order(function, shapes, permuted):
    args = [np.zeros(s, "float32") for s in shapes]
    graph = convert_func_graph(trace(function, args).graph)
    op = next(op for op in graph.ops if op.type in traits.MATRIX_PRODUCTS)
    sizes = [[t.num_elements for t in some] for some in (op.inputs, op.outputs)]
    assert op_compute.entries(op, *sizes) == permuted


@pytest.mark.parametrize("ramp_s", [1e-7, 1.0])
def test_short_ops_take_twice_as_long_and_long_ones_a_ramp_longer(ramp_s):
    ramping = CLUSTER.with_device(ramp_s=ramp_s)
    op, rule = op_of(tf.nn.relu, np.zeros((8, 32), "float32"), op_type="Relu")
    moved = 2 * 8 * 32 * 4 / 1e9
    found = pricer(cluster=ramping).op_seconds(op, rule, whole(op))
    assert found == pytest.approx(1e-6 + moved + min(moved, ramp_s))
    args = [np.zeros(s, "float32") for s in ((8, 32), (32, 8))]
    op, rule = op_of(tf.matmul, *args, op_type="MatMul")  # products have a `half_size`
    times = [pricer(cluster=c).op_seconds(op, rule, whole(op)) for c in (CLUSTER, ramping)]
    assert times[0] == times[1]


def whole(op):
    return Decision(
        OpStrategy((WHOLE,), tuple((R,) for _ in op.inputs), tuple((R,) for _ in op.outputs))
    )


def test_a_lookup_reads_the_rows_it_returns():
    table, ids = np.zeros((1000, 8), "float32"), np.zeros(4, "int32")
    op, rule = op_of(lambda t, i: tf.gather(t, i), table, ids, op_type="GatherV2")
    # 4 rows of 8 written, 4 indices and the axis read; the table is not.
    moved = 4 * 8 * 4 + 4 * 4 + 4
    assert pricer().op_seconds(op, rule, whole(op)) == pytest.approx(1e-6 + moved * 1e-9)


def test_an_elementwise_op_moves_what_it_reads_and_writes():
    x = np.zeros((8, 16), "float32")
    op, rule = op_of(lambda x, y: x + y, x, x, op_type="AddV2")
    assert pricer().op_seconds(op, rule, whole(op)) == pytest.approx(1e-6 + 3 * 512e-9)
    split = (rule.names.index("_1"), PLAIN)
    decision = Decision(OpStrategy((split,), ((Shard(0),),) * 2, ((Shard(0),),)))
    assert pricer().op_seconds(op, rule, decision) == pytest.approx(1e-6 + 3 * 128e-9)


@pytest.mark.parametrize("op_type, passes", [("AssignVariableOp", 2), ("AssignSubVariableOp", 3)])
def test_an_update_moves_the_variable_too(op_type, passes):
    build = GraphBuilder()
    handle, value = (
        build.emit("Placeholder", (), [((8, 16), d)], {"dtype": DType(d)}).outputs[0]
        for d in ("resource", "float32")
    )
    op = build.emit(op_type, (handle, value), [], {"dtype": DType("float32")}, stateful=True)
    rule = prepare(build.graph).rules[op]
    # The value read, the variable written and, to subtract from it, read.
    assert pricer().op_seconds(op, rule, whole(op)) == pytest.approx(1e-6 + passes * 512e-9)
    split = Decision(OpStrategy((WHOLE,), ((Shard(0),), (Shard(0),)), ()))
    assert pricer().op_seconds(op, rule, split) == pytest.approx(1e-6 + passes * 128e-9)


def test_a_view_takes_no_time():
    x = np.zeros((8, 16), "float32")
    op, rule = op_of(lambda x: tf.reshape(x, (16, 8)) + 1, x, op_type="Reshape")
    assert pricer().op_seconds(op, rule, whole(op)) == 0.0


def test_terms_count_as_many_times_as_an_op_stands_for():
    op, rule = product()
    roles = Roles({op: BACKWARD}, frozenset(), frozenset(), {op: 12})
    one = pricer(roles=roles)
    terms = one.zero()
    one.add_op(terms, op, rule, as_split(rule, None, ALONE))
    assert terms.compute[BACKWARD] == pytest.approx(12 * 9.192e-6)
    one.add_reshard(terms, Reshard(op.outputs[0], (SUM,), (R,)))
    # 8 * 32 floats among 4 ranks: 4 rounds, 1.5 times the bytes.
    assert terms.communication[BACKWARD] == pytest.approx(12 * (4e-6 + 1.5 * 1024e-9))
    assert terms.count == 12
    assert np.count_nonzero(terms.vector) == 3


# --- loops and branches ---------------------------------------------------------------


def step_of(function, args, specs, mesh):
    traced = Traced.of(function, args)
    anchors = Anchors(
        inputs=[replicated_spec(mesh.num_axes)] * len(args),
        tensors={f"arg{i}:0": spec for i, spec in enumerate(specs)},
        outputs=[replicated_spec(mesh.num_axes)] * len(traced.prepared.graph.outputs),
    )
    return propagate(traced.prepared, mesh, anchors)


def test_a_loop_takes_its_body_s_time_for_each_trip():
    def recurrent(x, w):
        return tf.scan(lambda h, row: tf.tanh(row @ w), x, initializer=tf.zeros((4, 16)))

    def loop_seconds(length):
        args = np.zeros((length, 4, 16), "float32"), np.zeros((16, 16), "float32")
        partitioned = step_of(recurrent, args, [(R,), (R,)], FOUR)
        (op,) = (op for op in partitioned.decisions if "While" in op.type)
        assert trips(op) == length
        rule = partitioned.prepared.rules[op]
        return pricer().op_seconds(op, rule, partitioned.decisions[op])

    five = loop_seconds(5)
    # At least the product (2 * 4 * 16 * 16 FLOPs) and the tanh of each trip, and their starts.
    assert five > 5 * (2.048e-6 + 2 * 4 * 16 * 4e-9 + 2e-6)
    per_trip = loop_seconds(10) / 10
    assert per_trip == pytest.approx(five / 5, rel=0.2), "but for the lists, which are longer"


def test_other_ops_run_once():
    op, _ = product()
    assert trips(op) == 1 and trips(Op("loop", "While")) == 1


def test_of_branches_the_longest_counts():
    def branches(flag, x):
        return tf.cond(flag > 0, lambda: tf.matmul(x, x), lambda: x + 1.0)

    args = np.float32(1), np.zeros((16, 16), "float32")
    partitioned = step_of(branches, args, [(R,), (R,)], FOUR)
    (op,) = (op for op in partitioned.decisions if "If" in op.type)
    found = pricer().op_seconds(op, partitioned.prepared.rules[op], partitioned.decisions[op])
    assert found == pytest.approx(1e-6 + 2 * 16**3 * 1e-9)
