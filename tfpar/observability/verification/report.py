"""Result of `verify`, as a value and as text."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence

from tfpar.observability.report.tables import render_table
from tfpar.observability.verification.compare import NOISE_FACTOR, ArrayDifference, Verdict

_SHOWN = 25  # rows of a table
_NAMED = 4  # variables in a sentence

JSON_VERSION = 1
"""Of `Verification.to_json`: it is counted up where a key changes its meaning or goes."""


_NOT_JUDGED = {
    Verdict.NOISE: "noise alone does as much as any error would (a step that amplifies roundings "
    "without bound, or draws new numbers). Verify it in a wider precision.",
    Verdict.NOT_FINITE: "entries are infinite or no numbers, on one device too. Verify it where "
    "the model trains, or with a smaller loss scale.",
}


class _Compared:
    """Base of what was compared, in one way or several."""

    name: str

    @property
    def differences(self) -> list[ArrayDifference]:
        raise NotImplementedError

    @property
    def worst(self) -> ArrayDifference:
        return max(self.differences, key=lambda d: d.rank)

    @property
    def error(self) -> float:
        return self.worst.error

    @property
    def noise(self) -> float:
        return self.worst.noise

    @property
    def verdict(self) -> Verdict:
        return self.worst.verdict

    @property
    def ok(self) -> bool:
        """Whether it was judged, and agrees."""
        return self.verdict.is_judged and self.verdict is not Verdict.DIFFERS


@dataclasses.dataclass(frozen=True)
class OutputReport(_Compared):
    """The worst difference, over all steps, of something that the step returns."""

    name: str
    difference: ArrayDifference

    @property
    def differences(self) -> list[ArrayDifference]:
        return [self.difference]


@dataclasses.dataclass(frozen=True)
class VariableReport(_Compared):
    """The worst differences of one variable over all steps.

    Attributes:
        name: its path.
        gradient: of its gradients, relative to their size; None if it has none.
        update: of its values after a step, relative to how far the step moved them.
    """

    name: str
    gradient: ArrayDifference | None
    update: ArrayDifference

    @property
    def differences(self) -> list[ArrayDifference]:
        return [self.update, *([] if self.gradient is None else [self.gradient])]

    @property
    def gradient_error(self) -> float | None:
        return None if self.gradient is None else self.gradient.error

    @property
    def update_error(self) -> float:
        return self.update.error


@dataclasses.dataclass(frozen=True)
class Verification:
    """The result of `verify`; true when everything was judged and agrees.

    Printed, it is a table, worst first.

    Attributes:
        losses: per step (one device, mesh), where it has one.
        outputs: what the step returns: the loss, metrics.
        variables: every variable of the model, its optimizers and metrics.
        random: op types of the step that draw new numbers each time they run, on one device too.
        extra: variables that plain Keras may update once more at the end of an epoch of such data.
        skipped: the steps whose gradients are not finite, in place of which others were taken.
    """

    losses: list[tuple[float, float]]
    outputs: list[OutputReport]
    variables: list[VariableReport]
    random: list[str]
    extra: list[str] = dataclasses.field(default_factory=list)
    skipped: list[int] = dataclasses.field(default_factory=list)

    @property
    def differences(self) -> list[OutputReport | VariableReport]:
        """Reports of all that was compared, with `name`, `error`, `noise`, `verdict` and `ok`."""
        return [*self.variables, *self.outputs]

    @property
    def ok(self) -> bool:
        """Whether all was judged, and nothing differs by more than roundings explain."""
        return Verdict.DIFFERS not in self._verdicts() and not self.not_judged

    @property
    def not_judged(self) -> dict[str, Verdict]:
        """The outputs and variables of which nothing can be told, and why: noise, or not finite."""
        verdicts: dict[str, list[Verdict]] = {}
        for each in (*self.outputs, *self.variables):
            verdicts.setdefault(each.name, []).extend(d.verdict for d in each.differences)
        return {
            name: max((v for v in each if not v.is_judged), key=lambda v: v.rank)
            for name, each in verdicts.items()
            if not all(v.is_judged for v in each)
        }

    def _verdicts(self) -> set[Verdict]:
        return {each.verdict for each in self.differences}

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        losses = [
            f"  step {i}: one device {a:.7g}, mesh {b:.7g}"
            + (" (skipped: gradients are not finite)" if i in self.skipped else "")
            for i, (a, b) in enumerate(self.losses)
        ]
        rows = [
            [
                r.name,
                "-",
                "-",
                _number(r.difference.error),
                _number(r.difference.noise),
                str(r.verdict),
            ]
            for r in self.outputs
            if r.verdict is not Verdict.EQUAL
        ]
        worst = sorted(self.variables, key=lambda v: v.worst.rank, reverse=True)
        rows += [
            [v.name, *_pair(v.gradient), *_pair(v.update), str(v.verdict)] for v in worst[:_SHOWN]
        ]
        columns = ["variable", "gradient", "noise", "value", "noise", "verdict"]
        table = render_table(
            "largest differences, relative to the gradient and to the change of the value",
            columns,
            rows,
            numeric=(1, 2, 3, 4),
        )
        return "\n".join(
            [
                *(["losses", *losses] if losses else []),
                *(table, *_left_out(worst[_SHOWN:]), self._counts()),
                *(*self.reasons, *self.notes),
            ]
        )

    def to_json(self) -> str:
        """Return all of it as JSON.

        The keys are `version`, `equal` (whether it is true), `losses`, `skipped`, `not_judged`,
        `outputs`, `variables` (worst first), `reasons`, `notes`.

        Errors, noise and resolution (the smallest error that would have been found) are relative,
        as in the table; null where there are none.
        """
        outputs = [
            {"name": o.name, "verdict": str(o.verdict), **_described("", o.difference)}
            for o in self.outputs
        ]
        variables = [
            {
                "name": v.name,
                "verdict": str(v.verdict),
                **_described("gradient_", v.gradient),
                **_described("update_", v.update),
            }
            for v in sorted(self.variables, key=lambda v: v.worst.rank, reverse=True)
        ]
        described = {
            "version": JSON_VERSION,
            "equal": self.ok,
            "losses": [{"one_device": one, "mesh": mesh} for one, mesh in self.losses],
            "skipped": self.skipped,
            "not_judged": [
                {"name": name, "verdict": str(why)} for name, why in self.not_judged.items()
            ],
            "outputs": outputs,
            "variables": variables,
            "reasons": self.reasons,
            "notes": self.notes,
        }
        return json.dumps(described, indent=2)

    @property
    def reasons(self) -> list[str]:
        """Reasons for the verdicts."""
        told, verdicts = [], self._verdicts()
        if Verdict.ROUNDING in verdicts:
            resolution, name = self._coarsest()
            told.append(
                "rounding: sums over the batch and over split dims run in another order; the model "
                f"amplifies roundings that much by itself (within {NOISE_FACTOR:g}x of plain runs "
                "whose sums are moved by a few roundings). So an error below "
                f"{resolution:.1g} of {name} would not be seen there, and smaller ones elsewhere."
            )
        for verdict, why in _NOT_JUDGED.items():
            names = [name for name, v in self.not_judged.items() if v is verdict]
            if names:
                told.append(f"{verdict}: not judged: {_named(names)}: {why}")
        if self.random and verdicts & {Verdict.NOISE, Verdict.DIFFERS}:
            told.append(
                f"{', '.join(self.random)} draw new numbers in every run, on one device too: use "
                "keras.random with a SeedGenerator to compare."
            )
        if Verdict.DIFFERS in verdicts:
            _, largest = max((each.worst.rank, each.name) for each in self.differences)
            told.append(
                f"Unexplained difference, largest at {largest}: please report it with the model."
            )
        return told

    @property
    def notes(self) -> list[str]:
        """Notes on how `fit` on one device differs from the mesh though steps are equal."""
        if not self.extra:
            return []
        return [
            "data of unknown length: fit on one device notices the end of an epoch by a step that "
            "gets no data, of which the ops that need none run all the same: "
            f"{_named(self.extra)} may be updated once more an epoch. On the mesh there are as "
            "many updates as batches, which is right. Single steps, as compared here, do not "
            "differ by it; what fit gives may."
        ]

    def _coarsest(self) -> tuple[float, str]:
        """The largest resolution of what is put down to rounding, and the name of that."""
        found = [(d, each.name) for each in self.differences for d in each.differences]
        return max((d.resolution, name) for d, name in found if d.verdict is Verdict.ROUNDING)

    def _counts(self) -> str:
        verdicts = [v.verdict for v in self.variables]
        told = [f"{verdicts.count(v)} {v}" for v in reversed(Verdict) if v in verdicts]
        return f"{len(verdicts)} variables: {', '.join(told)}"


def _left_out(variables: Sequence[VariableReport]) -> list[str]:
    if not variables:
        return []
    return [f"... and {len(variables)} more, none of them worse than {variables[0].verdict}"]


def _named(names: Sequence[str]) -> str:
    rest = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _described(prefix: str, difference: ArrayDifference | None) -> dict[str, float | None]:
    """The numbers of a difference, where JSON has such."""

    def number(key: str) -> float | None:
        value = None if difference is None else float(getattr(difference, key))
        return None if value is None or not math.isfinite(value) else value

    return {f"{prefix}{key}": number(key) for key in ("error", "noise", "resolution")}


def _pair(difference: ArrayDifference | None) -> list[str]:
    if difference is None:
        return ["-", "-"]
    return [_number(difference.error), _number(difference.noise)]


def _number(value: float) -> str:
    return f"{value:.1e}"
