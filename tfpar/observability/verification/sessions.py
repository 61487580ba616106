"""Steps of a graph, taken again on one device: in `tf.compat.v1.Session`s.

The sums of a graph as it comes cannot be moved. In their place the values of its variables are, by
more roundings, and what is below `MOVED_TOLERANCE` is granted.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np
import tensorflow as tf

from tfpar.observability.verification.noise import (
    COARSE_ROUNDINGS,
    MOVED_ROUNDINGS,
    MOVED_TOLERANCE,
)
from tfpar.observability.verification.steps import StepOutcome, TakenStep, Values


class SessionDevice:
    """Run of all steps in one Session, since ops that draw numbers go on where they stopped.

    Each starts from the values that the mesh had before it.

    Args:
        run: takes a step from each of the given values, in a new Session.
    """

    tolerance = MOVED_TOLERANCE

    def __init__(
        self, taken: Sequence[TakenStep], run: Callable[[Sequence[Values]], list[StepOutcome]]
    ) -> None:
        self._taken, self._run = taken, run
        self._outcomes: dict[tuple[float, int], list[StepOutcome]] = {}
        self._used: collections.Counter[tuple[float, int]] = collections.Counter()

    def plain(self, taken: TakenStep) -> StepOutcome:
        return self._take_more(taken, 1, 0.0)[0]

    def noisy(self, taken: TakenStep, runs: int) -> list[StepOutcome]:
        return self._take_more(taken, runs, MOVED_ROUNDINGS)

    def coarse(self, taken: TakenStep, runs: int) -> list[StepOutcome]:
        return self._take_more(taken, runs, COARSE_ROUNDINGS * MOVED_ROUNDINGS)

    def _take_more(self, taken: TakenStep, runs: int, roundings: float) -> list[StepOutcome]:
        """Outcomes of the step in so many more Sessions."""
        step = next(i for i, each in enumerate(self._taken) if each is taken)
        first = self._used[roundings, step]
        self._used[roundings, step] += runs
        return [self._take_all(roundings, seed)[step] for seed in range(first, first + runs)]

    def _take_all(self, roundings: float, seed: int) -> list[StepOutcome]:
        key = roundings, seed
        if key not in self._outcomes:
            rng = np.random.default_rng((int(roundings), seed))
            moved = [_move_values(taken.before, roundings, rng) for taken in self._taken]
            self._outcomes[key] = self._run(moved)
        return self._outcomes[key]


def _move_values(values: Values, roundings: float, rng: np.random.Generator) -> Values:
    """The values, each float moved by some roundings."""

    def move(value: np.ndarray) -> np.ndarray:
        if not roundings or not tf.as_dtype(value.dtype).is_floating:
            return value
        noise = rng.standard_normal(value.shape) * float(ml_dtypes.finfo(value.dtype).eps)
        return np.asarray(value.astype("float64") * (1 + roundings * noise)).astype(value.dtype)

    return {name: move(value) for name, value in values.items()}
