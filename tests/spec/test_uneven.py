"""Meshes whose ranks get unequal shares: what each stores, and how a batch is shared out."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfpar.spec import (
    ArgumentError,
    Mesh,
    Replicate,
    Shard,
    SpecError,
    UnevenMesh,
    apportion,
    local_indices,
    local_shape,
)


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=8), st.integers(0, 500))
def test_a_batch_is_shared_out_whole_and_everyone_gets_some(weights, more):
    total = len(weights) + more
    shares = apportion(total, weights)
    assert sum(shares) == total and min(shares) >= 1
    ordered = sorted(zip(weights, shares, strict=True))
    for (one, fewer), (other, many) in zip(ordered, ordered[1:], strict=False):
        assert fewer <= many or one == other


@pytest.mark.parametrize(
    "total, weights, expected",
    [
        (32, (3, 1), (24, 8)),
        (10, (3, 1), (8, 2)),  # of equal remainders the first is rounded up
        (7, (1, 1), (4, 3)),
        (4, (100, 1, 1, 1), (1, 1, 1, 1)),
        (13, (3, 1, 1, 3), (5, 2, 1, 5)),
    ],
)
def test_shares_are_in_proportion(total, weights, expected):
    assert apportion(total, weights) == expected


def test_fewer_samples_than_ranks_cannot_be_shared_out():
    with pytest.raises(ArgumentError, match="total is 1"):
        apportion(1, (3, 1))


MESH = UnevenMesh.over(Mesh.of([2, 2]), 0, (3, 1))


@pytest.mark.parametrize(
    "length, spec",
    [
        (8, (Shard(0), Replicate())),
        (8, (Shard(0), Shard(0))),
        (24, (Shard(0, None, 3), Replicate())),
        (24, (Shard(0, 12), Replicate())),
        (6, (Shard(0), Replicate())),  # no multiple of 4: cut evenly
        (7, (Replicate(), Shard(0))),
    ],
)
def test_each_entry_lies_where_shapes_say(length, spec):
    found = []
    for rank in range(MESH.size):
        index = local_indices(length, 0, spec, MESH, MESH.coordinates(rank))
        assert local_shape((length,), spec, MESH.seen_from(rank)) == index.shape
        found.append(index[index >= 0])
    copies = 4 // np.prod([2 for p in spec if isinstance(p, Shard)], dtype=int)
    counts = np.bincount(np.concatenate(found), minlength=length)
    assert (counts == copies).all()


def test_samples_stay_together_when_dims_are_joined():
    """(8, 5) as (40,): the rows of a rank are the entries of its rows."""
    spec = (Shard(0), Replicate())
    for rank in range(MESH.size):
        at = MESH.coordinates(rank)
        rows, entries = (local_indices(n, 0, spec, MESH, at) for n in (8, 40))
        np.testing.assert_array_equal(entries, (rows[:, None] * 5 + np.arange(5)).reshape(-1))


def test_an_uneven_mesh_is_none_of_the_even_ones():
    assert MESH != Mesh.of([2, 2]) and MESH.even == Mesh.of([2, 2])
    assert MESH != UnevenMesh.over(Mesh.of([2, 2]), 0, (1, 3))
    assert hash(MESH) == hash(UnevenMesh.over(Mesh.of([2, 2]), 0, [3, 1]))
    assert MESH.representatives == (0, 2) and MESH.seen_from(3).widest == MESH


def test_an_axis_within_ranks_leaves_their_shares():
    """Of microbatches: each rank cuts its own share."""
    parts = MESH.seen_from(2).with_axis("micro", 3)
    assert parts == UnevenMesh.over(Mesh.of([2, 2]).with_axis("micro", 3), 0, (3, 1), 2 * 3)
    assert parts.without_last_axis() == MESH.seen_from(2)
    spec = (Shard(0), Replicate(), Shard(0))
    for rank, samples in ((0, 6), (2, 2)):  # of 24, 18 and 6
        seen = MESH.seen_from(rank).within(Mesh.of([2, 2]).with_axis("micro", 3))
        assert local_shape((24,), spec, seen) == (samples,)


def test_ranks_with_the_same_share_see_the_mesh_alike():
    mesh = UnevenMesh.over(Mesh.of([4, 2]), 0, (2, 1, 2, 1))
    assert mesh.views == (mesh, mesh.seen_from(2))
    assert mesh.view_of == (0, 0, 1, 1, 0, 0, 1, 1)
    assert Mesh.of([2, 2]).views == (Mesh.of([2, 2]),)


@pytest.mark.parametrize("axis, shares", [(0, (3,)), (0, (3, 0)), (0, (1, 1, 1)), (2, (3, 1))])
def test_wrong_shares_are_refused(axis, shares):
    with pytest.raises(SpecError):
        UnevenMesh.over(Mesh.of([2, 2]), axis, shares)
