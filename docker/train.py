"""A small classifier on all ranks of the job: what the files of this folder run."""

import keras
import numpy as np

import tfpar as tap

rng = np.random.default_rng(0)
x = rng.normal(size=(512, 32)).astype("float32")
y = rng.integers(0, 10, 512)

with tap.auto_parallel():
    model = keras.Sequential(
        [
            keras.Input((32,)),
            keras.layers.Dense(64, "relu", name="hidden"),
            keras.layers.Dense(10, name="classes"),
        ],
        name="classifier",
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss)

history = model.fit(x, y, batch_size=64, epochs=2, verbose=0).history
print(f"losses {history['loss']}", flush=True)
