"""Steps that XLA compiles between collectives: p(X) = G(X) with `jit_compile=True` on both sides.

The plain run is traced and compiled too, so that its dropout has XLA's masks.
"""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import tfpar as tap
from tests.cases import nightly
from tests.e2e.test_recurrent import RECURRENT, classifier
from tests.equivalence import (
    Trained,
    assert_equivalent,
    assert_same,
    op_by_op,
    traced,
    train,
)
from tfpar.compile.local import MUST_COMPILE

rng = np.random.default_rng(0)


def compiled(build):
    """Builds the same model, compiled by XLA."""

    def build_compiled() -> keras.Model:
        model = build()
        model.jit_compile = True
        return model

    return build_compiled


def regions(trained: Trained, kind: str = "train"):
    graphs = trained.executable(kind).local.graphs()
    return [op for graph in graphs for op in graph.ops if op.attrs.get(MUST_COMPILE)]


def left_out(trained: Trained) -> set[str]:
    """The types of ops that run outside of what is compiled."""
    graph = trained.executable().local.graph
    return {op.type for op in graph.ops if not op.attrs.get(MUST_COMPILE)}


def images(size: int):
    x = rng.normal(size=(size, 8, 8, 3)).astype("float32")
    return x, np.arange(size) % 4


def convolutional() -> keras.Model:
    inputs = keras.Input((8, 8, 3))
    h = layers.Conv2D(4, 3, padding="same", activation="relu", name="conv")(inputs)
    h = layers.BatchNormalization(name="norm")(h)
    h = layers.Dropout(0.4, seed=3)(layers.GlobalAveragePooling2D()(h))
    model = keras.Model(inputs, layers.Dense(4, name="head")(h))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"])
    return model


MEGATRON = [tap.shard("block_._fc1/kernel", dim=1, axis="model")]


def blocks(optimizer=None, count: int = 2) -> keras.Model:
    """Blocks that are alike, as a transformer's are."""
    x = inputs = keras.Input((6,))
    for i in range(count):
        h = layers.LayerNormalization(name=f"block_{i}_norm")(x)
        h = layers.Dense(8, "gelu", name=f"block_{i}_fc1")(h)
        x = x + layers.Dense(6, name=f"block_{i}_fc2")(h)
    model = keras.Model(inputs, layers.Dense(2)(x))
    model.compile(optimizer or keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return model


def clipped() -> keras.Model:
    """By a norm to which all stages add."""
    return blocks(keras.optimizers.SGD(0.1, global_clipnorm=0.5))


def rows(size: int):
    return rng.normal(size=(size, 6)).astype("float32"), np.ones((size, 2), "float32")


def sentences():
    random = np.random.default_rng(0)
    return random.integers(1, 11, (8, 5)).astype("int32"), random.integers(0, 4, 8)


def gru() -> keras.Model:
    return classifier(RECURRENT["gru"])


@pytest.mark.slow
def test_blocks_split_both_ways():
    parallel, plain = assert_equivalent(
        compiled(lambda: blocks(count=4)), rows(8), tap.split([2, 2]), MEGATRON, plainly=traced
    )
    x, y = rows(8)
    scores = [run.model.evaluate(x, y, verbose=0) for run in (parallel, plain)]
    assert scores[0] == pytest.approx(scores[1], rel=1e-4)
    # The last five where a few of them stand alone: between collectives, or as what ranks share.
    assert left_out(parallel) <= {
        *("Placeholder", "RankConst", "Const", "AllReduce", "AllGather", "ReadVariableOp"),
        *("MatMul", "Reshape", "Slice", "Cast", "SelectV2"),
    }
    found = regions(parallel)
    assert len({op.attrs["f"] for op in found}) < len(found), "blocks that repeat share functions"


@pytest.mark.slow
def test_statistics_dropout_and_uneven_parts_of_the_batch():
    parallel, _ = assert_equivalent(
        compiled(convolutional), images(8), tap.split([3]), plainly=traced
    )
    assert regions(parallel)
    # Ranks in one memory hold, and update, one copy of what is replicated.
    assert {*parallel.executable().program.holders} == {(0, 0, 0)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        nightly({"pipeline": tap.Pipeline(microbatches=2)}),
        {"pipeline": tap.Pipeline(stages=2, microbatches=2)},
        nightly({"chunks": 2}),
    ],
    ids=["microbatches", "stages", "chunks"],
)
def test_pieces_of_a_batch(options):
    parallel, _ = assert_equivalent(
        compiled(clipped), rows(8), tap.split([2]), plainly=traced, options=options
    )
    assert regions(parallel) or "stages" in str(options)


@pytest.mark.slow
def test_what_is_recomputed_is_computed_twice():
    parallel, _ = assert_equivalent(
        compiled(blocks),
        rows(8),
        tap.split([2]),
        plainly=traced,
        options={"recompute": True},
    )
    functions = parallel.executable().local.graph.functions
    assert any(
        op.type == "XlaOptimizationBarrier" for body in functions.values() for op in body.ops
    )


@pytest.mark.slow
def test_loops_are_compiled_with_their_lists_where_keras_cannot():
    # Keras cannot compile this model: it traces a step for batches of any size, and takes the
    # length of the loop's lists from the batch.
    plain = train(op_by_op(gru), sentences())
    parallel = train(compiled(gru), sentences(), mesh=tap.split([2]), start=plain.start)
    assert_same(parallel, plain)
    assert left_out(parallel) <= {"Placeholder", "RankConst", "AllReduce", "AllGather"}
    functions = parallel.executable().local.graph.functions
    types = {op.type for r in regions(parallel) for op in functions[r.attrs["f"]].ops}
    assert {"While", "StatelessWhile", "EmptyTensorList"} <= types


class Unbounded(layers.Layer):
    """A loop that does not say how often it runs at most."""

    def build(self, shape):
        self.scale = self.add_weight(shape=shape[-1:], initializer="ones")

    def call(self, x):
        def body(i, x):
            return i + 1, tf.tanh(x * self.scale)

        return tf.while_loop(lambda i, x: i < 3, body, [0, x])[1]

    def compute_output_shape(self, shape):
        return shape


@pytest.mark.slow
def test_lists_of_unknown_length_stay_outside_and_that_is_said_once(caplog):
    def build() -> keras.Model:
        return classifier(lambda: [layers.GlobalAveragePooling1D(), Unbounded()])

    plain = train(op_by_op(build), sentences())
    with caplog.at_level("WARNING", "tfpar"):
        parallel = train(compiled(build), sentences(), mesh=tap.split([2]), start=plain.start)
    assert_same(parallel, plain)
    assert "While" in left_out(parallel) and regions(parallel)
    told = [r.getMessage() for r in caplog.records if "XLA does not compile" in r.getMessage()]
    assert len(told) == 1 and "EmptyTensorList" in told[0] and "While" in told[0]


@pytest.mark.slow
def test_functions_are_compiled_as_they_say():
    def step(x):
        for _ in range(5):
            x = tf.tanh(x)
        return tf.reduce_sum(x)

    x = tf.constant(rng.normal(size=(8, 4)).astype("float32"))
    for function, asked in (
        (step, {"jit_compile": True}),
        (tf.function(step, jit_compile=True), {}),
        (step, {}),
    ):
        with tap.auto_parallel([2], planner=None):
            on_mesh = tap.function(function, **asked)
        np.testing.assert_allclose(on_mesh(x), step(x), rtol=1e-5)
        (executable,) = on_mesh.executables
        calls = [op for op in executable.local.graph.ops if op.attrs.get(MUST_COMPILE)]
        assert bool(calls) == (function is not step or bool(asked))
