"""In which spec a fresh tensor is kept: as it was made, unless it is anchored, summed or lent."""

import pytest

from tests.propagation.by_hand import FLOAT, GRID, PAIR, ByHand, begun
from tfpar.propagation.final_spec import choose_final_spec, ends_at_weight, resolved_spec
from tfpar.spec import Mesh, parse_spec


def kept(prepared, tensor, made, mesh=PAIR, **given):
    return choose_final_spec(begun(prepared, mesh, **given), tensor, parse_spec(made))


def updates(laid):
    """A gradient whose only reader is a slot, which lies as it is said."""
    build = ByHand()
    gradient = build.product(build.fed("x", 4, 6), build.fed("y", 6, 8))
    slot = build.variable("slot", 4, 8, trainable=False)
    build.update(slot, build.binary("AddV2", build.read(slot), gradient))
    return build.prepared(), gradient, {"variables": {"slot": laid}}


def test_what_is_split_or_whole_stays_as_it_is_made():
    build = ByHand()
    y = build.unary("Relu", build.fed("x", 4, 6))
    prepared = build.prepared(y)
    assert kept(prepared, y, "S(1)") == parse_spec("S(1)")
    assert kept(prepared, y, "R") == parse_spec("R")


def test_a_sum_is_reduced_or_scattered_as_its_readers_want_it():
    for laid, expected in (("R", "R"), ("S(0)", "S(0)"), ("S(1)", "S(1)")):
        prepared, gradient, given = updates(laid)
        assert kept(prepared, gradient, "P(sum)", **given) == parse_spec(expected)


def test_a_sum_that_is_better_carried_on_stays_partial():
    build = ByHand()
    made = build.product(build.fed("x", 4, 6), build.fed("y", 6, 8))
    prepared = build.prepared(build.reduce("Sum", made, [0]))
    assert kept(prepared, made, "P(sum)") == parse_spec("P(sum)")
    assert kept(prepared, made, "P(max)") == parse_spec("R"), "that is no sum"


def test_in_a_body_nothing_is_reduced():
    prepared, gradient, given = updates("R")
    assert kept(prepared, gradient, "P(sum)", confined=True, **given) == parse_spec("P(sum)")


def test_what_stays_where_it_lies_is_kept_as_it_is_made():
    build = ByHand()
    listed = build.emit("TensorListFromTensor", (build.fed("x", 4, 6), build.shape_const([6])), [])
    made = listed.add_output((), "variant")
    assert kept(build.prepared(), made, "P(sum)") == parse_spec("P(sum)")


def test_an_anchor_has_the_say():
    prepared, gradient, given = updates("R")
    found = kept(prepared, gradient, "P(sum)", tensors={gradient: "S(1)"}, **given)
    assert found == parse_spec("S(1)")


def test_along_axes_that_an_anchor_leaves_open_it_lies_as_without():
    build = ByHand()
    y = build.unary("Relu", build.fed("x", 4, 6))
    given = {"tensors": {y: "R"}}
    assert kept(build.prepared(y), y, "S(0),S(1)", GRID, **given) == parse_spec("R,S(1)")


def test_without_an_anchor_the_same_is_answered_for_a_tensor_that_has_one():
    prepared, gradient, given = updates("S(0)")
    state = begun(prepared, PAIR, tensors={gradient: "S(1)"}, **given)
    assert resolved_spec(state, gradient, parse_spec("P(sum)")) == parse_spec("S(0)")


def test_a_16_bit_gradient_is_split_as_the_variable_that_it_updates():
    build = ByHand()
    handle = build.variable("w", 6, 8)
    gradient = build.unary("Neg", build.fed("gradient", 6, 8, dtype="bfloat16"))
    wide = build.cast(gradient, "float32")
    build.update(handle, build.binary("Sub", build.read(handle), wide))
    prepared, given = build.prepared(), {"variables": {"w": "S(0)"}}
    assert kept(prepared, gradient, "S(1)", **given) == parse_spec("S(0)")
    assert kept(prepared, gradient, "R", **given) == parse_spec("R"), "it is not split yet"
    assert kept(prepared, wide, "S(1)", **given) == parse_spec("S(1)")


# --- splits that propagation started --------------------------------------------------------------


@pytest.fixture
def attention():
    """Scores of two products, mixed with a third, and a product of that with a weight."""
    build = ByHand()
    x = build.fed("x", 8, 6)
    q, k, v = (build.reshape(build.product(x, build.fed(n, 6, 4)), (2, 4, 4)) for n in "qkv")
    attrs = {"T": FLOAT, "adj_x": False}
    scores = build.one("BatchMatMulV2", (q, k), (2, 4, 4), "float32", {**attrs, "adj_y": True})
    mixed = build.one("BatchMatMulV2", (scores, v), (2, 4, 4), "float32", {**attrs, "adj_y": False})
    joined = build.reshape(mixed, (8, 4))
    out = build.product(joined, build.weight("out", 4, 6))
    return build.prepared(out), joined, scores


def ends(attention, made, laid="R", mesh=PAIR, axis=0):
    prepared, joined, _ = attention
    state = begun(prepared, mesh, {"out": laid})
    return ends_at_weight(state, joined, axis, parse_spec(made))


def test_what_comes_of_the_meeting_leaves_by_the_product_with_the_weight(attention):
    prepared, joined, _ = attention
    (out,) = prepared.graph.outputs
    assert prepared.leaving == {joined: [(out.op, 1)]}


def test_what_the_heads_were_split_for_is_gathered_before_the_next_weight(attention):
    assert ends(attention, "S(0)")
    assert not ends(attention, "R"), "it is whole"


def test_not_where_the_product_goes_on_with_the_split(attention):
    assert not ends(attention, "S(1)"), "the weight has that dim too, and no split of its own"


def test_it_ends_for_readers_that_are_weights_only(attention):
    prepared, _, scores = attention
    assert not ends_at_weight(begun(prepared, PAIR), scores, 0, parse_spec("S(0)"))


def test_a_split_of_data_by_the_plan_does_not_end(attention):
    prepared, joined, _ = attention
    laid = begun(prepared, PAIR, {"out": "R"}, ["S(0)"])
    assert resolved_spec(laid, joined, parse_spec("S(0)")) == parse_spec("S(0)")
    lent = begun(prepared, PAIR, {"out": "R"}, ["R"])
    assert resolved_spec(lent, joined, parse_spec("S(0)")) == parse_spec("R")


def test_an_axis_of_the_mesh_is_looked_at_alone(attention):
    mesh = Mesh.of({"data": 2, "model": 2})
    assert ends(attention, "R,S(0)", "R,R", mesh, axis=1)
    assert not ends(attention, "R,S(0)", "R,R", mesh, axis=0)
