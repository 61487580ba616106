"""When two arrays that should be the same are, given what noise does to them."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

import ml_dtypes
import numpy as np
import tensorflow as tf

NOISE_FACTOR = 4.0
"""How many times the measured noise is still put down to rounding (empirical; see the tests)."""

GRANTED_ROUNDINGS = 4.0
"""Roundings of its own dtype that each entry may always be off by."""


class Verdict(str, enum.Enum):
    """What a comparison says, from best to worst."""

    EQUAL = "equal"
    """But for a few roundings."""
    ROUNDING = "rounding"
    """Noise explains the difference."""
    NOISE = "noise"
    """There is a difference, and so much noise that it would explain any."""
    DIFFERS = "DIFFERS"
    """Noise does not explain the difference."""

    def __str__(self) -> str:
        return self.value

    @property
    def rank(self) -> int:
        """Larger is worse."""
        return list(Verdict).index(self)


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far apart two arrays are.

    Attributes:
        error: root mean square of the difference, relative to the size of what is compared.
        noise: the same of what roundings do on one device.
        excess: how many times the noise the difference is, where it is not granted anyway.
    """

    error: float
    noise: float
    excess: float

    @property
    def verdict(self) -> Verdict:
        if self.excess > NOISE_FACTOR:
            return Verdict.DIFFERS
        if self.excess == 0:
            return Verdict.EQUAL
        return Verdict.NOISE if NOISE_FACTOR * self.noise >= 1 else Verdict.ROUNDING

    @property
    def rank(self) -> tuple[int, float, float]:
        """Larger is worse."""
        return self.verdict.rank, self.excess, self.error


def difference(
    plain: np.ndarray,
    mesh: np.ndarray,
    noisy: Sequence[np.ndarray],
    *,
    before: np.ndarray | None = None,
    epsilon: float | None = None,
) -> Difference:
    """How `mesh` differs from `plain`, given what `noisy` runs make of it.

    Args:
        before: what it was before the step, of a variable: differences are then relative to its
            change.
        epsilon: of the coarsest dtype in which entries have travelled, where that is not theirs.
    """
    gap, noise = _gap(mesh, plain), [_gap(n, plain) for n in noisy]
    beyond = np.maximum(gap - _granted(plain, mesh, epsilon), 0.0)
    spread, widest = _rms(np.stack(noise)), max(float(n.max(initial=0.0)) for n in noise)
    excess = max(_over(_rms(beyond), spread), _over(float(beyond.max(initial=0.0)), widest))
    scale = _rms(_wide(plain) if before is None else _gap(plain, before))
    return Difference(_over(_rms(gap), scale), _over(spread, scale), excess)


def _gap(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Absolute differences; infinite where one is no number and the other is another or none."""
    a, b = _wide(one), _wide(other)
    with np.errstate(invalid="ignore", over="ignore"):
        gap = np.abs(a - b)
    same = (one == other) | (np.isnan(a) & np.isnan(b))
    gap = np.where(np.isfinite(gap), gap, np.inf)
    if not _rounds(one):
        gap = np.maximum(gap, 1.0)  # of large integers, float64 may hide a difference
    return np.where(same, 0.0, gap)


def _granted(plain: np.ndarray, mesh: np.ndarray, epsilon: float | None) -> np.ndarray | float:
    if not _rounds(plain):
        return 0.0
    size = np.maximum(np.abs(_wide(plain)), np.abs(_wide(mesh)))
    size = np.where(np.isfinite(size), size, 0.0)
    granted = GRANTED_ROUNDINGS * _epsilon(plain) * size
    if epsilon is not None:
        granted = np.maximum(granted, GRANTED_ROUNDINGS * epsilon * size.max(initial=0.0))
    return granted


def _rounds(array: np.ndarray) -> bool:
    dtype = tf.as_dtype(array.dtype)
    return dtype.is_floating or dtype.is_complex


def _epsilon(array: np.ndarray) -> float:
    return float(ml_dtypes.finfo(array.dtype).eps)


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype("complex128" if array.dtype.kind == "c" else "float64")


def _rms(array: np.ndarray) -> float:
    """Root mean square, of any size of numbers."""
    largest = float(np.abs(array).max(initial=0.0))
    if largest == 0 or not np.isfinite(largest):
        return largest
    return largest * float(np.sqrt(np.mean(np.square(np.abs(array) / largest))))


def _over(size: float, unit: float) -> float:
    if size == 0:
        return 0.0
    if unit == 0 or not np.isfinite(size):
        return 0.0 if not np.isfinite(unit) else float("inf")
    return size / unit
