"""Models that Keras has quantized train as on one device: adapters beside whole numbers of 8 and 4
bits, and products in float8."""

from __future__ import annotations

import keras
import numpy as np
import pytest

import tfpar as tap
from tests.cases import nightly
from tests.equivalence import assert_equivalent, traced
from tfpar.tf.keras import parallel_model

ROWS = [tap.batch("data")]
COLUMNS = [tap.shard("fc1/kernel", 1, "model")]


def numbers() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(16, 16)).astype("float32"), rng.normal(size=(16, 4)).astype("float32")


def perceptron(mode: str, rank: int | None = 2) -> keras.Model:
    """Two layers, quantized; of adapters of this rank only these are trained."""
    hidden = keras.layers.Dense(64, "relu", name="fc1")
    inputs = keras.Input((16,))
    model = keras.Model(inputs, keras.layers.Dense(4, name="fc2")(hidden(inputs)))
    for layer in model.layers[1:]:
        if rank is not None:
            layer.enable_lora(rank)
        layer.quantize(mode)
    model.compile(keras.optimizers.SGD(0.05), "mse", jit_compile=False)
    return model


@pytest.mark.parametrize(
    ("mode", "mesh", "constraints"),
    [
        ("int8", {"data": 1, "model": 2}, COLUMNS),
        nightly("int8", {"data": 2}, ROWS),
        nightly("int8", {"data": 2}, [tap.fsdp("data")]),
        nightly("int4", {"data": 2}, ROWS),
    ],
)
def test_adapters_beside_whole_numbers_train_as_on_one_device(mode, mesh, constraints):
    parallel, _ = assert_equivalent(
        lambda: perceptron(mode), numbers(), tap.split(mesh), constraints, plainly=traced
    )
    specs = parallel.executable().partitioned.variable_specs
    (kernel,) = (v for v in specs if v.name == "fc1/kernel")
    assert not kernel.trainable and kernel.dtype == "int8"
    assert (tap.Shard(1) in specs[kernel]) == (constraints is COLUMNS)


@pytest.mark.parametrize("mesh", [{"data": 2}, nightly({"data": 1, "model": 2})])
def test_what_float8_changes_is_its_own_rounding(mesh):
    """A difference in the last digit may become one of an eighth where a gradient is rounded to two
    bits of fraction: what is compared allows for that."""
    constraints = COLUMNS if "model" in mesh else ROWS
    keras.utils.set_random_seed(0)
    with tap.auto_parallel(mesh, constraints, planner=None):
        model = perceptron("float8", rank=None)
    report = tap.verify(model, *(part[:8] for part in numbers()), steps=2)
    assert report.ok, str(report)
    model.train_on_batch(*numbers())
    graph = parallel_model(model).executables["train"].partitioned.graph
    assert {"float8_e4m3fn", "float8_e5m2"} <= {t.dtype for op in graph.ops for t in op.outputs}
