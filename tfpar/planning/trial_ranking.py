"""Ranking of the plans that trials may run: what was measured corrects the cluster by which the
others are priced (auto3d, §4.2 and §4.3).

Factors of compute and of links are fitted to all steps that were measured, by least squares of
relative errors. Each plan is priced on the corrected cluster as on any other, so that a factor acts
on what a step waits for and not on what it hides. A factor of which trials say nothing stays 1. The
fit says how sure it is, too: of two plans that use links alike, the trial of one tells much of the
other; of one that uses them otherwise, little.

Types of devices and of links (`cluster.parts`) have factors of their own. They are expected to be
more or less alike, since what makes one slower than described, such as the ops of a model, mostly
makes the others so; trials of plans that wait for one of them tell it from the others. Where a
cluster has more than `MOST_TYPES` of one sort, all of these have one factor.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tfpar.cluster.description import Cluster
from tfpar.cluster.parts import ClusterParts
from tfpar.cluster.scaling import Correction
from tfpar.planning.objective import UNCERTAINTY

Price = Callable[[Cluster], float]
"""Predicts the seconds of a step by one plan; infinite where they are not known."""

SPREAD = 1.0
"""Standard deviation of a factor's logarithm before anything is measured: descriptions are expected
to be wrong by e = 2.7 times."""

ALIKE = 0.5
"""Correlation of the logarithms of the factors of two types of one sort, before anything is
measured: half of what one is wrong by is expected of the other."""

MOST_TYPES = 4
"""Number of types of one sort that have factors of their own. Each is priced for, on each plan."""

SURE = 2.0
"""Standard deviations by which a plan has to be predicted slower for it not to be tried."""


class TrialRanking:
    """Ranking of plans by what they are predicted to take on a cluster that trials correct.

    Args:
        prices: of the plans.
        cluster: as described.

    Attributes:
        correction: by all that was measured so far; None before, and where nothing was predicted of
            what was measured.
    """

    def __init__(self, prices: Sequence[Price], cluster: Cluster) -> None:
        self.correction: Correction | None = None
        self._prices, self._cluster = prices, cluster
        self._factors = _factors_of(cluster)
        self._fit = _Fit.unmeasured(_prior(self._factors))
        self._clusters: dict[Correction, Cluster] = {}
        self._known: dict[tuple[int, Correction], float] = {}

    def seconds(self, plan: int) -> float:
        """Predict the seconds of a step by a plan, by its number, on the corrected cluster."""
        return self._seconds(plan, self.correction or Correction())

    def learn(self, measured: Mapping[int, float]) -> None:
        """Correct the cluster by all seconds that were measured, by the numbers of their plans."""
        plans = [plan for plan in measured if self._is_known(plan)]
        logs = np.log([measured[plan] for plan in plans])
        self._fit = self._fit.to(lambda factors: self._logs(plans, factors), logs)
        self.correction = self._correction(self._fit.factors) if plans else None

    def choose(self, left: Iterable[int], best_s: float) -> int | None:
        """Choose the plan to try next: the one that is predicted to be fastest; None if none is
        likely to take less than `best_s`, the best that was measured.

        Any is likely to until more plans were measured than there are factors, which puts the
        prediction to the test. Those whose seconds are not known always are, and come last.
        """
        hopeful = [plan for plan in left if self._may_beat(plan, best_s)]
        return min(hopeful, key=self.seconds, default=None)

    def _may_beat(self, plan: int, best_s: float) -> bool:
        if not self._is_known(plan):
            return True
        (log,), (deviation,) = self._fit.predict(lambda factors: self._logs([plan], factors))
        return bool(log - SURE * deviation < math.log(best_s))

    def _is_known(self, plan: int) -> bool:
        return 0 < self._seconds(plan, Correction()) < math.inf

    def _logs(self, plans: Sequence[int], factors: np.ndarray) -> np.ndarray:
        """The logarithms of the seconds of plans."""
        correction = self._correction(factors)
        return np.log([self._seconds(plan, correction) for plan in plans])

    def _correction(self, factors: np.ndarray) -> Correction:
        found: dict[str, list[float]] = {}
        parts = {}
        for factor, log in zip(self._factors, map(float, factors), strict=True):
            found.setdefault(factor.sort, []).append(log)
            if factor.part:
                parts[factor.part] = math.exp(log)
        common = {sort: math.exp(math.fsum(logs) / len(logs)) for sort, logs in found.items()}
        return Correction(**common, parts=parts)

    def _seconds(self, plan: int, correction: Correction) -> float:
        key = plan, correction
        if key not in self._known:
            if correction not in self._clusters:
                self._clusters[correction] = correction.apply(self._cluster)
            self._known[key] = self._prices[plan](self._clusters[correction])
        return self._known[key]


class _Factor(NamedTuple):
    """Factor of a correction: of all that a field of `Correction` is of, or of one type of it.

    Attributes:
        sort: the field.
        part: the name of the type; empty: of all.
    """

    sort: str
    part: str = ""


def _factors_of(cluster: Cluster) -> list[_Factor]:
    """List the factors that the cluster has something for."""
    parts = ClusterParts.of(cluster)
    sorts = {"work": [*parts.devices.values()]}
    if any(node.size > 1 for node in cluster.nodes):
        sorts["within"] = [*parts.within.values()]
    if cluster.num_nodes > 1:
        sorts["between"] = [*parts.between.values()]
    found = []
    for sort, names in sorts.items():
        is_told_apart = 1 < len(names) <= MOST_TYPES
        found += [_Factor(sort, name) for name in names] if is_told_apart else [_Factor(sort)]
    return found


def _prior(factors: Sequence[_Factor]) -> np.ndarray:
    """The covariance of the logarithms of factors before anything is measured."""
    alike = [[ALIKE if one.sort == other.sort else 0.0 for other in factors] for one in factors]
    return np.asarray(SPREAD**2 * (alike + (1 - ALIKE) * np.eye(len(factors))))


# --- least squares ----------------------------------------------------------------------------

_DIFFERENCE = math.log(1.05)
"""Of a factor's logarithm, by which derivatives are taken."""

