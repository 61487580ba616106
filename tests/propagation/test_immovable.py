"""What cannot move: variables, lists, and anything in a body; and which lists can be made anew."""

import pytest

from tests.propagation.by_hand import FLOAT, GRID, PAIR, ByHand, begun, moves, passed, specs
from tfpar.propagation.decide import ImmovableInputError
from tfpar.propagation.immovable import (
    RetryWithWholeLists,
    check_immovable,
    check_local,
    make_immovable_error,
)
from tfpar.propagation.lists import is_loose, makes_list, remaking
from tfpar.propagation.step import move
from tfpar.spec import SpecError, parse_spec

WHOLE, ROWS, COLUMNS, SUM = specs("R", "S(0)", "S(1)", "P(sum)")


class WithLists(ByHand):
    def listed(self, x):
        """The rows of `x` as a list."""
        inputs = (x, self.shape_const(x.shape[1:]))
        attrs = {"element_dtype": FLOAT}
        return self.one("TensorListFromTensor", inputs, x.shape, "variant", attrs)

    def opaque(self, listed):
        """A list that came out of something nobody can look into."""
        return self.one("Mystery", (listed,), listed.shape, "variant")


# --- what stays where it lies -----------------------------------------------------------------


def test_a_variable_is_read_as_it_lies():
    build = ByHand()
    handle = build.variable("w", 4, 6)
    state = begun(build.prepared(), GRID, {"w": "S(0),R"})
    check_immovable(state, handle, parse_spec("S(0),R"))
    with pytest.raises(ImmovableInputError) as error:
        check_immovable(state, handle, parse_spec("S(0),S(1)"))
    assert error.value.axes == (1,)


def test_a_tensor_moves_but_not_in_a_body():
    build = ByHand()
    x = build.fed("x", 4, 6)
    state = begun(build.prepared(x), GRID, {}, ["S(0),R"])
    check_immovable(state, x, parse_spec("R,R"))
    check_local(state, x, parse_spec("S(0),S(1)"))
    with pytest.raises(ImmovableInputError) as error:
        check_local(state, x, parse_spec("R,S(1)"))
    assert error.value.axes == (0,)


# --- what users are told, or what is tried next -------------------------------------------------


def test_in_a_body_the_op_around_it_is_told():
    build = ByHand()
    y = build.unary("Relu", build.fed("x", 4, 6))
    error = ImmovableInputError(0)
    assert make_immovable_error(begun(build.prepared(y), PAIR, confined=True), y.op, error) is error


def test_variables_that_exclude_each_other_are_named_with_their_axis():
    build = ByHand()
    first, second = build.variable("a", 4, 6), build.variable("b", 4, 6)
    op = build.emit("Mystery", (first, second), [], stateful=True)
    build.graph.effects.append(op)
    state = begun(build.prepared(), GRID, {"a": "R,S(0)", "b": "R,S(1)"})
    error = make_immovable_error(state, op, ImmovableInputError(1))
    assert isinstance(error, SpecError)
    assert "a as R,S(0), b as R,S(1)" in str(error) and "'model'" in str(error)


def test_makers_of_lists_are_asked_to_stay_whole_until_all_of_them_do():
    build = WithLists()
    made = build.opaque(build.listed(build.fed("x", 4, 6)))
    op = build.one("TensorListStack", (made,), (4, 6), "float32").op
    prepared = build.prepared(*op.outputs)
    asked = make_immovable_error(begun(prepared, PAIR, {}, ["R"]), op, ImmovableInputError(0))
    makers = {made.op, made.op.inputs[0].op}
    assert isinstance(asked, RetryWithWholeLists) and asked.ops == {(maker, 0) for maker in makers}
    state = begun(prepared, PAIR, {}, ["R"], whole=asked.ops)
    state.specs |= {made: WHOLE}
    assert isinstance(make_immovable_error(state, op, ImmovableInputError(0)), SpecError)


# --- lists that can be made anew -----------------------------------------------------------------


def test_a_list_made_in_plain_sight_is_loose_and_one_from_elsewhere_is_not():
    build = WithLists()
    listed = build.listed(build.fed("x", 4, 6))
    fed = build.fed("list", 4, 6, dtype="variant")
    hidden = build.opaque(listed)
    prepared = build.prepared(listed, fed, hidden)
    assert is_loose(listed, prepared.rules, ())
    assert not is_loose(fed, prepared.rules, ()) and is_loose(fed, prepared.rules, {fed})
    assert not is_loose(hidden, prepared.rules, ())
    again = WithLists()
    kept = again.one("Identity", (again.fed("list", 4, 6, dtype="variant"),), (4, 6), "variant")
    rules = again.prepared(kept).rules
    assert not is_loose(kept, rules, ()), "what it is made of came from elsewhere"
    assert not is_loose(build.graph.inputs[0], prepared.rules, ()), "that is no list"


def test_a_list_is_made_anew_of_its_elements():
    build = WithLists()
    x = build.fed("x", 4, 6)
    listed = build.listed(x)
    prepared = build.prepared(listed)
    rule = prepared.rules[listed.op]
    assert makes_list(listed.op, rule)
    strategy = remaking(listed.op, rule, COLUMNS, PAIR)
    assert strategy.in_specs[0] == COLUMNS and strategy.out_specs == (COLUMNS,)
    assert remaking(listed.op, rule, ROWS, PAIR).in_specs[0] == WHOLE, "its length stays whole"
    assert remaking(listed.op, rule, SUM, PAIR).in_specs[0] == SUM


def test_moving_a_list_moves_what_it_is_made_of():
    build = WithLists()
    x = build.fed("x", 4, 6)
    listed = build.listed(x)
    state = passed(build.prepared(listed), PAIR, {}, ["R"])
    assert state.spec(listed) == WHOLE
    move(state, listed, COLUMNS)
    assert moves(state) == [(x, WHOLE, COLUMNS)]
    move(state, listed, COLUMNS)
    assert len(moves(state)) == 1, "once for all readers"
