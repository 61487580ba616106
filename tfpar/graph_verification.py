"""A graph on the mesh against the same graph in a `tf.compat.v1.Session`.

Both run the same fetches from the same values. A second Session, from values moved by a few
roundings, tells what difference the order of sums alone can make.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfpar.report.tables import render_table

_NOISE_FACTOR = 10.0  # how many times the measured noise still counts as rounding (empirical)
_ROUNDINGS = 4  # by which values are moved for it
_FLOOR = 1e-4  # below it nothing is measured: float32 sums in another order (empirical)

Values = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Difference:
    """Of one variable or fetch: the error, and what noise there is, relative to its size.

    A variable's size is that of its update, where there is one.
    """

    name: str
    error: float
    noise: float

    @property
    def ok(self) -> bool:
        return self.error <= max(_FLOOR, _NOISE_FACTOR * self.noise)


@dataclasses.dataclass(frozen=True)
class GraphVerification:
    """The result of `GraphProgram.verify`; true when everything agrees.

    Attributes:
        differences: of every variable, and of every fetch that has a value in every step.
    """

    differences: list[Difference]

    @property
    def ok(self) -> bool:
        return all(d.ok for d in self.differences)

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        rows = [
            [d.name, f"{d.error:.1e}", f"{d.noise:.1e}", "agrees" if d.ok else "DIFFERS"]
            for d in self.differences
        ]
        columns = ["variable or fetch", "difference", "rounding noise", "verdict"]
        return render_table("largest differences", columns, rows, numeric=(1, 2))


@dataclasses.dataclass(frozen=True)
class Run:
    """What one way to run a graph gives: by name, each step's fetches, and the final variables."""

    fetches: Sequence[Values]
    variables: Values


def moved(values: Values) -> dict[str, np.ndarray]:
    """The values, each float moved by a few roundings."""
    rng = np.random.default_rng(0)

    def move(value: np.ndarray) -> np.ndarray:
        if value.dtype.kind != "f":
            return value
        noise = rng.standard_normal(value.shape) * np.finfo(value.dtype).eps * _ROUNDINGS
        return np.asarray(value * (1 + noise), value.dtype)

    return {name: move(value) for name, value in values.items()}


def compared(start: Values, plain: Run, noisy: Run, mesh: Run) -> GraphVerification:
    """What differs between `plain` and `mesh`, beside what does between `plain` and `noisy`."""
    found = []
    for name, value in plain.variables.items():
        size = _rms(_difference(value, start[name])) or _rms(value)
        error, noise = (
            _relative(_difference(run.variables[name], value), size) for run in (mesh, noisy)
        )
        found.append(Difference(name, error, noise))
    for name in plain.fetches[0]:
        pairs = [
            (step[name], other[name], moved[name])
            for step, other, moved in zip(plain.fetches, mesh.fetches, noisy.fetches, strict=True)
        ]
        error = max(_relative(_difference(b, a), _rms(a)) for a, b, _ in pairs)
        noise = max(_relative(_difference(c, a), _rms(a)) for a, _, c in pairs)
        found.append(Difference(name, error, noise))
    return GraphVerification(found)


def _difference(value: Any, other: Any) -> np.ndarray:
    """Of numbers, their difference; of all else, 1 where it is unequal."""
    a, b = np.asarray(value), np.asarray(other)
    if a.shape != b.shape:
        return np.array(np.inf)
    if a.dtype.kind in "iuf":
        same = (a == b) | (np.isnan(a) & np.isnan(b) if a.dtype.kind == "f" else False)
        return np.where(same, 0.0, a.astype("float64") - b.astype("float64"))
    return (a != b).astype("float64")


def _rms(value: Any) -> float:
    array = np.asarray(value)
    if array.dtype.kind not in "iufb":
        return 1.0 if array.size else 0.0
    return float(np.sqrt(np.mean(np.square(array.astype("float64"))))) if array.size else 0.0


def _relative(difference: np.ndarray, size: float) -> float:
    error = _rms(difference)
    if np.isnan(error):
        return np.inf
    return error / size if size else (np.inf if error else 0.0)
