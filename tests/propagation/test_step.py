"""One op's step: what is recorded of it, and what it leaves for later."""

import pytest

from tests.propagation.by_hand import FLOAT, GRID, PAIR, ByHand, before, begun, moves, specs
from tfpar.propagation.decide import FREE, ImmovableInputError
from tfpar.propagation.immovable import RetryWithWholeLists
from tfpar.propagation.partitioned_graph import Decision, OpPlan
from tfpar.propagation.planned_op import apply_op_plan
from tfpar.propagation.step import move, record, settle_root, visit
from tfpar.spec import Mesh, SpecError, parse_spec

WHOLE, ROWS, COLUMNS, SUM = specs("R", "S(0)", "S(1)", "P(sum)")


def product(fed=("S(1)", "S(0)"), mesh=PAIR):
    build = ByHand()
    made = build.product(build.fed("x", 4, 6), build.fed("y", 6, 8))
    state = begun(build.prepared(made), mesh, {}, fed)
    return state, made


# --- what is recorded ---------------------------------------------------------------------------


def test_a_step_records_the_decision_and_lays_what_the_op_makes():
    state, made = product(("S(0)", "R"))
    visit(state, made.op)
    assert state.result.decisions[made.op].strategy.out_specs == (ROWS,)
    assert state.spec(made) == ROWS and not moves(state)


def test_what_comes_otherwise_than_it_is_read_is_moved():
    state, made = product(("S(1)", "R"))
    visit(state, made.op)
    assert (made.op.inputs[1], WHOLE, ROWS) in moves(state)


def test_what_is_kept_otherwise_than_it_is_made_is_resolved_at_once():
    state, made = product()
    visit(state, made.op)
    resolution = state.result.resolutions[made]
    assert (resolution.source, resolution.target) == (SUM, WHOLE)
    assert state.result.reshards == [resolution] and state.spec(made) == WHOLE


def test_a_tensor_is_moved_once_for_all_who_read_it_so():
    state, made = product(("R", "R"))
    x = made.op.inputs[0]
    for need in (ROWS, ROWS, COLUMNS, WHOLE):
        move(state, x, need)
    assert moves(state) == [(x, WHOLE, ROWS), (x, WHOLE, COLUMNS)]


def test_a_plan_says_how_an_op_runs_if_it_can():
    build = ByHand()
    made = build.product(build.fed("x", 4, 6), build.fed("y", 6, 8))
    prepared = build.prepared(made)
    plans = {
        "it can": (OpPlan(specs("S(1)", "S(0)"), specs("P(sum)"), specs("S(1)")), COLUMNS),
        "it cannot": (OpPlan(specs("S(1)", "R"), specs("P(sum)"), specs("S(1)")), WHOLE),
    }
    for case, (plan, expected) in plans.items():
        state = begun(prepared, PAIR, {}, ["R", "R"], ops={made.op.name: plan})
        visit(state, made.op)
        assert state.spec(made) == expected, case


def test_kept_specs_may_be_given():
    state, made = product(("R", "R"))
    plan = OpPlan(specs("S(1)", "S(0)"), specs("P(sum)"), specs("S(0)"))
    decision, kept = apply_op_plan(state, made.op, plan)
    record(state, made.op, decision, kept)
    assert state.spec(made) == ROWS


def test_what_one_rank_runs_for_all_is_noted():
    build = ByHand()
    op = build.emit("Mystery", (build.fed("x", 4, 6),), [((4, 6), "float32")], stateful=True)
    prepared = build.prepared(*op.outputs)
    state = begun(prepared, PAIR, {}, ["R"])
    visit(state, op)
    assert state.result.shared == {op}
    alone = begun(prepared, Mesh.of([1]), {}, ["R"])
    visit(alone, op)
    assert not alone.result.shared, "one rank has nobody to send to"
    confined = begun(prepared, PAIR, {}, ["R"], confined=True)
    visit(confined, op)
    assert not confined.result.shared, "the op around it is run by one rank"


# --- what waits -----------------------------------------------------------------------------------


def opened():
    build = ByHand()
    handle = build.variable("w", 6, 8)
    read = build.read(handle)
    made = build.product(build.fed("x", 4, 6), read)
    return build.prepared(made), handle, read, made


