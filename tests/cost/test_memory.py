"""What a rank stores at once, against liveness worked out by hand."""

import math

import pytest

from tests.planning.problems import Captured, price
from tests.propagation.by_hand import PAIR, ByHand
from tfpar.cluster import find_cluster
from tfpar.constraints import batch
from tfpar.cost.liveness import BufferLiveness, Buffers
from tfpar.cost.memory import live_peak, operands_of_collectives, peak
from tfpar.cost.pricer import Pricer
from tfpar.ir import BACKWARD, FORWARD, DType, Graph, GraphBuilder, Roles
from tfpar.planning.intra_op import find_planner
from tfpar.planning.pricing import propagate_plan
from tfpar.plans import plan_from_constraints
from tfpar.propagation import Anchors, prepare, propagate
from tfpar.spec import Mesh, Replicate, Shard, local_shape

R = Replicate()
KB = 1024


def local_bytes(mesh):
    return lambda tensor, spec: 4 * math.prod(local_shape(tensor.shape, spec, mesh))


def partition(graph, mesh, spec=(R,)):
    anchors = Anchors(inputs=[spec] * len(graph.inputs), outputs=[None] * len(graph.outputs))
    return propagate(prepare(graph), mesh, anchors)


def peak_of(build, ranks=1, spec=(R,), times=None, backward=()):
    mesh = Mesh.of([ranks])
    graph = build.graph
    laid = partition(graph, mesh, spec)
    by_name = {op.name: op for op in graph.ops}
    times = {by_name[n]: t for n, t in (times or {}).items()}
    phase = {op: BACKWARD if op.name in backward else FORWARD for op in graph.ops}
    return peak(laid, local_bytes(mesh), times, phase=phase)


def chain(*op_types, rows=16):
    """A chain of ops on one (rows, 16) input, 1 KB for 16 rows."""
    build = GraphBuilder(Graph())
    attrs = {"dtype": DType("float32")}
    x = build.emit("Placeholder", (), [((rows, 16), "float32")], attrs, "x").outputs[0]
    build.graph.inputs.append(x)
    for i, op_type in enumerate(op_types):
        build.name = f"op{i}"
        if op_type == "MatMul":
            kinds = {"T": DType("float32"), "transpose_a": False, "transpose_b": False}
            x = build.one("MatMul", (x, x), (rows, 16), "float32", kinds)
        elif op_type == "Reshape":
            x = build.reshape(x, [16, rows])
        else:
            x = build.unary(op_type, x)
    build.graph.outputs.append(x)
    return build


def test_an_elementwise_op_takes_the_place_of_what_nobody_reads_again():
    assert peak_of(chain("Relu", "Tanh", "Exp")).num_bytes == 1 * KB


def test_a_product_needs_its_inputs_and_its_result():
    found = peak_of(chain("Relu", "MatMul"))
    assert found.num_bytes == 2 * KB and "op1" in found.op
    assert [size for _, size in found.largest] == [KB, KB]


def test_one_of_two_tasks_holds_what_the_step_does_wherever_it_is_cut():
    """The first is to leave what the second reads, and nothing else."""
    build = chain("MatMul", "Relu", "Reshape", "MatMul", "Tanh", "Relu")
    x, last = build.graph.inputs[0], build.graph.outputs[0]
    attrs = {"T": DType("float32"), "transpose_a": False, "transpose_b": False}
    build.one("MatMul", (last, x), (16, 16), "float32", attrs)  # x is there to the end
    mesh, ops = Mesh.of([1]), build.graph.ops
    buffers, size = Buffers(partition(build.graph, mesh)), local_bytes(mesh)
    whole = BufferLiveness(buffers, ops, lambda _: False).find_peak(size)
    assert whole.num_bytes == 3 * KB
    for at in range(1, len(ops)):
        read = {buffer for op in ops[at:] for buffer in buffers.used(op)}
        first = BufferLiveness(buffers, ops[:at], read.__contains__)
        second = BufferLiveness(buffers, ops[at:], lambda _: False)
        assert set(second.given) == {buffer for buffer in read if buffer[0].op in ops[:at]}
        assert max(task.find_peak(size).num_bytes for task in (first, second)) == 3 * KB
        assert first.find_peak(size).op is whole.op or second.find_peak(size).op is whole.op


def test_what_is_read_in_another_spec_by_the_backward_pass_is_told_apart():
    build = chain("Relu", "MatMul")
    (product,) = (op.name for op in build.graph.ops if op.type == "MatMul")
    halves = {"ranks": 2, "spec": (Shard(0),)}  # the product reads its input in two specs
    assert peak_of(build, **halves).copied_bytes == 0, "the forward pass alone does"
    copied = peak_of(build, **halves, backward=[product]).copied_bytes
    assert copied == pytest.approx(KB / 2), "the columns of the left one"
    assert peak_of(build, backward=[product]).copied_bytes == 0, "nothing is split"


def test_what_is_gathered_of_variables_for_the_backward_pass_is_told_apart():
    build = ByHand(Graph())
    x, w = build.fed("x", 64, 16), build.weight("w", 16, 16)
    y = build.product(x, w)  # of rows of x, for which w is gathered
    again = build.product(y, w)
    anchors = Anchors({"w": (Shard(0),)}, inputs=[(Shard(0),)], outputs=[None])
    laid = propagate(build.prepared(again), PAIR, anchors)
    phase = dict.fromkeys(laid.graph.ops, FORWARD)
    phase[laid.graph.outputs[0].op] = BACKWARD
    found = peak(laid, local_bytes(PAIR), phase=phase)
    assert (found.gathered_bytes, found.copied_bytes) == (KB, 0)
    forward = dict.fromkeys(laid.graph.ops, FORWARD)
    assert peak(laid, local_bytes(PAIR), phase=forward).gathered_bytes == 0, "nobody keeps it"


