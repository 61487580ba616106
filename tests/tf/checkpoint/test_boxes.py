"""The boxes of all distinct shards are the tensor, once; replicas share the writing."""

import numpy as np
import pytest
from hypothesis import given, settings

from tests.spec.strategies import laid_out
from tfpar.spec import (
    Mesh,
    Partial,
    Replicate,
    Shard,
    SpecError,
    local_shape,
    parse_spec,
    take_local,
)
from tfpar.tf.checkpoint import Box, choose_writers, list_boxes
from tfpar.tf.checkpoint.boxes import covers

R, S = Replicate(), Shard


def at(begin, size):
    return tuple(slice(b, b + s) for b, s in zip(begin, size, strict=True))


@settings(deadline=None, max_examples=150)
@given(laid_out())
def test_boxes_lie_in_the_shard_as_in_the_tensor(case):
    shape, spec, mesh = case
    whole = np.arange(1, np.prod(shape, dtype=int) + 1).reshape(shape)
    for rank in range(mesh.size):
        shard = take_local(whole, spec, mesh, mesh.coordinates(rank))
        rest = shard.copy()
        for box in list_boxes(shape, spec, mesh, rank):
            stored = at(box.local_begin, box.size)
            np.testing.assert_array_equal(shard[stored], whole[at(box.begin, box.size)])
            rest[stored] = 0
        assert not rest.any()  # nothing but padding, which `take_local` fills with zeros


@settings(deadline=None, max_examples=150)
@given(laid_out())
def test_the_boxes_of_the_writers_cover_the_tensor_once(case):
    shape, spec, mesh = case
    (ranks,) = choose_writers([4], [spec], mesh)
    count = np.zeros(shape, int)
    parts = []
    for rank in ranks:
        for box in list_boxes(shape, spec, mesh, rank):
            count[at(box.begin, box.size)] += 1
            parts.append((box.begin, box.size))
    assert (count == 1).all()
    assert covers(parts, shape)
    assert not covers(parts[1:], shape)
    assert not covers([*parts, parts[0]], shape)


def test_an_overlap_does_not_make_up_for_a_gap():
    assert covers([((0, 0), (2, 3)), ((2, 0), (2, 3))], (4, 3))
    assert not covers([((0, 0), (2, 3)), ((1, 0), (2, 3))], (4, 3))


def test_plain_strided_and_empty_shards():
    mesh = Mesh.of([2])
    assert list_boxes((8, 3), (S(0),), mesh, 1) == [Box((4, 0), (4, 3), (0, 0))]
    assert list_boxes((8, 3), (S(0, 4),), mesh, 1) == [
        Box((2, 0), (2, 3), (0, 0)),
        Box((6, 0), (2, 3), (2, 0)),
    ]
    assert list_boxes((1, 3), (S(0),), mesh, 1) == []
    assert list_boxes((), (R,), mesh, 1) == [Box((), (), ())]
    assert list_boxes((0, 3), (S(1),), mesh, 0) == [Box((0, 0), (0, 3), (0, 0))]
    assert list_boxes((0, 3), (S(1),), mesh, 1) == []


def test_slice_specs_are_tensorflows():
    assert Box((0, 3), (2, 3), (0, 0)).slice_spec((4, 6)) == "4 6 0,2:3,3"
    assert Box.whole((4, 6)).slice_spec((4, 6)) == ""
    assert Box.whole(()).slice_spec(()) == ""


def test_stripes_are_a_box_in_blocks_of_limited_size():
    box = Box((0, 2, 0), (1, 5, 4), (0, 1, 0))
    assert list(box.stripes(20)) == [box]
    assert list(box.stripes(11)) == [
        Box((0, 2, 0), (1, 2, 4), (0, 1, 0)),
        Box((0, 4, 0), (1, 2, 4), (0, 3, 0)),
        Box((0, 6, 0), (1, 1, 4), (0, 5, 0)),
    ]
    assert len(list(box.stripes(1))) == 5
    assert list(Box.whole(()).stripes(0)) == [Box.whole(())]


def test_partial_values_are_refused():
    with pytest.raises(SpecError, match=r"P\(sum\),R is a partial value"):
        list_boxes((4,), (Partial(), R), Mesh.of([2, 2]), 0)


def test_replicas_share_the_bytes():
    mesh = Mesh.of([4, 2])
    rng = np.random.default_rng(0)
    # Kernels and biases in turn, as a model has them.
    specs = [parse_spec("R,S(1)"), parse_spec("R,R")] * 40
    shapes = [(int(n), 64) if i % 2 == 0 else (64,) for i, n in enumerate(rng.integers(1, 999, 80))]
    ranks = choose_writers([4 * int(np.prod(s)) for s in shapes], specs, mesh)
    load = np.zeros(mesh.size)
    for shape, spec, writing in zip(shapes, specs, ranks, strict=True):
        assert len(writing) == (2 if spec[1] == S(1) else 1)
        for rank in writing:
            load[rank] += np.prod(local_shape(shape, spec, mesh))
    assert load.max() < 1.05 * load.mean()
