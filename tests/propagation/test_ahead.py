"""Splits that nothing behind an op asks for, but what comes next: generated dims, open weights."""

import numpy as np

from tests.propagation.by_hand import FLOAT, GRID, PAIR, ByHand, before, begun, passed
from tfpar.propagation.decide import OpStrategy
from tfpar.propagation.factors import WHOLE
from tfpar.propagation.partitioned_graph import Decision
from tfpar.propagation.rule_decision import decide_by_rule, split_generated, split_opened
from tfpar.spec import parse_spec

# --- dims that an op makes of nothing ---------------------------------------------------------


def filled(batch=4):
    """A Fill that is added to a slot, as zeros are that a gradient is scattered into."""
    build = ByHand()
    attrs = {"T": FLOAT}
    value = build.fed("value")
    made = build.one("Fill", (build.shape_const([batch, 8]), value), (batch, 8), "float32", attrs)
    slot = build.variable("slot", batch, 8, trainable=False)
    build.update(slot, build.binary("AddV2", build.read(slot), made))
    return build.prepared(), made


def made_as(laid, batch=4):
    """What it is made as where the slot lies as `laid`."""
    prepared, made = filled(batch)
    mesh, fed = (GRID, "R,R") if "," in laid else (PAIR, "R")
    state = before(made.op, prepared, mesh, {"slot": laid}, [fed])
    return decide_by_rule(state, made.op).strategy.out_specs[0]


def test_a_rank_makes_only_the_part_that_all_readers_hold():
    assert made_as("S(0)") == parse_spec("S(0)")
    assert made_as("S(1)") == parse_spec("S(1)")
    assert made_as("R") == parse_spec("R")
    assert made_as("S(0),S(1)") == parse_spec("S(0),S(1)")


def test_what_does_not_divide_is_made_in_parts_too():
    assert made_as("S(0)", batch=5) == parse_spec("S(0)")


def test_an_axis_along_which_it_must_not_split_is_left_whole():
    prepared, made = filled()
    whole = frozenset({(made.op, 0)})
    state = before(made.op, prepared, GRID, {"slot": "S(0),S(1)"}, ["R,R"], whole=whole)
    decision = decide_by_rule(state, made.op)
    assert decision.strategy.out_specs == (parse_spec("R,S(1)"),)


def test_a_dim_that_an_input_has_is_not_generated():
    """The rows of a one-hot follow its indices; its classes follow the readers."""
    build = ByHand()
    ids = build.fed("ids", 4, dtype="int32")
    operands = [build.const(np.int32(8)), build.const(1.0, "float32"), build.const(0.0, "float32")]
    attrs = {"T": FLOAT, "axis": -1}
    made = build.one("OneHot", (ids, *operands), (4, 8), "float32", attrs)
    slot = build.variable("slot", 4, 8, trainable=False)
    build.update(slot, build.binary("AddV2", build.read(slot), made))
    for laid, expected in (("S(0)", "R"), ("S(1)", "S(1)")):
        state = before(made.op, build.prepared(), PAIR, {"slot": laid}, ["R"])
        (found,) = decide_by_rule(state, made.op).strategy.out_specs
        assert found == parse_spec(expected)


def test_a_decision_that_is_settled_already_stays():
    prepared, made = filled()
    state = before(made.op, prepared, PAIR, {"slot": "R"}, ["R"])
    decision = decide_by_rule(state, made.op)
    assert split_generated(state, made.op, decision, ()) is decision


# --- weights whose first reader has no wish of its own ------------------------------------------


def scaled(hidden=6):
    """x * scale, then a matrix: the scale is open."""
    build = ByHand()
    x = build.fed("x", 4, hidden)
    scale = build.weight("scale", hidden)
    y = build.binary("Mul", x, scale)
    out = build.product(y, build.weight("kernel", hidden, 8))
    return build.prepared(out), y


def scale_of(kernel, fed="R", mesh=PAIR, hidden=6, anchor=None):
    """How the scale comes to lie where the matrix lies as `kernel`."""
    prepared, y = scaled(hidden)
    tensors = None if anchor is None else {y: anchor}
    state = passed(prepared, mesh, {"kernel": kernel}, [fed], tensors)
    (handle,) = (v.handle for v in prepared.graph.variables if v.name == "scale")
    return state.spec(handle)


def test_an_open_weight_is_laid_as_the_next_matrix_is_split():
    assert scale_of("S(0)") == parse_spec("S(0)")
    assert scale_of("S(1)") == parse_spec("R"), "that is a dim which the scale does not have"
    assert scale_of("R") == parse_spec("R")
    assert scale_of("R,S(0)", "R,R", GRID) == parse_spec("R,S(0)")


def test_not_where_its_reader_reads_something_split():
    """Along that axis the reader has a wish of its own."""
    assert scale_of("S(0)", fed="S(0)") == parse_spec("R")


def test_not_where_the_plan_lays_what_its_reader_makes():
    assert scale_of("S(0)", anchor="R") == parse_spec("R")


def test_not_where_it_does_not_divide():
    assert scale_of("S(0)", hidden=5) == parse_spec("R")


def test_nothing_is_opened_where_no_input_is_a_weight():
    prepared, y = scaled()
    state = begun(prepared, PAIR, {"kernel": "S(0)"}, ["R"])
    rule = prepared.rules[y.op]
    whole = (parse_spec("R"),)
    decision = Decision(OpStrategy((WHOLE,), whole * len(rule.inputs), whole))
    assert split_opened(state, y.op, decision, [], ()) is decision
