"""The choice among candidates of an outer search, and what is said of those that lost."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from tfpar.pipeline.generators import name_of
from tfpar.planning.candidates import Candidate
from tfpar.planning.drive import SearchResult
from tfpar.planning.objective import UNCERTAINTY
from tfpar.plans import Plan, RejectedCandidate
from tfpar.spec import MemoryLimitError, TfparError
from tfpar.spec.quantities import format_bytes


def choose(found: Sequence[Candidate], rejected: Sequence[RejectedCandidate]) -> SearchResult:
    """Choose the fastest candidate, or one without stages if predictions cannot tell that the
    fastest is faster.

    Args:
        found: one at least.
        rejected: what has no candidate, and why.
    """
    ranked = sorted(found, key=order_of)
    near = ranked[0].seconds * (1 + UNCERTAINTY)
    without = (one for one in ranked if one.plan.stages is None and one.seconds <= near)
    best = next(without, ranked[0])
    others = tuple(one for one in ranked if one is not best)
    rivals = [
        RejectedCandidate(name_of_plan(one.plan), one.plan.cost, plan=one.plan) for one in others
    ]
    plan = dataclasses.replace(best.plan, rivals=(*rivals, *rejected))
    return SearchResult(dataclasses.replace(best, plan=plan), others)


def order_of(candidate: Candidate) -> tuple[float, int]:
    """Return the key by which the fastest comes first, of equal ones that with fewest
    microbatches."""
    return candidate.seconds, candidate.plan.microbatches


def needed_bytes(error: TfparError) -> float:
    """Return what a rank would store at least; infinite if something else leaves no candidate."""
    return error.needed_bytes if isinstance(error, MemoryLimitError) else math.inf


def name_of_plan(plan: Plan) -> str:
    """Name a plan: `2 stages (1f1b), 8 microbatches, each data=4 x model=2`."""
    sizes = dict(zip(plan.mesh.axis_names, plan.mesh.shape, strict=True))
    split = " and ".join(axis for axis in plan.batch_axes if sizes[axis] > 1)
    if plan.stages is None:
        name = f"no stages, {plan.mesh}" + (f", batch over {split}" if split else "")
        return f"{name}, {plan.microbatches} microbatches" if plan.microbatches > 1 else name
    again = ", recomputing" if plan.stages.recompute else ""
    name = name_of(plan.stages.schedule)
    schedule = "an order of its own" if name == "given" else name
    stages, actors = plan.stages.num_stages, plan.stages.num_actors
    shared = f" on {actors} sets of ranks" if stages > actors else ""
    return (
        f"{stages_text(stages)}{shared} ({schedule}{again}), "
        f"{plan.microbatches} microbatches, each {plan.mesh}"
        + (f", batch over {split}" if split else "")
    )


def stages_text(number: int) -> str:
    """Name a number of stages."""
    return "no stages" if number == 1 else f"{number} stages"


def reason_of(error: TfparError) -> str:
    """Why there is no plan, in a few words."""
    if isinstance(error, MemoryLimitError):
        return f"a rank would store {format_bytes(error.needed_bytes)}"
    return str(error).split(". ")[0].rstrip(".")
