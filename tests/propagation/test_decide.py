"""The cheapest way to run an op, axis by axis, given how its inputs come."""

from __future__ import annotations

import pytest

from tests.propagation.by_hand import GRID, PAIR, ByHand, specs
from tfpar.propagation.decide import ImmovableInputError, OperandState, OpStrategy, choose_strategy
from tfpar.propagation.factors import CARRY, WHOLE
from tfpar.spec import Mesh, format_spec, parse_spec

SMALL, LARGE = 10, 1000


def rule_of(make, *shapes):
    build = ByHand()
    made = make(build, *(build.fed(f"x{i}", *shape) for i, shape in enumerate(shapes)))
    return build.prepared(made).rules[made.op]


def product():
    """`i k, k j -> i j`."""
    return rule_of(lambda build, x, y: build.product(x, y), (4, 6), (6, 8))


def addition():
    return rule_of(lambda build, x, y: build.binary("AddV2", x, y), (4, 6), (4, 6))


def ran(rule, arriving, sizes=(LARGE, LARGE), out=LARGE, mesh=PAIR, operands=None, **how):
    """How `rule` runs on inputs of so many bytes, as text: "in; in -> out"."""
    given = [OperandState(size) for size in sizes] if operands is None else operands
    laid = [None if text is None else parse_spec(text) for text in arriving]
    strategy = choose_strategy(rule, given, laid, out, mesh, **how)
    taken, made = ("; ".join(map(format_spec, s)) for s in (strategy.in_specs, strategy.out_specs))
    return f"{taken} -> {made}"


# --- what is split already --------------------------------------------------------------------


@pytest.mark.parametrize(
    "arriving, expected",
    [
        (("S(0)", "R"), "S(0); R -> S(0)"),
        (("R", "S(1)"), "R; S(1) -> S(1)"),
        (("S(1)", "S(0)"), "S(1); S(0) -> P(sum)"),
        (("S(1)", "R"), "S(1); S(0) -> P(sum)"),
        (("R", "R"), "R; R -> R"),
    ],
)
def test_an_op_goes_on_with_a_split_that_an_input_has(arriving, expected):
    assert ran(product(), arriving) == expected


def test_of_two_splits_the_one_that_moves_less_is_taken():
    assert ran(product(), ("S(0)", "S(1)"), (LARGE, SMALL)) == "S(0); R -> S(0)"
    assert ran(product(), ("S(0)", "S(1)"), (SMALL, LARGE)) == "R; S(1) -> S(1)"


def test_inputs_that_are_not_split_start_no_split():
    assert ran(addition(), ("R", "R")) == "R; R -> R"


def test_axes_are_decided_one_after_the_other():
    assert ran(product(), ("S(0),S(1)", "R,S(0)"), mesh=GRID) == "S(0),S(1); R,S(0) -> S(0),P(sum)"


def test_an_axis_of_one_rank_splits_nothing():
    assert ran(product(), ("S(0)", "R"), mesh=Mesh.of([1])) == "R; R -> R"


def test_a_dim_that_is_shorter_than_the_axis_is_still_split_one_of_a_single_entry_is_not():
    one = rule_of(lambda build, x, y: build.product(x, y), (1, 6), (6, 8))
    assert ran(one, ("S(0)", "R")) == "R; R -> R"


def test_open_inputs_come_as_they_are_wanted():
    assert ran(product(), ("S(0)", None)) == "S(0); R -> S(0)"
    assert ran(product(), ("S(1)", None)) == "S(1); S(0) -> P(sum)"


# --- partial sums -------------------------------------------------------------------------------


def test_partials_pass_where_the_op_is_linear_and_readers_reduce_them():
    both = ("P(sum)", "P(sum)")
    assert ran(addition(), both, deferred=True) == "P(sum); P(sum) -> P(sum)"


def test_one_sum_is_cheaper_than_two():
    assert ran(addition(), ("P(sum)", "P(sum)")) == "P(sum); P(sum) -> P(sum)"


def test_a_partial_meets_a_whole_addend_after_it_is_summed():
    assert ran(addition(), ("P(sum)", "R")) == "R; R -> R"


def test_a_small_addend_goes_along_with_a_sum_that_is_reduced_later():
    bias = (LARGE, SMALL)
    assert ran(addition(), ("P(sum)", "R"), bias, deferred=True) == "P(sum); P(sum) -> P(sum)"


def test_zeros_are_partial_for_free():
    operands = [OperandState(LARGE), OperandState(LARGE, zero=True)]
    found = ran(addition(), ("P(sum)", "R"), operands=operands, deferred=True)
    assert found == "P(sum); P(sum) -> P(sum)"


def test_maxima_pass_only_through_what_relabels():
    turned = rule_of(lambda build, x: build.transpose(x, (1, 0)), (4, 6))
    assert ran(turned, ("P(max)", "R")) == "P(max); R -> P(max)"
    assert ran(addition(), ("P(max)", "P(max)")) == "R; R -> R"


