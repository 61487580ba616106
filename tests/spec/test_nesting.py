"""Splits of one dim by two axes, with the outer one taken away or put in."""

import itertools

import pytest

from tfpar.spec import Mesh, Replicate, Shard, local_indices, parse_placement
from tfpar.spec.nesting import within_outer, without_outer

LENGTH = 24
MESH = Mesh.of([2, 3])


def shards(length, parts):
    """All placements along an axis that split a dim of this length evenly."""
    for stride in range(1, length):
        shard = Shard(0, stride)
        if shard.fits(length) and shard.is_even(length, parts):
            yield shard
    if length % parts == 0:
        yield Shard(0)


def held(spec, inner):
    """The entries that ranks at one coordinate of the inner axis hold, of all outer ones."""
    outers = range(1 if isinstance(spec[0], Replicate) else MESH.shape[0])
    found = (local_indices(LENGTH, 0, spec, MESH, (outer, inner)) for outer in outers)
    return sorted(itertools.chain.from_iterable(map(list, found)))


def test_without_the_outer_axis_the_inner_one_has_the_same_entries():
    found = 0
    for outer in shards(LENGTH, 2):
        for inner in shards(LENGTH // 2, 3):
            alone = without_outer(inner, outer, LENGTH, 2, 3)
            if alone is not None:
                found += 1
                for rank in range(3):
                    assert held((Replicate(), alone), rank) == held((outer, inner), rank)
                assert within_outer(alone, outer, LENGTH, 2, 3) is inner
    assert found > 10


def test_within_an_outer_axis_the_inner_one_has_entries_that_it_had():
    found = 0
    for outer in shards(LENGTH, 2):
        for inner in shards(LENGTH, 3):
            nested = within_outer(inner, outer, LENGTH, 2, 3)
            if nested is not None:
                found += 1
                for rank in range(3):
                    assert held((outer, nested), rank) == held((Replicate(), inner), rank)
    assert found > 10


@pytest.mark.parametrize(
    ("outer", "inner", "length", "alone"),
    [
        ("S(0)", "S(0)", 8, "S(0/4)"),  # halves of each half
        ("S(0)", "S(0/2)", 8, "S(0/2)"),  # runs of two are runs of two in more of them
        ("S(0/2)", "S(0)", 8, "S(0)"),  # every other entry of the first half: the first half
        ("S(0/4)", "S(0)", 8, "S(0)"),
        ("S(0)", "S(0)", 6, None),  # blocks of three with padding are none of six
        ("S(0)", "S(0)", 5, None),
    ],
)
def test_what_an_inner_axis_has_alone(outer, inner, length, alone):
    found = without_outer(parse_placement(inner), parse_placement(outer), length, 2, 2)
    assert found is (None if alone is None else parse_placement(alone))


def test_whole_blocks_are_in_no_outer_block():
    assert within_outer(Shard(0), Shard(0), 8, 2, 2) is None