_LONGEST = math.log(10.0)
"""The most by which an iteration changes a factor's logarithm."""

_SETTLED = 0.03
"""An iteration that changes none by more is the last one: predictions are less certain."""

_ITERATIONS, _HALVINGS = 12, 6  # at most

Predict = Callable[[np.ndarray], np.ndarray]
"""Predicts the logarithms of measurements by those of the factors."""


@dataclasses.dataclass(frozen=True)
class _Fit:
    """Logarithms of factors, and how sure they are.

    Before anything is measured they are 0, with a covariance of `prior`.

    Attributes:
        error: by which predictions by the right factors deviate: that of those which were
            measured, and `UNCERTAINTY` at least; infinite where there are too few to say.
    """

    factors: np.ndarray
    covariance: np.ndarray
    prior: np.ndarray
    error: float = math.inf

    @classmethod
    def unmeasured(cls, prior: np.ndarray) -> _Fit:
        return cls(np.zeros(len(prior)), prior, prior)

    def to(self, predict: Predict, logs: np.ndarray) -> _Fit:
        """Fit to measurements, from these factors on, by Gauss and Newton's method."""
        if not len(logs):
            return self.unmeasured(self.prior)
        expected = np.linalg.inv(self.prior)

        def loss(factors: np.ndarray) -> float:
            errors = logs - predict(factors)
            return float(errors @ errors / UNCERTAINTY**2 + factors @ expected @ factors)

        factors = self.factors
        for _ in range(_ITERATIONS):
            slopes = _slopes(predict, factors)
            pull = slopes.T @ (logs - predict(factors)) / UNCERTAINTY**2 - expected @ factors
            step = _covariance(slopes, UNCERTAINTY, expected) @ pull
            step *= min(1.0, _LONGEST / max(np.abs(step).max(), _SETTLED))
            for _ in range(_HALVINGS):
                if loss(factors + step) <= loss(factors):
                    factors = factors + step
                    break
                step = step / 2
            if np.abs(step).max() < _SETTLED:
                break
        errors, spare = logs - predict(factors), len(logs) - len(factors)
        if spare <= 0:  # factors explain whatever was measured
            return _Fit(factors, _covariance(slopes, UNCERTAINTY, expected), self.prior)
        error = max(UNCERTAINTY, math.sqrt(float(errors @ errors) / spare))
        return _Fit(factors, _covariance(slopes, error, expected), self.prior, error)

    def predict(self, predict: Predict) -> tuple[np.ndarray, np.ndarray]:
        """Predict the logarithms of measurements, and their standard deviations."""
        slopes = _slopes(predict, self.factors)
        variances = np.einsum("ij,jk,ik->i", slopes, self.covariance, slopes) + self.error**2
        return predict(self.factors), np.sqrt(variances)


def _covariance(slopes: np.ndarray, error: float, expected: np.ndarray) -> np.ndarray:
    """The covariance of factors that are fitted to measurements with such slopes and errors.

    Args:
        expected: their precision before.
    """
    return np.asarray(np.linalg.inv(slopes.T @ slopes / error**2 + expected))


def _slopes(predict: Predict, factors: np.ndarray) -> np.ndarray:
    """The derivatives of predictions, one row each."""
    here = predict(factors)
    steps = _DIFFERENCE * np.eye(len(factors))
    return np.stack([(predict(factors + step) - here) / _DIFFERENCE for step in steps], axis=1)
