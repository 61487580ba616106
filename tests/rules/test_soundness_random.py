"""Random ops: stateless ones give one device's numbers, stateful ones the same on every rank."""

import numpy as np
import pytest
import tensorflow as tf

from tests.partitioned import MESHES, check, run, sweep, was_split
from tfpar.spec import Mesh, Replicate, Shard

rng = np.random.default_rng(0)


def f(*shape):
    return rng.normal(size=shape).astype("float32")


def test_stateless_numbers_do_not_depend_on_the_mesh():
    def function(x, seed):
        draws = [
            tf.random.stateless_uniform(x.shape, seed),
            tf.random.stateless_normal(x.shape, seed),
            tf.random.stateless_truncated_normal(x.shape, seed),
            tf.cast(tf.random.stateless_uniform(x.shape, seed, 0, 9, tf.int32), tf.float32),
        ]
        return [x * d for d in draws] + [tf.random.experimental.stateless_shuffle(x, seed)]

    sweep(function, [f(5, 6), np.array([3, 7])], trials=3)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int32", "int64"])
def test_a_rank_draws_its_shard_alone(dtype):
    def function(x, seed):
        if dtype.startswith("int"):
            low, high = tf.constant(0, dtype), tf.constant(1000, dtype)
            draws = [
                tf.random.stateless_uniform(x.shape, seed, low, high, dtype),
                tf.random.stateless_uniform(x.shape, seed, None, None, dtype),
            ]
        else:
            draws = [
                tf.random.stateless_uniform(x.shape, seed, dtype=dtype),
                tf.random.stateless_normal(x.shape, seed, dtype=dtype),
                tf.random.stateless_truncated_normal(x.shape, seed, dtype=dtype),
            ]
        return [x * d for d in draws]

    kinds = ["RandomUniformInt", "RandomUniformFullInt"]
    if not dtype.startswith("int"):
        kinds = ["RandomUniform", "RandomNormal", "TruncatedNormal"]
    for mesh, spec in (
        (Mesh.of([2]), (Shard(0),)),
        (Mesh.of([4]), (Shard(0),)),
        (Mesh.of([2, 2]), (Shard(0), Shard(0))),
        (Mesh.of([2, 2]), (Shard(1), Shard(0))),
    ):
        for shape in ((5, 3), (16, 2), (7,)):
            if len(shape) == 1 and spec[0] != Shard(0):
                continue
            x = (10 * f(*shape)).astype(dtype)
            result = check(
                function, [x, np.array([3, 7])], [spec, (Replicate(),) * len(spec)], mesh
            )
            assert all(was_split([result], f"Stateless{k}V2", "n") for k in kinds)


def test_counter_carries_into_its_high_word():
    key, counter = np.array([5], "uint64"), np.array([2**64 - 2, 9], "uint64")

    def function(x):
        return x * tf.raw_ops.StatelessRandomUniformV2(
            shape=x.shape, key=key, counter=counter, alg=1, dtype=tf.float32
        )

    result = check(function, [f(8, 4)], [(Shard(0),)], Mesh.of([4]))
    assert was_split([result], "StatelessRandomUniformV2", "n")


def test_dropout_masks_are_drawn_where_they_are_used():
    def function(x, seed):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.nn.experimental.stateless_dropout(tf.tanh(x), 0.4, seed)
            loss = tf.reduce_sum(y * y)
        return y, tape.gradient(loss, x)

    runs = sweep(function, [f(6, 3, 4), np.array([3, 7])], trials=4)
    assert was_split(runs, "StatelessRandomUniformV2", "n")
    assert was_split(runs, "GreaterEqual", "_2")


def test_draws_of_older_kinds():
    def function(x, seed):
        raw, shape = tf.raw_ops, x.shape
        draws = [
            raw.StatelessRandomUniform(shape=shape, seed=seed),
            raw.StatelessRandomNormal(shape=shape, seed=seed),
            raw.StatelessTruncatedNormal(shape=shape, seed=seed),
            raw.StatelessRandomUniformInt(shape=shape, seed=seed, minval=-3, maxval=9),
            raw.StatelessRandomUniformFullInt(shape=shape, seed=seed, dtype=tf.int32) % 7,
        ]
        key, counter, algorithm = raw.StatelessRandomGetKeyCounterAlg(seed=seed)
        for alg in (algorithm, raw.StatelessRandomGetAlg()):
            draws.append(
                raw.StatelessRandomUniformV2(shape=shape, key=key, counter=counter, alg=alg)
            )
        return [x * tf.cast(d, x.dtype) for d in draws]

    sweep(function, [f(5, 3), np.array([3, 7])], trials=2)


