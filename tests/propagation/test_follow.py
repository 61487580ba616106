"""Which weight a slot follows, read off the ops that update it; specs of one from the other's."""

import pytest

from tests.propagation.by_hand import ByHand
from tfpar.propagation.follow import followed_spec, followed_weights, leading_spec
from tfpar.propagation.prepared_graph import prepare
from tfpar.spec import parse_spec


def links(build):
    graph = build.graph
    found = followed_weights(graph, prepare(graph).rules)
    return {slot.name: (weight.name, mapping) for slot, (weight, mapping) in found.items()}


def test_a_slot_follows_the_weight_that_it_is_updated_with():
    build = ByHand()
    weight, slot = build.variable("w", 6, 8), build.variable("w/m", 6, 8, trainable=False)
    other = build.variable("v", 6, 8)
    build.update(slot, build.binary("Mul", build.read(slot), build.read(weight)))
    build.update(other, build.read(other))
    assert links(build) == {"w/m": ("w", (0, 1))}


def test_a_slot_of_row_means_follows_on_the_dim_that_it_has():
    build = ByHand()
    weight, rows = build.variable("w", 6, 8), build.variable("w/rows", 6, trainable=False)
    gradient = build.fed("gradient", 6, 8)
    means = build.binary("AddV2", build.read(rows), build.reduce("Mean", gradient, [1]))
    scaled = build.binary("Mul", gradient, build.expand_dims(means, 1))
    build.update(rows, means)
    build.update(weight, build.binary("Sub", build.read(weight), scaled))
    assert links(build) == {"w/rows": ("w", (0,))}


def test_a_slot_tied_to_two_weights_alike_follows_neither():
    build = ByHand()
    slot = build.variable("m", 6, 8, trainable=False)
    sums = build.binary("AddV2", build.weight("w", 6, 8), build.weight("v", 6, 8))
    build.update(slot, sums)
    assert links(build) == {}


def test_a_gradient_ties_no_slot_to_what_it_is_computed_of():
    """Past the product lie the activations, of which a dim may be as long as the weight's."""
    build = ByHand()
    weight, slot = build.variable("w", 6, 8), build.variable("m", 6, 8, trainable=False)
    gradient = build.product(build.fed("x", 4, 6), build.fed("dy", 4, 8), (True, False))
    build.update(slot, gradient)
    build.update(weight, build.binary("Sub", build.read(weight), gradient))
    assert links(build) == {"m": ("w", (0, 1))}


@pytest.mark.parametrize(
    "weight, mapping, slot, back",
    [
        ("S(0),S(1)", (0, 1), "S(0),S(1)", "S(0),S(1)"),
        ("S(0),S(1)", (1, 0), "S(1),S(0)", "S(0),S(1)"),
        ("S(0),S(1)", (1,), "R,S(0)", "R,S(1)"),
        ("S(1/4),R", (None, 1), "S(1/4),R", "S(1/4),R"),
        ("S(0),P(sum)", (0,), "S(0),R", "S(0),R"),
    ],
)
def test_a_slot_is_split_where_its_weight_is(weight, mapping, slot, back):
    assert followed_spec(parse_spec(weight), mapping) == parse_spec(slot)
    assert leading_spec(parse_spec(slot), mapping) == parse_spec(back)
