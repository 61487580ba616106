"""What each rank does in the test of KerasHub: `python -m tests.tf.distributed.hub_ranks FOLDER`.

FOLDER holds what plain Keras made of the same model and data (`plain.npz`, `plain.json`). Each
check that holds or fails becomes a line of JSON in FOLDER/checks.
"""

from __future__ import annotations

import builtins
import json
import sys
from pathlib import Path
from typing import Any

import h5py
import keras
import keras_hub
import numpy as np
import tensorflow as tf

import tfpar as tap
from tests.cases import is_nightly
from tests.tf.distributed.state_ranks import Checks
from tfpar.tf.distributed.world import this_world

LETTERS = {c: i for i, c in enumerate(["<|endoftext|>", *"abcdefgh", "Ġ", "Ġa"])}
TEXT = ["abc a", "bcd ab", "cde abc", "def abcd"] * 2
PROMPTS = ["abc", "b"]
SPLIT = (
    tap.shard("token_embedding/embeddings", dim=0, axis="model"),
    tap.shard("feedforward_intermediate_dense/kernel", dim=1, axis="model"),
    tap.shard("lora_kernel_b", dim=1, axis="model"),
)


def build(sampler: str | None = None) -> keras_hub.models.GPT2CausalLM:
    """A tiny GPT-2 with a tokenizer of letters, without a download; sampling is seeded."""
    keras.utils.set_random_seed(3)
    tokenizer = keras_hub.models.GPT2Tokenizer(vocabulary=LETTERS, merges=["Ġ a"])
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=len(LETTERS) + 1,
        num_layers=1,
        num_heads=2,
        hidden_dim=8,
        intermediate_dim=16,
        max_sequence_length=8,
    )
    preprocessor = keras_hub.models.GPT2CausalLMPreprocessor(tokenizer, sequence_length=8)
    model = keras_hub.models.GPT2CausalLM(backbone, preprocessor)
    model.compile(
        keras.optimizers.SGD(0.5),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        sampler=sampler or keras_hub.samplers.RandomSampler(seed=5),
        jit_compile=False,
    )
    return model


def trained(model: keras_hub.models.GPT2CausalLM) -> keras_hub.models.GPT2CausalLM:
    model.fit(TEXT, batch_size=4, epochs=2, verbose=0)
    return model


def generated(model: keras_hub.models.GPT2CausalLM) -> dict[str, Any]:
    """Tokens that are drawn, twice, and then the likeliest."""
    drawn = [model.generate(PROMPTS, stop_token_ids=None) for _ in range(2)]
    model.compile(model.optimizer, model.loss, sampler="greedy", jit_compile=False)
    return {"drawn": drawn, "likeliest": model.generate(PROMPTS)}


def functions(model: keras.Model) -> list[np.ndarray]:
    """What `tf.function`s of the user's make of a model's weights."""
    x = np.linspace(-1, 1, 32).reshape(8, 4).astype("float32")
    weights = [v.value for v in model.trainable_variables]
    call = tf.function(lambda x: model(x))
    nested = tf.function(lambda x: call(x) + weights[0][0, 0])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(call(x) ** 2)
    outer = tape.gradient(loss, weights)

    @tf.function
    def train(steps):
        loss = tf.zeros([])
        for _ in tf.range(steps):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x) - 1.0) ** 2)
            gradients = tape.gradient(loss, weights)
            model.optimizer.apply(gradients, model.trainable_variables)
        return loss

    @tf.function
    def branch(is_wanted):
        return model(x) if is_wanted else tf.zeros([8, 6])

    steps = [train(tf.constant(3)) for _ in range(2)]
    branches = [branch(tf.constant(is_wanted)) for is_wanted in (True, False)]
    found = [call(x), nested(x), *outer, *steps, *branches, *model.get_weights()]
    return [np.asarray(value) for value in found]


