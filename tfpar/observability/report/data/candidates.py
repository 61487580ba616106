"""Candidates that a plan was compared with, and why they lost."""

from __future__ import annotations

import math
from collections.abc import Iterator

from tfpar.observability.report.data.overview import parts_of
from tfpar.observability.report.data.schema import CandidateSummary
from tfpar.observability.report.rejected_candidates import explain_rejection
from tfpar.plans import Plan
from tfpar.spec.quantities import format_bytes, format_seconds


def candidates_of(plan: Plan) -> Iterator[CandidateSummary]:
    """The plan, then what else was found or priced, by kind; nothing where it was not priced."""
    if plan.cost is None:
        return
    step_s = 0.0 if plan.cluster is None else plan.cluster.step_s
    limit = math.inf
    if plan.cluster is not None:
        limit = max(device.memory_bytes for device in plan.cluster.devices)
    measured = {trial.name: trial.measured_s for trial in plan.trials}
    own = plan.trials[0].measured_s if plan.trials else None
    parts = parts_of(plan.cost, step_s)
    fits, bytes_ = plan.fits(limit), plan.cost.memory_bytes
    yield CandidateSummary("this plan", "plan", plan.cost.seconds, bytes_, fits, "", parts, own)
    for name, seconds, memory in plan.layouts:
        known = None if memory is None else memory <= limit
        lost = _why(plan.cost.seconds, seconds, memory, limit)
        yield CandidateSummary(name, "layout", seconds, memory, known, lost)
    for rival in plan.rivals:
        cost = rival.cost
        yield CandidateSummary(
            rival.name,
            "pipeline",
            None if cost is None else cost.seconds,
            None if cost is None else cost.memory_bytes,
            None if cost is None else cost.memory_bytes <= limit,
            explain_rejection(rival, plan),
            () if cost is None else parts_of(cost, step_s),
            measured.get(rival.name),
        )
    for one in plan.attempts:
        lost = ""
        if one.seconds is not None:
            room = math.inf if one.fits else 0.0
            lost = _why(plan.cost.seconds, one.seconds, one.memory_bytes, room)
        yield CandidateSummary(one.move, "move", one.seconds, one.memory_bytes, one.fits, lost)
    for name, seconds, memory in plan.baselines:
        known = None if memory is None else memory <= limit
        yield CandidateSummary(name, "baseline", seconds, memory, known)
    for trial in plan.trials:
        lost = trial.reason
        if trial.measured_s is not None and own is not None and trial is not plan.trials[0]:
            lost = f"measured {format_seconds(trial.measured_s - own)} slower"
        yield CandidateSummary(
            trial.name, "trial", trial.predicted_s, None, None, lost, (), trial.measured_s
        )


def _why(chosen_s: float, seconds: float, memory: float | None, limit: float) -> str:
    """Return the reason why another mesh was not taken."""
    if memory is not None and memory > limit:
        return f"does not fit: a rank would store {format_bytes(memory)}"
    if seconds > chosen_s:
        return f"{format_seconds(seconds - chosen_s)} slower"
    return "nearer than predictions can tell, and less simple"
