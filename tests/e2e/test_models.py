"""Ways to write a model, against one device."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfpar as tap
from tests.e2e.features import COLUMN, MESH, compiled, f, i, same
from tests.equivalence import assert_same, op_by_op


class Lazy(keras.Model):
    """Subclassed: its variables are made at the first fit."""

    def __init__(self):
        super().__init__()
        self.fc1 = layers.Dense(10, "tanh", name="fc1")
        self.norm = layers.BatchNormalization()
        self.drop = layers.Dropout(0.3, seed=5)
        self.blocks = [layers.Dense(10, "relu") for _ in range(2)]
        self.head = layers.Dense(2)

    def call(self, x, training=False):
        x = self.norm(self.fc1(x), training=training)
        for block in self.blocks:
            x = x + self.drop(block(x), training=training)
        return self.head(x)


@pytest.mark.slow
def test_subclassed_model_built_by_fit():
    def build():
        model = Lazy()
        model.compile("adam", "mse", metrics=["mae"], jit_compile=False)
        return model

    x, y = f(12, 6), f(12, 2)
    keras.utils.set_random_seed(7)
    plain = op_by_op(build)()
    plain.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    keras.utils.set_random_seed(7)
    with tap.auto_parallel(MESH, COLUMN, planner=None):
        model = build()
    model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
    for got, want in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
    assert model.evaluate(x, y, batch_size=6, verbose=0) == pytest.approx(
        plain.evaluate(x, y, batch_size=6, verbose=0), rel=1e-4
    )


class Gan(keras.Model):
    """Two optimizers, a random input made in the step, metrics of its own."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential(
            [keras.Input((3,)), layers.Dense(10, "relu", name="fc1"), layers.Dense(6)]
        )
        self.discriminator = keras.Sequential(
            [keras.Input((6,)), layers.Dense(8, "relu"), layers.Dense(1)]
        )
        self.seeds = keras.random.SeedGenerator(3)
        self.loss_tracker = keras.metrics.Mean(name="loss")

    def compile(self, **arguments):
        super().compile(**arguments)
        self.generator_optimizer = keras.optimizers.Adam(0.01)
        self.discriminator_optimizer = keras.optimizers.SGD(0.05, momentum=0.9)

    @property
    def metrics(self):
        return [self.loss_tracker]

    def call(self, x):
        return self.discriminator(x)

    def train_step(self, real):
        count = ops.shape(real)[0]
        labels = ops.concatenate([ops.ones((count, 1)), ops.zeros((count, 1))])
        cross_entropy = keras.losses.BinaryCrossentropy(from_logits=True)
        noise = keras.random.normal((count, 3), seed=self.seeds)
        with tf.GradientTape(persistent=True) as tape:
            fake = self.generator(noise, training=True)
            scores = self.discriminator(ops.concatenate([real, fake]), training=True)
            d_loss = cross_entropy(labels, scores)
            g_loss = cross_entropy(ops.ones((count, 1)), scores[count:])
        for loss, part, optimizer in (
            (d_loss, self.discriminator, self.discriminator_optimizer),
            (g_loss, self.generator, self.generator_optimizer),
        ):
            weights = part.trainable_weights
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        del tape
        self.loss_tracker.update_state(d_loss + g_loss)
        return {"loss": self.loss_tracker.result(), "d_loss": d_loss}

    def test_step(self, real):
        score = ops.mean(self.discriminator(real, training=False))
        return {"score": score}


@pytest.mark.slow
def test_gan_with_two_optimizers():
    def build():
        model = Gan()
        model.compile(jit_compile=False)
        return model

    x = f(12, 6)
    parallel, plain = same(build, (x, None), epochs=2)
    got = parallel.model.evaluate(x, batch_size=4, verbose=0, return_dict=True)
    want = plain.model.evaluate(x, batch_size=4, verbose=0, return_dict=True)
    assert got.keys() == want.keys()
    for name, value in got.items():
        np.testing.assert_allclose(value, want[name], rtol=1e-3)
    slots = [n for n in parallel.specs() if "fc1_kernel" in n]
    assert slots and all(parallel.specs()[n] == "R,S(1)" for n in slots)


