"""Candidates for measured trials: the plans of a step that a search compared, and what became of
them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from tfpar.cluster.scaling import Correction
from tfpar.planning.candidates import name_of_plan
from tfpar.planning.meshes import logical_meshes
from tfpar.planning.problem import Problem
from tfpar.planning.request import PlanRequest
from tfpar.plans import Candidate, Plan
from tfpar.plans.equivalence import execution_key
from tfpar.spec import PlanError

Search = Callable[[PlanRequest], tuple[Plan, Problem]]
"""Finds the plan of one step for what is requested; see `StepSearch`."""


def select_trial_candidates(
    best: Plan, search: Search, request: PlanRequest, count: int
) -> list[Plan]:
    """Select the plans that may be tried, by prediction, `best` first; all fit, and no two run in
    the same way.

    They are those of other numbers of stages and, where constraints leave the mesh open, the best
    of other logical meshes, which are searched one by one.

    Args:
        best: what `search` found for the request, or for it with another pipeline.
        count: of the trials: so many other meshes are searched at most.
    """
    found = {execution_key(best): best}
    others = [rival.plan for rival in best.findings.rivals if rival.plan is not None]
    if not request.constraints and request.base is None:
        others += _on_other_meshes([best, *others], search, request, count)
    limit = request.cluster.device.memory_bytes
    for plan in sorted(others, key=_seconds):
        if plan.cost is None or plan.fits(limit):
            found.setdefault(execution_key(plan), plan)
    plans = [dataclasses.replace(plan, partitioned=None) for plan in found.values()]
    return [plan.with_findings(rivals=_rivals(plan, plans, best)) for plan in plans]


def attach_trials(
    plans: Sequence[Plan],
    trials: Mapping[int, Candidate],
    correction: Correction | None = None,
    corrected_s: Sequence[float | None] = (),
) -> Plan:
    """Return the plan that was measured to be fastest, with all that was found out.

    Args:
        plans: that the trials chose from.
        trials: by the numbers of their plans, in the order in which they ran; one was measured.
        correction: of the cluster, by what they took; None: it is not known.
        corrected_s: seconds of each plan on the corrected cluster, by its number.
    """
    anew = dict(enumerate(corrected_s))
    told = {
        at: dataclasses.replace(trial, corrected_s=anew.get(at)) for at, trial in trials.items()
    }
    # Those that could not be run come last.
    order = sorted(told, key=lambda at: _or_infinite(told[at].measured_s))
    best, by_name = plans[order[0]], {name_of_plan(plans[at]): s for at, s in anew.items()}
    rivals = (
        dataclasses.replace(rival, corrected_s=by_name.get(rival.name))
        for rival in best.findings.rivals
    )
    return best.with_findings(
        rivals=tuple(rivals), trials=tuple(told[at] for at in order), correction=correction
    )


def _on_other_meshes(
    known: list[Plan], search: Search, request: PlanRequest, count: int
) -> Iterator[Plan]:
    """The best plan of each of the `count` meshes that are nearest to the best of all."""
    meshes = logical_meshes(request.mesh)
    whole = next((plan for plan in known if plan.stages is None), None)
    if whole is not None and whole.findings.layouts:
        names = [other.name for other in whole.findings.layouts]
        near = [m for name in names for m in meshes if name in (str(m), str(m.mesh))]
        meshes = [*near, *(logical for logical in meshes if logical not in near)]
    for logical in meshes[:count]:
        try:
            plan, _ = search(dataclasses.replace(request, meshes=(logical,)))
        except PlanError:
            continue  # none fits, or this mesh has none
        yield plan


def _rivals(plan: Plan, plans: list[Plan], best: Plan) -> tuple[Candidate, ...]:
    """Return the rejected candidates of `plan`: the other plans, and those of `best` that are none
    of these."""
    others = [Candidate.priced(name_of_plan(p), p.cost) for p in plans if p is not plan]
    names = {name_of_plan(p) for p in plans}
    return (*others, *(rival for rival in best.findings.rivals if rival.name not in names))


def _seconds(plan: Plan) -> float:
    return _or_infinite(None if plan.cost is None else plan.cost.seconds)


def _or_infinite(seconds: float | None) -> float:
    return math.inf if seconds is None else seconds