def dense() -> keras.Model:
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(6, name="d"), keras.layers.Dense(6, name="e")]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile("adam", "mse", jit_compile=False)
    model.fit(np.ones((8, 4), "float32"), np.ones((8, 6), "float32"), batch_size=8, verbose=0)
    return model


def functions_read_what_is_split(folder: Path, mesh: tap.Mesh) -> None:
    split = [
        tap.shard("d/kernel", dim=1, axis="model"),
        tap.shard("d/bias", dim=0, axis="model"),
        tap.shard("e/kernel", dim=0, axis="model"),
    ]
    with tap.auto_parallel(mesh, split, planner=None):
        model = dense()
    with np.load(folder / "plain.npz") as plain:
        want = [plain[f"function{i}"] for i in range(sum("function" in k for k in plain))]
    for got, wanted in zip(functions(model), want, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)


class OneWriter:
    """While it lasts, files are opened for writing on the first rank only."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._open, self._h5 = builtins.open, h5py.File.__init__

    def __enter__(self) -> None:
        def check(mode: str) -> None:
            assert self._rank == 0 or mode.startswith("r"), f"opened with {mode!r}"

        def open_(file, mode="r", *args, **kwargs):
            check(mode)
            return self._open(file, mode, *args, **kwargs)

        def h5(file, name, mode="r", *args, **kwargs):
            check(mode)
            self._h5(file, name, mode, *args, **kwargs)

        builtins.open, h5py.File.__init__ = open_, h5

    def __exit__(self, *error: object) -> None:
        builtins.open, h5py.File.__init__ = self._open, self._h5


def saves(folder: Path, model: keras_hub.models.GPT2CausalLM, rank: int) -> None:
    with OneWriter(rank):
        model.save_to_preset(folder / "task")
        model.preprocessor.save_to_preset(folder / "preprocessor")
        model.preprocessor.tokenizer.save_to_preset(folder / "tokenizer")
        keras.saving.save_weights(model.backbone, folder / "backbone.weights.h5")
        model.save_weights(folder / "parts.weights.json", max_shard_size=1e-6)
    values = {v.path: keras.ops.convert_to_numpy(v) for v in model.backbone.weights}
    if not rank:
        np.savez(folder / "trained.npz", **values)


def saves_lora(folder: Path, mesh: tap.Mesh, rank: int) -> None:
    with tap.auto_parallel(mesh, SPLIT, planner=None):
        model = build()
        model.backbone.enable_lora(2)
    trained(model)
    with OneWriter(rank):
        model.backbone.save_lora_weights(str(folder / "trained.lora.h5"))
    values = {v.path: keras.ops.convert_to_numpy(v) for v in model.backbone.trainable_weights}
    assert any(np.any(v) for name, v in values.items() if "lora_kernel_b" in name)
    if not rank:
        np.savez(folder / "lora.npz", **values)


def an_error_while_saving_is_everyones(folder: Path, model: keras_hub.models.Task) -> None:
    (folder / "taken").write_text("a file")
    try:
        model.save_to_preset(folder / "taken")
    except (OSError, tap.TfparError) as error:
        assert "taken" in str(error), error
    else:
        raise AssertionError("a preset was saved in a file")


def main(folder: Path) -> None:
    world = this_world()
    assert world is not None
    rank, mesh = world.rank, tap.Mesh.of({"model": world.size})
    check = Checks(folder, "checks", rank)
    check("functions", lambda: functions_read_what_is_split(folder, mesh))
    with tap.auto_parallel(mesh, SPLIT[:2], planner=None):
        model = build()
    trained(model)

    def generate() -> None:
        plain = json.loads((folder / "plain.json").read_text())
        assert generated(model) == plain

    if is_nightly():
        check("generate", generate)
    check("save", lambda: saves(folder, model, rank))
    check("error", lambda: an_error_while_saving_is_everyones(folder, model))
    if is_nightly():
        check("lora", lambda: saves_lora(folder, mesh, rank))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
