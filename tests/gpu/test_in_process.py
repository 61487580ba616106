"""Ranks on GPUs, all in one process: p(X) = G(X), with XLA and without."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import tfpar as tap
from benchmarks import models
from tests.equivalence import assert_same, train
from tfpar.tf.keras import parallel_model

LENGTH, VOCABULARY, CLASSES = 16, 50, 6


def transformer(jit_compile):
    keras.utils.set_random_seed(0)
    model = models.gpt(num_layers=2, hidden=32, heads=2, length=LENGTH, vocabulary=VOCABULARY)
    model = models.compile_model(model, keras.optimizers.SGD(0.1, momentum=0.9))
    model.jit_compile = jit_compile
    return model


def tokens(size):
    rng = np.random.default_rng(0)
    x = rng.integers(0, VOCABULARY, (size, LENGTH)).astype("int32")
    return x, np.roll(x, -1, axis=1)


def convolutional(jit_compile):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((16, 16, 3))
    x = inputs
    for filters in (8, 16):
        x = keras.layers.Conv2D(filters, 3, padding="same", strides=2, use_bias=False)(x)
        x = keras.layers.BatchNormalization()(x)
        x = keras.layers.ReLU()(x)
    x = keras.layers.Dropout(0.3, seed=1)(keras.layers.GlobalAveragePooling2D()(x))
    model = keras.Model(inputs, keras.layers.Dense(CLASSES)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=jit_compile)
    return model


def images(size):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(size, 16, 16, 3)).astype("float32")
    return x, rng.integers(0, CLASSES, size).astype("int32")


def recurrent(jit_compile):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((LENGTH,), dtype="int32")
    x = keras.layers.Embedding(VOCABULARY, 16)(inputs)
    x = keras.layers.GRU(16, use_cudnn=False)(x)
    model = keras.Model(inputs, keras.layers.Dense(CLASSES)(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, jit_compile=False)
    model.jit_compile = jit_compile
    return model


def sequences(size):
    x, _ = tokens(size)
    return x, (x.sum(1) % CLASSES).astype("int32")


MODELS = {
    "transformer": (transformer, tokens),
    "convolutional": (convolutional, images),
    "recurrent": (recurrent, sequences),
}
SPLIT = [tap.shard(".*kernel", -1, "model")]
LAYOUTS = {
    "data": (tap.split([4]), []),
    "data uneven": (tap.split([3]), []),
    "both": (tap.split([2, 2]), SPLIT),
}


@pytest.mark.parametrize("jit_compile", [False, True], ids=["kernels", "xla"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_trains_as_on_one_device(name, layout, jit_compile):
    build, data = MODELS[name]
    mesh, constraints = LAYOUTS[layout]
    if name == "recurrent" and jit_compile:
        plain = train(lambda: build(False), data(8), batch_size=4)
    else:
        plain = train(lambda: build(jit_compile), data(8), batch_size=4)
    parallel = train(
        lambda: build(jit_compile),
        data(8),
        batch_size=4,
        mesh=mesh,
        constraints=constraints,
        start=plain.start,
    )
    assert_same(parallel, plain)
    devices = parallel.executable().ranks.devices
    assert len(devices) == mesh.size and all("GPU" in device for device in devices)


def test_variables_lie_on_their_ranks_gpus():
    with tap.auto_parallel(tap.split([1, 4]), SPLIT, planner=None):
        model = transformer(False)
    model.fit(*tokens(4), batch_size=4, verbose=0)
    kernel = next(v for v in model.weights if "head/kernel" in v.path)
    shards = kernel._value.shards
    assert [shards[rank].device.rpartition("/")[2] for rank in range(4)] == [
        f"device:GPU:{rank}" for rank in range(4)
    ]


def test_microbatches_and_stages():
    plain = train(lambda: transformer(False), tokens(8), batch_size=8)
    for pipeline in (tap.Pipeline(microbatches=4), tap.Pipeline(stages=2, microbatches=4)):
        piped = train(
            lambda: transformer(False),
            tokens(8),
            batch_size=8,
            mesh=tap.split([2]),
            start=plain.start,
            options={"pipeline": pipeline},
        )
        assert_same(piped, plain)


def test_a_searched_plan_on_detected_gpus():
    with tap.auto_parallel(tap.split([4]), planner="auto"):
        model = transformer(True)
    model.fit(*tokens(8), batch_size=8, verbose=0)
    plan = tap.plan_of(model)
    assert plan.cost is not None and parallel_model(model).executables["train"].mesh.size == 4
