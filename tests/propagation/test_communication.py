"""The one list of what a step moves: whose each collective is, and who waits for it."""

import tfpar as tap
from tests.plan.graphs import mlp, partition
from tfpar.ir import BACKWARD, FORWARD, UPDATE, Roles, When
from tfpar.plans import plan_from_constraints
from tfpar.propagation.communication import Communication
from tfpar.propagation.partitioned_graph import Decision, PartitionedGraph, Reshard
from tfpar.spec import Mesh, Partial, Replicate, Shard

MESH = Mesh.of([2, 2])
R, SUM = Replicate(), Partial("sum")


def laid(*constraints):
    return partition(mlp(hidden=16), plan_from_constraints(mlp(hidden=16), MESH, constraints))


def columns():
    """`fc1` by columns, `fc2` by rows: the products of `fc2` are added up over model."""
    return laid(
        tap.batch("data"),
        tap.shard("fc1/kernel", dim=1, axis="model"),
        tap.shard("fc2/kernel", dim=0, axis="model"),
    )


def test_collectives_are_communications_by_the_names_of_axes():
    partitioned = columns()
    listed = [(c.kind, c.axes, c.num_bytes) for c in partitioned.communications()]
    assert ("all_reduce", (1,), 4 * 6 * 4) in listed, "half of the batch, in floats"
    named = [(k, tuple(MESH.axis_names[a] for a in axes), n) for k, axes, n in listed]
    assert partitioned.collectives() == named


def test_what_is_moved_is_made_by_its_op():
    for moved in columns().communications():
        assert moved.tensor in moved.op.outputs


def test_collectives_carry_a_tensor_in_the_dtype_that_is_said():
    partitioned = columns()
    tensors = {moved.tensor for moved in partitioned.communications()}
    halves = partitioned.communications(dict.fromkeys(tensors, "float16"))
    whole = partitioned.communications()
    assert [2 * c.num_bytes for c in halves] == [c.num_bytes for c in whole]
    partitioned.wire_dtypes = dict.fromkeys(tensors, "float16")
    assert [2 * n for *_, n in partitioned.collectives()] == [
        c.num_bytes for c in partitioned.communications({})
    ]


def test_local_steps_are_no_communication():
    (op, *_) = (op for op in mlp().ops if op.type == "Relu")
    tensor = op.outputs[0]
    assert Reshard(tensor, (R, R), (Shard(0), R)).communications(MESH, {}) == []
    (moved,) = Reshard(tensor, (SUM, R), (R, Shard(0))).communications(MESH, {})
    assert (moved.kind, moved.axes, moved.num_bytes) == ("all_reduce", (0,), 4 * 10 * 4)


def test_what_runs_in_an_op_s_place_moves_for_that_op():
    inner = columns()
    (outer, *_) = (op for op in mlp().ops if op.type == "Relu")
    strategy = next(iter(inner.decisions.values())).strategy
    within = list(Decision(strategy, expansion=inner).communications(outer))
    assert {(moved.op, moved.tensor) for moved in within} == {(outer, None)}
    assert [c.num_bytes for c in within] == [c.num_bytes for c in inner.communications()]
    around = PartitionedGraph(inner.prepared, MESH, decisions={outer: Decision(strategy, inner)})
    assert around.collectives() == inner.collectives()


def test_what_one_rank_computes_is_broadcast_to_all():
    (op, *_) = (op for op in mlp().ops if op.type == "Relu")
    moved = Communication.of_shared(op, MESH)
    assert (moved.kind, moved.axes, moved.num_bytes) == ("broadcast", (0, 1), 8 * 10 * 4)


def test_roles_say_who_waits():
    (op, *_) = (op for op in mlp().ops if op.type == "Relu")
    (tensor,) = op.outputs
    roles = Roles({op: FORWARD}, frozenset(), frozenset())
    moved = Communication(Communication.of_shared(op, MESH).step, 4, op, tensor)
    assert moved.when(roles) is When.BETWEEN
    late = Roles({op: BACKWARD}, frozenset({tensor}), frozenset())
    assert moved.when(late) is When.BESIDE
    update = Roles({op: UPDATE}, frozenset(), frozenset())
    assert moved.when(update) is When.AFTER
    inside = moved._replace(tensor=None)
    assert {inside.when(r) for r in (roles, late, update)} == {When.BETWEEN}, "the op waits"
