"""How one op runs as its rule has it, and what such decisions are remembered by."""

import numpy as np
import pytest

from tests.propagation.by_hand import FLOAT, GRID, PAIR, ByHand, before, begun, moves, passed, specs
from tfpar.propagation.decide import ImmovableInputError
from tfpar.propagation.factors import CARRY, WHOLE
from tfpar.propagation.rule_decision import decide_by_rule, strategy_by_rule
from tfpar.spec import Mesh, parse_spec

ROWS, COLUMNS, WHOLE_SPEC, SUM = specs("S(0)", "S(1)", "R", "P(sum)")


def product():
    build = ByHand()
    x, y = build.fed("x", 4, 6), build.fed("y", 6, 8)
    made = build.product(x, y)
    return build.prepared(made), made.op


def run(state, op):
    strategy = decide_by_rule(state, op).strategy
    return strategy.in_specs, strategy.out_specs


def test_an_op_splits_what_comes_split():
    prepared, op = product()
    assert run(begun(prepared, PAIR, {}, ["S(0)", "R"]), op) == ((ROWS, WHOLE_SPEC), (ROWS,))
    assert run(begun(prepared, PAIR, {}, ["R", "S(1)"]), op) == ((WHOLE_SPEC, COLUMNS), (COLUMNS,))
    assert run(begun(prepared, PAIR, {}, ["S(1)", "S(0)"]), op) == ((COLUMNS, ROWS), (SUM,))


def test_decisions_are_shared_by_ops_of_one_rule_that_are_read_alike():
    build = ByHand()
    x = build.fed("x", 4, 6)
    first, second = build.unary("Relu", x), build.unary("Relu", x)
    prepared = build.prepared(first, second)
    state = begun(prepared, PAIR, {}, ["S(0)"])
    assert decide_by_rule(state, first.op) is decide_by_rule(state, second.op)


def test_an_op_that_must_not_split_runs_whole_along_that_axis_only():
    prepared, op = product()
    given = begun(prepared, GRID, {}, ["S(0),S(0)", "R,R"], whole=frozenset({(op, 1)}))
    (factor, other) = decide_by_rule(given, op).strategy.splits
    assert factor[0] >= 0 and other == WHOLE


def test_what_a_plan_says_of_the_first_axes_holds_and_the_rest_follows():
    prepared, op = product()
    given = begun(prepared, GRID, {}, ["S(0),S(0)", "R,R"])
    short = begun(prepared, PAIR, {}, ["S(1)", "S(0)"])
    planned = strategy_by_rule(short, op)
    strategy = strategy_by_rule(given, op, planned=planned)
    assert strategy.splits[0] == planned.splits[0] and strategy.out_specs == specs("P(sum),S(0/2)")


def test_variables_that_contradict_each_other_raise():
    build = ByHand()
    first, second = build.variable("a", 6, 8), build.variable("b", 6, 8)
    attrs = {"T": FLOAT, "use_locking": False}
    inputs = (first, second, build.const(0.1, "float32"), build.const(0.9, "float32"))
    gradient = build.fed("gradient", 6, 8)
    op = build.emit(
        "ResourceApplyKerasMomentum",
        (*inputs[:3], gradient, inputs[3]),
        [],
        {**attrs, "use_nesterov": False},
        stateful=True,
    )
    build.graph.effects.append(op)
    state = before(op, build.prepared(), PAIR, {"a": "S(0)", "b": "S(1)"}, ["R"])
    with pytest.raises(ImmovableInputError) as error:
        decide_by_rule(state, op)
    assert error.value.axes == (0,)


# --- sparse ops: the same rule, read in two ways ---------------------------------------------


def summed_into_tables():
    """The rows of two batches, each summed into a table; to one of these something is added."""
    build = ByHand()
    rows, ids = build.fed("rows", 4, 6), build.fed("ids", 4, dtype="int32")
    count = build.const(np.int32(1000))
    attrs = {"T": FLOAT}
    alone, tied = (
        build.one("UnsortedSegmentSum", (rows, ids, count), (1000, 6), "float32", attrs)
        for _ in range(2)
    )
    total = build.binary("AddV2", tied, build.fed("decay", 1000, 6))
    return build, alone, tied, total


