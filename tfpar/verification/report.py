"""What `verify` found, as a value and as text."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence

from tfpar.report.tables import render_table
from tfpar.verification.compare import NOISE_FACTOR, Difference, Verdict

_SHOWN = 25  # rows of a table
_NAMED = 4  # variables in a sentence

JSON_VERSION = 1
"""Of `Verification.to_json`: it is counted up where a key changes its meaning or goes."""


@dataclasses.dataclass(frozen=True)
class OutputReport:
    """The worst difference, over all steps, of something that the step returns."""

    name: str
    difference: Difference

    @property
    def verdict(self) -> Verdict:
        return self.difference.verdict


@dataclasses.dataclass(frozen=True)
class VariableReport:
    """The worst differences of one variable over all steps.

    Attributes:
        name: its path.
        gradient: of its gradients, relative to their size; None if it has none.
        update: of its values after a step, relative to how far the step moved them.
    """

    name: str
    gradient: Difference | None
    update: Difference

    @property
    def worst(self) -> Difference:
        found = [self.update, *([] if self.gradient is None else [self.gradient])]
        return max(found, key=lambda d: d.rank)

    @property
    def verdict(self) -> Verdict:
        return self.worst.verdict

    @property
    def gradient_error(self) -> float | None:
        return None if self.gradient is None else self.gradient.error

    @property
    def update_error(self) -> float:
        return self.update.error

    @property
    def noise(self) -> float:
        return self.worst.noise


@dataclasses.dataclass(frozen=True)
class Verification:
    """The result of `verify`; true when everything agrees. Printed, it is a table, worst first.

    Attributes:
        losses: per step (one device, mesh).
        outputs: what the step returns: the loss, metrics.
        variables: every variable of the model, its optimizers and metrics.
        random: op types of the step that draw new numbers each time they run, on one device too.
        extra: variables that plain Keras may update once more at the end of an epoch of such data.
    """

    losses: list[tuple[float, float]]
    outputs: list[OutputReport]
    variables: list[VariableReport]
    random: list[str]
    extra: list[str] = dataclasses.field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing differs by more than roundings explain.

        If the step draws new numbers each time, what noise would explain counts as different.
        """
        verdicts = self._verdicts()
        untold = self.random and Verdict.NOISE in verdicts
        return Verdict.DIFFERS not in verdicts and not untold

    def _verdicts(self) -> set[Verdict]:
        return {v.verdict for v in self.variables} | {o.verdict for o in self.outputs}

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        losses = [
            f"  step {i}: one device {a:.7g}, mesh {b:.7g}" for i, (a, b) in enumerate(self.losses)
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
                *("losses", *losses, table, *_left_out(worst[_SHOWN:]), self._counts()),
                *(*self.reasons, *self.notes),
            ]
        )

    def to_json(self) -> str:
        """All of it: `version`, `equal`, `losses`, `outputs`, `variables` (worst first), `reasons`,
        `notes`.

        Errors and noise are relative, as in the table; null where there are none.
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
            "outputs": outputs,
            "variables": variables,
            "reasons": self.reasons,
            "notes": self.notes,
        }
        return json.dumps(described, indent=2)

    @property
    def reasons(self) -> list[str]:
        """What explains the verdicts."""
        told, verdicts = [], self._verdicts()
        if Verdict.ROUNDING in verdicts:
            told.append(
                "rounding: sums over the batch and over split dims run in another order; the model "
                f"amplifies roundings that much by itself (within {NOISE_FACTOR:g}x of plain runs "
                "whose sums are moved by a few roundings)."
            )
        if Verdict.NOISE in verdicts:
            told.append(
                "noise: what roundings alone do is as large as what is compared (a gradient that "
                "is zero but for roundings, or a step that amplifies them without bound): nothing "
                "can be told of these."
            )
        if self.random and verdicts & {Verdict.NOISE, Verdict.DIFFERS}:
            told.append(
                f"{', '.join(self.random)} draw new numbers in every run, on one device too: use "
                "keras.random with a SeedGenerator to compare."
            )
        if Verdict.DIFFERS in verdicts:
            found = [(v.worst.rank, v.name) for v in self.variables]
            found += [(o.difference.rank, o.name) for o in self.outputs]
            told.append(
                f"Unexplained difference, largest at {max(found)[1]}: please report it with the "
                f"model."
            )
        return told

    @property
    def notes(self) -> list[str]:
        """In what `fit` on one device is another than on the mesh, though steps are equal."""
        if not self.extra:
            return []
        rest = len(self.extra) - _NAMED
        names = ", ".join(self.extra[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")
        return [
            "data of unknown length: fit on one device notices the end of an epoch by a step that "
            f"gets no data, of which the ops that need none run all the same: {names} may be "
            "updated once more an epoch. On the mesh there are as many updates as batches, which "
            "is right. Single steps, as compared here, do not differ by it; what fit gives may."
        ]

    def _counts(self) -> str:
        verdicts = [v.verdict for v in self.variables]
        told = [f"{verdicts.count(v)} {v}" for v in reversed(Verdict) if v in verdicts]
        return f"{len(verdicts)} variables: {', '.join(told)}"


def _left_out(variables: Sequence[VariableReport]) -> list[str]:
    if not variables:
        return []
    return [f"... and {len(variables)} more, none of them worse than {variables[0].verdict}"]


def _described(prefix: str, difference: Difference | None) -> dict[str, float | None]:
    """The error of a difference and its noise, where JSON has such numbers."""
    found = (None, None) if difference is None else (difference.error, difference.noise)
    error, noise = (None if n is None or not math.isfinite(n) else float(n) for n in found)
    return {f"{prefix}error": error, f"{prefix}noise": noise}


def _pair(difference: Difference | None) -> list[str]:
    if difference is None:
        return ["-", "-"]
    return [_number(difference.error), _number(difference.noise)]


def _number(value: float) -> str:
    return f"{value:.1e}"
