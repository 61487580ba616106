"""Steps of `verify` as they are compared, and the report that comes of all of them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import ml_dtypes
import numpy as np

from tfpar.observability.verification.compare import (
    MORE_NOISE_RUNS,
    NOISE_RUNS,
    ArrayDifference,
    Verdict,
    difference,
)
from tfpar.observability.verification.report import OutputReport, VariableReport, Verification

Values = dict[str, np.ndarray]


@dataclasses.dataclass
class StepOutcome:
    """Result of a step: what it returned, its gradients, and all variables afterwards."""

    logs: Values
    gradients: Values
    after: Values

    @property
    def loss(self) -> float | None:
        """`loss`, or the first of what it returned; None where that is no single number."""
        found = self.logs.get("loss", next(iter(self.logs.values()), None))
        if found is None or found.ndim or found.dtype.kind in "SUO":
            return None
        return float(found)

    @property
    def is_skipped(self) -> bool:
        """Whether gradients are not finite, as where a loss scale is too large yet."""
        return not all(map(_is_finite, self.gradients.values()))


@dataclasses.dataclass
class TakenStep:
    """A step that the mesh has taken, from the values `before`."""

    batch: Any
    before: Values
    mesh: StepOutcome

    @property
    def can_be_repeated(self) -> bool:
        """Whether a smaller loss scale may make its gradients finite, as the loss is."""
        return self.mesh.is_skipped and math.isfinite(self.mesh.loss or 0.0)


@dataclasses.dataclass
class ComparedStep:
    """The differences of one step, by name.

    Attributes:
        losses: None where it has none.
        is_skipped: neither side has finite gradients, so that only what else there is was compared.
            Which entries overflow may hang on the order of a sum.
    """

    losses: tuple[float, float] | None
    is_skipped: bool
    logs: dict[str, ArrayDifference]
    gradients: dict[str, ArrayDifference]
    updates: dict[str, ArrayDifference]

    def has(self, verdict: Verdict) -> bool:
        found = (*self.logs.values(), *self.gradients.values(), *self.updates.values())
        return any(d.verdict is verdict for d in found)


class SingleDeviceRun(Protocol):
    """Run of steps on one device: plainly, with noise, and with much more of it.

    Attributes:
        tolerance: what is always granted, of the size of the whole.
    """

    tolerance: float

    def plain(self, taken: TakenStep) -> StepOutcome: ...
    def noisy(self, taken: TakenStep, runs: int) -> list[StepOutcome]: ...
    def coarse(self, taken: TakenStep, runs: int) -> list[StepOutcome]: ...


def compare_step(
    device: SingleDeviceRun, taken: TakenStep, compression: str | None
) -> ComparedStep:
    """Take the step again on one device, with as much noise as it needs, and compare.

    Args:
        compression: the dtype in which gradients are added up over ranks, if not in their own.
    """
    plain, noisy = device.plain(taken), device.noisy(taken, NOISE_RUNS)
    compare = functools.partial(_compare, taken, plain, compression, device.tolerance)
    compared = compare(noisy)
    if compared.has(Verdict.DIFFERS):
        noisy += device.noisy(taken, MORE_NOISE_RUNS)
        compared = compare(noisy)
    if compared.has(Verdict.NOISE):
        compared = compare(noisy, device.coarse(taken, NOISE_RUNS))
    return compared


def _compare(
    taken: TakenStep,
    plain: StepOutcome,
    compression: str | None,
    tolerance: float,
    noisy: Sequence[StepOutcome],
    coarse: Sequence[StepOutcome] = (),
) -> ComparedStep:
    mesh, before = taken.mesh, taken.before
    is_skipped = mesh.is_skipped and plain.is_skipped
    epsilon = None if compression is None else float(ml_dtypes.finfo(compression).eps)
    judge = functools.partial(difference, tolerance=tolerance)

    def gradient(name: str, value: np.ndarray) -> ArrayDifference:
        other = mesh.gradients[name]
        if is_skipped and not (_is_finite(value) and _is_finite(other)):
            return ArrayDifference(0.0, math.inf, 0.0, math.inf, value.size)
        runs, widely = ([o.gradients[name] for o in some] for some in (noisy, coarse))
        return judge(value, other, runs, epsilon=epsilon, coarse=widely)

    def log(name: str, value: np.ndarray) -> ArrayDifference:
        runs, widely = ([o.logs[name] for o in some] for some in (noisy, coarse))
        return judge(value, mesh.logs[name], runs, coarse=widely)

    def update(name: str, value: np.ndarray) -> ArrayDifference:
        runs, widely = ([o.after[name] for o in some] for some in (noisy, coarse))
        return judge(value, mesh.after[name], runs, before=before[name], coarse=widely)

    losses = None if plain.loss is None or mesh.loss is None else (plain.loss, mesh.loss)
    return ComparedStep(
        losses,
        is_skipped,
        {name: log(name, value) for name, value in plain.logs.items()},
        {name: gradient(name, value) for name, value in plain.gradients.items()},
        {name: update(name, value) for name, value in plain.after.items()},
    )


def build_verification(
    compared: Sequence[ComparedStep], steps: int, random: list[str], extra: list[str]
) -> Verification:
    """Report the worst of all steps.

    Args:
        steps: how many were asked for; there are more in place of those that are skipped.
        random, extra: as in the report.
    """
    full = [step for step in compared if not step.is_skipped]
    worst = functools.partial(_worst, compared, full if len(full) >= steps else compared)
    of_variable: dict[str, list[ArrayDifference]] = {}
    for name, found in worst("gradients").items():
        of_variable.setdefault(name.partition("#")[0], []).append(found)
    variables = [
        VariableReport(
            name,
            max(of_variable[name], key=lambda d: d.rank) if name in of_variable else None,
            update,
        )
        for name, update in worst("updates").items()
    ]
    return Verification(
        [step.losses for step in compared if step.losses],
        [OutputReport(name, found) for name, found in worst("logs").items()],
        variables,
        random,
        extra,
        [i for i, step in enumerate(compared) if step.is_skipped],
    )


def _worst(
    steps: Sequence[ComparedStep], judged: Sequence[ComparedStep], kind: str
) -> Mapping[str, ArrayDifference]:
    """The worst, by name, in the steps that are judged; what differs counts in all of them."""

    def of(some: Sequence[ComparedStep], name: str) -> list[ArrayDifference]:
        return [getattr(step, kind)[name] for step in some]

    def worst(name: str) -> ArrayDifference:
        differing = [d for d in of(steps, name) if d.verdict is Verdict.DIFFERS]
        return max([*differing, *of(judged, name)], key=lambda d: d.rank)

    return {name: worst(name) for name in getattr(steps[0], kind)}


def _is_finite(array: np.ndarray) -> bool:
    return array.dtype.kind in "biuSUO" or bool(np.all(np.isfinite(array.astype("complex128"))))