def test_views_are_what_they_are_views_of():
    assert peak_of(chain("Relu", "Reshape", "Reshape", "Tanh")).num_bytes == 1 * KB


def test_what_is_read_later_stays():
    build = chain("Relu", "MatMul", "MatMul")
    first = build.graph.ops[1].outputs[0]
    build.graph.outputs[0] = build.binary("AddV2", build.graph.outputs[0], first)
    # The first result, and input and result of the last product.
    assert peak_of(build).num_bytes == 3 * KB


def test_each_rank_stores_its_part():
    assert peak_of(chain("Relu", "Tanh"), 4, (Shard(0),)).num_bytes == pytest.approx(KB / 4)


def test_runs_that_stand_for_several_blocks_add_up():
    """Forward keeps two tensors a block, backward frees them: n blocks keep 2 n."""
    build = GraphBuilder(Graph())
    attrs = {"dtype": DType("float32")}
    x = build.emit("Placeholder", (), [((16, 16), "float32")], attrs, "x").outputs[0]
    build.graph.inputs.append(x)
    kinds = {"T": DType("float32"), "transpose_a": False, "transpose_b": False}

    def product(a, b, name):
        return build.emit("MatMul", (a, b), [((16, 16), "float32")], kinds, name).outputs[0]

    a = product(x, x, "a")
    h = product(a, a, "h")
    back = product(h, h, "between")
    g = product(h, back, "g")
    build.graph.outputs.append(product(g, a, "end"))
    one, five = (peak_of(build, times=dict.fromkeys(("a", "h", "g", "end"), n)) for n in (1, 5))
    assert five.num_bytes - one.num_bytes == pytest.approx(2 * 4 * KB, abs=2 * KB)


def partial_products(count):
    """Products of 1 KB each, summed over 2 ranks."""
    build = GraphBuilder(Graph())
    attrs, kinds = {"dtype": DType("float32")}, {"transpose_a": False, "transpose_b": False}
    x, w = (
        build.emit("Placeholder", (), [((16, 16), "float32")], attrs, name).outputs[0]
        for name in "xw"
    )
    build.graph.inputs += [x, w]
    for i in range(count):
        made = [((16, 16), "float32")]
        op = build.emit("MatMul", (x, w), made, {"T": DType("float32"), **kinds}, f"op{i}")
        build.graph.outputs += op.outputs
    anchors = Anchors(inputs=[(Shard(1),), (Shard(0),)], outputs=[(R,)] * count)
    return propagate(prepare(build.graph), Mesh.of([2]), anchors)


@pytest.mark.parametrize(
    "bucket_kb, deferred, expected",
    [
        (4, False, [1, 1, 1, 1, 1]),  # each by itself, as soon as it is there
        (2, True, [1, 2, 1, 2, 1]),
        (0.5, True, [1, 1, 1, 1, 1]),
        (100, True, [1, 1, 1, 1, 5]),
    ],
)
def test_operands_of_collectives_wait_until_a_bucket_is_full(bucket_kb, deferred, expected):
    laid = partial_products(5)
    outputs = frozenset(laid.graph.outputs) if deferred else frozenset()
    roles = Roles({}, outputs, frozenset())
    found = operands_of_collectives(laid, local_bytes(laid.mesh), roles, bucket_kb * KB)
    assert [found[t.op] / KB for t in laid.graph.outputs] == pytest.approx(expected)
    # All that is there when the last one runs: its operand or bucket, and all results.
    whole = peak(laid, local_bytes(laid.mesh), {}, found)
    inputs = 2 * KB / 2
    assert whole.num_bytes == inputs + 5 * KB + expected[-1] * KB


def test_what_an_op_stands_for_fills_buckets_too():
    laid = partial_products(2)
    first, second = (t.op for t in laid.graph.outputs)
    roles = Roles({}, frozenset(laid.graph.outputs), frozenset(), {first: 7})
    found = operands_of_collectives(laid, local_bytes(laid.mesh), roles, 4 * KB)
    assert found == {first: 4 * KB, second: KB}


def test_libraries_keep_a_buffer_for_what_they_pack():
    laid = partial_products(3)
    roles = Roles.of(laid.graph)
    pricer = Pricer(laid.mesh, find_cluster("rhino-m8", laid.mesh), roles)
    passing = operands_of_collectives(laid, pricer.stored, roles, 4 * KB)
    alone = peak(laid, pricer.stored, {}, passing)
    assert live_peak(laid, pricer, 4 * KB).num_bytes == alone.num_bytes + KB


def test_an_update_has_a_temporary_for_each_of_two_slots():
    problem = Captured.saved("one_large_layer").problem([1], "rhino-m8")
    laid = propagate_plan(find_planner("tap").solve(problem), problem)
    pricer = Pricer(laid.mesh, problem.cluster, Roles.of(laid.graph))
    without, slots = (live_peak(laid, pricer, 0.0, ratio).num_bytes for ratio in (0.0, 2.0))
    assert slots - without == 8 * 4096 * 4


def test_peaks_of_real_steps_lie_between_the_parts():
    problem = Captured.saved("gpt_narrow").problem([2, 2], "cpu")
    found = plan_from_constraints(problem.step.graph, Mesh.of([2, 2]), [batch("data")])
    cost = price(problem, found)
    assert cost.live_bytes >= max(cost.gradient_bytes, cost.activation_bytes)
    roles = Roles.of(problem.step.graph)
    pricer = Pricer(found.mesh, problem.cluster, roles)
    assert pricer.trains
