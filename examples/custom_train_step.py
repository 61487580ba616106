"""A GAN: two networks, two optimizers, and a `train_step` of its own.

The whole step is captured, whatever it does; so it is partitioned as `fit`'s own would be.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import tensorflow as tf
from keras import layers
from machines import FOUR_CORES
from shipped_data import digits

import tfpar as tap

NOISE = 32


class GAN(keras.Model):
    def __init__(self, generator: keras.Model, critic: keras.Model) -> None:
        super().__init__(name="gan")
        self.generator, self.critic = generator, critic
        self.seeds = keras.random.SeedGenerator(1)
        self.critic_optimizer = keras.optimizers.Adam(1e-3, beta_1=0.5, name="critic_adam")
        self.entropy = keras.losses.BinaryCrossentropy(from_logits=True)

    def train_step(self, images):
        count = tf.shape(images)[0]
        noise = keras.random.normal((count, NOISE), seed=self.seeds)
        real, made = tf.ones((count, 1)), tf.zeros((count, 1))
        with tf.GradientTape() as tape:
            both = tf.concat([images, self.generator(noise)], axis=0)
            critic_loss = self.entropy(tf.concat([real, made], 0), self.critic(both))
        weights = self.critic.trainable_variables
        self.critic_optimizer.apply(tape.gradient(critic_loss, weights), weights)

        with tf.GradientTape() as tape:
            loss = self.entropy(real, self.critic(self.generator(noise)))
        weights = self.generator.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss, "critic_loss": critic_loss}


def build() -> keras.Model:
    keras.utils.set_random_seed(0)
    generator = keras.Sequential(
        [
            keras.Input((NOISE,)),
            layers.Dense(256, "relu", name="g1"),
            layers.Dense(256, "relu", name="g2"),
            layers.Dense(64, "sigmoid", name="g3"),
        ],
        name="generator",
    )
    critic = keras.Sequential(
        [
            keras.Input((64,)),
            layers.Dense(256, "leaky_relu", name="c1"),
            layers.Dense(256, "leaky_relu", name="c2"),
            layers.Dense(1, name="c3"),
        ],
        name="critic",
    )
    model = GAN(generator, critic)
    model.compile(keras.optimizers.Adam(1e-3, beta_1=0.5))
    return model


def main() -> None:
    images = digits()[0].reshape(-1, 64)[:1792]
    with tap.auto_parallel([4], cluster=FOUR_CORES):
        model = build()
    history = model.fit(images, batch_size=128, epochs=5, shuffle=False, verbose=0).history
    print(tap.plan_of(model).summary())
    alone = build().fit(images, batch_size=128, epochs=5, shuffle=False, verbose=0).history
    for name in ("loss", "critic_loss"):
        for where, losses in (("on the mesh", history[name]), ("on one device", alone[name])):
            print(f"{name} {where}:", *(f"{loss:.4f}" for loss in losses))


if __name__ == "__main__":
    main()
