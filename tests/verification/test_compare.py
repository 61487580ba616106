"""What is put down to rounding, and what is not."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tfpar.verification import Verdict
from tfpar.verification.compare import NOISE_FACTOR, difference

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
    assert verdict(plain, (VALUES * 1.01).astype(ml_dtypes.bfloat16), [plain] * 3) is Verdict.EQUAL
    wrong = (VALUES * 0.5).astype(ml_dtypes.bfloat16)
    assert verdict(plain, wrong, wobbling(plain, 0.01)) is Verdict.DIFFERS


@pytest.mark.parametrize("dtype", ["int32", "uint64", "bool"])
def test_integers_are_equal_exactly(dtype):
    plain = np.array([2**63 + 1, 0], "uint64").astype(dtype)
    mesh = np.array([2**63 + 1, 1], "uint64").astype(dtype)
    assert verdict(plain, plain, [plain] * 3) is Verdict.EQUAL
    assert verdict(plain, mesh, [plain] * 3) is Verdict.DIFFERS
    # What a rounding tips over it may tip over here.
    assert verdict(plain, mesh, [plain, mesh, plain]) is not Verdict.DIFFERS


def test_large_integers_are_not_compared_as_floats():
    plain, mesh = (np.array([2**63 + n], "uint64") for n in (1, 2))
    assert verdict(plain, mesh, [plain] * 3) is Verdict.DIFFERS


def test_what_is_no_number_is_so_in_both():
    plain = np.array([np.nan, np.inf, 1.0], "float32")
    assert verdict(plain, plain.copy(), [plain] * 3) is Verdict.EQUAL
    for at, value in ((0, 1.0), (1, -np.inf), (2, np.nan)):
        mesh = plain.copy()
        mesh[at] = value
        assert verdict(plain, mesh, [plain] * 3) is Verdict.DIFFERS


def test_variables_are_judged_by_how_far_they_moved():
    after = (VALUES + 1e-3).astype("float32")
    found = difference(after, after + np.float32(5e-4), [after] * 3, before=VALUES)
    assert 0.4 < found.error < 0.6


def test_noise_as_large_as_the_thing_itself_is_told():
    plain = np.zeros(100, "float32")
    noisy = wobbling(plain, 1e-8)
    assert verdict(plain, noisy[0], noisy) is Verdict.NOISE


def test_nothing_to_compare():
    empty = np.zeros((0, 3), "float32")
    assert verdict(empty, empty, [empty] * 3) is Verdict.EQUAL
