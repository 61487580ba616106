"""Effects of Keras's train steps and of functions come in the order that TensorFlow gives them.

Programs of TensorFlow 1 are in `test_effect_order`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest

from tests.cases import is_nightly
from tests.e2e.effect_modes import MODES, STEPS, assert_runs_so
from tests.e2e.effect_steps import Run, run_fit, run_function

SWEPT = 30 if is_nightly() else 1
"""How many programs the long sweep runs of each kind."""


@functools.cache
def alone(run: Callable[..., Run], seed: int) -> np.ndarray:
    return run(seed, STEPS)[0]


def check(run: Callable[..., Run], seed: int, mode: str) -> None:
    got, executable = run(seed, STEPS, **MODES[mode])
    want = alone(run, seed)
    np.testing.assert_allclose(got, want, atol=1e-3, err_msg=f"program {seed}, {mode}")
    assert_runs_so(executable, mode)


@pytest.mark.parametrize("run", [run_fit, run_function])
def test_in_stages(run):
    # In the forward pass of 0 no stage reads what its rate is made of.
    check(run, 0, "stages")


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("run", [run_fit, run_function])
def test_random_steps_give_what_tensorflow_gives(run, mode):
    for seed in range(1, 1 + SWEPT):
        check(run, seed, mode)
