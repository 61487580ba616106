"""The choice among candidates of an outer search, and what is said of those that lost."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from tfpar.planning.candidates import SolvedCandidate
from tfpar.planning.drive import SearchResult
from tfpar.planning.objective import UNCERTAINTY
from tfpar.plans import Candidate
from tfpar.spec import MemoryLimitError, TfparError
from tfpar.spec.quantities import format_bytes


def choose(found: Sequence[SolvedCandidate], rejected: Sequence[Candidate]) -> SearchResult:
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
    rivals = (Candidate.priced(one.name, one.cost, plan=one.plan) for one in others)
    plan = best.plan.with_findings(rivals=(*rivals, *rejected))
    return SearchResult(dataclasses.replace(best, plan=plan), others)


def order_of(candidate: SolvedCandidate) -> tuple[float, int]:
    """Return the key by which the fastest comes first, of equal ones that with fewest
    microbatches."""
    return candidate.seconds, candidate.plan.microbatches


def needed_bytes(error: TfparError) -> float:
    """Return what a rank would store at least; infinite if something else leaves no candidate."""
    return error.needed_bytes if isinstance(error, MemoryLimitError) else math.inf


def reason_of(error: TfparError) -> str:
    """Why there is no plan, in a few words."""
    if isinstance(error, MemoryLimitError):
        return f"a rank would store {format_bytes(error.needed_bytes)}"
    return str(error).split(". ")[0].rstrip(".")
