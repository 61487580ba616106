"""A shard made by itself is, to the bit, the shard cut from the whole value."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfpar.spec import Mesh, Replicate, Shard, SpecError
from tfpar.tf.variables.initial.blocks import BlockProgram, block_program
from tfpar.tf.variables.initial.shard import shard_value, shard_values
from tfpar.tf.variables.values import cut_shard

LIMIT = 700  # bytes: many blocks, even for small values
SHAPES = ((64, 48), (7, 5), (3, 3, 8, 16), (5,), (1, 4096), ())
FAMILY = ("glorot", "he", "lecun")  # scaled uniform and truncated normal: two shapes tell
LAYOUTS = (
    (Mesh.of([2]), (Shard(0),)),
    (Mesh.of([4]), (Shard(1),)),
    (Mesh.of([4]), (Replicate(),)),
    (Mesh.of([2, 2]), (Shard(0), Shard(1))),
    (Mesh.of([2, 2]), (Shard(0), Shard(0))),
    (Mesh.of([2, 2]), (Shard(1, 8), Replicate())),
)

make = keras.initializers
INITIALIZERS = {
    "zeros": make.Zeros(),
    "ones": make.Ones(),
    "constant": make.Constant(0.3),
    "random_uniform": make.RandomUniform(-1, 2, seed=3),
    "random_normal": make.RandomNormal(0.1, 0.5, seed=4),
    "truncated_normal": make.TruncatedNormal(seed=5),
    "glorot_uniform": make.GlorotUniform(seed=1),
    "glorot_normal": make.GlorotNormal(seed=2),
    "he_uniform": make.HeUniform(seed=6),
    "he_normal": make.HeNormal(seed=7),
    "lecun_uniform": make.LecunUniform(seed=8),
    "lecun_normal": make.LecunNormal(seed=9),
    "untruncated": make.VarianceScaling(2.0, "fan_avg", "untruncated_normal", seed=10),
}


def assert_exact(initial, shape, dtype="float32", layouts=LAYOUTS, whole=None):
    whole = tf.cast(initial() if whole is None else whole, dtype)
    for mesh, spec in layouts:
        if any(isinstance(p, Shard) and not fits(p, shape) for p in spec):
            continue
        for rank in (0, mesh.size - 1):
            shard = shard_value(initial, shape, dtype, spec, mesh, rank, limit_bytes=LIMIT)
            want = cut_shard(whole, spec, mesh, rank)
            assert shard.shape == want.shape and shard.dtype == want.dtype
            assert shard.numpy().tobytes() == want.numpy().tobytes(), (spec, rank)


def fits(shard, shape) -> bool:
    return shard.dim < len(shape) and shape[shard.dim] % (shard.stride or 1) == 0


def made_in_blocks(initial, shape, dtype="float32") -> bool:
    return block_program(initial, shape, tf.as_dtype(dtype), LIMIT) is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", INITIALIZERS)
def test_initializers_of_keras(name):
    for shape in SHAPES[:2] if name.startswith(FAMILY) else SHAPES:
        initial = lambda shape=shape: INITIALIZERS[name](shape, dtype="float32")  # noqa: E731
        assert_exact(initial, shape)
        if np.prod(shape) * 4 > LIMIT:
            assert made_in_blocks(initial, shape)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("name", ["random_uniform", "random_normal", "truncated_normal"])
def test_dtypes(name, dtype):
    for shape in ((67, 9), (2, 3, 75)):
        initial = lambda shape=shape: INITIALIZERS[name](shape, dtype=dtype)  # noqa: E731
        assert_exact(initial, shape, dtype)
        assert made_in_blocks(initial, shape, dtype)


def test_what_is_made_whole():
    """A QR decomposition needs all of the matrix; the diagonal's op makes all rows."""
    for initializer in (make.Orthogonal(seed=3), make.Identity(0.5)):
        initial = lambda made=initializer: made((16, 24), dtype="float32")  # noqa: E731
        assert_exact(initial, (16, 24))
        assert not made_in_blocks(initial, (16, 24))


def test_functions_of_stateless_draws():
    def initial():
        noise = tf.random.stateless_uniform([60, 7], [1, 2])
        return tf.where(noise < 0.3, noise * 2.0 - 1.0, tf.random.stateless_normal([60, 7], [3, 4]))

    assert_exact(initial, (60, 7))
    assert made_in_blocks(initial, (60, 7))
    integers = lambda: tf.random.stateless_uniform([300], [1, 2], 0, 9, tf.int32)  # noqa: E731
    assert_exact(integers, (300,), "int32")
    assert_exact(integers, (300,), "float32")
    assert made_in_blocks(integers, (300,))


def test_tensors_and_arrays():
    array = np.random.default_rng(0).normal(size=(40, 6)).astype("float32")
    tensor = tf.constant(array)
    assert_exact(lambda: array, (40, 6))
    assert_exact(lambda: make.Constant(array[0])((40, 6), dtype="float32"), (40, 6))
    assert_exact(lambda: tf.identity(tensor), (40, 6))
    assert made_in_blocks(lambda: tf.identity(tensor), (40, 6))


