"""Comparison of two arrays that should be the same, given what noise does to them.

Three sizes of a difference are each held against those of noisy runs: its root mean square finds
what is a little wrong everywhere, its largest entry what is wrong in one row of a table, and its
scale, the factor by which the whole is larger or smaller, what is less off in every entry than
roundings are. Roundings of many entries cancel in the scale, so that in 16 bits a sum that is 1.02
times too large shows there alone. Where little but the scale differs, the mesh has less noise than
runs in which every sum is moved, and its scale is taken to have less, too (by `QUIETEST` at most).

Noise is what at least two noisy runs show: of each size, the largest run but one. So no single run
explains a difference. What is not finite says nothing of other entries: in a noisy run it is left
out, and in what is compared it has to be so in both, and is not judged.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import NamedTuple

import ml_dtypes
import numpy as np
import tensorflow as tf

NOISE_RUNS = 3
MORE_NOISE_RUNS = 12
"""Before anything is said to differ."""

NOISE_FACTOR = 2.0
"""How many times the measured noise is still put down to rounding (empirical; see the tests)."""

QUIETEST = 0.5
"""By how much noise in the scale may be taken for less, where the mesh has less of other noise."""

AGREEMENT = 0.05
"""Relative error below which arrays agree, whatever else noise would explain."""

GRANTED_ROUNDINGS = 4.0
"""Roundings of its own dtype that each entry may always be off by."""


class Verdict(str, enum.Enum):
    """Result of a comparison, from best to worst."""

    EQUAL = "equal"
    """But for a few roundings."""
    ROUNDING = "rounding"
    """Noise explains the difference."""
    NOISE = "noise"
    """Not judged: there is a difference, and so much noise that it would explain any."""
    NOT_FINITE = "not finite"
    """Not judged: entries are infinite or no numbers, on one device too."""
    DIFFERS = "DIFFERS"
    """Noise does not explain the difference."""

    def __str__(self) -> str:
        return self.value

    @property
    def rank(self) -> int:
        """Larger is worse."""
        return list(Verdict).index(self)

    @property
    def is_judged(self) -> bool:
        """Whether an error would have been seen."""
        return self not in (Verdict.NOISE, Verdict.NOT_FINITE)


@dataclasses.dataclass(frozen=True)
class ArrayDifference:
    """Distance between two arrays.

    Attributes:
        error: root mean square of the difference, relative to the size of what is compared.
        noise: the same of what roundings do on one device.
        excess: how many times the noise the difference is, where it is not granted anyway.
        resolution: the smallest relative error that would have been found; 0 where there is none.
        not_finite: entries that could not be compared.
    """

    error: float
    noise: float
    excess: float
    resolution: float = 0.0
    not_finite: int = 0

    @property
    def verdict(self) -> Verdict:
        if self.excess > NOISE_FACTOR:
            return Verdict.DIFFERS
        if self.not_finite:
            return Verdict.NOT_FINITE
        if self.error > AGREEMENT and self.resolution >= 1:
            return Verdict.NOISE
        return Verdict.ROUNDING if self.excess else Verdict.EQUAL

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
    coarse: Sequence[np.ndarray] = (),
    tolerance: float = 0.0,
) -> ArrayDifference:
    """Compare `mesh` with `plain`, given what `noisy` runs make of it; what is no number, or has
    another shape, has to be equal.

    Args:
        before: what it was before the step, of a variable: differences are then relative to its
            change, if it has changed.
        epsilon: of the coarsest dtype in which entries have travelled, where that is not theirs.
        coarse: runs with much more noise. Where their differences are larger than those of `noisy`
            ones in proportion, roundings are small beside what is added up, even if that cancels:
            what is left of it is judged by the size of `coarse` differences, not by its own.
        tolerance: what is always granted, of the size of the whole.
    """
    if plain.dtype.kind in "SUO" or mesh.dtype.kind in "SUO" or plain.shape != mesh.shape:
        far = 0.0 if plain.shape == mesh.shape and np.all(plain == mesh) else np.inf
        return ArrayDifference(error=far, noise=0.0, excess=far)
    noisy, coarse = ([r for r in runs if r.shape == plain.shape] for runs in (noisy, coarse))
    judged, is_mismatched = _judged_entries(plain, mesh, noisy, before)
    size = _finite(plain)
    change = size if before is None else _finite(_gap(plain, before))
    unit = np.where(judged, change if np.any(change[judged]) else size, 0.0)
    gap = np.where(judged, _finite(_gap(mesh, plain)), 0.0)
    unit_rms = _rms(unit)
    noise = _noise_of(noisy, plain, unit, judged)
    not_judged = judged.size - int(np.count_nonzero(judged))
    if not (np.any(gap) or is_mismatched):
        return ArrayDifference(0.0, _ratio(noise.rms, unit_rms), 0.0, 0.0, not_judged)
    granted = np.where(judged, _granted(plain, mesh, epsilon), 0.0)
    granted_scale = _granted_scale(size, granted, unit)
    if tolerance and _rounds(plain):
        granted = np.maximum(granted, tolerance * unit_rms)
        granted_scale = max(granted_scale, tolerance)
    beyond = np.maximum(np.abs(gap) - granted, 0.0)
    # Where the whole is small, its own roundings are a part of it, which the mesh's do not repeat.
    share = min(_ratio(noise.rms, unit_rms), 1.0)
    granted_scale += share**2
    found = _sizes(gap, unit)
    # The mesh has less noise than runs in which every sum is moved, as what is no scale shows.
    quiet = min(max(_ratio(found.rest, noise.rest), share, QUIETEST), 1.0)
    noise_scale = quiet * noise.scale
    excess = max(
        np.inf if is_mismatched else 0.0,
        _ratio(_rms(beyond), noise.rms),
        _ratio(_largest(beyond), noise.largest),
        _ratio(max(found.scale - granted_scale, 0.0), noise_scale),
    )
    reach = max(unit_rms, _noise_of(coarse, plain, unit, judged).rms)
    resolution = min(
        _ratio(_rms(granted) + NOISE_FACTOR * noise.rms, reach),
        granted_scale + NOISE_FACTOR * noise_scale if unit_rms else np.inf,
    )
    return ArrayDifference(
        _ratio(_rms(gap), unit_rms),
        _ratio(noise.rms, unit_rms),
        float(excess),
        float(resolution),
        not_judged,
    )


# --- entries ----------------------------------------------------------------------------


def _judged_entries(
    plain: np.ndarray, mesh: np.ndarray, noisy: Sequence[np.ndarray], before: np.ndarray | None
) -> tuple[np.ndarray, bool]:
    """The entries that can be compared, and whether one is finite on one side alone.

    What is not finite was so before the step, or is not judged. Nor is what noise makes so, in one
    run where the mesh does too, in all but one run where it does not.
    """
    changing = [~_same_kind(each, plain) for each in noisy]
    times = np.sum(changing, axis=0) if changing else np.zeros(plain.shape, int)
    alike = _same_kind(mesh, plain)
    finite = np.isfinite(_wide(plain))
    unknown = (times >= max(len(noisy) - 1, 1)) & (mesh != plain)
    kept = alike & ~finite & (False if before is None else _equal(plain, before))
    judged = (alike & finite & ~unknown) | kept
    return judged, bool(np.any(~alike & (times == 0)))


def _same_kind(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Mask the entries where both are finite, both the same infinity, or both nan."""
    finite = np.isfinite(_wide(one)) & np.isfinite(_wide(other))
    return finite | _equal(one, other)


