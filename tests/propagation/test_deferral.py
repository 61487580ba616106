"""Where partial sums are resolved: which tensors are better carried on, and on what terms."""

from tests.propagation.by_hand import FLOAT, GRID, PAIR, ByHand, specs
from tfpar.propagation.deferral import Carry
from tfpar.propagation.prepared_graph import prepare
from tfpar.spec import parse_spec

SUM = parse_spec("P(sum)")


def summed(count=3):
    """Products of one input with several matrices, added up."""
    build = ByHand()
    x = build.fed("x", 4, 6)
    products = [build.product(x, build.fed(f"w{i}", 6, 8)) for i in range(count)]
    attrs = {"T": FLOAT, "N": count}
    return build, products, build.one("AddN", products, (4, 8), "float32", attrs)


def scored(heads: int = 2):
    """Queries times keys of one batch and head each, each made by a product."""
    build = ByHand()
    x = build.fed("x", 4 * heads, 6)
    sides = [build.reshape(build.product(x, build.fed(name, 6, 5)), (heads, 4, 5)) for name in "qk"]
    attrs = {"T": FLOAT, "adj_x": False, "adj_y": True}
    scores = build.one("BatchMatMulV2", sides, (heads, 4, 4), "float32", attrs)
    return build, sides, scores


# --- what is carried ----------------------------------------------------------------------------


def test_sums_that_are_added_up_are_reduced_once_for_all():
    build, products, total = summed()
    carried = build.prepared(total).carried
    assert set(products) <= set(carried) and total not in carried


def test_a_sum_that_is_read_twice_is_reduced_before():
    build = ByHand()
    made = build.product(build.fed("x", 4, 6), build.fed("w", 6, 8))
    readers = [build.binary("Mul", made, build.fed(n, 4, 8)) for n in "ab"]
    assert made not in build.prepared(*readers).carried


def test_a_sum_is_carried_to_where_it_is_smaller():
    build = ByHand()
    made = build.product(build.fed("x", 4, 6), build.fed("w", 6, 8))
    total = build.reduce("Sum", made, [0])
    carried = build.prepared(total).carried
    assert made in carried and total not in carried


def test_what_is_larger_later_is_reduced_before():
    build = ByHand()
    made = build.product(build.fed("x", 4, 6), build.fed("w", 6, 1))
    wide = build.binary("Mul", made, build.fed("y", 4, 8))
    assert made not in build.prepared(wide).carried


def test_what_is_not_linear_ends_the_way():
    build = ByHand()
    made = build.product(build.fed("x", 4, 6), build.fed("w", 6, 8))
    total = build.reduce("Sum", build.unary("Relu", made), [0])
    assert made not in build.prepared(total).carried


def test_what_a_graph_gives_is_left_to_its_readers_if_they_reduce_it():
    build, _, total = summed()
    build.graph.outputs = [total]
    assert total in prepare(build.graph, reduces=False).carried
    assert total not in prepare(build.graph).carried


def test_ops_are_deferred_if_all_that_they_give_is_carried():
    build, products, total = summed()
    deferred = build.prepared(total).deferred
    assert {p.op for p in products} <= deferred and total.op not in deferred


# --- on what terms ------------------------------------------------------------------------------


def test_a_plan_that_splits_what_it_is_multiplied_with_bars_it():
    build = ByHand()
    made = build.product(build.fed("x", 4, 6), build.fed("w", 6, 8))
    scale = build.weight("scale", 8)
    total = build.reduce("Sum", build.binary("Mul", made, scale), [0])
    carry = build.prepared(total).carried[made]
    assert scale in carry.past
    rows, whole = specs("S(0)", "R")
    assert carry.holds(0, (SUM[0],), PAIR, lambda t: whole)
    assert carry.holds(0, (SUM[0],), PAIR, lambda t: None), "it may be laid yet"
    assert not carry.holds(0, (SUM[0],), PAIR, lambda t: rows)


def test_a_product_of_two_sums_asks_for_something_to_scatter_them_over():
    build, sides, scores = scored()
    prepared = build.prepared(scores)
    first = sides[0].op.inputs[0]
    (factors,) = prepared.carried[sides[0]].meets
    assert factors == ((0, 2),), "the heads, which lead dim 0"
    (before,) = prepared.carried[first].meets
    assert before == ((0, 2),), "and dim 0 of what is reshaped"


def test_what_no_axis_divides_is_not_worth_carrying():
    carry = Carry(meets=(((0, 3), (1, 6)),))
    assert carry.holds(0, SUM, PAIR, lambda t: None), "the second factor divides"
    assert not Carry(meets=(((0, 3),),)).holds(0, SUM, PAIR, lambda t: None)
    made = parse_spec("S(1),P(sum)")
    assert not carry.holds(1, made, GRID, lambda t: None), "of six, two ranks have three left"


def test_terms_are_joined_without_repeating_any():
    build = ByHand()
    x, y = build.fed("x", 4), build.fed("y", 4)
    joined = Carry((x,), (((0, 2),),)).joined(Carry((x, y), (((0, 2),), ((1, 3),))))
    assert joined == Carry((x, y), (((0, 2),), ((1, 3),)))


# --- meetings -----------------------------------------------------------------------------------


def test_a_meeting_names_the_factors_of_both_and_of_the_result():
    build, sides, scores = scored()
    meetings = build.prepared(scores).meetings
    assert {(op, t) for op, t in meetings.factors} == {(scores.op, t) for t in sides}
    assert meetings.dims[scores] == {0}


def test_a_product_of_a_sum_and_what_is_fed_is_no_meeting():
    build = ByHand()
    made = build.product(build.fed("x", 4, 6), build.fed("w", 6, 8))
    again = build.product(made, build.fed("v", 8, 5))
    assert not build.prepared(again).meetings.factors
