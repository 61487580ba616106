"""Slices, strided slices, paddings and permutations along a dim, against the plain ops."""

import pytest
import tensorflow as tf
from tensorflow.compiler.tf2xla.python.xla import dynamic_slice, dynamic_update_slice

from tests.partitioned import check, sweep, was_split
from tests.rules.test_soundness_layout import f, with_gradient
from tfpar.spec import Mesh, Shard

STRIDED = {
    "full dims": lambda x: x[1:3],
    "shrink": lambda x: x[:, 2],
    "negative": lambda x: x[-3:, :, -1],
    "new axis": lambda x: x[:, None, 1:, ..., None],
    "ellipsis": lambda x: x[..., 2:],
    "reverse": lambda x: x[:, ::-1],
    "steps": lambda x: x[1::2, ::3, ::-2],
    "pieces": lambda x: (x[:, :4], x[:, 4:8], x[:, -4:]),
    "neighbours": lambda x: (x[:, 0::2], x[:, 1::2], x[:, 2::3]),
    "beyond": lambda x: x[-100:100, :100],
    "one": lambda x: (x[0:1], x[:, 3:4]),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", STRIDED)
def test_strided_slice_and_gradient(case):
    runs = sweep(with_gradient(STRIDED[case]), [f(5, 12, 3)], trials=4)
    if case not in ("steps",):
        assert any(was_split(runs, "StridedSlice", f"d{d}") for d in range(3))
        assert any(was_split(runs, "StridedSliceGrad", f"d{d}") for d in range(3))


@pytest.mark.parametrize("mesh", [Mesh.of([2]), Mesh.of([3])])
def test_pieces_and_neighbours_split_along_the_cut_dim(mesh):
    strided = (Shard(1, 4),)
    result = check(with_gradient(STRIDED["pieces"]), [f(5, 12, 3)], [strided], mesh)
    assert was_split([result], "StridedSlice", "d1")
    assert was_split([result], "StridedSliceGrad", "d1")
    for x in (f(5, 12, 3), f(5, 8, 3)):  # 8 leaves padding on three ranks
        halves = lambda x: (x[:, 0::2], x[:, 1::2])  # noqa: E731
        unit = 1 if x.shape[1] // 2 % mesh.size == 0 else 2
        result = check(with_gradient(halves), [x], [(Shard(1, None, unit),)], mesh)
        assert was_split([result], "StridedSlice", "d1")
        assert was_split([result], "StridedSliceGrad", "d1")


@pytest.mark.slow
def test_one_entry_of_a_split_dim():
    """A class token of a split sequence: the rank that holds it gives it, others zeros."""

    def function(x, y):
        return with_gradient(lambda x: x[:, 3])(x) + [
            with_gradient(lambda x: x[-1, :, 1])(x)[1] + y
        ]

    runs = sweep(function, [f(5, 7, 3), f(5, 7, 3)], trials=4)
    assert was_split(runs, "StridedSlice", "d0") and was_split(runs, "StridedSlice", "d1")
    assert all(was_split(runs, "StridedSliceGrad", k) for k in ("d0", "d1", "d2"))
    runs = sweep(lambda x: (tf.cast(x, tf.int32)[2], (x > 0)[:, 1], x[4, -7]), [f(5, 7)], trials=4)
    assert was_split(runs, "StridedSlice", "d0") and was_split(runs, "StridedSlice", "d1")
    result = check(lambda x: x[:, 4], [f(5, 7)], [(Shard(1),)], Mesh.of([3]))
    assert [kind for kind, _, _ in result.partitioned.collectives()] == ["all_reduce"]


def test_strided_slice_at_a_position_that_is_not_known():
    def function(x, i):
        return x[i], x[:, i : i + 2], tf.strided_slice(x, [0, i], [5, i + 1], shrink_axis_mask=2)

    runs = sweep(
        lambda x: function(x, tf.cast(tf.reduce_sum(tf.zeros_like(x)), tf.int32) + 1),
        [f(5, 4, 3)],
        trials=3,
    )
    assert was_split(runs, "StridedSlice", "d2")


@pytest.mark.slow
def test_slice():
    def function(x):
        i = tf.cast(tf.reduce_sum(tf.zeros_like(x)), tf.int32)
        return (
            tf.slice(x, [1, 0, 0], [2, -1, 3]),
            tf.slice(x, [0, 4, 0], [5, 8, 3]),
            tf.slice(x, [i, 0, 0], [3, 12, 3]),
        )

    runs = sweep(with_gradient(function), [f(5, 12, 3)], trials=4)
    assert all(was_split(runs, "Slice", f"d{d}") for d in (0, 1, 2))
    for mesh in (Mesh.of([2]), Mesh.of([3])):
        result = check(
            with_gradient(lambda x: tf.slice(x, [0, 4, 0], [5, 8, 3])),
            [f(5, 12, 3)],
            [(Shard(1, 4),)],
            mesh,
        )
        assert was_split([result], "Slice", "d1") and was_split([result], "Pad", "d1")


@pytest.mark.slow
def test_slice_update():
    def function(x, y):
        with tf.GradientTape() as tape:
            tape.watch([x, y])
            z = tf.raw_ops.TensorStridedSliceUpdate(
                input=x, begin=[0, 4], end=[5, 8], strides=[1, 1], value=y
            )
            loss = tf.reduce_sum(tf.sin(z) * z)
        return [z, *tape.gradient(loss, [x, y])]

    runs = sweep(function, [f(5, 12, 3), f(5, 4, 3)], trials=4)
    assert all(was_split(runs, "TensorStridedSliceUpdate", f"d{d}") for d in (0, 1, 2))


@pytest.mark.slow
def test_dynamic_update_slice():
    def function(x, y):
        i = tf.cast(tf.reduce_sum(tf.zeros_like(x)), tf.int32)
        return (
            dynamic_update_slice(x, y, tf.stack([0, i + 5, 0])),
            dynamic_slice(x, tf.stack([0, i + 5, 0]), [5, 4, 3]),
        )

    runs = sweep(function, [f(5, 7, 3), f(5, 4, 3)], trials=3)
    for op_type in ("XlaDynamicUpdateSlice", "XlaDynamicSlice"):
        assert was_split(runs, op_type, "d0") and was_split(runs, op_type, "d2")


@pytest.mark.slow
def test_pad():
    def function(x):
        return (
            tf.pad(x, [[0, 0], [1, 2], [0, 0]]),
            tf.pad(x, [[0, 0], [4, 8], [0, 0]]),
            tf.pad(x, [[0, 0], [0, 1], [0, 0]], constant_values=2.0),
            tf.pad(x, [[0, 0], [1, 1], [0, 0]], "REFLECT"),
            tf.pad(x, [[0, 0], [1, 1], [0, 1]], "SYMMETRIC"),
        )

    runs = sweep(with_gradient(function), [f(5, 4, 3)], trials=4)
    for op_type in ("Pad", "PadV2", "MirrorPad", "MirrorPadGrad"):
        assert was_split(runs, op_type, "d0"), op_type
    assert was_split(runs, "Pad", "d1") and was_split(runs, "Pad", "d2")


def test_reverse_and_roll():
    def function(x):
        lengths = tf.constant([1, 3, 2, 4, 0])
        return (
            tf.reverse(x, [1]),
            tf.roll(x, [1, -2], [0, 1]),
            tf.reverse_sequence(x, lengths, seq_axis=1, batch_axis=0),
        )

    runs = sweep(with_gradient(function), [f(5, 4, 3)], trials=4)
    assert was_split(runs, "ReverseV2", "d0") and was_split(runs, "Roll", "d2")
    assert was_split(runs, "ReverseSequence", "d0")