def test_gradient_of_gamma_draws():
    def function(alpha, sample):
        return tf.raw_ops.RandomGammaGrad(alpha=alpha, sample=sample)

    args = [1 + np.abs(f(5, 1)), 0.5 + np.abs(f(3, 5, 4))]
    runs = sweep(function, args, trials=2, rtol=1e-4)
    assert all(was_split(runs, "RandomGammaGrad", k) for k in ("_0", "_1", "_2"))


def test_a_draw_that_nothing_sharded_reads_stays_whole():
    def function(x, seed):
        noise = tf.random.stateless_normal([4, 4], seed)
        return tf.reduce_sum(noise) + x, noise

    check(function, [f(6), np.array([3, 7])], [(Shard(0),), (Replicate(),)], MESHES[0])


def test_stateless_draws_of_sharded_parameters():
    def function(logits, rates, seed):
        return [
            tf.random.stateless_categorical(logits, 3, seed),
            tf.random.stateless_gamma([2, 5], seed, rates),
            tf.random.stateless_poisson([2, 5], seed, rates),
            tf.random.stateless_binomial([2, 5], seed, tf.fill([5], 7.0), tf.nn.sigmoid(rates)),
        ]

    args = [f(5, 6), np.abs(f(5)) + 1, np.array([3, 7])]
    sweep(function, args, trials=3, partial=False)


def test_stateful_ops_run_once_for_all():
    def function(x):
        return [
            x + tf.random.uniform(x.shape),
            x + tf.random.normal(x.shape),
            x + tf.random.truncated_normal(x.shape),
            tf.random.shuffle(x),
            x + tf.cast(tf.random.categorical(x, 6), x.dtype),
        ]

    x = f(6, 6)
    result = run(function, [x], [(Shard(0), Shard(1))], Mesh.of([2, 2]))
    uniform, normal, truncated, shuffled, _ = result.outputs
    assert ((uniform - x >= 0) & (uniform - x < 1)).all()
    assert np.abs(normal - x).max() < 6 and np.abs(truncated - x).max() <= 2.0001
    np.testing.assert_array_equal(sorted(map(tuple, shuffled)), sorted(map(tuple, x)))
    kinds = [kind for kind, _, _ in result.partitioned.collectives()]
    assert kinds.count("broadcast") == 5


def test_replicas_of_a_stateful_draw_agree():
    """A sum over ranks of what each holds is as many times the first rank's value."""

    def function(x):
        noise = tf.random.normal([8])
        return tf.reduce_sum(x[:, None] * noise[None, :], 0), noise

    result = run(function, [np.ones(4, "float32")], [(Shard(0),)], Mesh.of([4]))
    np.testing.assert_allclose(result.outputs[0], 4 * result.outputs[1], rtol=1e-5)


def test_python_functions_run_once():
    calls = []

    def observe(v):
        calls.append(v)
        return np.float32(len(calls)) * v

    def function(x):
        y = tf.numpy_function(observe, [tf.reduce_sum(x)], tf.float32)
        y.set_shape([])
        return x * y

    result = run(function, [np.ones(4, "float32")], [(Shard(0),)], MESHES[0])
    assert len(calls) == 2  # once in the plain run, which comes first, and once for all ranks
    np.testing.assert_allclose(result.expected[0], 4.0 * np.ones(4))
    np.testing.assert_allclose(result.outputs[0], 8.0 * np.ones(4))


def test_draws_in_a_loop_agree():
    def function(x):
        def body(i, total):
            return i + 1, total + x * tf.random.normal([1])

        return tf.while_loop(lambda i, _: i < 3, body, [0, tf.zeros_like(x)])[1]

    result = run(function, [np.ones(4, "float32")], [(Shard(0),)], Mesh.of([4]))
    np.testing.assert_allclose(result.outputs[0], result.outputs[0][0] * np.ones(4), rtol=1e-6)


def test_seeded_ops_give_one_devices_stream():
    def function(x):
        return x + tf.random.uniform(x.shape, seed=5)

    tf.random.set_seed(11)
    check(function, [f(4, 3)], [(Shard(0),)], MESHES[0])
    check(function, [f(4, 3)], [(Replicate(),)], MESHES[1])
