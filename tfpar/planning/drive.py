"""The driver of planning: a loop over candidates.

make      an outer search proposes a candidate: a pipeline, where its actors are, what it keeps
          of a candidate before it (`PipelineSearch`: one pipeline that is given, or all)
lay out   the planner finds the layout of one actor's ranks (`solve`), which is cut in stages
fit       moves make it store less where it does not fit (`memory`)
price     its whole step is priced (`planning.pricing.price`)
keep      the outer search keeps the best, by which it decides what to propose next
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Protocol

from tfpar.cluster.description import Cluster
from tfpar.cost.cost import Cost
from tfpar.pipeline import Pipeline
from tfpar.planning.candidates import Groups, Order, Proposal, SolvedCandidate
from tfpar.planning.incumbent import SearchInterrupted
from tfpar.planning.inter_op.relaxed_estimate import RelaxedEstimate
from tfpar.spec import PlanError, ScheduleError, SpecError, TfparError


class Evaluator(Protocol):
    """Makes candidates of proposals, for one step and one request."""

    def evaluate(self, proposal: Proposal) -> SolvedCandidate | None:
        """Evaluate a proposal to a candidate; None if it cannot run so, or runs as one before it.

        Raises:
            PlanError: there is no plan, a MemoryLimitError if none fits.
            SpecError, ScheduleError: the proposal contradicts what is asked.
            SearchInterrupted: Ctrl-C; knows the best plan so far of this proposal.
        """
        ...

    def estimate(self, pipeline: Pipeline | None) -> RelaxedEstimate | None:
        """Return the relaxed estimate of a pipeline; None if it is not known, or not worth it."""
        ...

    def bound(self, pipeline: Pipeline | None) -> Cost | None:
        """Return what the work of a pipeline alone costs, by part; None if that is not known."""
        ...

    def is_good_enough(self, candidate: SolvedCandidate) -> bool:
        """Whether no more stages need to be searched."""
        ...

    def machine_types(self, pipeline: Pipeline | None, ranks: Order) -> Sequence[Cluster | None]:
        """List the machines of an actor for which layouts are searched."""
        ...

    def rank_orders(
        self, pipeline: Pipeline | None, given: SolvedCandidate | None
    ) -> Sequence[Order]:
        """Orders of machines that may be faster than the given one, the most promising first.

        Args:
            given: the candidate for the given order; None if none fits.
        """
        ...

    def unlike_groups(self, given: SolvedCandidate) -> Sequence[Groups]:
        """Return ways to share out ranks among actors in unlike numbers that may be faster than a
        candidate, the most promising first."""
        ...


@dataclasses.dataclass(frozen=True)
class SearchResult:
    """The best candidate, and those that lost, the fastest first. The plan of the best has these
    and what has no candidate, with why, as its rivals."""

    best: SolvedCandidate
    others: tuple[SolvedCandidate, ...] = ()


class PipelineSearch(Protocol):
    """The outer search: proposes candidates, and sees what becomes of each.

    Attributes:
        outcome: the candidate of the last proposal, None, or why there is none; set by the driver.
    """

    outcome: SolvedCandidate | TfparError | None

    def proposals(self) -> Iterator[Proposal]:
        """Yield the proposals to evaluate, one by one.

        Raises:
            PlanError: there is no plan; a MemoryLimitError if none fits.
        """
        ...

    def result(self) -> SearchResult | None:
        """Return the best candidate so far, and the others; None if there is none."""
        ...


def search_plan(search: PipelineSearch, evaluator: Evaluator) -> SearchResult:
    """Return the best of the candidates that `search` proposes.

    Raises:
        PlanError, SpecError, ScheduleError: as of `PipelineSearch.proposals`.
        SearchInterrupted: Ctrl-C; knows the best plan so far.
    """
    try:
        for proposal in search.proposals():
            try:
                search.outcome = evaluator.evaluate(proposal)
            except (PlanError, ScheduleError, SpecError) as error:
                search.outcome = error
    except KeyboardInterrupt:
        found = search.result()
        if found is None:
            raise
        make = functools.partial(found.best.plan.with_findings, cut_short=True)
        raise SearchInterrupted(make) from None
    found = search.result()
    assert found is not None, "a search that ends without an error has a candidate"
    return found