@pytest.mark.parametrize("first", ["alone", "tied"])
def test_what_is_added_up_is_reduced_with_that_whichever_op_was_decided_first(first):
    """The few rows are gathered for the table of its own; a table that is added to something is
    summed over the ranks in any case."""
    build, alone, tied, total = summed_into_tables()
    prepared = build.prepared(alone, total)
    assert prepared.rules[alone.op] is prepared.rules[tied.op]
    state = before(alone.op, prepared, PAIR, {}, ["S(0)", "S(0)", "R"])
    ops = (alone.op, tied.op) if first == "alone" else (tied.op, alone.op)
    made = {op: decide_by_rule(state, op).strategy for op in ops}
    assert made[alone.op].splits == (WHOLE,) and made[alone.op].out_specs == (WHOLE_SPEC,)
    assert made[tied.op].splits[0][0] >= 0 and made[tied.op].out_specs == (SUM,)


def test_partials_pass_where_an_op_is_linear_and_readers_can_reduce_less():
    """Three products are added up: carried through the sum, they are reduced once."""
    build = ByHand()
    x, weights = build.fed("x", 4, 6), [build.fed(n, 6, 8) for n in "abc"]
    products = [build.product(x, w) for w in weights]
    attrs = {"T": FLOAT, "N": 3}
    total = build.one("AddN", products, (4, 8), "float32", attrs)
    prepared = build.prepared(total)
    state = passed(prepared, PAIR, {}, ["S(1)", "S(0)", "S(0)", "S(0)"])
    assert state.result.decisions[total.op].strategy.splits[0][0] == CARRY
    assert moves(state) == [(total, SUM, WHOLE_SPEC)]


# --- expansions -----------------------------------------------------------------------------


def loss():
    """Softmax cross entropy of 4 rows and 8 classes."""
    build = ByHand()
    inputs = build.fed("logits", 4, 8), build.fed("labels", 4, 8)
    attrs = {"T": FLOAT}
    outputs = [((4,), "float32"), ((4, 8), "float32")]
    op = build.emit("SoftmaxCrossEntropyWithLogits", inputs, outputs, attrs)
    return build.prepared(*op.outputs), op


def decided(prepared, op, laid, mesh=PAIR, **given):
    return decide_by_rule(before(op, prepared, mesh, {}, [laid, laid], **given), op)


def test_an_op_whose_plain_factor_is_split_runs_itself():
    prepared, op = loss()
    decision = decided(prepared, op, "S(0)")
    assert decision.expansion is None
    assert decision.strategy.out_specs == (parse_spec("S(0)"), parse_spec("S(0)"))


def test_split_classes_run_as_the_decomposition_which_reduces_over_them():
    prepared, op = loss()
    inner = decided(prepared, op, "S(1)").expansion
    assert inner is not None and inner.prepared is not prepared
    assert {kind for kind, _, _ in inner.collectives()} == {"all_reduce"}


def test_what_the_op_gives_is_what_its_decomposition_gives():
    prepared, op = loss()
    decision = decided(prepared, op, "S(1)")
    assert decision.strategy.out_specs == tuple(decision.expansion.output_specs)
    assert decision.strategy.in_specs == tuple(
        decision.expansion.specs[t] for t in decision.expansion.graph.inputs
    )


def test_an_axis_of_one_rank_splits_nothing():
    prepared, op = loss()
    assert decided(prepared, op, "S(1)", Mesh.of([1])).expansion is None


def test_alike_ops_share_what_they_run_as():
    build = ByHand()
    logits = build.fed("logits", 4, 8)
    first, second = build.unary("Softmax", logits), build.unary("Softmax", logits)
    prepared = build.prepared(first, second)
    state = before(first.op, prepared, PAIR, {}, ["S(1)"])
    one, other = (decide_by_rule(state, t.op) for t in (first, second))
    assert one.expansion is other.expansion is not None
    wider = before(first.op, prepared, Mesh.of([4]), {}, ["S(1)"])
    assert decide_by_rule(wider, first.op).expansion is not one.expansion
