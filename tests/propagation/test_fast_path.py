"""The short way: the same step as the long one, where it may be taken."""

import pytest

from tests.propagation.by_hand import GRID, PAIR, ByHand, begun, moves
from tfpar.propagation.engine import make_fast_path
from tfpar.propagation.step import visit
from tfpar.spec import parse_spec


def split_sum():
    build = ByHand()
    x, y = build.fed("x", 4, 6), build.fed("y", 4, 6)
    total = build.binary("AddV2", x, y)
    return build.prepared(build.unary("Relu", total)), total


def test_an_op_runs_as_it_ran_before():
    prepared, total = split_sum()
    first = begun(prepared, PAIR, {}, ["S(0)", "R"])
    assert not make_fast_path(first)(total.op), "nothing was decided yet"
    visit(first, total.op)
    second = begun(prepared, PAIR, {}, ["S(0)", "R"])
    assert make_fast_path(second)(total.op)
    assert second.specs[total] == first.specs[total]
    assert second.result.decisions[total.op] is first.result.decisions[total.op]
    assert moves(second) == moves(first) and len(moves(first)) == 1
    assert not make_fast_path(begun(prepared, PAIR, {}, ["S(1)", "R"]))(total.op), (
        "it comes otherwise"
    )


@pytest.mark.parametrize("given", ["confined", "whole", "tensors"])
def test_not_where_more_than_the_specs_decides(given):
    prepared, total = split_sum()
    visit(begun(prepared, PAIR, {}, ["S(0)", "S(0)"]), total.op)
    other = {
        "confined": {"confined": True},
        "whole": {"whole": frozenset({(total.op, 0)})},
        "tensors": {"tensors": {total: "R"}},
    }[given]
    assert make_fast_path(begun(prepared, PAIR, {}, ["S(0)", "S(0)"]))(total.op)
    assert not make_fast_path(begun(prepared, PAIR, {}, ["S(0)", "S(0)"], **other))(total.op)


def test_a_sum_is_resolved_as_its_readers_want_it_now():
    build = ByHand()
    product = build.product(build.fed("x", 4, 6), build.fed("y", 6, 8))
    slot = build.variable("slot", 4, 8, trainable=False)
    build.update(slot, build.binary("AddV2", build.read(slot), product))
    prepared = build.prepared()
    for laid in ("R", "S(0)", "R"):
        first, second = (begun(prepared, PAIR, {"slot": laid}, ["S(1)", "S(0)"]) for _ in range(2))
        visit(first, product.op)
        assert make_fast_path(second)(product.op)
        assert second.spec(product) == first.spec(product) == parse_spec(laid)
        assert moves(second) == moves(first)


def test_not_for_what_reads_what_is_open():
    build = ByHand()
    open_ = build.weight("w", 6, 8)
    again = begun(build.prepared(open_), PAIR)
    visit(begun(build.prepared(open_), PAIR), open_.op)
    assert not make_fast_path(again)(open_.op)


def test_what_was_done_on_one_mesh_says_nothing_of_another():
    prepared, total = split_sum()
    visit(begun(prepared, PAIR, {}, ["S(0)", "S(0)"]), total.op)
    assert not make_fast_path(begun(prepared, GRID, {}, ["S(0),R", "S(0),R"]))(total.op)
