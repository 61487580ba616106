"""Keras's mixed policies: collectives carry 16 bits wherever the step computes in 16 bits."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import keras
import numpy as np
import pytest
from keras import layers

import tfpar as tap
from tests.cases import nightly
from tests.equivalence import Trained, op_by_op, train
from tfpar.tf.keras import parallel_model

WIDTH, VOCABULARY, LENGTH = 8, 30, 4
_HALVES = {"float16", "bfloat16", "half"}


@contextlib.contextmanager
def policy(name: str) -> Iterator[None]:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def perceptron(optimizer="sgd") -> keras.Model:
    inputs = keras.Input((WIDTH,))
    h = layers.Dense(16, "tanh", name="fc1")(inputs)
    model = keras.Model(inputs, layers.Dense(4, name="fc2")(h))
    model.compile(optimizer, "mse", jit_compile=False)
    return model


def lookup() -> keras.Model:
    """A table of which a step reads few rows."""
    ids = keras.Input((LENGTH,), dtype="int32")
    h = layers.Embedding(50 * VOCABULARY, WIDTH, name="tokens")(ids)
    model = keras.Model(ids, layers.Dense(4, name="head")(h))
    model.compile("adam", "mse", jit_compile=False)
    return model


def numbers(n: int = 64) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(n, WIDTH)).astype("float32"), 3 + rng.normal(size=(n, 4)).astype("f4")


def ids(n: int = 64) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.integers(0, VOCABULARY, (n, LENGTH)), rng.normal(size=(n, LENGTH, 4)).astype("f4")


DATA_PARALLEL = perceptron, numbers, [2], ()
LAYOUTS = {
    "data parallel": DATA_PARALLEL,
    "tensor parallel": (perceptron, numbers, [1, 2], [tap.shard("fc1/kernel", 1, "model")]),
    "split weights": (
        perceptron,
        numbers,
        [2],
        [tap.batch("data"), tap.shard("fc./kernel", 0, "data"), tap.shard("fc1/bias", 0, "data")],
    ),
    "sparse gradients": (lookup, ids, [2], ()),
}


@functools.cache
def exactly(layout: str) -> Trained:
    """Trained on one device in full precision."""
    build, data, *_ = LAYOUTS[layout]
    return train(op_by_op(build), data(), batch_size=64)


@functools.cache
def trained(layout: str, name: str, batch_size: int = 64) -> Trained:
    """Trained on the mesh, from where `exactly` starts."""
    build, data, mesh, constraints = LAYOUTS[layout]
    with policy(name):
        return train(
            build,
            data(),
            mesh=tap.split(mesh),
            constraints=constraints,
            batch_size=batch_size,
            start=exactly(layout).start,
        )


def payloads(run: Trained, kind: str) -> list[int]:
    """Bytes of each collective of that kind in the program, but for the loss."""
    graph = run.executable().local.graph
    return sorted(
        tensor.num_bytes
        for op in graph.ops
        if op.type == kind
        for tensor in (op.outputs if kind == "AllGather" else op.inputs)
        if tensor.shape
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "kinds", "name"),
    [
        nightly("data parallel", ["AllReduce"], "mixed_bfloat16"),
        nightly("data parallel", ["AllReduce"], "mixed_float16"),
        ("tensor parallel", ["AllReduce"], "mixed_bfloat16"),
        nightly("tensor parallel", ["AllReduce"], "mixed_float16"),
        nightly("split weights", ["AllGather", "ReduceScatter", "AllReduce"], "mixed_bfloat16"),
        ("split weights", ["AllGather", "ReduceScatter", "AllReduce"], "mixed_float16"),
    ],
)
def test_collectives_carry_half_the_bytes(layout, kinds, name):
    whole, halves = trained(layout, "float32"), trained(layout, name)
    for kind in kinds:
        wanted = payloads(whole, kind)
        assert wanted and [2 * size for size in payloads(halves, kind)] == wanted


@pytest.mark.slow
def test_a_gradient_is_moved_to_its_weight_before_it_is_cast_up():
    """Of few samples the activations move; the gradient comes in columns, its weight has rows."""
    whole, halves = (
        trained("split weights", name, batch_size=4) for name in ("float32", "mixed_bfloat16")
    )
    wanted = payloads(whole, "AllToAll")
    assert wanted and [2 * size for size in payloads(halves, "AllToAll")] == wanted


@pytest.mark.slow
def test_rows_of_a_sparse_gradient_travel_as_they_were_computed():
    whole, halves = (trained("sparse gradients", name) for name in ("float32", "mixed_bfloat16"))
    rows = 64 * LENGTH * WIDTH
    assert payloads(whole, "AllGather").count(4 * rows) == 2  # the gradient, and its square
    assert payloads(halves, "AllGather").count(4 * rows) == 1
    assert payloads(halves, "AllGather").count(2 * rows) == 1
    step = halves.executable().partitioned
    assert ("all_gather", ("data",), 2 * rows) in step.collectives()


@pytest.mark.slow
def test_compression_leaves_alone_what_has_16_bits():
    build, data, mesh, _ = LAYOUTS["sparse gradients"]
    with policy("mixed_bfloat16"), tap.auto_parallel(mesh, planner=None, compression="fp16"):
        model = build()
    model.fit(*data(), batch_size=64, verbose=0)
    step = parallel_model(model).executables["train"]
    wire_dtypes = {step.partitioned.wire_dtypes.get(r.tensor) for r in step.partitioned.reshards}
    assert "bfloat16" in wire_dtypes and "float16" not in wire_dtypes
    casts = [op for op in step.local.graph.ops if op.type == "Cast"]
    assert not [op for op in casts if {op.inputs[0].dtype, op.outputs[0].dtype} < _HALVES]


def distance(one: list[np.ndarray], other: list[np.ndarray]) -> float:
    pairs = [(a, b) for a, b in zip(one, other, strict=True) if a.dtype.kind == "f"]
    return float(np.sqrt(sum(np.sum((a - b) ** 2, dtype="float64") for a, b in pairs)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "name"),
    [
        nightly("data parallel", "mixed_bfloat16"),
        nightly("data parallel", "mixed_float16"),
        ("tensor parallel", "mixed_bfloat16"),
        nightly("tensor parallel", "mixed_float16"),
        nightly("split weights", "mixed_bfloat16"),
        ("split weights", "mixed_float16"),
        ("sparse gradients", "mixed_bfloat16"),
        nightly("sparse gradients", "mixed_float16"),
    ],
)
def test_ranks_round_no_more_than_one_device_does(layout, name):
    build, data, *_ = LAYOUTS[layout]
    exact = exactly(layout)
    with policy(name):
        plain = train(build, data(), batch_size=64, start=exact.start)
    ranks = trained(layout, name)
    weights = len(exact.weights)  # a loss scale has state of its own
    rounded = distance(plain.weights[:weights], exact.weights)
    assert 0 < distance(ranks.weights[:weights], plain.weights[:weights]) < 2 * rounded
    np.testing.assert_allclose(ranks.losses, plain.losses, rtol=2e-2)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [nightly("data parallel"), "split weights"])
def test_what_overflows_on_one_rank_is_skipped_by_all(layout):
    x, y = numbers(3 * 64)
    y[64 + 50] = 2e4  # in the second step, of the second rank
    build, _, mesh, constraints = LAYOUTS[layout]
    with policy("mixed_float16"):
        plain = train(build, (x, y), batch_size=64)
        ranks = train(
            build, (x, y), batch_size=64, mesh=mesh, constraints=constraints, start=plain.start
        )
    for run in (plain, ranks):
        assert float(run.model.optimizer.dynamic_scale) == 2.0**14
        assert int(run.model.optimizer.inner_optimizer.iterations) == 2
    for got, wanted in zip(ranks.weights, plain.weights, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-2, atol=1e-3)
