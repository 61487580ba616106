"""A graph on the mesh against the same graph in a `tf.compat.v1.Session`.

Both run the same fetches from the same values. Sessions that start from values moved by some
roundings tell what difference the order of sums alone can make. What is compared is judged as by
`tap.verify` (`verification.compare`), in every step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import tensorflow as tf

from tfpar.report.tables import render_table
from tfpar.verification.compare import (
    MORE_NOISE_RUNS,
    NOISE_RUNS,
    Difference,
    Verdict,
    difference,
)

_ROUNDINGS = 20.0
"""By which values are moved: more than sums are off, since nothing else has noise (empirical)."""

_COARSE = 16.0
"""How much more they are moved to see whether differences grow with it."""

_FLOOR = 1e-4
"""Below it nothing is measured: float32 sums in another order (empirical)."""

Values = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class FetchDifference:
    """The worst difference of one variable or fetch.

    Attributes:
        name: of the variable or fetch.
        difference: relative to its size; a variable's is that of its update, where there is one.
    """

    name: str
    difference: Difference

    @property
    def error(self) -> float:
        return self.difference.error

    @property
    def noise(self) -> float:
        return self.difference.noise

    @property
    def verdict(self) -> Verdict:
        return self.difference.verdict

    @property
    def ok(self) -> bool:
        """Whether it was judged, and agrees."""
        return self.verdict.is_judged and self.verdict is not Verdict.DIFFERS


@dataclasses.dataclass(frozen=True)
class GraphVerification:
    """The result of `GraphProgram.verify`; true when everything was judged and agrees.

    Attributes:
        differences: of every variable, and of every fetch that has a value in every step.
    """

    differences: list[FetchDifference]

    @property
    def ok(self) -> bool:
        return all(d.ok for d in self.differences)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        def told(verdict: Verdict) -> str:
            if not verdict.is_judged:
                return f"not judged: {verdict}"
            return "DIFFERS" if verdict is Verdict.DIFFERS else "agrees"

        rows = [
            [d.name, f"{d.error:.1e}", f"{d.noise:.1e}", told(d.verdict)] for d in self.differences
        ]
        columns = ["variable or fetch", "difference", "rounding noise", "verdict"]
        return render_table("largest differences", columns, rows, numeric=(1, 2))


@dataclasses.dataclass(frozen=True)
class Run:
    """What one way to run a graph gives: by name, each step's fetches, and the final variables."""

    fetches: Sequence[Values]
    variables: Values


def compare_runs(start: Values, mesh: Run, run: Callable[[Values], Run]) -> GraphVerification:
    """Compare the mesh with one device.

    Args:
        start: the values from which the mesh has run.
        run: runs the same on one device, from other values.
    """
    seeds = iter(range(NOISE_RUNS + MORE_NOISE_RUNS + NOISE_RUNS))

    def noisy(number: int, roundings: float = _ROUNDINGS) -> list[Run]:
        return [run(_moved(start, roundings, next(seeds))) for _ in range(number)]

    plain, runs = run(start), noisy(NOISE_RUNS)
    found = _compared(start, plain, mesh, runs)
    if any(d.verdict is Verdict.DIFFERS for d in found):
        runs += noisy(MORE_NOISE_RUNS)
        found = _compared(start, plain, mesh, runs)
    if any(d.verdict is Verdict.NOISE for d in found):
        coarse = noisy(NOISE_RUNS, _COARSE * _ROUNDINGS)
        found = _compared(start, plain, mesh, runs, coarse)
    return GraphVerification(found)


def _moved(values: Values, roundings: float, seed: int) -> dict[str, np.ndarray]:
    """The values, each float moved by some roundings."""
    rng = np.random.default_rng(seed)

    def move(value: np.ndarray) -> np.ndarray:
        if not tf.as_dtype(value.dtype).is_floating:
            return value
        noise = rng.standard_normal(value.shape) * float(ml_dtypes.finfo(value.dtype).eps)
        return np.asarray(value.astype("float64") * (1 + roundings * noise)).astype(value.dtype)

    return {name: move(value) for name, value in values.items()}


def _compared(
    start: Values, plain: Run, mesh: Run, noisy: Sequence[Run], coarse: Sequence[Run] = ()
) -> list[FetchDifference]:
    found = []
    for name, value in plain.variables.items():
        moved, widely = ([run.variables[name] for run in runs] for runs in (noisy, coarse))
        worst = _difference(value, mesh.variables[name], moved, widely, start[name])
        found.append(FetchDifference(name, worst))
    for name in plain.fetches[0]:
        steps = [_difference(*compared) for compared in _by_step(name, plain, mesh, noisy, coarse)]
        found.append(FetchDifference(name, max(steps, key=lambda d: d.rank)))
    return found


def _by_step(
    name: str, plain: Run, mesh: Run, noisy: Sequence[Run], coarse: Sequence[Run]
) -> Iterator[tuple[Any, Any, list[Any], list[Any]]]:
    for step, value in enumerate(plain.fetches):
        moved, widely = ([run.fetches[step][name] for run in runs] for runs in (noisy, coarse))
        yield value[name], mesh.fetches[step][name], moved, widely


def _difference(
    plain: Any, mesh: Any, noisy: Sequence[Any], coarse: Sequence[Any], before: Any = None
) -> Difference:
    """Of numbers as `verify` compares them; all else has to be equal."""
    one, other, *runs = map(np.asarray, (plain, mesh, *noisy, *coarse))
    is_number = all(a.dtype.kind not in "SUO" for a in (one, other))
    if is_number and one.shape == other.shape:
        alike = [run if run.shape == one.shape else one for run in runs]
        moved, widely = alike[: len(noisy)], alike[len(noisy) :]
        return difference(one, other, moved, before=before, coarse=widely, tolerance=_FLOOR)
    is_equal = one.shape == other.shape and bool(np.all(one == other))
    far = 0.0 if is_equal else np.inf
    return Difference(error=far, noise=0.0, excess=far)
