"""What a capture does, as counts: whoever changes it so that it does more says why here."""

import keras
import numpy as np
import pytest

import tfpar as tap
from benchmarks import models
from tfpar.tf.capture.step import argument_specs
from tfpar.tf.keras.adapter import parallel_model

CEILINGS = {2: 1_040, 4: 1_860}
"""Ops traced for a GPT of so many layers without its optimizer; about 2 % above what was counted
when they were set."""


@pytest.mark.slow
@pytest.mark.parametrize("layers", CEILINGS)
def test_a_capture_traces_no_more_ops_than_it_did(layers):
    with tap.auto_parallel([1], planner=None):
        model = models.compile_model(
            models.gpt(num_layers=layers, hidden=32, heads=4, vocabulary=100, length=16)
        )
    specs = argument_specs((models.batch_of(model, 8),))
    step = parallel_model(model).capture_gradients(specs)
    assert len(step.graph.ops) <= step.ops_traced <= CEILINGS[layers]


@keras.saving.register_keras_serializable("tests")
class Counting(keras.layers.Dense):
    calls = 0

    def call(self, inputs):
        type(self).calls += 1
        return super().call(inputs)


@pytest.mark.slow
@pytest.mark.parametrize("planner", ["auto", None])
def test_a_first_fit_calls_each_layer_once(planner):
    """Keras alone calls them twice: to make what the optimizer keeps, and to trace the step."""
    with tap.auto_parallel([2], planner=planner):
        model = keras.Sequential([keras.Input((6,)), Counting(8), Counting(8), Counting(4)])
        model.compile("adam", "mse")
    Counting.calls = 0
    batch = np.ones((4, 6), "float32"), np.ones((4, 4), "float32")
    model.fit(*batch, batch_size=4, epochs=2, verbose=0)
    assert Counting.calls == 3
