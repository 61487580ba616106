"""Reshards: the steps from one spec to another."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.spec.strategies import laid_out, specs
from tfpar.propagation.reshard import lower_reshard, step_bytes
from tfpar.spec import COLLECTIVES, Mesh, local_shape, parse_spec, replicated_spec

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
            assert before == after or axis in step.axes
        local_shape(shape, step.after, mesh)  # every spec on the way fits
        current = step.after
    assert current == target


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
        ("R,R", "P(sum),R", ["keep_first"], 0),
        ("S(0),R", "P(sum),R", ["all_gather", "keep_first"], 4 * 64),
    ],
)
def test_steps_and_payloads_by_hand(source, target, kinds, num_bytes):
    mesh, shape = Mesh.of([2, 2]), (8, 8)
    steps = lower_reshard(shape, parse_spec(source), parse_spec(target), mesh)
    assert [s.kind for s in steps] == kinds
    assert sum(step_bytes(s, shape, 4, mesh) for s in steps) == num_bytes