def _equal(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    return (one == other) | (np.isnan(_wide(one)) & np.isnan(_wide(other)))


def _gap(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Differences, with their sign."""
    with np.errstate(invalid="ignore", over="ignore"):
        gap = _wide(one) - _wide(other)
    if not _rounds(one):  # of large integers, float64 may hide a difference
        gap = np.where(np.abs(gap) < 1.0, np.where(gap < 0, -1.0, 1.0), gap)
    return np.where(_equal(one, other), 0.0, gap)


def _finite(array: np.ndarray) -> np.ndarray:
    wide = _wide(array)
    return np.where(np.isfinite(wide), wide, 0.0)


def _granted(plain: np.ndarray, mesh: np.ndarray, epsilon: float | None) -> np.ndarray | float:
    if not _rounds(plain):
        return 0.0
    size = np.maximum(np.abs(_finite(plain)), np.abs(_finite(mesh)))
    granted = GRANTED_ROUNDINGS * _epsilon(plain) * size
    if epsilon is not None:
        granted = np.maximum(granted, GRANTED_ROUNDINGS * epsilon * size.max(initial=0.0))
    return granted


# --- sizes of differences ---------------------------------------------------------------


class _Sizes(NamedTuple):
    """Sizes of a difference, or of noise."""

    rms: float
    largest: float
    scale: float
    rest: float
    """Root mean square of what is no scale."""


def _noise_of(
    runs: Sequence[np.ndarray], plain: np.ndarray, unit: np.ndarray, judged: np.ndarray
) -> _Sizes:
    """Return the sizes that all noisy runs but one stay below: one may be wild."""
    found = []
    for run in runs:
        counted = judged & np.isfinite(_wide(run))
        gap = np.where(counted, _finite(_gap(run, plain)), 0.0)
        found.append(_sizes(gap, unit)._replace(rms=_rms(gap[counted])))
    but_one = [sorted(each)[max(len(found) - 2, 0)] for each in zip(*found, strict=True)]
    return _Sizes(*but_one) if found else _Sizes(0.0, 0.0, 0.0, 0.0)


def _sizes(gap: np.ndarray, unit: np.ndarray) -> _Sizes:
    """Measure a difference; its scale is the part of `unit` nearest to it (least squares)."""
    rms, largest, unit_largest = _rms(gap), _largest(gap), _largest(unit)
    if unit_largest == 0:
        return _Sizes(rms, largest, 0.0, rms)
    along = unit / unit_largest
    scale = float(np.vdot(along, gap / unit_largest).real / np.vdot(along, along).real)
    return _Sizes(rms, largest, abs(scale), _rms(gap - scale * unit))


def _granted_scale(size: np.ndarray, granted: np.ndarray, unit: np.ndarray) -> float:
    """Bound the change of the scale by the granted roundings, which are random.

    Entries of one size may all be rounded alike.
    """
    largest = _largest(unit)
    if largest == 0 or not np.any(granted):
        return 0.0
    along = np.abs(unit).ravel() / largest
    _, group = np.unique(np.abs(size), return_inverse=True)
    moved = np.bincount(group.ravel(), along * (granted.ravel() / largest))
    return float(np.sqrt(np.sum(np.square(moved))) / np.sum(np.square(along)))


def _largest(array: np.ndarray) -> float:
    return float(np.abs(array).max(initial=0.0))


def _rms(array: np.ndarray) -> float:
    """Root mean square, of any size of numbers."""
    largest = _largest(array)
    if largest == 0:
        return 0.0
    return largest * float(np.sqrt(np.mean(np.square(np.abs(array) / largest))))


def _ratio(size: float, unit: float) -> float:
    if size == 0:
        return 0.0
    return size / unit if unit else float("inf")


# --- dtypes -----------------------------------------------------------------------------


def _rounds(array: np.ndarray) -> bool:
    dtype = tf.as_dtype(array.dtype)
    return dtype.is_floating or dtype.is_complex


def _epsilon(array: np.ndarray) -> float:
    return float(ml_dtypes.finfo(array.dtype).eps)


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype("complex128" if array.dtype.kind == "c" else "float64")
