"""Between specs of tensors and splits of factors, axis by axis."""

import pytest

from tests.propagation.by_hand import ByHand
from tfpar.propagation.factors import (
    REPLICATE,
    WHOLE,
    fits,
    shard_of,
    size_after,
    spec_of,
    split_in_place,
    split_of,
    splits_of,
)
from tfpar.rules import PLAIN
from tfpar.spec import Mesh, Shard, UnevenMesh, parse_spec


def product():
    """The rule of `i k, k j -> i j` with i = 4, k = 6, j = 8."""
    build = ByHand()
    made = build.product(build.fed("x", 4, 6), build.fed("y", 6, 8))
    return build.prepared(made).rules[made.op]


def merged():
    """The rule of a reshape `a b -> (a b)` with a = 4, b = 6."""
    build = ByHand()
    made = build.reshape(build.fed("x", 4, 6), (24,))
    return build.prepared(made).rules[made.op]


K = (1, PLAIN)


def test_a_split_shows_in_each_operand_that_has_the_factor():
    rule = product()
    shapes = (2,)
    found = [spec_of(dims, rule, (K,), shapes) for dims in rule.inputs]
    assert found == [parse_spec("S(1)"), parse_spec("S(0)")]
    assert spec_of(rule.outputs[0], rule, (K,), shapes) == parse_spec("R")
    assert spec_of(rule.outputs[0], rule, (K,), shapes, is_output=True) == parse_spec("P(sum)")


@pytest.mark.parametrize("text", ["S(0),R", "R,S(1)", "S(0),S(1)", "S(0),S(0)", "R,R"])
def test_splits_of_a_spec_make_that_spec(text):
    rule, shape = product(), (2, 2)
    splits = splits_of(rule.inputs[0], parse_spec(text), rule.sizes, shape)
    assert None not in splits
    assert spec_of(rule.inputs[0], rule, tuple(splits), shape) == parse_spec(text)


def test_the_major_factor_of_a_merged_dim_is_cut_in_blocks_the_minor_one_in_strides():
    rule = merged()
    (out,), (major, minor) = rule.outputs, ((0, PLAIN), (1, PLAIN))
    assert shard_of(out, major, rule.sizes, 2) == Shard(0)
    assert shard_of(out, minor, rule.sizes, 2) == Shard(0, 6)
    assert split_of(out, Shard(0), rule.sizes, 2) == major
    assert split_of(out, Shard(0, 6), rule.sizes, 2) == minor


def test_a_major_factor_that_parts_do_not_divide_is_cut_in_whole_units():
    rule = merged()
    assert shard_of(rule.outputs[0], (0, PLAIN), rule.sizes, 3) == Shard(0, None, 6)


def test_strides_are_relative_to_what_the_axes_before_left():
    rule = merged()
    found = spec_of(rule.outputs[0], rule, ((1, PLAIN), (1, PLAIN)), (2, 3))
    assert found == (Shard(0, 6), Shard(0, 3))
    assert splits_of(rule.outputs[0], found, rule.sizes, (2, 3)) == [(1, PLAIN)] * 2


def test_a_shard_across_factors_is_none_of_theirs_nor_are_later_ones_of_that_dim():
    rule = merged()
    spec = (Shard(0, 4), Shard(0))
    assert splits_of(rule.outputs[0], spec, rule.sizes, (2, 2)) == [None, None]


def test_an_axis_that_shards_nothing_makes_no_split():
    rule = product()
    assert splits_of(rule.inputs[0], parse_spec("P(sum),R"), rule.sizes, (2, 2)) == [WHOLE] * 2
    assert WHOLE[0] == REPLICATE


def test_what_cannot_be_cut_in_a_pattern_does_not_fit():
    assert fits(8, PLAIN) and fits(8, (4, 2)) and fits(8, (None, 4))
    assert not fits(8, (3, 1)) and not fits(8, (4, 3)) and not fits(8, (None, 3))


def test_a_rank_stores_the_longest_block():
    assert [size_after(7, PLAIN, parts) for parts in (1, 2, 4)] == [7, 4, 2]


@pytest.mark.parametrize(
    ("before", "pattern", "after", "expected"),
    [
        (K, PLAIN, K, PLAIN),
        (K, PLAIN, WHOLE, (3, 1)),  # blocks of each three
        (WHOLE, (3, 1), K, PLAIN),  # and back
        (WHOLE, PLAIN, K, PLAIN),  # of what an axis before has split, no block is in place
        ((1, (2, 1)), PLAIN, WHOLE, PLAIN),  # of every other entry a block is one of all
    ],
)
def test_a_split_in_place_holds_the_same_entries(before, pattern, after, expected):
    found = split_in_place((1, pattern), (4, 6, 8), [before], [after], Mesh.of([2, 3]))
    assert found == (1, expected)


def test_shares_that_are_unequal_leave_nothing_in_place_elsewhere():
    mesh = UnevenMesh.over(Mesh.of([2, 3]), 0, (1, 2))
    assert split_in_place(K, (4, 6, 8), [K], [WHOLE], mesh) == K
