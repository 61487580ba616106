"""A U-Net that makes handwritten digits out of noise, by diffusion.

The network is told an image with noise and how much of it there is, and learns what the noise is.
Then it takes noise away from nothing but noise, step by step, under the same plan.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import numpy as np
from keras import layers, ops
from machines import FOUR_CORES
from shipped_data import digits

import tfpar as tap

CHANNELS = 32


def convolutions(x, time, channels: int, name: str):
    """Two of them, with the time added between, and what came in added to what goes out."""
    h = layers.Conv2D(channels, 3, padding="same", name=f"{name}_conv1")(x)
    h = layers.GroupNormalization(8, name=f"{name}_norm1")(h)
    shift = layers.Dense(channels, name=f"{name}_time")(time)
    h = layers.Activation("silu")(h + shift[:, None, None, :])
    h = layers.Conv2D(channels, 3, padding="same", name=f"{name}_conv2")(h)
    h = layers.GroupNormalization(8, name=f"{name}_norm2")(h)
    return layers.Activation("silu")(h + layers.Conv2D(channels, 1, name=f"{name}_skip")(x))


def build() -> keras.Model:
    keras.utils.set_random_seed(0)
    images = keras.Input((8, 8, 1), name="image")
    noise = keras.Input((1,), name="noise")  # how much, from 0 to 1
    waves = noise * (2.0 ** np.arange(8, dtype="float32"))
    waves = ops.concatenate([ops.sin(waves), ops.cos(waves)], axis=-1)
    time = layers.Dense(64, "silu", name="time")(waves)
    top = convolutions(images, time, CHANNELS, "down")
    x = convolutions(layers.AveragePooling2D(2)(top), time, 2 * CHANNELS, "bottom")
    x = layers.Concatenate()([layers.UpSampling2D()(x), top])
    x = convolutions(x, time, CHANNELS, "up")
    model = keras.Model([images, noise], layers.Conv2D(1, 1, name="head")(x), name="unet")
    model.compile(keras.optimizers.Adam(3e-3), "mse")
    return model


def signal(noise):
    """How much of the image is left beside so much noise: squares add up to one."""
    return np.cos(noise * np.pi / 2), np.sin(noise * np.pi / 2)


def noisy(images: np.ndarray):
    rng = np.random.default_rng(0)
    level = rng.uniform(size=(len(images), 1)).astype("float32")
    noise = rng.normal(size=images.shape).astype("float32")
    kept, added = (part[:, :, None, None] for part in signal(level))
    return {"image": kept * images + added * noise, "noise": level}, noise


def sample(model: keras.Model, count: int, steps: int = 20) -> np.ndarray:
    x = np.random.default_rng(1).normal(size=(count, 8, 8, 1)).astype("float32")
    levels = np.linspace(0.98, 0.0, steps + 1, dtype="float32")
    for level, below in zip(levels, levels[1:], strict=False):
        told = {"image": x, "noise": np.full((count, 1), level, "float32")}
        noise = model.predict_on_batch(told)
        kept, added = signal(level)
        image = np.clip((x - added * noise) / kept, -1, 1)
        kept, added = signal(below)
        x = kept * image + added * noise
    return x


def main() -> None:
    images = digits()[0][:1792]
    x, y = noisy(np.concatenate([2 * images - 1] * 2))
    # So few steps are not worth the search that finds the best plan.
    with tap.auto_parallel([4], cluster=FOUR_CORES, search_seconds=600):
        model = build()
    history = model.fit(x, y, batch_size=128, epochs=4, verbose=0)
    print(tap.plan_of(model).summary())
    print("losses:", *(f"{loss:.4f}" for loss in history.history["loss"]))
    for row in np.concatenate(list(sample(model, 6)[..., 0]), axis=1):
        print("".join(" .:*#"[int(2.49 * (np.clip(value, -1, 1) + 1))] * 2 for value in row))


if __name__ == "__main__":
    main()
