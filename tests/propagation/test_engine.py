"""A pass: begun, run op by op, finished; and begun anew where lists ask for it."""

import pytest

from tests.propagation.by_hand import GRID, PAIR, ByHand, begun, moves, specs
from tfpar.propagation.decide import ImmovableInputError
from tfpar.propagation.engine import (
    begin,
    finish,
    lay_outputs,
    propagate,
    run_segment,
    with_lists_whole,
)
from tfpar.propagation.immovable import RetryWithWholeLists
from tfpar.propagation.partitioned_graph import Anchors, OpPlan
from tfpar.spec import parse_spec

WHOLE, ROWS, COLUMNS, SUM = specs("R", "S(0)", "S(1)", "P(sum)")


def layer():
    """relu(x @ w) with an open weight, and a weight that nothing reads."""
    build = ByHand()
    made = build.product(build.fed("x", 4, 6), build.weight("w", 6, 8))
    build.variable("unread", 3, 5)
    return build.prepared(build.unary("Relu", made))


def test_variables_and_inputs_are_laid_before_the_first_op():
    prepared = layer()
    anchors = Anchors(variables={"w": COLUMNS}, inputs=[ROWS])
    state = begin(prepared, PAIR, anchors)
    weight, unread = prepared.graph.variables
    assert state.spec(prepared.graph.inputs[0]) == ROWS and state.spec(weight.handle) == COLUMNS
    assert state.is_open(unread.handle) and not state.result.decisions


def test_inputs_that_are_not_named_come_whole():
    prepared = layer()
    found = propagate(prepared, PAIR, Anchors())
    assert found.specs[prepared.graph.inputs[0]] == WHOLE


def test_shards_of_one_entry_are_no_shards():
    build = ByHand()
    x = build.fed("x", 1, 6)
    state = begin(build.prepared(x), GRID, Anchors(inputs=[parse_spec("S(0),S(1)")]))
    assert state.spec(x) == parse_spec("R,S(1)")


def test_a_pass_is_its_segments_one_after_the_other():
    prepared = layer()
    anchors = Anchors(variables={"w": COLUMNS}, inputs=[ROWS])
    whole, ops = propagate(prepared, PAIR, anchors), prepared.graph.ops
    for cut in range(len(ops)):
        state = begin(prepared, PAIR, anchors)
        run_segment(state, ops[:cut])
        run_segment(state, ops[cut:])
        parts = finish(state)
        assert parts.specs == whole.specs and parts.reshards == whole.reshards, cut


def test_what_still_waits_at_the_end_of_a_segment_comes_whole():
    """Only `closed_segments` cuts a graph so that this lays nothing otherwise than a pass."""
    prepared = layer()
    weight, unread = prepared.graph.variables
    state = begun(prepared, PAIR, {}, ["S(1)"])
    (read,) = prepared.consumers[weight.handle]
    run_segment(state, prepared.graph.ops[: prepared.position[read] + 1])
    assert state.spec(weight.handle) == WHOLE
    assert state.is_open(unread.handle), "nothing of it was run"


def test_weights_that_nothing_reads_lie_whole():
    prepared = layer()
    found = propagate(prepared, PAIR, Anchors(inputs=[COLUMNS]))
    weight, unread = prepared.graph.variables
    assert found.variable_specs == {weight: ROWS, unread: WHOLE}


def product_given(outputs=(), **given):
    build = ByHand()
    made = build.product(build.fed("x", 4, 6), build.fed("y", 6, 8))
    anchors = Anchors(inputs=specs("S(1)", "S(0)"), outputs=outputs)
    return propagate(build.prepared(made), PAIR, anchors, **given), made


def test_sums_that_the_graph_returns_are_reduced():
    found, made = product_given()
    assert found.output_specs == [WHOLE]
    assert [(r.tensor, r.target) for r in found.reshards] == [(made, WHOLE)]


def test_outputs_come_as_they_are_asked_for():
    found, made = product_given(outputs=[COLUMNS])
    assert found.output_specs == [COLUMNS]
    assert found.reshards[-1].target == COLUMNS


def test_in_a_body_sums_come_out_as_they_are():
    found, _ = product_given(confined=True)
    assert found.output_specs == [SUM] and not found.reshards


def test_a_body_cannot_give_what_crosses_ranks():
    with pytest.raises(ImmovableInputError) as error:
        product_given(outputs=[WHOLE], confined=True)
    assert error.value.axes == (0,)


def test_outputs_are_laid_without_touching_what_is_kept():
    build = ByHand()
    y = build.unary("Relu", build.fed("x", 4, 6))
    state = begin(build.prepared(y), PAIR, Anchors(inputs=[ROWS], outputs=[WHOLE]))
    run_segment(state, state.prepared.graph.ops)
    lay_outputs(state)
    assert state.spec(y) == ROWS and moves(state) == [(y, ROWS, WHOLE)]


def test_a_pass_begins_anew_with_all_that_must_be_whole_by_then():
    build = ByHand()
    first, second = (build.unary("Relu", build.fed(name, 4, 6)).op for name in "xy")
    tried = []

    def run(whole):
        tried.append(whole)
        for op in (first, second):
            if (op, 0) not in whole:
                raise RetryWithWholeLists(frozenset({(op, 0)}))
        return "it runs"

    assert with_lists_whole(run) == "it runs"
    both = frozenset({(first, 0), (second, 0)})
    assert tried == [frozenset(), frozenset({(first, 0)}), both]


def test_an_op_that_a_plan_names_does_not_run_as_it_ran_before():
    build = ByHand()
    y = build.unary("Relu", build.fed("x", 4, 6))
    prepared = build.prepared(y)
    for _ in range(2):  # so that it is known by now
        propagate(prepared, PAIR, Anchors(inputs=[WHOLE]))
    named = {y.op.name: OpPlan((ROWS,), (ROWS,), (ROWS,))}
    found = propagate(prepared, PAIR, Anchors(inputs=[WHOLE], ops=named))
    assert found.specs[y] == ROWS


def test_a_pass_leaves_graph_and_anchors_as_they_are():
    prepared = layer()
    anchors = Anchors(inputs=[ROWS])
    text = str(prepared.graph)
    first = propagate(prepared, PAIR, anchors)
    again = propagate(prepared, PAIR, anchors)
    assert str(prepared.graph) == text and again.specs == first.specs
    assert again.specs is not first.specs
