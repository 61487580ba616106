"""Reshards: the steps from one spec to another."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tfpar as tap
from tests.plan.graphs import mlp, partition
from tests.spec.strategies import laid_out, specs
from tfpar.ir import BACKWARD, FORWARD, UPDATE, Roles, When
from tfpar.plans import plan_from_constraints
from tfpar.propagation.partitioned_graph import Decision, PartitionedGraph, Reshard
from tfpar.propagation.reshard import Communication, lower_reshard, step_bytes
from tfpar.spec import (
    COLLECTIVES,
    Mesh,
    Partial,
    Replicate,
    Shard,
    local_shape,
    parse_spec,
    replicated_spec,
)

# --- steps -----------------------------------------------------------------------


@st.composite
def reshards(draw):
    shape, source, mesh = draw(laid_out(partial=True))
    return shape, source, draw(specs(shape, mesh, partial=True)), mesh


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(reshards())
def test_steps_lead_from_source_to_target(case):
    shape, source, target, mesh = case
    current = source
    for step in lower_reshard(shape, source, target, mesh):
        assert step.before == current and step.after != current
        for axis, (before, after) in enumerate(zip(step.before, step.after, strict=True)):
            assert before == after or axis in step.axes or keeps_rows(before, after)
        local_shape(shape, step.after, mesh)  # every spec on the way fits
        current = step.after
    assert current == target


def keeps_rows(before, after):
    """Whether a minor axis may hold the same rows of a dim that a major one splits no more."""
    return isinstance(before, Shard) and isinstance(after, Shard) and before.dim == after.dim


@settings(max_examples=200, deadline=None)
@given(reshards())
def test_each_axis_moves_a_bounded_number_of_times(case):
    shape, source, target, mesh = case
    steps = lower_reshard(shape, source, target, mesh)
    moves = [sum(axis in step.axes for step in steps) for axis in range(mesh.num_axes)]
    # At most: out of the way, and to where it is wanted.
    assert max(moves) <= 2


@settings(max_examples=200, deadline=None)
@given(laid_out(partial=True))
def test_no_change_takes_no_step(laid):
    shape, spec, mesh = laid
    assert lower_reshard(shape, spec, spec, mesh) == ()


@settings(max_examples=200, deadline=None)
@given(laid_out())
def test_cutting_what_is_whole_moves_nothing(laid):
    shape, spec, mesh = laid
    steps = lower_reshard(shape, replicated_spec(mesh.num_axes), spec, mesh)
    assert {s.kind for s in steps} <= {"slice"}
    assert sum(step_bytes(s, shape, 4, mesh) for s in steps) == 0


@settings(max_examples=200, deadline=None)
@given(reshards())
def test_collectives_have_a_price_and_local_steps_none(case):
    shape, source, target, mesh = case
    for step in lower_reshard(shape, source, target, mesh):
        price = step_bytes(step, shape, 4, mesh)
        assert step.is_collective == (step.kind in COLLECTIVES)
        assert price == 0 if not step.is_collective else price % 4 == 0 and price > 0


@pytest.mark.parametrize(
    "source, target, kinds, num_bytes",
    [
        ("S(0),R", "R,R", ["all_gather"], 4 * 64),
        ("R,R", "S(0),S(1)", ["slice", "slice"], 0),
        ("P(sum),R", "R,R", ["all_reduce"], 4 * 64),
        ("P(sum),P(sum)", "R,R", ["all_reduce"], 4 * 64),
        ("P(sum),P(max)", "R,R", ["all_reduce", "all_reduce"], 2 * 4 * 64),
        ("P(sum),R", "S(1),R", ["reduce_scatter"], 4 * 64),
        ("P(sum),S(0)", "R,S(0)", ["all_reduce"], 4 * 32),
        ("P(sum),R", "R,S(0)", ["slice", "all_reduce"], 4 * 32),
        ("S(0),R", "S(1),R", ["all_to_all"], 4 * 32),
        ("S(0),R", "S(1/4),R", ["all_gather", "slice"], 4 * 64),
        ("S(0),S(0)", "S(0),R", ["all_gather"], 4 * 32),
        ("S(0),S(0)", "R,S(0)", ["all_gather", "all_gather", "slice"], 4 * 32 + 4 * 64),
        # The minor axis keeps its rows: two of each four.
        ("S(0),S(0)", "R,S(0/4)", ["all_gather"], 4 * 32),
        ("R,S(0/4)", "S(0),S(0)", ["slice"], 0),
        ("S(0),S(0)", "S(1),S(0/4)", ["all_to_all"], 4 * 16),
        ("S(1),S(0/4)", "S(0),S(0)", ["all_to_all"], 4 * 16),
        ("P(sum),S(0/4)", "S(0),S(0)", ["reduce_scatter"], 4 * 32),
        ("R,R", "P(sum),R", ["keep_first"], 0),
        ("S(0),R", "P(sum),R", ["all_gather", "keep_first"], 4 * 64),
    ],
)
def test_steps_and_payloads_by_hand(source, target, kinds, num_bytes):
    mesh, shape = Mesh.of([2, 2]), (8, 8)
    steps = lower_reshard(shape, parse_spec(source), parse_spec(target), mesh)
    assert [s.kind for s in steps] == kinds
    assert sum(step_bytes(s, shape, 4, mesh) for s in steps) == num_bytes


# --- communication --------------------------------------------------------------------------

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
    (outer, *_) = (op for op in inner.graph.ops if op.type == "Relu")
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
