"""Storage: cutting a value into shards and putting it together again."""

import math

import numpy as np
import pytest
from hypothesis import given, settings

from tests.spec.strategies import laid_out
from tfpar.spec import (
    Mesh,
    Replicate,
    Shard,
    SpecError,
    assemble,
    dim_is_even,
    local_indices,
    local_shape,
    sliced_spec,
    take_local,
)


def shards_of(value, spec, mesh):
    return [take_local(value, spec, mesh, mesh.coordinates(r)) for r in range(mesh.size)]


def sharded_dims(spec):
    return {p.dim for p in spec if isinstance(p, Shard)}


@settings(max_examples=300, deadline=None)
@given(laid_out(partial=True))
def test_assemble_undoes_take_local(laid):
    shape, spec, mesh = laid
    value = np.arange(1, 1 + math.prod(shape), dtype="float32").reshape(shape)
    shards = shards_of(value, spec, mesh)
    assert {s.shape for s in shards} == {local_shape(shape, spec, mesh)}
    np.testing.assert_array_equal(assemble(shards, shape, spec, mesh), value)


@settings(max_examples=200, deadline=None)
@given(laid_out())
def test_padding_is_never_read(laid):
    shape, spec, mesh = laid
    value = np.arange(1, 1 + math.prod(shape), dtype="float32").reshape(shape)
    # take_local pads with zero and the value holds none.
    garbage = [np.where(s == 0, np.nan, s) for s in shards_of(value, spec, mesh)]
    np.testing.assert_array_equal(assemble(garbage, shape, spec, mesh), value)


@settings(max_examples=200, deadline=None)
@given(laid_out())
def test_every_entry_lies_on_as_many_ranks_as_axes_replicate(laid):
    shape, spec, mesh = laid
    copies = math.prod(n for n, p in zip(mesh.shape, spec, strict=True) if not isinstance(p, Shard))
    counts = np.zeros(shape, int)
    for rank in range(mesh.size):
        at = [local_indices(n, d, spec, mesh, mesh.coordinates(rank)) for d, n in enumerate(shape)]
        counts[np.ix_(*(i[i >= 0] for i in at))] += 1
    assert (counts == copies).all()


@settings(max_examples=200, deadline=None)
@given(laid_out())
def test_a_dim_is_even_where_nothing_is_padded(laid):
    shape, spec, mesh = laid
    for dim in sharded_dims(spec):
        padded = any(
            (local_indices(shape[dim], dim, spec, mesh, mesh.coordinates(r)) < 0).any()
            for r in range(mesh.size)
        )
        assert dim_is_even(shape, spec, mesh, dim) != padded


def test_blocks_by_hand():
    mesh = Mesh.of([2, 2])
    value = np.arange(8)
    assert [list(s) for s in shards_of(value, (Shard(0), Shard(0)), mesh)] == [
        [0, 1],
        [2, 3],
        [4, 5],
        [6, 7],
    ]
    # Every run of four is cut in two: the minor factor of (2 4).
    assert [list(s) for s in shards_of(value, (Replicate(), Shard(0, 4)), mesh)][:2] == [
        [0, 1, 4, 5],
        [2, 3, 6, 7],
    ]
    assert [list(s) for s in shards_of(np.arange(1, 6), (Shard(0), Replicate()), mesh)][::2] == [
        [1, 2, 3],
        [4, 5, 0],
    ]
    # Blocks are whole multiples of the unit.
    assert [list(s) for s in shards_of(np.arange(1, 7), (Shard(0, None, 2),), Mesh.of([2]))] == [
        [1, 2, 3, 4],
        [5, 6, 0, 0],
    ]


def test_more_ranks_than_entries():
    mesh = Mesh.of([4])
    shards = shards_of(np.arange(1, 3), (Shard(0),), mesh)
    assert [list(s) for s in shards] == [[1], [2], [0], [0]]
    np.testing.assert_array_equal(assemble(shards, (2,), (Shard(0),), mesh), [1, 2])


def test_empty_and_scalar_values():
    mesh = Mesh.of([2])
    empty = np.zeros((0, 3))
    assert assemble(shards_of(empty, (Shard(0),), mesh), (0, 3), (Shard(0),), mesh).shape == (0, 3)
    assert assemble([np.array(3), np.array(3)], (), (Replicate(),), mesh) == 3


def test_slices_are_of_the_first_dim_that_is_whole_and_divides():
    mesh, R, S = Mesh.of({"data": 2, "model": 2, "batch": 3}), Replicate(), Shard  # noqa: N806
    assert sliced_spec((6, 3, 8), (R, R, S(0)), mesh, (1,)) == (R, S(2), S(0))
    assert sliced_spec((6, 8, 8), (R, R, S(0)), mesh, (0, 1)) == (S(1), S(1), S(0))
    assert sliced_spec((6, 8, 8), (S(1), R, S(0)), mesh, (1,)) == (S(1), S(2), S(0))
    with pytest.raises(SpecError, match=r"No dim of \[6, 3\] is left to be cut in 2 slices"):
        sliced_spec((6, 3), (R, R, S(0)), mesh, (1,))