class Distiller(keras.Model):
    def __init__(self, teacher, student):
        super().__init__()
        self.teacher, self.student = teacher, student

    def call(self, x, training=False):
        return self.student(x, training=training)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        loss = super().compute_loss(x, y, y_pred, sample_weight, training=training)
        soft = ops.softmax(self.teacher(x, training=False) / 2.0)
        return loss + ops.mean(keras.losses.kl_divergence(soft, ops.softmax(y_pred / 2.0)))


@pytest.mark.nightly
def test_distillation_from_a_frozen_teacher():
    def net(width, name):
        return keras.Sequential(
            [keras.Input((6,)), layers.Dense(width, "relu", name="fc1"), layers.Dense(3)], name=name
        )

    def build():
        teacher = net(16, "teacher")
        teacher.trainable = False
        model = Distiller(teacher, net(8, "student"))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"], jit_compile=False)
        return model

    parallel, _ = same(build, (f(12, 6), i(3, 12)))
    assert parallel.specs()["teacher/fc1/kernel"] == "R,S(1)"


@pytest.mark.slow
def test_frozen_layers_and_compiling_again():
    def build():
        x = keras.Input((6,))
        h = layers.Dense(10, "tanh", trainable=False, name="fc1")(x)
        h = layers.BatchNormalization(trainable=False)(h)
        return compiled(x, layers.Dense(2)(h), optimizer="adam")

    data = f(8, 6), f(8, 2)
    runs = same(build, data)
    for run in runs:
        np.testing.assert_array_equal(run.model.get_layer("fc1").kernel, run.start[0])
        run.model.trainable = True
        for layer in run.model.layers:
            layer.trainable = True
        run.model.compile("rmsprop", "mae", jit_compile=False)
        run.start = run.model.get_weights()
        run.history = run.model.fit(*data, batch_size=4, epochs=2, shuffle=False, verbose=0).history
        run.weights = run.model.get_weights()
        assert (run.weights[0] != run.start[0]).any()
    assert_same(*runs)


@pytest.mark.slow
def test_tied_weights():
    """The table of the embedding is the head's kernel, split over the vocabulary."""

    class Tied(keras.Model):
        def __init__(self):
            super().__init__()
            self.table = layers.Embedding(11, 6, name="table")
            self.fc1 = layers.Dense(6, "tanh", name="fc1")

        def call(self, ids):
            return ops.matmul(self.fc1(self.table(ids)), ops.transpose(self.table.embeddings))

    def tied():
        model = Tied()
        model.build((None, 5))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, jit_compile=False)
        return model

    def reversible():
        ids = keras.Input((5,), dtype="int32")
        table = layers.ReversibleEmbedding(11, 6, name="table")
        x = layers.Dense(6, "tanh", name="fc1")(table(ids))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        return compiled(ids, table(x, reverse=True), optimizer="adam", loss=loss)

    data = i(11, 8, 5), i(11, 8, 5)
    make = reversible if hasattr(layers, "ReversibleEmbedding") else tied
    parallel, _ = same(make, data, [tap.shard("table/embeddings", dim=0, axis="model")])
    assert "S(0)" in next(s for n, s in parallel.specs().items() if "embeddings" in n)


@pytest.mark.slow
def test_nested_models_and_two_models_sharing_layers():
    """Each trains on its own; what one learns the other has."""

    def pair():
        x = keras.Input((6,))
        trunk = keras.Sequential([keras.Input((6,)), layers.Dense(10, "tanh", name="fc1")])
        shared = layers.Dense(4, name="shared")
        first = compiled(x, layers.Dense(2)(shared(trunk(x))), optimizer="adam")
        second = compiled(x, layers.Dense(1)(shared(trunk(x * 2.0))), optimizer="sgd", loss="mae")
        return first, second

    x, y, z = f(12, 6), f(12, 2), f(12, 1)
    keras.utils.set_random_seed(7)
    plain = tuple(op_by_op(lambda model=model: model)() for model in pair())
    keras.utils.set_random_seed(7)
    with tap.auto_parallel(MESH, COLUMN, planner=None):
        parallel = pair()
    for first, second in (plain, parallel):
        for _ in range(2):
            first.fit(x, y, batch_size=4, shuffle=False, verbose=0)
            second.fit(x, z, batch_size=4, shuffle=False, verbose=0)
    for a, b in zip(parallel, plain, strict=True):
        for got, want in zip(a.get_weights(), b.get_weights(), strict=True):
            np.testing.assert_allclose(got, want, atol=1e-5)
