"""Models with a `train_step` of their own, as tutorials write them, train as on one device."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from tests.one_epoch import assert_trains_as_on_one_device, cases

FEATURES, CLASSES = 6, 3


def momentum(learning_rate=0.05):
    return keras.optimizers.SGD(learning_rate, momentum=0.9)


def adam(learning_rate=1e-3, **options):
    return keras.optimizers.Adam(learning_rate, **options)


def labels_crossentropy(labels, logits):
    return ops.mean(keras.losses.sparse_categorical_crossentropy(labels, logits, from_logits=True))


def encoder(*sizes):
    return keras.Sequential(
        [*(layers.Dense(n, "relu") for n in sizes[:-1]), layers.Dense(sizes[-1])]
    )


def ready(model, shape, *optimizers, **arguments):
    """Compiled, and called once so that its weights exist."""
    model.compile(*optimizers, jit_compile=False, **arguments)
    model(np.zeros((1, *shape), "float32"))
    return model


def functional(kind, dropout=0.0, **arguments):
    """A classifier of the class `kind`, with the `train_step` of that class."""
    inputs = keras.Input((FEATURES,))
    hidden = layers.Dense(8, "relu")(inputs)
    if dropout:
        hidden = layers.Dropout(dropout, seed=1)(hidden)
    model = kind(inputs, layers.Dense(CLASSES)(hidden))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(momentum(), loss, jit_compile=False, **arguments)
    return model


# --- generative models -----------------------------------------------------------------


class Sampling(layers.Layer):
    """Draws from a normal distribution with the mean and the log variance that it is given."""

    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(3)

    def call(self, moments):
        mean, log_variance = moments
        noise = keras.random.normal(ops.shape(mean), seed=self.seeds)
        return mean + ops.exp(0.5 * log_variance) * noise


class VariationalAutoencoder(keras.Model):
    """Two heads on one encoder, noise in the middle, two metrics that the model owns."""

    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential(
            [
                layers.Conv2D(4, 3, strides=2, padding="same", activation="relu"),
                layers.Flatten(),
                layers.Dense(8, "relu"),
            ]
        )
        self.mean = layers.Dense(3)
        self.log_variance = layers.Dense(3)
        self.sampling = Sampling()
        self.decoder = keras.Sequential(
            [
                layers.Dense(4 * 4 * 4, "relu"),
                layers.Reshape((4, 4, 4)),
                layers.Conv2DTranspose(1, 3, strides=2, padding="same", activation="sigmoid"),
            ]
        )
        self.total = keras.metrics.Mean(name="total")
        self.divergence = keras.metrics.Mean(name="divergence")

    @property
    def metrics(self):
        return [self.total, self.divergence]

    def call(self, images):
        hidden = self.encoder(images)
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        return self.decoder(self.sampling([mean, log_variance])), mean, log_variance

    def train_step(self, data):
        images, _ = data
        with tf.GradientTape() as tape:
            rebuilt, mean, log_variance = self(images, training=True)
            errors = ops.sum(keras.losses.binary_crossentropy(images, rebuilt), axis=(1, 2))
            terms = 1 + log_variance - ops.square(mean) - ops.exp(log_variance)
            divergence = ops.mean(ops.sum(-0.5 * terms, axis=1))
            loss = ops.mean(errors) + divergence
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        self.total.update_state(loss)
        self.divergence.update_state(divergence)
        return {"loss": loss, **{m.name: m.result() for m in self.metrics}}


class WassersteinGan(keras.Model):
    """Two networks, an optimizer each, and a penalty on the gradient for a mixed input."""

    def __init__(self):
        super().__init__()
        self.critic = keras.Sequential([layers.Dense(8), layers.LeakyReLU(), layers.Dense(1)])
        self.generator = keras.Sequential([layers.Dense(8, "tanh"), layers.Dense(FEATURES)])
        self.seeds = keras.random.SeedGenerator(1)

    def compile(self, critic_optimizer, generator_optimizer, **arguments):
        super().compile(**arguments)
        self.critic_optimizer = critic_optimizer
        self.generator_optimizer = generator_optimizer

    def call(self, latent):
        return self.critic(self.generator(latent))

    def noise(self, number):
        return keras.random.normal((number, 4), seed=self.seeds)

    def penalty(self, real, fake):
        share = keras.random.uniform((ops.shape(real)[0], 1), seed=self.seeds)
        mixed = real + share * (fake - real)
        with tf.GradientTape() as tape:
            tape.watch(mixed)
            score = self.critic(mixed)
        squares = ops.sum(ops.square(tape.gradient(score, mixed)), axis=1)
        return ops.mean(ops.square(ops.sqrt(squares + 1e-8) - 1))

    def train_step(self, data):
        real, _ = data
        number, weights = ops.shape(real)[0], self.critic.trainable_variables
        with tf.GradientTape() as tape:
            fake = self.generator(self.noise(number))
            critic_loss = ops.mean(self.critic(fake)) - ops.mean(self.critic(real))
            critic_loss = critic_loss + 10 * self.penalty(real, fake)
        gradients = tape.gradient(critic_loss, weights)
        self.critic_optimizer.apply_gradients(zip(gradients, weights, strict=True))
        weights = self.generator.trainable_variables
        with tf.GradientTape() as tape:
            generator_loss = -ops.mean(self(self.noise(number)))
        gradients = tape.gradient(generator_loss, weights)
        self.generator_optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {"loss": critic_loss, "generator_loss": generator_loss}


# --- contrastive models ----------------------------------------------------------------


class SimClr(keras.Model):
    """Every sample of the batch is compared with every other one."""

    def __init__(self):
        super().__init__()
        self.encoder = encoder(16, 8)

    def call(self, views):
        return ops.normalize(self.encoder(views), axis=1)

    def train_step(self, data):
        first, second = data
        with tf.GradientTape() as tape:
            likeness = ops.matmul(self(first), ops.transpose(self(second))) / 0.1
            labels = ops.arange(ops.shape(likeness)[0], dtype="int32")
            loss = labels_crossentropy(labels, likeness)
            loss = loss + labels_crossentropy(labels, ops.transpose(likeness))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        found = ops.cast(ops.argmax(likeness, axis=1), "int32") == labels
        return {"loss": loss, "accuracy": ops.mean(ops.cast(found, "float32"))}


class MomentumContrast(keras.Model):
    """A queue of old keys that each batch moves on, and a second network that trails the first."""

    QUEUE = 24

    def __init__(self):
        super().__init__()
        self.queries = encoder(8, 4)
        self.keys = encoder(8, 4)
        self.queue = self.add_weight(
            shape=(self.QUEUE, 4), initializer="random_normal", trainable=False, name="queue"
        )

        self.keys.trainable = False

    def call(self, views):
        return self.queries(views), self.keys(views)

    def train_step(self, data):
        first, second = data
        keys = ops.stop_gradient(ops.normalize(self.keys(second), axis=1))
        with tf.GradientTape() as tape:
            queries = ops.normalize(self.queries(first), axis=1)
            positive = ops.sum(queries * keys, axis=1, keepdims=True)
            negative = queries @ ops.transpose(self.queue.value)
            logits = ops.concatenate([positive, negative], axis=1) / 0.2
            loss = labels_crossentropy(ops.zeros(ops.shape(logits)[0], "int32"), logits)
        weights = self.queries.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        for trailing, leading in zip(self.keys.weights, self.queries.weights, strict=True):
            trailing.assign(0.9 * trailing + 0.1 * leading)
        self.queue.assign(ops.concatenate([keys, self.queue], axis=0)[: self.QUEUE])
        return {"loss": loss}


# --- more than one pass a step ---------------------------------------------------------


class SharpnessAware(keras.Model):
    """Moves the weights uphill, takes the gradient there, and moves them back."""

    def train_step(self, data):
        x, y = data
        weights = self.trainable_variables
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, weights)
        norm = tf.linalg.global_norm(gradients)
        climbs = [gradient * 0.05 / (norm + 1e-12) for gradient in gradients]
        for weight, climb in zip(weights, climbs, strict=True):
            weight.assign_add(climb)
        with tf.GradientTape() as tape:
            loss_above = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss_above, weights)
        for weight, climb in zip(weights, climbs, strict=True):
            weight.assign_sub(climb)
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        return {"loss": loss, "loss_above": loss_above}


class Accumulating(keras.Model):
    """Adds the gradients of two batches up in variables of its own, then applies them."""

    def __init__(self, *arguments, **keywords):
        super().__init__(*arguments, **keywords)
        self.count = tf.Variable(0, trainable=False, dtype=tf.int32)
        self.sums = [
            tf.Variable(tf.zeros(weight.shape), trainable=False)
            for weight in self.trainable_variables
        ]

    def compile(self, optimizer, *arguments, **keywords):
        optimizer.build(self.trainable_variables)
        super().compile(optimizer, *arguments, **keywords)

    def train_step(self, data):
        x, y = data
        self.count.assign_add(1)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        for total, gradient in zip(self.sums, gradients, strict=True):
            total.assign_add(gradient)
        tf.cond(tf.equal(self.count, 2), self.apply_sums, lambda: None)
        return {"loss": loss}

    def apply_sums(self):
        means = [total / 2.0 for total in self.sums]
        self.optimizer.apply_gradients(zip(means, self.trainable_variables, strict=True))
        self.count.assign(0)
        for total in self.sums:
            total.assign(tf.zeros_like(total))


class Adversarial(keras.Model):
    """Trains on inputs moved against it, and pulls both predictions together."""

    def train_step(self, data):
        x, y = data
        weights = self.trainable_variables
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = self.compute_loss(x, y, self(x, training=True))
        attack = x + 0.1 * tf.sign(tape.gradient(loss, x))
        with tf.GradientTape() as tape:
            logits = self(x, training=True)
            attacked = self(attack, training=True)
            apart = keras.losses.kl_divergence(ops.softmax(logits), ops.softmax(attacked))
            loss = self.compute_loss(x, y, logits) + self.compute_loss(x, y, attacked)
            loss = self.optimizer.scale_loss(loss + ops.mean(apart))
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {**self.compute_metrics(x, y, logits), "loss": loss}


class DifferentialEquation(keras.Model):
    """The loss asks that u'' + u = y: a third derivative through the network."""

    def __init__(self):
        super().__init__()
        self.solution = keras.Sequential([layers.Dense(8, "tanh"), layers.Dense(1)])

    def call(self, x):
        return self.solution(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            with tf.GradientTape() as second:
                second.watch(x)
                with tf.GradientTape() as first:
                    first.watch(x)
                    value = self(x)
                slope = first.gradient(value, x)
            curvature = second.gradient(slope, x)
            loss = ops.mean(ops.square(curvature + value - y))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


class WideAndDeep(keras.Model):
    """One loss, but each half of the model has an optimizer of its own."""

    def __init__(self):
        super().__init__()
        self.deep = encoder(8, 1)
        self.wide = layers.Dense(1)

    def call(self, x):
        return self.wide(x) + self.deep(x)

    def compile(self, wide_optimizer, deep_optimizer, **arguments):
        super().compile(**arguments)
        self.wide_optimizer = wide_optimizer
        self.deep_optimizer = deep_optimizer

    def train_step(self, data):
        x, y = data
        wide, deep = self.wide.trainable_variables, self.deep.trainable_variables
        with tf.GradientTape() as tape:
            prediction = self(x, training=True)
            loss = self.compute_loss(x, y, prediction)
        for_wide, for_deep = tape.gradient(loss, [wide, deep])
        self.wide_optimizer.apply_gradients(zip(for_wide, wide, strict=True))
        self.deep_optimizer.apply_gradients(zip(for_deep, deep, strict=True))
        return {**self.compute_metrics(x, y, prediction), "loss": loss}


def autoencoded(samples):
    images = samples.share(8, 8, 1)
    return images, images


def two_views(samples):
    return samples.real(FEATURES), samples.real(FEATURES)


def classified(samples):
    return samples.real(FEATURES), samples.labels(CLASSES)


def regressed(samples, features=FEATURES):
    return samples.real(features), samples.real(1)


MODELS = {
    "vae": (lambda: ready(VariationalAutoencoder(), (8, 8, 1), adam()), autoencoded),
    # Real and made samples cancel in a bias's gradient: Adam would make much of the roundings.
    "wgan_gp": (
        lambda: ready(WassersteinGan(), (4,), adam(epsilon=1e-4), adam(epsilon=1e-4)),
        regressed,
    ),
    "simclr": (lambda: ready(SimClr(), (FEATURES,), momentum()), two_views),
    "moco_queue": (lambda: ready(MomentumContrast(), (FEATURES,), momentum()), two_views),
    "sam_optimizer": (lambda: functional(SharpnessAware), classified),
    "manual_accumulation": (lambda: functional(Accumulating), classified),
    "fgsm_rdrop": (lambda: functional(Adversarial, dropout=0.2, metrics=["accuracy"]), classified),
    "pinn_second_derivative": (
        lambda: ready(DifferentialEquation(), (1,), momentum(0.02)),
        lambda samples: regressed(samples, features=1),
    ),
    "wide_deep_two_opts": (
        lambda: ready(
            WideAndDeep(),
            (FEATURES,),
            keras.optimizers.Ftrl(0.1),
            adam(0.01),
            loss="mse",
            metrics=["mae"],
        ),
        regressed,
    ),
}
BY_DEFAULT = ("wgan_gp", "moco_queue", "manual_accumulation")
IN_BOTH_WAYS = ("simclr", "manual_accumulation")


@pytest.mark.parametrize(("name", "mode"), cases(MODELS, BY_DEFAULT, IN_BOTH_WAYS))
def test_trains_as_on_one_device(name, mode):
    assert_trains_as_on_one_device(*MODELS[name], mode)
