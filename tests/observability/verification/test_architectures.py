"""Models that others wrote, and ways to write one: right ones pass, in each precision."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import tfpar as tap
from tests.cases import nightly
from tests.e2e import test_architectures as others
from tests.e2e.test_mixed_precision import policy
from tests.e2e.test_models import Distiller, Gan, Lazy
from tests.equivalence import without_graph_optimizers
from tests.one_epoch import layout_of_strangers
from tfpar.observability.verification import Verification

rng = np.random.default_rng(0)

ARCHITECTURES = [
    ("llama", "mixed_bfloat16"),
    ("resnet", "float32"),
    nightly("gpt2", "mixed_float16"),
    nightly("bert", "bfloat16"),
    nightly("t5", "mixed_bfloat16"),
    nightly("vit", "mixed_float16"),
]


def verified(build, data, constraints=None, **arguments) -> Verification:
    if constraints is None:
        keras.utils.set_random_seed(7)
        constraints = layout_of_strangers(build(), seed=1)
        with_policy = keras.config.dtype_policy()
        keras.utils.clear_session(free_memory=False)  # so that layers get the same names again
        keras.config.set_dtype_policy(with_policy)
    keras.utils.set_random_seed(7)
    with tap.auto_parallel(tap.split([2, 2]), constraints, planner=None):
        model = build()
    with without_graph_optimizers():
        return tap.verify(model, *data(model), steps=1, **arguments)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), ARCHITECTURES)
def test_architectures_pass(name, dtype):
    """Under Adam, dropout as it is, and a layout that the model was not made for."""
    architecture = others.ARCHITECTURES[name]

    def build():
        model = architecture.build()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=architecture.from_logits)
        model.compile("adam", loss, metrics=["accuracy"], jit_compile=False)
        return model

    def data(model):
        shape = [others.LENGTH if n is None else n for n in model.output.shape[1:]]
        labels = rng.integers(0, shape[-1], (others.NUM_SAMPLES, *shape[:-1]))
        return others.inputs_of(model, rng), labels.astype("int32")

    keras.utils.clear_session(free_memory=False)
    with policy(dtype):
        report = verified(build, data, batch_size=others.BATCH)
    assert report.ok, str(report)


def lazy():
    model = Lazy()
    model.compile("adam", "mse", metrics=["mae"], jit_compile=False)
    model.build((None, 6))
    return model


def gan():
    model = Gan()
    model.compile(jit_compile=False)
    return model


def distiller():
    def net(width):
        return keras.Sequential(
            [
                keras.Input((6,)),
                keras.layers.Dense(width, "relu", name="fc1"),
                keras.layers.Dense(3),
            ]
        )

    teacher = net(16)
    teacher.trainable = False
    model = Distiller(teacher, net(8))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, jit_compile=False)
    return model


X = rng.normal(size=(5, 6)).astype("float32")
WAYS = {
    "subclassed": (lazy, (X, rng.normal(size=(5, 2)).astype("float32"))),
    "two optimizers": (gan, (X, None)),
    "a frozen part": (distiller, (X, rng.integers(0, 3, 5))),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "dtype"),
    [
        ("subclassed", "mixed_bfloat16"),
        ("two optimizers", "mixed_float16"),
        ("two optimizers", "float32"),
        ("a frozen part", "float32"),
    ],
)
def test_ways_to_write_a_model_pass(way, dtype):
    build, data = WAYS[way]
    with policy(dtype):
        report = verified(build, lambda _: data, [tap.shard(".*fc1/kernel", 1, "model")])
    assert report.ok, str(report)
    assert sum(v.gradient is not None for v in report.variables) >= 4
