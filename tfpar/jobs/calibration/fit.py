"""Fits of rates to measured times. All are of relative errors, and robust: machines are noisy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np

from tfpar.cost.op_compute import efficiency

UNMEASURABLE = 1e15
"""Bytes/s of what takes no time that could be told from noise."""

_ROUNDS = 30
_SMALL = 0.02  # residuals below count alike
_LEAST_PART = 0.1  # of a time is not the start
_CLEARLY = 1.5
_RAMPS = (0.0, *(1e-6 * 2.0 ** (k / 2) for k in range(21)))  # to 1 ms
_HALF_SIZES = (0.0, *(2.0 ** (k / 4) for k in range(45)))  # to 2048

Sides = tuple[int, int, int]
T = TypeVar("T")


def alpha_beta(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """(seconds to start, bytes/s) of `startup + size / bandwidth`.

    Neither is negative. Outliers are weighed down: what is least is the sum of the absolute
    relative errors.
    """
    t = np.asarray(seconds, float)
    rows = np.stack([1.0 / t, np.asarray(sizes, float) / t], axis=1)
    weights = np.ones(len(t))
    alpha = beta = 0.0
    for _ in range(_ROUNDS):
        alpha, beta = _not_negative(rows * weights[:, None], weights)
        residuals = np.abs(rows @ (alpha, beta) - 1.0)
        weights = 1.0 / np.sqrt(np.maximum(residuals, _SMALL))
    return float(alpha), float(min(1.0 / beta, UNMEASURABLE) if beta > 0 else UNMEASURABLE)


def _not_negative(rows: np.ndarray, wanted: np.ndarray) -> tuple[float, float]:
    """Least squares of two unknowns that are 0 or more."""
    alpha, beta = np.linalg.lstsq(rows, wanted, rcond=None)[0]
    if alpha >= 0 and beta >= 0:
        return alpha, beta
    alone = [max(float(c @ wanted / (c @ c)), 0.0) for c in rows.T]
    candidates = [(alone[0], 0.0), (0.0, alone[1])]
    return min(candidates, key=lambda x: float(np.sum((rows @ x - wanted) ** 2)))


def longer_than(
    dispatch_s: float, what: Sequence[T], seconds: Sequence[float]
) -> tuple[list[T], list[float]]:
    """Return the ops that took clearly longer than a host takes to issue one, and their seconds: of
    the others a chain says how fast the host is. All, if fewer than two are left."""
    found = [(w, t) for w, t in zip(what, seconds, strict=True) if t > _CLEARLY * dispatch_s]
    if len(found) < 2:
        return list(what), list(seconds)
    return [w for w, _ in found], [t for _, t in found]


def product_rate(
    sides: Sequence[Sides], seconds: Sequence[float], launch_s: float
) -> tuple[float, float]:
    """(FLOP/s, half size) of matrix products: see `cost.op_compute.efficiency`."""

    work = [2.0 * math.prod(s) for s in sides]

    def error(half_size: float, peak: float) -> float:
        expected = [
            launch_s + w / (peak * efficiency(s, half_size))
            for w, s in zip(work, sides, strict=True)
        ]
        return sum(abs(math.log(e / t)) for e, t in zip(expected, seconds, strict=True))

    def peaks(half_size: float) -> Iterator[float]:
        """Yield the peak rate that each product implies."""
        for w, s, t in zip(work, sides, seconds, strict=True):
            if t > launch_s:
                yield w / (t - launch_s) / efficiency(s, half_size)

    candidates = [(h, peak) for h in _HALF_SIZES for peak in peaks(h)]
    half_size, peak = min(candidates, key=lambda c: error(*c))
    return peak, half_size


def memory_rate(
    moved: Sequence[float], seconds: Sequence[float], launch_s: float
) -> tuple[float, float]:
    """(bytes/s, seconds to ramp up) of ops that moved so many bytes; see `Device.ramp_s`."""
    known = [(n, max(t - launch_s, _LEAST_PART * t)) for n, t in zip(moved, seconds, strict=True)]

    def error(ramp_s: float, rate: float) -> float:
        return sum(abs(math.log(add_ramp(n / rate, ramp_s) / t)) for n, t in known)

    candidates = [(s, n / remove_ramp(t, s)) for s in _RAMPS for n, t in known]
    ramp_s, rate = min(candidates, key=lambda c: error(*c))
    return rate, ramp_s


def add_ramp(work_s: float, ramp_s: float) -> float:
    """Seconds of an op that would take `work_s` if the device were at it from the first."""
    return work_s + min(work_s, ramp_s)


def remove_ramp(seconds: float, ramp_s: float) -> float:
    """The work of an op that takes so long: what `add_ramp` makes of it is `seconds`."""
    return max(seconds / 2, seconds - ramp_s)


def overlap(arithmetic_s: float, collectives_s: float, both_s: float) -> float:
    """Return the part of the arithmetic that goes on during the collectives, 0 to 1."""
    hidden = arithmetic_s + collectives_s - both_s
    return min(max(hidden / min(arithmetic_s, collectives_s), 0.0), 1.0)
