"""What is put down to rounding, and what is not."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tfpar.observability.verification import Verdict
from tfpar.observability.verification.compare import NOISE_FACTOR, difference

rng = np.random.default_rng(0)
VALUES = rng.normal(size=1000).astype("float32")


def wobbling(values: np.ndarray, size: float, runs: int = 3) -> list[np.ndarray]:
    return [
        (values.astype("float64") + size * rng.normal(size=values.shape)).astype(values.dtype)
        for _ in range(runs)
    ]


def verdict(plain, mesh, noisy, **arguments) -> Verdict:
    return difference(plain, mesh, noisy, **arguments).verdict


def test_as_much_as_noise_is_rounding_and_more_differs():
    noisy = wobbling(VALUES, 1e-3)
    (near,) = wobbling(VALUES, 1e-3, 1)
    (far,) = wobbling(VALUES, 2 * NOISE_FACTOR * 1e-3, 1)
    assert verdict(VALUES, VALUES, noisy) is Verdict.EQUAL
    assert verdict(VALUES, near, noisy) is Verdict.ROUNDING
    assert verdict(VALUES, far, noisy) is Verdict.DIFFERS


def test_one_wrong_entry_of_many_is_found():
    noisy = wobbling(VALUES, 1e-3)
    mesh = VALUES.copy()
    mesh[17] += 0.05
    found = difference(VALUES, mesh, noisy)
    assert found.error < 4e-3 and found.verdict is Verdict.DIFFERS


def test_a_small_error_everywhere_is_found_under_noise_with_outliers():
    noisy = wobbling(VALUES, 1e-4)
    noisy[0][3] += 1.0
    noisy[1][5] += 1.0
    assert verdict(VALUES, VALUES * 1.5, noisy) is Verdict.DIFFERS


def test_a_few_roundings_are_always_granted():
    mesh = np.nextafter(np.nextafter(VALUES, 9, dtype="f4"), 9, dtype="f4")
    assert verdict(VALUES, mesh, [VALUES] * 3) is Verdict.EQUAL
    assert verdict(VALUES, VALUES * np.float32(1 + 1e-5), [VALUES] * 3) is Verdict.DIFFERS


def test_bfloat16_is_compared():
    plain = VALUES.astype(ml_dtypes.bfloat16)
    assert verdict(plain, plain, [plain] * 3) is Verdict.EQUAL
    near, *noisy = wobbling(plain, 0.003, 16)[::-1]
    assert verdict(plain, near, noisy) is not Verdict.DIFFERS
    for wrong in (VALUES * 0.5, VALUES * 1.02):
        found = difference(plain, wrong.astype(ml_dtypes.bfloat16), wobbling(plain, 0.01))
        assert found.verdict is Verdict.DIFFERS


def test_a_scale_is_found_that_no_entry_shows():
    """And where an entry by itself is not more off than noise, but all to one side."""
    noisy = wobbling(VALUES, 0.05)
    found = difference(VALUES, VALUES * np.float32(1.02), noisy)
    assert found.error < found.noise and found.verdict is Verdict.DIFFERS
    assert found.resolution < 0.02
    # Noise in every sum makes more of everything than a mesh does: what is a scale and hardly
    # anything else is less likely noise than the same beside other noise.
    common = [VALUES * np.float32(1 + 0.01 * s) for s in (-1, 1, 0.9)]
    noisy = [
        noise + one - VALUES for noise, one in zip(wobbling(VALUES, 0.05), common, strict=True)
    ]
    mesh = VALUES * np.float32(1.015)
    assert verdict(VALUES, mesh, noisy) is Verdict.DIFFERS
    assert verdict(VALUES, *wobbling(mesh, 0.05, 1), noisy) is Verdict.ROUNDING
    # Of entries that are all alike one rounding moves the scale.
    ones = np.ones(1000, "float32")
    assert verdict(ones, ones + np.float32(3e-7), [ones] * 3) is Verdict.EQUAL


@pytest.mark.parametrize("wild", [np.inf, np.nan, 1e30])
def test_one_wild_run_explains_nothing(wild):
    plain, mesh = np.array([1, 1], "f4"), np.array([1, -500], "f4")
    for at in (0, 1):
        outlier = plain.copy()
        outlier[at] = wild
        assert verdict(plain, mesh, [plain, plain, outlier]) is Verdict.DIFFERS
        assert verdict(plain, plain, [plain, plain, outlier]) is Verdict.EQUAL


@pytest.mark.parametrize("dtype", ["int32", "uint64", "bool"])
def test_integers_are_equal_exactly(dtype):
    plain = np.array([2**63 + 1, 0], "uint64").astype(dtype)
    mesh = np.array([2**63 + 1, 1], "uint64").astype(dtype)
    assert verdict(plain, plain, [plain] * 3) is Verdict.EQUAL
    assert verdict(plain, mesh, [plain] * 3) is Verdict.DIFFERS
    # What a rounding tips over it may tip over here.
    assert verdict(plain, mesh, [plain, mesh, mesh]) is not Verdict.DIFFERS


def test_large_integers_are_not_compared_as_floats():
    plain, mesh = (np.array([2**63 + n], "uint64") for n in (1, 2))
    assert verdict(plain, mesh, [plain] * 3) is Verdict.DIFFERS


def test_what_is_no_number_is_so_in_both():
    """It is not judged then, unless it was so before."""
    plain = np.array([np.nan, np.inf, 1.0], "float32")
    found = difference(plain, plain.copy(), [plain] * 3)
    assert found.verdict is Verdict.NOT_FINITE and found.not_finite == 2
    assert verdict(plain, plain.copy(), [plain] * 3, before=plain) is Verdict.EQUAL
    for at, value in ((0, 1.0), (1, -np.inf), (2, np.nan)):
        mesh = plain.copy()
        mesh[at] = value
        assert verdict(plain, mesh, [plain] * 3) is Verdict.DIFFERS


def test_what_overflows_by_roundings_is_not_judged():
    plain, over = (np.array([6e4, x, 1.0], "float16") for x in (6.5e4, np.inf))
    assert verdict(plain, over, [plain, over, plain]) is Verdict.NOT_FINITE
    assert verdict(plain, plain, [over] * 3) is Verdict.EQUAL
    assert verdict(plain, plain * np.float16(0.9), [over] * 3) is Verdict.DIFFERS
    assert verdict(plain, plain * np.array([1, 0.9, 1], "f2"), [over] * 3) is Verdict.NOT_FINITE


def test_variables_are_judged_by_how_far_they_moved():
    after = (VALUES + 1e-3).astype("float32")
    found = difference(after, after + np.float32(5e-4), [after] * 3, before=VALUES)
    assert 0.4 < found.error < 0.6


def test_noise_as_large_as_the_thing_itself_is_told():
    """Unless it grows with the noise: then what is added up is larger, and cancels."""
    plain, *noisy = wobbling(np.zeros(100, "float32"), 1e-8, 5)
    mesh = noisy.pop()
    assert verdict(plain, mesh, noisy) is Verdict.NOISE
    assert verdict(plain, mesh, noisy, coarse=wobbling(plain, 2e-8)) is Verdict.NOISE
    assert verdict(plain, mesh, noisy, coarse=wobbling(plain, 16e-8)) is Verdict.ROUNDING
    assert verdict(plain, mesh + np.float32(8e-8), noisy, coarse=wobbling(plain, 16e-8)) is (
        Verdict.DIFFERS
    )
    # And what agrees, agrees.
    assert verdict(VALUES, VALUES * 1.01, wobbling(VALUES, 2.0)) is Verdict.ROUNDING


def test_nothing_to_compare():
    empty = np.zeros((0, 3), "float32")
    assert verdict(empty, empty, [empty] * 3) is Verdict.EQUAL
