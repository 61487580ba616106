"""Effects of Keras's train steps and of functions come in the order that TensorFlow gives them.

Programs of TensorFlow 1 are in `test_effect_order`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest

from tests.cases import is_nightly
from tests.e2e.effect_modes import MODES, STEPS
from tests.e2e.effect_steps import results_of_fit, results_of_function

SWEPT = 30 if is_nightly() else 1
"""How many programs the long sweep runs of each kind."""


@functools.cache
def alone(results_of: Callable[..., np.ndarray], seed: int) -> np.ndarray:
    return results_of(seed, STEPS)


def check(results_of: Callable[..., np.ndarray], seed: int, mode: str) -> None:
    got, want = results_of(seed, STEPS, **MODES[mode]), alone(results_of, seed)
    np.testing.assert_allclose(got, want, atol=1e-3, err_msg=f"program {seed}, {mode}")


@pytest.mark.parametrize("results_of", [results_of_fit, results_of_function])
def test_in_stages(results_of):
    # 0 reads in no stage's forward pass what its rate is made of.
    check(results_of, 0, "stages")


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("results_of", [results_of_fit, results_of_function])
def test_random_steps_give_what_tensorflow_gives(results_of, mode):
    for seed in range(1, 1 + SWEPT):
        check(results_of, seed, mode)
