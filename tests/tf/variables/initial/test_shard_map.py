"""Pieces say what `local_indices` says, and rows copied piece by piece make the shard."""

import itertools
import math

import numpy as np
import pytest

from tfpar.spec import Mesh, Replicate, Shard, local_indices
from tfpar.tf.variables.initial.shard_map import EntryRange, ShardMap, pieces, row_dim

SHARDS = (Replicate(), Shard(0), Shard(0, 4), Shard(0, 6, 3), Shard(1))


@pytest.mark.parametrize("mesh", [Mesh.of([2]), Mesh.of([5]), Mesh.of([2, 3])], ids=str)
@pytest.mark.parametrize("length", [12, 24, 7, 1])
def test_pieces_are_the_local_indices(mesh, length):
    for spec in itertools.product(SHARDS, repeat=mesh.num_axes):
        for rank in range(mesh.size):
            coords = mesh.coordinates(rank)
            try:
                index = local_indices(length, 0, spec, mesh, coords)
            except ValueError:  # a stride that does not fit this length
                continue
            index[index < 0] = length - 1
            made = np.full(len(index), -1)
            for piece in pieces(length, 0, spec, mesh, coords):
                made[piece.at : piece.at + piece.count] = np.arange(piece.start, piece.stop)
            np.testing.assert_array_equal(made, index)


def test_a_plain_shard_is_one_piece():
    mesh = Mesh.of([4])
    assert pieces(10**9, 0, (Shard(0),), mesh, (1,)) == (
        EntryRange(250_000_000, 500_000_000, 0, 250_000_000),
    )


@pytest.mark.parametrize(
    "spec",
    [(Shard(0), Shard(2)), (Shard(1), Shard(1)), (Shard(2, 4), Replicate()), (Shard(0), Shard(1))],
)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_rows_in_any_blocks_make_the_shard(spec, dim):
    shape, mesh = (3, 5, 8), Mesh.of([2, 2])
    value = np.arange(math.prod(shape)).reshape(shape)
    rows = value.reshape(-1, *shape[dim + 1 :])
    for rank in range(mesh.size):
        held = ShardMap(shape, spec, mesh, rank)
        shard = np.full(held.local_shape, -1)
        for start in range(0, len(rows), 4):
            for copy in held.copies(dim, start, min(start + 4, len(rows))):
                box = value[(*copy.prefix, copy.rows, *held.spans(dim))]
                shard[copy.target] = held.take(box, dim)
        index = [
            local_indices(n, d, spec, mesh, mesh.coordinates(rank)) for d, n in enumerate(shape)
        ]
        want = value[
            np.ix_(*(np.where(i < 0, n - 1, i) for i, n in zip(index, shape, strict=True)))
        ]
        np.testing.assert_array_equal(shard, want)


def test_rows_are_small_enough():
    assert row_dim((10, 100, 100), 4, 40_000) == 0
    assert row_dim((10, 100, 100), 4, 39_999) == 1
    assert row_dim((1, 4096), 4, 1) == 1
