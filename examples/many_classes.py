"""A classifier with 100,000 classes: which word follows four others in Python's library.

Nearly all weights are those of the table of words and of the last layer. Data parallelism would
sum their gradients over all ranks in each step; the search splits them instead.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
from keras import layers
from shipped_data import next_words

import tfpar as tap

CLUSTER = "v100-ethernet"  # without it the plan is for the machine that runs the script
CLASSES, CONTEXT = 100_000, 4


def build() -> keras.Model:
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((CONTEXT,), dtype="int32"),
            layers.Embedding(CLASSES, 32, name="words"),
            layers.Flatten(),
            layers.Dense(128, "relu", name="hidden"),
            layers.Dense(CLASSES, name="classes"),
        ],
        name="classifier",
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])
    return model


def main() -> None:
    x, y, words = next_words(4096, CONTEXT, CLASSES)
    with tap.auto_parallel([4], cluster=CLUSTER):
        model = build()
    history = model.fit(x, y, batch_size=256, epochs=3, verbose=0)
    plan = tap.plan_of(model)
    print(plan.summary())
    print(plan.explain("classes/kernel"))
    print("losses:", *(f"{loss:.4f}" for loss in history.history["loss"]))
    guesses = model.predict(x[:3], verbose=0).argmax(axis=-1)
    for window, guess in zip(x, guesses, strict=False):
        print(*(words[i] for i in window), "->", words[guess])


if __name__ == "__main__":
    main()