def test_an_op_that_only_relabels_what_is_open_waits_with_it():
    prepared, handle, read, made = opened()
    (weight,) = prepared.graph.variables
    state = before(made.op, prepared, PAIR, {}, ["S(1)"])
    assert state.waiting == {weight: [read.op]}
    assert state.specs[read] is FREE and state.root_of[read] is weight
    assert read.op not in state.result.decisions


def test_its_first_reader_lays_the_root_and_runs_what_waited():
    prepared, handle, read, made = opened()
    state = before(made.op, prepared, PAIR, {}, ["S(1)"])
    visit(state, made.op)
    assert state.spec(handle) == state.spec(read) == ROWS
    assert read.op in state.result.decisions and not state.waiting
    assert not [m for m in moves(state) if m[0] is not made], "nothing had to move"


def test_a_root_may_be_laid_without_a_reader():
    prepared, handle, read, made = opened()
    (weight,) = prepared.graph.variables
    state = before(made.op, prepared, PAIR, {}, ["R"])
    settle_root(state, weight, COLUMNS)
    assert state.spec(handle) == state.spec(read) == COLUMNS


def test_a_draw_is_a_root_of_its_own():
    build = ByHand()
    drawn = build.draw(4, 6)
    state = before(drawn.op, build.prepared(drawn), PAIR, {}, ["R", "R"])
    visit(state, drawn.op)
    assert state.waiting == {drawn.op: []} and drawn.op not in state.result.decisions
    settle_root(state, drawn.op, ROWS)
    assert state.spec(drawn) == ROWS and isinstance(state.result.decisions[drawn.op], Decision)


def test_a_region_does_not_wait_for_what_is_open():
    build = ByHand()
    body = ByHand()
    body.graph.outputs = [body.unary("Relu", body.fed("a", 6, 8))]
    build.graph.functions["body"] = body.graph
    handle = build.variable("w", 6, 8)
    op = build.emit("PartitionedCall", (build.read(handle),), [((6, 8), "float32")], {"f": "body"})
    state = before(op, build.prepared(*op.outputs), PAIR)
    visit(state, op)
    assert state.spec(handle) == WHOLE and op in state.result.decisions


# --- what cannot be -------------------------------------------------------------------------------


def test_variables_that_exclude_each_other_are_an_error_for_users():
    build = ByHand()
    handles = [build.variable(name, 6, 8) for name in "ab"]
    inputs = (*handles, build.const(0.1, "float32"), build.fed("gradient", 6, 8))
    op = build.emit(
        "ResourceApplyKerasMomentum",
        (*inputs, build.const(0.9, "float32")),
        [],
        {"T": FLOAT, "use_locking": False, "use_nesterov": False},
        stateful=True,
    )
    build.graph.effects.append(op)
    state = before(op, build.prepared(), PAIR, {"a": "S(0)", "b": "S(1)"}, ["R"])
    with pytest.raises(SpecError, match="a as S.0., b as S.1."):
        visit(state, op)


def test_lists_that_exclude_each_other_are_made_whole_instead():
    build = ByHand()
    fed = [build.fed(name, 4, 6, 8, dtype="variant") for name in "ab"]
    listed = [build.one("Mystery", (x,), x.shape, "variant") for x in fed]
    op = build.emit("Mystery", listed, [])
    state = before(op, build.prepared(), GRID, {}, ["R,R", "R,R"])
    for tensor, laid in zip(listed, specs("R,S(1)", "R,S(2)"), strict=True):  # as out of a loop
        state.specs[tensor] = laid
    with pytest.raises(RetryWithWholeLists) as error:
        visit(state, op)
    assert {(t.op, 1) for t in listed} <= error.value.ops
    assert {axis for _, axis in error.value.ops} == {1}


def test_in_a_body_what_would_cross_ranks_is_refused():
    build = ByHand()
    odd = build.one("Mystery", (build.fed("x", 4, 6),), (4, 6), "float32")
    with pytest.raises(ImmovableInputError):
        visit(begun(build.prepared(odd), PAIR, {}, ["S(0)"], confined=True), odd.op)


def test_inputs_lie_whole_unless_they_are_laid():
    build = ByHand()
    x = build.fed("x", 4, 6)
    prepared = build.prepared(x)
    state = begun(prepared, PAIR)
    visit(state, x.op)
    assert state.spec(x) == WHOLE
    laid = begun(prepared, PAIR, {}, ["S(0)"])
    visit(laid, x.op)
    assert laid.spec(x) == parse_spec("S(0)")
