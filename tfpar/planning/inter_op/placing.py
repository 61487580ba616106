"""Placing of actors on machines, which all outer searches of pipelines share.

A layout for one pipeline is searched for each type of machines that its actors have, in several
orders of these machines. The few orders that are estimated to be fastest are planned beside the
given one, which is taken unless predictions can tell that another is faster.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator

from tfpar.pipeline import Pipeline
from tfpar.planning.candidates import BalancedShares, NewLayout, Order, Proposal, SolvedCandidate
from tfpar.planning.drive import Evaluator, SearchResult
from tfpar.planning.meshes import LogicalMesh
from tfpar.planning.objective import UNCERTAINTY
from tfpar.spec import MemoryLimitError, TfparError

Proposing = Generator[Proposal, None, SolvedCandidate]
"""Proposals, and at the end the best of their candidates."""


class Placing:
    """An outer search that places the actors of pipelines; see `drive.PipelineSearch`.

    Attributes:
        placed: the best candidate so far of the pipeline that was placed last.
    """

    def __init__(self, evaluator: Evaluator) -> None:
        self.outcome: SolvedCandidate | TfparError | None = None
        self.placed: SolvedCandidate | None = None
        self.evaluator = evaluator

    def propose(self, proposal: Proposal) -> Generator[Proposal, None, SolvedCandidate | None]:
        """Propose one candidate, and return it evaluated; None if it cannot run so.

        Raises:
            TfparError: why there is none.
        """
        yield proposal
        if isinstance(self.outcome, TfparError):
            raise self.outcome
        return self.outcome

    def place(
        self,
        pipeline: Pipeline | None,
        order: Order | None = None,
        meshes: tuple[LogicalMesh, ...] = (),
    ) -> Proposing:
        """Propose candidates with a new layout for a pipeline, and return the best.

        Args:
            order: of ranks, the only one; None: the given one, and those that may be faster.
            meshes: the logical meshes of a stage to choose from; none: all.

        Raises:
            MemoryLimitError: none fits, in whichever order.
            PlanError, SpecError, ScheduleError: as of `Evaluator.evaluate`.
        """
        self.placed = None
        error: MemoryLimitError | None = None
        try:
            self.placed = yield from self._place_in_order(pipeline, order or (), meshes)
        except MemoryLimitError as caught:
            error = caught
        given = self.placed
        if order is None and (given is None or given.plan.cost is not None):
            for ranks in self.evaluator.rank_orders(pipeline, given):
                try:
                    other = yield from self._place_in_order(pipeline, ranks, meshes)
                except MemoryLimitError:
                    continue
                margin = UNCERTAINTY if self.placed is given else 0.0
                if self.placed is None or other.seconds * (1 + margin) < self.placed.seconds:
                    self.placed = other
        if self.placed is None:
            assert error is not None, "nothing fits"
            raise error
        balanced = yield from self.propose(BalancedShares(self.placed))
        self.placed = balanced or self.placed
        return self.placed

    def _place_in_order(
        self, pipeline: Pipeline | None, ranks: Order, meshes: tuple[LogicalMesh, ...]
    ) -> Proposing:
        """The fastest candidate whose layout is searched for any type of its actors' machines."""
        found: list[SolvedCandidate] = []
        errors: list[MemoryLimitError] = []
        for machines in self.evaluator.machine_types(pipeline, ranks):
            try:
                candidate = yield from self.propose(NewLayout(pipeline, ranks, machines, meshes))
            except MemoryLimitError as error:
                errors.append(error)
                continue
            if candidate is None:
                continue
            if candidate.plan.cost is None:
                return candidate
            found.append(candidate)
            if self.placed is None or not ranks:
                self.placed = _fastest(found)
        if not found:
            raise min(errors, key=lambda error: error.needed_bytes)
        return _fastest(found)


class GivenPipeline(Placing):
    """The outer search where the pipeline is given."""

    def __init__(self, evaluator: Evaluator, pipeline: Pipeline | None) -> None:
        super().__init__(evaluator)
        self._pipeline = pipeline

    def proposals(self) -> Iterator[Proposal]:
        yield from self.place(self._pipeline)

    def result(self) -> SearchResult | None:
        return None if self.placed is None else SearchResult(self.placed)


def _fastest(found: list[SolvedCandidate]) -> SolvedCandidate:
    return min(found, key=lambda one: one.seconds)
