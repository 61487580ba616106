"""Candidates as text: those that a search of pipelines rejected, and why; those that were tried."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tfpar.observability.report.data.schema import CandidateSummary
from tfpar.observability.report.tables import render_table
from tfpar.spec.quantities import format_bytes, format_seconds

if TYPE_CHECKING:
    from tfpar.cluster.scaling import Correction
    from tfpar.cost.cost import Cost
    from tfpar.plans import Candidate, Plan

COLUMNS = (
    "Pipeline",
    "A step",
    "Compute",
    "Collectives",
    "Gradients",
    "Transfers",
    "Bubble",
    "Host",
    "Memory",
    "Why not",
)


def rivals_table(candidates: Sequence[CandidateSummary]) -> str:
    """Format the rejected candidates: cost by part, and what would have to change for each to win.

    Collectives are what forward and backward pass and update wait for; gradients are what is not
    hidden of their sums, transfers what a rank waits for what other stages send, and the bubble
    what it waits for their work. The host is what it waits for ops to be issued; the column is left
    out where none waits for that.
    """
    plan = next(c for c in candidates if c.kind == "plan")
    rivals = [c for c in candidates if c.kind == "pipeline"]
    rows = [["(taken)", *_cells(plan), ""], *([c.name, *_cells(c), c.why] for c in rivals)]
    columns = list(COLUMNS)
    if not any(part.name == "host" for c in (plan, *rivals) for part in c.parts):
        at = columns.index("Host")
        for row in (columns, *rows):
            del row[at]
    return render_table(
        "Pipelines that were compared", columns, rows, numeric=range(1, len(columns) - 1)
    )


def _cells(candidate: CandidateSummary) -> list[str]:
    if candidate.seconds is None or candidate.memory_bytes is None:
        return [""] * 8
    parts = {part.name: part.seconds for part in candidate.parts}
    waited = parts.get("collectives", 0.0) + parts.get("hidden", 0.0)
    others = [parts.get(name, 0.0) for name in ("gradients", "transfers", "bubble", "host")]
    seconds = [candidate.seconds, parts.get("compute", 0.0), waited, *others]
    return [*map(format_seconds, seconds), format_bytes(candidate.memory_bytes)]


def explain_rejection(rival: Candidate, plan: Plan) -> str:
    """Explain why a candidate was rejected, and what would have to change for it to win."""
    assert plan.cost is not None
    turns = _turning_points(rival, plan)
    if rival.cost is None or rival.reason:
        return f"{rival.reason}{turns}"
    limit = math.inf if plan.cluster is None else max(d.memory_bytes for d in plan.cluster.devices)
    if rival.cost.memory_bytes > limit:
        stored = format_bytes(rival.cost.memory_bytes)
        return f"does not fit: a rank would store {stored}{turns}"
    late = rival.cost.seconds - plan.cost.seconds
    measured = {trial.name: trial.measured_s for trial in plan.findings.trials}
    its = measured.get(rival.name)
    if its is not None:
        assert plan.findings.trials[0].measured_s is not None, "what was taken was measured"
        return f"measured {format_seconds(its - plan.findings.trials[0].measured_s)} slower"
    if rival.corrected_s is not None and plan.findings.trials:
        return _untried(rival.corrected_s, plan.findings.trials[0].measured_s or 0.0)
    if late <= 0:
        return f"nearer than predictions can tell, and has more stages{turns}"
    part, seconds = max(_seconds(rival.cost).items(), key=lambda item: item[1])
    slower = f"{format_seconds(late)} slower"
    if turns:
        return f"{slower}{turns}"
    if seconds <= late:
        return f"{slower}: no part of it alone makes up for that"
    percent = math.ceil(1000 * late / seconds - 1e-9) / 10
    return f"{slower}: {part} would have to take {percent:g} % less"


def _untried(corrected_s: float, best_s: float) -> str:
    """Explain why a plan was not tried, by its prediction on the corrected cluster."""
    late = corrected_s - best_s
    if late < 0:
        return f"not tried: trials were over; corrected, {format_seconds(-late)} faster"
    return f"not tried: corrected by trials, {format_seconds(late)} slower"


def _turning_points(rival: Candidate, plan: Plan) -> str:
    """`; taken if links were 3.5 times faster, or the batch 2 times larger or devices 2 times
    fewer`."""
    found = []
    if rival.links is not None:
        found.append(f"links were {_times(rival.links, 'faster', 'slower')}")
    if rival.batch is not None:
        batch = _times(rival.batch, "larger", "smaller")
        devices = _times(1 / rival.batch, "more", "fewer")
        found.append(f"the batch were {batch}, or devices were {devices}")
    if rival.memory_limit is not None:
        assert rival.cost is not None, "it is known what it stores"
        least = rival.cost.memory_bytes >= rival.memory_limit
        bound = "at least" if least else "less than"
        found.append(f"a device had {bound} {format_bytes(rival.memory_limit)} of memory")
    return f"; taken if {', or if '.join(found)}" if found else ""


def _times(factor: float, more: str, less: str) -> str:
    """Format a factor from which a candidate wins, in two digits, rounded away from 1."""
    times = max(factor, 1 / factor)
    unit = 10.0 ** (math.floor(math.log10(times)) - 1)
    times = math.ceil(times / unit - 1e-9) * unit
    return f"{times:.4g} times {more if factor > 1 else less}"


def _seconds(cost: Cost) -> dict[str, float]:
    return {
        "compute": sum(cost.compute_s),
        "collectives": sum(cost.communication_s) - cost.hidden_s,
        "gradients": cost.exposed_s,
        "transfers": cost.transfer_s,
        "the bubble": cost.bubble_s,
        "the host": cost.host_wait_s,
    }


# --- trials ---------------------------------------------------------------------------------

_TRIAL_COLUMNS = ("Plan", "Predicted", "Corrected", "Measured", "Measured / predicted", "Why not")


def trials_table(trials: Sequence[CandidateSummary]) -> str:
    """Format each plan that was tried, the one that was taken first: what was predicted of it, for
    the cluster as described and as trials corrected it, and what was measured."""
    rows = []
    for trial in trials:
        predicted, measured = trial.seconds, trial.measured_s
        ratio = f"{measured / predicted:.2f}" if measured and predicted else ""
        times = map(_shown, (predicted, trial.corrected_s, measured))
        rows.append([trial.name, *times, ratio, trial.why])
    return render_table("Plans that were tried", _TRIAL_COLUMNS, rows, numeric=range(1, 5))


def correction_text(correction: Correction) -> str:
    """`work takes 3 times, links within nodes 0.5 times as long as the cluster says`; parts that
    were told apart follow by name, as in `V100 1 times, T4 2 times`."""
    factors = {
        "links within nodes": correction.within,
        "links between nodes": correction.between,
        **correction.parts,
    }
    shown = [
        f"work takes {_factor(correction.work)} times",
        *(
            f"{name} {_factor(factor)} times"
            for name, factor in factors.items()
            if factor != 1 or name in correction.parts
        ),
    ]
    return f"{', '.join(shown)} as long as the cluster says"


def _factor(factor: float) -> str:
    return f"{factor:,.0f}" if factor >= 10 else f"{factor:.2g}"


def trials_text(tried: int, candidates: int, correction: Correction) -> str:
    """`tried 3 of 5 plans: work takes 3 times as long as the cluster says`."""
    plans = "plan" if candidates == 1 else "plans"
    return f"tried {tried} of {candidates} {plans}: {correction_text(correction)}"


def trial_text(trial: Candidate) -> str:
    """`tried no stages, data=2: 12.00 ms a step (predicted 10.00 ms)`."""
    assert trial.measured_s is not None, "a trial that ran"
    text = f"tried {trial.name}: {format_seconds(trial.measured_s)} a step"
    if not math.isfinite(trial.seconds):
        return text
    return f"{text} (predicted {format_seconds(trial.seconds)})"


def _shown(seconds: float | None) -> str:
    return "" if seconds is None else format_seconds(seconds)
