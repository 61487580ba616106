"""Collectives that run at the same time are priced as the one that they are packed into."""

import dataclasses

import pytest

import tfpar as tap
from tests.clusters import device, two_levels
from tfpar.cluster import Link
from tfpar.compile.local import COLLECTIVE_TYPES, build_local_program, pack_collectives
from tfpar.cost.evaluation import evaluate, terms_of
from tfpar.cost.packing_gain import NOTHING, PackingKey, PackingSets
from tfpar.cost.pricer import Pricer
from tfpar.ir import FORWARD, DType, Graph, GraphBuilder, Roles, Variable
from tfpar.propagation import Anchors, prepare, propagate

LINK = Link(2.0**30, 2.0**-10)
CLUSTER = two_levels("test", 2, 2, device(2.0**30, 2.0**30, 2.0**30, 2.0**30, 0.0), LINK, LINK)
MESH = tap.Mesh.of([4])
SIZE = 8 * 16 * 4  # bytes of a product


def heads(count: int) -> Graph:
    """Products of one tensor with some weights, and what they are multiplied to."""
    build = GraphBuilder()

    def source(shape, dtype, name):
        attrs = {"dtype": DType(dtype)}
        return build.emit("Placeholder", (), [(shape, dtype)], attrs, name).outputs[0]

    x = source((8, 32), "float32", "x")
    build.graph.inputs.append(x)
    made = []
    for i in range(count):
        handle = source((32, 16), "resource", f"handle/{i}")
        build.graph.variables.append(Variable(f"w{i}", (32, 16), "float32", True, handle))
        dtype = {"dtype": DType("float32")}
        weight = build.one("ReadVariableOp", (handle,), (32, 16), "float32", dtype)
        attrs = {"T": DType("float32"), "transpose_a": False, "transpose_b": False}
        made.append(build.one("MatMul", (x, weight), (8, 16), "float32", attrs))
    result = build.unary("Tanh", made[0])
    for other in made[1:]:
        result = build.one("Mul", (result, build.unary("Tanh", other)), (8, 16), "float32")
    build.graph.outputs.append(result)
    return build.graph


def laid(count: int):
    """Weights whose rows are split: each product is summed over the ranks."""
    rows = {f"w{i}": (tap.Shard(0),) for i in range(count)}
    whole = (tap.Replicate(),)
    return propagate(prepare(heads(count)), MESH, Anchors(rows, [whole], outputs=[whole]))


@pytest.mark.parametrize("count", [1, 2, 3])
def test_several_sums_start_once_as_they_do_when_the_step_is_written(count):
    partitioned = laid(count)
    roles = Roles.of(partitioned.graph)
    assert [kind for kind, *_ in partitioned.collectives()] == ["all_reduce"] * count
    pricer = Pricer(MESH, CLUSTER, roles)
    cost = evaluate(partitioned, CLUSTER, roles)
    expected = pricer.collective_seconds("all_reduce", (0,), count * SIZE)
    assert cost.communication_s == (pytest.approx(expected, rel=1e-12), 0.0, 0.0)
    written = pack_collectives(build_local_program(partitioned).graph)
    ran = sum(op.type in COLLECTIVE_TYPES for op in written.ops)
    assert cost.collectives == ran == 1


def test_what_a_fold_stands_for_is_saved_as_often():
    partitioned = laid(3)
    graph = partitioned.graph
    once = evaluate(partitioned, CLUSTER, Roles.of(graph))
    twelve = evaluate(partitioned, CLUSTER, Roles.of(graph, times=dict.fromkeys(graph.ops, 12)))
    assert twelve.communication_s[FORWARD] == pytest.approx(12 * once.communication_s[FORWARD])
    assert twelve.collectives == 12


def test_parts_that_share_a_bucket_add_up_to_the_step():
    partitioned = laid(3)
    pricer = Pricer(MESH, CLUSTER, Roles.of(partitioned.graph))
    step = terms_of(partitioned, pricer)
    parts = [terms_of(partitioned, pricer, part=[op]) for op in partitioned.graph.ops]
    total = pricer.zero()
    for part in parts:
        total += part
    assert total.together == step.together and len(step.together) == 1
    assert pricer.cost(total).seconds == pytest.approx(pricer.cost(step).seconds, rel=1e-12)
    for part in parts:
        total -= part
    assert total.together == NOTHING


def test_what_is_not_of_one_kind_group_and_time_is_not_packed():
    found = NOTHING
    packable = PackingKey(0, "all_gather", (0,), FORWARD, 1)
    others = [{"group": 1}, {"kind": "all_reduce"}, {"axes": (1,)}, {"phase": 1}]
    for changes in ({}, *others):
        found = found.plus(PackingSets.one(packable._replace(**changes), 8, 1.0))
    assert not list(found.saved(lambda *_: 0.0))
    found = found.plus(PackingSets.one(packable._replace(times=3), 8, 1.0).plus(NOTHING))
    assert not list(found.saved(lambda *_: 0.0))
    found = found.plus(PackingSets.one(packable, 24, 3.0))
    ((when, seconds, fewer, _),) = found.saved(lambda kind, axes, num_bytes: num_bytes / 16)
    assert (when, seconds, fewer) == pytest.approx((FORWARD, 4.0 - 2.0, 1))


def test_roles_without_a_graph_have_no_groups():
    partitioned = laid(3)
    alone = dataclasses.replace(Roles.of(partitioned.graph), graph=Graph())
    cost = evaluate(partitioned, CLUSTER, alone)
    assert cost.collectives == 3
    each = Pricer(MESH, CLUSTER, alone).collective_seconds("all_reduce", (0,), SIZE)
    assert cost.communication_s[FORWARD] == pytest.approx(3 * each, rel=1e-12)
