"""What ranks of one mesh need of those of another."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tfpar.spec import Mesh, Replicate, Shard, SpecError
from tfpar.spec.layout import take_local
from tfpar.spec.pieces import Pieces, ShardedTensor, pieces_between

R, S = Replicate(), Shard
ONE, TWO, THREE = (Mesh.of({"data": n}) for n in (1, 2, 3))
GRID = Mesh.of({"data": 2, "model": 3})


def stored(value: np.ndarray, tensor: ShardedTensor, rank: int) -> np.ndarray:
    return take_local(value, tensor.spec, tensor.mesh, tensor.coordinates(rank))


def moved(value: np.ndarray, source: ShardedTensor, found: Pieces, rank: int) -> np.ndarray:
    """What a rank makes of the pieces that it gets."""
    got = []
    for piece in found.pieces:
        sender = piece.sources[rank]
        if sender is None:
            got.append(np.zeros(piece.sizes[rank]))
        else:
            got.append(stored(value, source, sender)[np.ix_(*piece.taken[rank])])
    for dim in reversed(range(value.ndim)):
        count = found.grid[dim]
        got = [np.concatenate(got[i : i + count], dim) for i in range(0, len(got), count)]
    (whole,) = got
    return whole[np.ix_(*found.order[rank])] if value.ndim else whole


def check(source: ShardedTensor, target: ShardedTensor) -> Pieces:
    """Each rank gets what it stores, of whom stores it, each entry once."""
    value = 1 + np.arange(np.prod(target.shape, dtype=int)).reshape(target.shape)
    found = pieces_between(source, target)
    for rank in range(target.num_ranks):
        expected = stored(value, target, rank)
        got = moved(value, source, found, rank)
        assert got.shape == expected.shape
        np.testing.assert_array_equal(got[expected > 0], expected[expected > 0])
        entries = sum(np.prod(p.sizes[rank]) for p in found.pieces if p.sources[rank] is not None)
        assert entries == np.count_nonzero(expected) or not expected.any()
    for piece in found.pieces:
        sent = [pair for round_ in piece.targets() for pair in round_.items()]
        assert sorted(target for _, target in sent) == [
            rank for rank, sender in enumerate(piece.sources) if sender is not None
        ]
    return found


SPECS = {
    ONE: [(R,)],
    TWO: [(R,), (S(0),), (S(1),), (S(0, 4),)],
    THREE: [(R,), (S(0),), (S(1),)],
    GRID: [(R, R), (S(0), S(1)), (S(1), S(0)), (R, S(0)), (S(0), S(0)), (S(0, 4), S(1))],
}


@pytest.mark.parametrize("source", SPECS)
def test_each_rank_gets_what_it_stores_and_nothing_twice(source):
    layouts = [(mesh, spec) for mesh, specs in SPECS.items() for spec in specs]
    for spec, (mesh, other) in itertools.product(SPECS[source], layouts):
        check(ShardedTensor((8, 6), source, spec), ShardedTensor((8, 6), mesh, other))


def test_lengths_that_no_mesh_divides():
    for shape in ((7, 5), (1, 2), (2, 3)):
        for spec, other in itertools.product([(R,), (S(0),), (S(1),)], repeat=2):
            check(ShardedTensor(shape, TWO, spec), ShardedTensor(shape, THREE, other))


def test_microbatches_that_ranks_share():
    """Rows 0 to 3 are the first microbatch, however many ranks there are."""
    alone = ShardedTensor((8, 2), ONE.with_axis("micro", 2), (R, S(0)), (0,))
    shared = ShardedTensor((8, 2), TWO.with_axis("micro", 2), (S(0, 4), S(0)), (0,))
    assert alone.num_ranks == 1 and shared.num_ranks == 2
    assert [shared.indices(rank, 0).tolist() for rank in (0, 1)] == [[0, 1], [2, 3]]
    check(alone, shared)
    check(shared, alone)


def test_who_stores_none_of_what_is_needed_is_told_apart():
    mine = ShardedTensor((8,), ONE.with_axis("micro", 2), (R, S(0)), (0,))
    other = ShardedTensor((8,), TWO.with_axis("micro", 2), (S(0), S(0)), (0,))
    with pytest.raises(SpecError, match=r"\[4, 5\]"):
        pieces_between(mine, other)


def test_copies_are_sent_by_different_ranks():
    found = check(ShardedTensor((6,), TWO, (R,)), ShardedTensor((6,), GRID, (R, S(0))))
    assert {sender for piece in found.pieces for sender in piece.sources} == {0, 1}
    assert found.num_entries == 2 * 6


def test_a_scalar_goes_to_all():
    assert check(ShardedTensor((), TWO, (R,)), ShardedTensor((), THREE, (R,))).num_entries == 3