def test_a_sum_or_a_function_of_uncertain_last_bits_is_made_whole():
    draw = lambda: tf.random.stateless_uniform([90, 3], [1, 2])  # noqa: E731
    for function in (lambda x: x / tf.reduce_sum(x), lambda x: x - tf.reduce_mean(x, 0), tf.exp):
        initial = lambda function=function: function(draw())  # noqa: E731
        assert_exact(initial, (90, 3))
        assert not made_in_blocks(initial, (90, 3))


def test_a_draw_with_a_state_is_drawn_once():
    initial = lambda: tf.random.normal([60, 6])  # noqa: E731
    for rank in range(2):
        tf.random.set_seed(7)
        whole, after = initial(), tf.random.normal([3])
        tf.random.set_seed(7)
        spec, mesh = (Shard(0),), Mesh.of([2])
        shard = shard_value(initial, (60, 6), "float32", spec, mesh, rank, limit_bytes=LIMIT)
        np.testing.assert_array_equal(shard, cut_shard(whole, spec, mesh, rank))
        np.testing.assert_array_equal(tf.random.normal([3]), after)


def test_a_seed_generator_advances_once():
    def value_and_state(function):
        generator = keras.random.SeedGenerator(5)
        initializer = make.GlorotUniform(seed=generator)
        return function(lambda: initializer((60, 6), dtype="float32")), generator.state.numpy()

    spec, mesh = (Shard(1),), Mesh.of([2])
    whole, state = value_and_state(lambda initial: initial())
    shard, state_after = value_and_state(
        lambda initial: shard_value(initial, (60, 6), "float32", spec, mesh, 1, limit_bytes=LIMIT)
    )
    np.testing.assert_array_equal(shard, cut_shard(whole, spec, mesh, 1))
    np.testing.assert_array_equal(state_after, state)


def test_ranks_of_one_process_share_the_blocks():
    mesh, spec = Mesh.of([2, 2]), (Shard(1), Shard(0))
    for name in ("random_normal", "truncated_normal"):
        initial = lambda name=name: INITIALIZERS[name]((60, 6), dtype="float32")  # noqa: E731
        for ranks in ([0, 1, 2, 3], [2]):
            shards = shard_values(initial, (60, 6), "float32", spec, mesh, ranks, limit_bytes=LIMIT)
            for rank, shard in zip(ranks, shards, strict=True):
                np.testing.assert_array_equal(shard, cut_shard(initial(), spec, mesh, rank))


def test_what_is_made_whole_is_made_by_one_call():
    calls = itertools.count()

    def initial():
        return tf.fill([4, 4], float(next(calls)))

    layout = (Shard(0),), Mesh.of([2]), [0, 1]
    for shard in shard_values(initial, (4, 4), "float32", *layout):
        np.testing.assert_array_equal(shard, np.zeros((2, 4)))

    tf.random.set_seed(7)
    whole = tf.random.normal([60, 6])
    tf.random.set_seed(7)
    draw = lambda: tf.random.normal([60, 6])  # noqa: E731
    shards = shard_values(draw, (60, 6), "float32", *layout, limit_bytes=LIMIT)
    np.testing.assert_array_equal(tf.concat(shards, 0), whole)


def test_ranks_of_padding_alone_hold_the_last_entry():
    initial = lambda: INITIALIZERS["random_normal"]((5, 64), dtype="float32")  # noqa: E731
    mesh = Mesh.of([4])
    shard = shard_value(initial, (5, 64), "float32", (Shard(0),), mesh, 3, limit_bytes=LIMIT)
    np.testing.assert_array_equal(shard, [initial()[4]] * 2)


def test_a_wrong_shape_is_named():
    for limit in (1, 1 << 20):
        with pytest.raises(SpecError, match=r"\(3, 4\).*\(4, 4\)"):
            shard_value(
                lambda: tf.zeros([3, 4]),
                (4, 4),
                "float32",
                (Shard(0),),
                Mesh.of([2]),
                0,
                limit_bytes=limit,
            )


def test_blocks_that_no_rank_holds_are_not_made(monkeypatch):
    made = []
    block = BlockProgram.block
    monkeypatch.setattr(BlockProgram, "block", lambda p, i: (made.append(i), block(p, i))[1])
    initial = lambda: INITIALIZERS["random_normal"]((64, 8), dtype="float32")  # noqa: E731
    shard_value(initial, (64, 8), "float32", (Shard(0),), Mesh.of([4]), 2, limit_bytes=256)
    assert made == [4, 5]


def test_a_shard_can_be_updated_in_place():
    """The memory is TensorFlow's: a variable takes the shard and is no alias of anything."""
    initial = lambda: INITIALIZERS["random_normal"]((64, 8), dtype="float32")  # noqa: E731
    mesh = Mesh.of([2])
    shard = shard_value(initial, (64, 8), "float32", (Shard(0),), mesh, 0, limit_bytes=LIMIT)
    variable = tf.Variable(shard)
    variable.assign_add(tf.ones_like(shard))
    np.testing.assert_array_equal(shard, initial()[:32])
    np.testing.assert_array_equal(variable, initial()[:32] + 1.0)
