"""Steps as they are captured read back from their text, before and after they are simplified."""

from __future__ import annotations

from collections.abc import Callable

import keras
import pytest

import tfpar as tap
from benchmarks.models import SMALL, batch_of, compile_model
from tests.ir.text.same import assert_same_step
from tfpar.compile import simplify_step
from tfpar.ir import fingerprint, format_step, parse_step
from tfpar.tf.capture import CapturedStep, argument_specs
from tfpar.tf.keras import parallel_model

QUICK = ("wide",)
SLOW = ("gpt", "switch")
AT_NIGHT = tuple(name for name in SMALL if name not in (*QUICK, *SLOW))


def captured(build: Callable[[], keras.Model]) -> CapturedStep:
    with tap.auto_parallel([1], planner=None):
        model = compile_model(build())
    specs = argument_specs((batch_of(model, 4),))
    return parallel_model(model).step("train").capture(specs)


def recurrent() -> keras.Model:
    """A loop, whose bodies are functions."""
    inputs = keras.Input((5, 3))
    return keras.Model(inputs, keras.layers.Dense(2)(keras.layers.GRU(4)(inputs)))


MODELS = [
    pytest.param(recurrent, id="recurrent"),
    *(pytest.param(SMALL[name], id=name) for name in QUICK),
    *(pytest.param(SMALL[name], id=name, marks=pytest.mark.slow) for name in SLOW),
    *(pytest.param(SMALL[name], id=name, marks=pytest.mark.nightly) for name in AT_NIGHT),
]


@pytest.mark.parametrize("build", MODELS)
def test_a_captured_step_reads_back(build):
    step = captured(build)
    for simplify in (False, True):
        if simplify:
            simplify_step(step)
        text = format_step(step)
        read = parse_step(text)
        assert_same_step(read, step)
        assert format_step(read) == text
        assert fingerprint(read.graph) == fingerprint(step.graph)


def test_the_recurrent_step_has_bodies():
    assert captured(recurrent).graph.functions
