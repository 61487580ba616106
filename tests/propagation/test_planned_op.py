"""Ops that run as a plan says, as far as they can."""

import pytest

from tests.propagation.by_hand import GRID, PAIR, ByHand, before, begun, specs
from tfpar.propagation.partitioned_graph import OpPlan
from tfpar.propagation.planned_op import apply_op_plan
from tfpar.spec import Mesh, parse_spec

SPLIT_SUM = OpPlan(specs("S(1)", "S(0)"), specs("P(sum)"), specs("S(1)"))


def product():
    build = ByHand()
    made = build.product(build.fed("x", 4, 6), build.fed("y", 6, 8))
    return build.prepared(made), made.op


def test_it_runs_and_is_kept_as_planned():
    prepared, op = product()
    decision, kept = apply_op_plan(begun(prepared, PAIR, {}, ["R", "R"]), op, SPLIT_SUM)
    assert decision.strategy.in_specs == SPLIT_SUM.in_specs
    assert decision.strategy.out_specs == SPLIT_SUM.made
    assert kept == list(SPLIT_SUM.kept)


@pytest.mark.parametrize(
    "plan",
    [
        OpPlan(specs("S(0)", "S(0)"), specs("P(sum)"), specs("R")),
        OpPlan(specs("S(0)", "R"), specs("S(1)"), specs("S(1)")),
        OpPlan(specs("S(0)"), specs("S(0)"), specs("S(0)")),
        OpPlan(specs("S(0)", "R"), (), ()),
        OpPlan(specs("S(0)", "R"), specs("S(0)"), specs("S(0/3)")),
    ],
    ids=["factors differ", "made otherwise", "too few inputs", "no outputs", "no such stride"],
)
def test_what_its_rule_does_not_have_it_does_not_run(plan):
    prepared, op = product()
    assert apply_op_plan(begun(prepared, PAIR, {}, ["R", "R"]), op, plan) is None


def updating():
    build = ByHand()
    op = build.update(build.variable("w", 4, 6), build.fed("x", 4, 6))
    return build.prepared(), op


def test_a_variable_that_lies_otherwise_forbids_it():
    prepared, op = updating()
    rows = OpPlan(specs("S(0)", "S(0)"), (), ())
    assert apply_op_plan(begun(prepared, PAIR, {"w": "S(1)"}, ["R"]), op, rows) is None
    assert apply_op_plan(begun(prepared, PAIR, {"w": "S(0)"}, ["R"]), op, rows)
    assert apply_op_plan(begun(prepared, PAIR, {}, ["R"]), op, rows), "an open one is laid so"


def test_along_axes_that_the_plan_does_not_speak_of_it_runs_as_its_inputs_come():
    prepared, op = product()
    state = before(op, prepared, GRID, {}, ["R,S(0)", "R,R"])
    decision, (kept,) = apply_op_plan(state, op, SPLIT_SUM)
    assert decision.strategy.in_specs == specs("S(1),S(0)", "S(0),R")
    assert decision.strategy.out_specs == specs("P(sum),S(0)")
    assert kept == parse_spec("S(1),S(0)")


def test_what_is_remembered_is_that_of_plan_and_mesh():
    prepared, op = product()
    run = apply_op_plan(begun(prepared, PAIR, {}, ["R", "R"]), op, SPLIT_SUM)
    again = apply_op_plan(begun(prepared, PAIR, {}, ["S(0)", "R"]), op, SPLIT_SUM)
    assert run[0] is again[0], "how inputs come changes nothing of it"
    wider = apply_op_plan(begun(prepared, Mesh.of([4]), {}, ["R", "R"]), op, SPLIT_SUM)
    assert wider[0] is not run[0]


def test_a_region_is_left_to_its_bodies():
    build = ByHand()
    x = build.fed("x", 4, 6)
    op = build.emit("PartitionedCall", (x,), [((4, 6), "float32")], {"f": "body"})
    plan = OpPlan(specs("S(0)"), specs("S(0)"), specs("S(0)"))
    assert apply_op_plan(begun(build.prepared(*op.outputs), PAIR, {}, ["R"]), op, plan) is None
