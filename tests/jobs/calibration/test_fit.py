"""Rates are found again in times that were made from them, with noise."""

import math

import numpy as np
import pytest

from tfpar.cost import efficiency
from tfpar.jobs.calibration import fit

SIZES = (1e3, 16e3, 130e3, 1e6, 4e6)
SIDES = [(n, n, n) for n in (32, 64, 128, 256, 512)] + [(16, 256, 256), (256, 16, 256)]


def noisy(times, seed, by=0.03):
    rng = np.random.default_rng(seed)
    return [t * math.exp(rng.normal(0, by)) for t in times]


@pytest.mark.parametrize("seed", range(3))
def test_startup_and_bandwidth_are_found(seed):
    times = noisy([2e-4 + n / 1e9 for n in SIZES], seed)
    startup, bandwidth = fit.alpha_beta(SIZES, times)
    assert startup == pytest.approx(2e-4, rel=0.1)
    assert bandwidth == pytest.approx(1e9, rel=0.1)


def test_one_time_that_is_far_off_does_not_matter():
    times = [1e-4 + n / 2e9 for n in SIZES]
    times[2] *= 20
    startup, bandwidth = fit.alpha_beta(SIZES, times)
    assert startup == pytest.approx(1e-4, rel=0.1)
    assert bandwidth == pytest.approx(2e9, rel=0.1)


def test_neither_startup_nor_time_of_bytes_is_negative():
    assert fit.alpha_beta((1e3, 1e6), (1e-6, 2e-3))[0] == 0.0
    startup, bandwidth = fit.alpha_beta((1e3, 1e6), (2e-3, 1e-3))
    assert startup > 0 and bandwidth == fit.UNMEASURABLE


@pytest.mark.parametrize("half_size", [0.0, 16.0, 64.0, 256.0])
def test_peak_and_half_size_are_found(half_size):
    times = noisy(
        [3e-6 + 2 * math.prod(s) / (50e9 * efficiency(s, half_size)) for s in SIDES], 0, 0.01
    )
    peak, found = fit.product_rate(SIDES, times, 3e-6)
    assert peak == pytest.approx(50e9, rel=0.2)
    assert found == pytest.approx(half_size, rel=0.3, abs=2.0)


@pytest.mark.parametrize("ramp_s", [0.0, 1.6e-5, 1.28e-4])
def test_memory_bandwidth_and_ramp_are_found(ramp_s):
    moved = [2e4, 1e5, 4e5, 1e6, 4e6, 1e7]
    times = noisy([1e-5 + fit.add_ramp(n / 8e9, ramp_s) for n in moved], 1, 0.01)
    rate, found = fit.memory_rate(moved, times, 1e-5)
    assert rate == pytest.approx(8e9, rel=0.1)
    assert found == pytest.approx(ramp_s, rel=0.3, abs=4e-6)


@pytest.mark.parametrize("work_s", [1e-6, 1e-4, 1e-2])
def test_what_ramps_up_is_found_again(work_s):
    assert fit.remove_ramp(fit.add_ramp(work_s, 1e-4), 1e-4) == pytest.approx(work_s)


def test_overlap_is_what_is_saved():
    assert fit.overlap(2.0, 1.0, 2.0) == 1.0
    assert fit.overlap(1.0, 2.0, 3.0) == 0.0
    assert fit.overlap(1.0, 1.0, 1.5) == pytest.approx(0.5)
    assert fit.overlap(1.0, 1.0, 2.5) == 0.0  # they are in each other's way