def test_partials_that_meet_are_scattered_over_what_they_share():
    """Each scattered moves half of what summing it whole moves, and the work is shared."""
    times = rule_of(lambda build, x, y: build.binary("Mul", x, y), (4, 6), (4, 6))
    assert ran(times, ("P(sum)", "P(sum)")) == "S(0); S(0) -> S(0)"
    odd = rule_of(lambda build, x, y: build.binary("Mul", x, y), (3, 5), (3, 5))
    assert ran(odd, ("P(sum)", "P(sum)")) == "R; R -> R", "nothing divides"


def test_partials_are_scattered_evenly_over_what_later_axes_split_too():
    times = rule_of(lambda build, x, y: build.binary("Mul", x, y), (6, 4), (6, 4))
    alike = ("P(sum),S(0)", "P(sum),S(0)")
    assert ran(times, alike, mesh=Mesh.of([3, 2])) == "S(0),S(0); S(0),S(0) -> S(0),S(0)"
    assert ran(times, alike, mesh=GRID) == "S(1),S(0); S(1),S(0) -> S(1),S(0)"


# --- what cannot move ---------------------------------------------------------------------------


def test_what_is_pinned_stays_and_the_others_come_to_it():
    operands = [OperandState(LARGE), OperandState(SMALL, pinned=True)]
    assert ran(addition(), ("S(0)", "S(1)"), operands=operands) == "S(1); S(1) -> S(1)"


def test_a_pinned_input_is_not_cut_for_another_that_is_split():
    operands = [OperandState(LARGE), OperandState(SMALL, pinned=True)]
    assert ran(addition(), ("S(0)", "R"), operands=operands) == "R; R -> R"


def test_of_splits_that_move_as_much_the_one_that_keeps_more_in_place_is_taken():
    """To gather the second moves as much as to exchange the first, which is twice as large."""
    assert ran(product(), ("S(0)", "S(0)"), (2 * LARGE, LARGE)) == "S(0); R -> S(0)"


def test_pinned_inputs_that_contradict_each_other_are_an_error_of_their_axis():
    operands = [OperandState(LARGE, pinned=True)] * 2
    with pytest.raises(ImmovableInputError) as error:
        ran(addition(), ("R,S(0)", "R,S(1)"), mesh=GRID, operands=operands)
    assert error.value.axes == (1,)


def test_confined_inputs_may_be_cut_but_not_gathered():
    operands = [OperandState(LARGE, confined=True)] * 2
    assert ran(addition(), ("S(0)", "R"), operands=operands) == "S(0); S(0) -> S(0)"
    with pytest.raises(ImmovableInputError):
        ran(addition(), ("S(0)", "R"), operands=operands, whole_axes={0})


def test_what_stays_where_it_lies_is_pinned_unless_it_is_loose():
    build = ByHand()
    handle, x = build.variable("w", 4, 6), build.fed("x", 4, 6)
    assert OperandState.of(handle).pinned and not OperandState.of(handle, loose=True).pinned
    assert not OperandState.of(x).pinned and OperandState.of(x).num_bytes == 4 * 6 * 4


# --- what is asked for --------------------------------------------------------------------------


def test_along_axes_that_must_be_whole_everything_is_gathered():
    found = ran(product(), ("S(0),S(0)", "R,R"), mesh=GRID, whole_axes={1})
    assert found == "S(0),R; R,R -> S(0),R"


def test_what_is_planned_for_the_first_axes_holds():
    planned = OpStrategy(((1, (None, 1)),), specs("S(1)", "S(0)"), specs("P(sum)"))
    found = ran(product(), ("S(0),S(0)", "R,R"), mesh=GRID, planned=planned)
    assert found == "S(1),S(0/2); S(0),R -> P(sum),S(0/2)", "rows stay where they are"
    carried = OpStrategy(((CARRY, (None, 1)),), specs("P(sum)", "R"), specs("P(sum)"))
    found = ran(product(), ("S(0),S(0)", "R,R"), mesh=GRID, planned=carried)
    assert found == "P(sum),S(0/2); R,R -> P(sum),S(0/2)"


def test_a_sparse_op_gathers_little_where_it_would_reduce_much():
    contracted, arriving = product(), ("S(1)", "S(0)")
    sizes, out = (SMALL, SMALL), LARGE
    assert ran(contracted, arriving, sizes, out) == "S(1); S(0) -> P(sum)"
    assert ran(contracted, arriving, sizes, out, sparse=True) == "R; R -> R"
    assert ran(contracted, arriving, (LARGE, LARGE), SMALL, sparse=True).endswith("P(sum)")


def test_a_strategy_says_of_each_axis_what_it_splits():
    strategy = choose_strategy(
        product(), [OperandState(LARGE)] * 2, specs("S(0),R", "R,R"), LARGE, GRID
    )
    assert strategy.splits == ((0, (None, 1)), WHOLE)
