"""The flops of a model are those of its programs, whatever these compute again."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers

import tfpar as tap
from tests.e2e.test_monitor import CLASSES, WIDTH, small
from tests.e2e.test_pipelines_found import rows
from tfpar.cost.op_compute import model_flops
from tfpar.tf.keras import parallel_model


@pytest.mark.slow
def test_flops_count_once_what_is_computed_again_and_loops_for_each_trip():
    def recurrent() -> keras.Model:
        inputs = keras.Input((5, WIDTH))
        model = keras.Model(inputs, layers.Dense(CLASSES)(layers.SimpleRNN(8)(inputs)))
        model.compile("sgd", "mse", jit_compile=False)
        return model

    def flops(build, data, **options) -> float:
        with tap.auto_parallel([2], planner=None, verbose=0, **options):
            model = build()
        model.fit(*data, batch_size=8, verbose=0)
        found = model_flops(parallel_model(model).executables["train"].partitioned)
        assert list(found) == ["float32"]
        return found["float32"]

    x, y = rows(8, WIDTH)
    dense = 2 * 8 * (3 * 8 * CLASSES + 2 * WIDTH * 8)
    assert flops(small, (x, y)) == flops(small, (x, y), recompute=True) == dense
    x, y = np.ones((8, 5, WIDTH), "float32"), np.ones((8, CLASSES), "float32")
    trip = 2 * 8 * (WIDTH * 8 + 8 * 8)
    assert flops(recurrent, (x, y)) > 5 * trip + 2 * 8 * 3 * 8 * CLASSES
