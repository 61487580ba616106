"""Measured trials of candidates against their predictions, as text."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from tfpar.observability.report.data.schema import CandidateSummary
from tfpar.observability.report.tables import render_table
from tfpar.plans import Candidate
from tfpar.spec.quantities import format_seconds

COLUMNS = ("Plan", "Predicted", "Measured", "Measured / predicted", "Why not")


def trials_table(trials: Sequence[CandidateSummary]) -> str:
    """Format each plan that was tried, the one that was taken first."""
    rows = []
    for trial in trials:
        predicted, measured = trial.seconds, trial.measured_s
        ratio = f"{measured / predicted:.2f}" if measured and predicted else ""
        rows.append([trial.name, _shown(predicted), _shown(measured), ratio, trial.why])
    return render_table("Plans that were tried", COLUMNS, rows, numeric=range(1, 4))


def trial_text(trial: Candidate) -> str:
    """`tried no stages, data=2: 12.00 ms a step (predicted 10.00 ms)`."""
    assert trial.measured_s is not None, "a trial that ran"
    text = f"tried {trial.name}: {format_seconds(trial.measured_s)} a step"
    if not isfinite(trial.seconds):
        return text
    return f"{text} (predicted {format_seconds(trial.seconds)})"


def _shown(seconds: float | None) -> str:
    return "" if seconds is None else format_seconds(seconds)
