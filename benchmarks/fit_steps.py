"""The constants of `benchmarks.measured_steps`, fitted to the rows that are never scored.

    python -m benchmarks.fit_steps [--evaluations N] [--json FILE]

Prints the `Constants` with the least mean error of predicted seconds, by the method of Nelder and
Mead from those in force.
"""

from __future__ import annotations

import argparse
import statistics

import numpy as np
from scipy.optimize import minimize

from benchmarks.measured_steps import CONSTANTS, FITTED, Constants, MeasuredStep
from benchmarks.results import save

FIRST_MOVE = 0.15
"""Of the logarithm of each constant."""


def mean_error(constants: Constants, steps: list[MeasuredStep]) -> float:
    """Mean of the relative errors of predicted seconds."""
    return statistics.mean(abs(step.predicted_s(constants) / step.seconds - 1) for step in steps)


def fitted(steps: list[MeasuredStep], evaluations: int) -> Constants:
    """The constants that predict these steps best."""
    start = np.log(CONSTANTS)
    found = minimize(
        lambda point: mean_error(_constants(point), steps),
        start,
        method="Nelder-Mead",
        options={
            "maxfev": evaluations,
            "initial_simplex": np.vstack([start, start + FIRST_MOVE * np.eye(len(start))]),
        },
    )
    return _constants(found.x)


def _constants(logarithms: np.ndarray) -> Constants:
    return Constants(*np.exp(logarithms).tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--evaluations", type=int, default=250, help="predictions of all rows")
    parser.add_argument("--json", metavar="FILE", help="write the constants")
    arguments = parser.parse_args()
    steps = MeasuredStep.read(FITTED)
    found = fitted(steps, arguments.evaluations)
    error = mean_error(found, steps)
    print(f"{found}: {error:.2%} off on average")
    save(arguments.json, [found._asdict() | {"mean_error": error}])


if __name__ == "__main__":
    main()
