"""Enumeration of pipelines: numbers of stages and microbatches, and schedules.

auto3d, §4.1, for stages that take consecutive ranks: the outer loop enumerates degrees, and
planners find the layouts inside. A layout for the ranks of one stage is the costly part, and the
same for any number of microbatches. So each number of stages is planned once, and priced, as its
tasks are simulated, with more and more microbatches as long as these pay.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tfpar.pipeline import Pipeline
from tfpar.planning.candidates import (
    BestSchedule,
    OtherMicrobatches,
    OtherStages,
    Proposal,
    SolvedCandidate,
    microbatches_text,
    stages_text,
)
from tfpar.planning.drive import Evaluator, SearchResult
from tfpar.planning.inter_op.choosing import choose, needed_bytes, order_of, reason_of
from tfpar.planning.inter_op.placing import Placing, Proposing
from tfpar.planning.inter_op.relaxed_estimate import RelaxedEstimate
from tfpar.planning.objective import UNCERTAINTY
from tfpar.plans import Candidate, Plan
from tfpar.spec import (
    ArgumentError,
    MemoryLimitError,
    Mesh,
    PlanError,
    ScheduleError,
    SpecError,
    TfparError,
)
from tfpar.spec.mesh import divisors
from tfpar.spec.quantities import format_bytes

PATIENCE = 2
"""After how many numbers in a row that are no better the next larger ones are left out."""

FILLED = 4
"""Microbatches for each stage that are tried first: the bubble is a quarter of the work then."""

MOST = 16
"""Microbatches for each stage beyond which nothing is gained: the bubble is a sixteenth then."""

STAGES_OF_EACH = (2, 4)
"""Numbers of stages that each actor may have in place of one, where ranks wait long for others."""

_UNCUT = "the batch cannot be cut in microbatches, of which stages need several"

LEAST = 2
"""Number of `_tries` that are considered where memory is short: those with the most microbatches,
whose meshes are the same, without and with a second forward pass."""

ROOMY = 2 / 3
"""Fraction of the memory that a plan may store, by the relaxed estimate, for one that fits to be
likely: stages differ, and their memory is known only once they are there."""

SHORT = 1.5
"""The shortfall of one number of stages that is expected of others, at most. All estimates leave
out transfers; what goes beyond has causes of its own, such as little memory."""

MAX_MEMORY_RATIO = 2
"""Largest ratio of what the fastest plan in some number of stages stores to the memory, for plans
that fit to be searched, where other numbers have some."""


def numbers_of_stages(mesh: Mesh, least: int = 1) -> tuple[int, ...]:
    """Return the numbers of equal stages, at least `least`, that the ranks of `mesh` divide
    into."""
    return tuple(n for n in divisors(mesh.size) if n >= least)


class Deferred(NamedTuple):
    """A number of stages that is planned once the estimates of others are known.

    Attributes:
        estimate: that of the best of its pipelines.
        tries: these pipelines, in the order in which plans are to be found.
    """

    estimate: RelaxedEstimate
    tries: Sequence[Pipeline | None]


class EnumeratePipelines(Placing):
    """The outer search that tries every number of stages that may pay.

    It ends with a plan without stages if predictions cannot tell that the fastest is faster
    (`planning.objective.UNCERTAINTY`). A plan that its planner has not priced is taken as it is.
    Where memory is short, it takes long to find a plan that fits: from the first number of stages
    on whose fastest plan does not, relaxed estimates come first, until more stages are hardly
    faster by them than some that fit. Those whose fastest plan fits are planned first; of estimates
    that predictions cannot tell apart, the fewest stages with room to spare. A number is left out
    if its estimate, corrected by how much longer than estimated the plans found so far take, could
    not be told from the best of them; and, once there is a plan, if its fastest plan stores far
    more than there is.

    Args:
        stages: numbers to choose from, ascending.
        batch_size: of the step; None if unknown: then nothing is cut in microbatches.
        memory_limit: bytes that each rank may store; of stages that were priced, their own devices
            say what theirs may.
        ranks: of the job. Microbatches are cut so that those of a stage can share them evenly.
        why_enough: is said of the stages that are not searched once a candidate is good enough; if
            empty, nothing is.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        stages: Sequence[int],
        batch_size: int | None,
        memory_limit: float,
        ranks: int,
        why_enough: str = "",
    ) -> None:
        super().__init__(evaluator)
        self._stages = stages
        self._memory_limit = memory_limit
        self._ranks = ranks
        self._why_enough = why_enough
        self._cuts = divisors(batch_size or 1)
        self._found: list[SolvedCandidate] = []
        self._lost: list[Candidate] = []
        self._left: dict[str, list[int]] = {}
        self._errors: dict[int, TfparError] = {}
        self._deferred: dict[int, Deferred] = {}
        self._shortfalls: list[float] = []
        self._unpriced: SolvedCandidate | None = None

    def proposals(self) -> Iterator[Proposal]:
        worse, least = 0, math.inf
        for number in self._stages:
            if number > 1 and len(self._cuts) == 1:
                self._leave(number, _UNCUT)
                continue
            if worse == PATIENCE:
                self._leave(number, "fewer stages were no worse twice in a row")
                continue
            if self._found and self.evaluator.is_good_enough(min(self._found, key=order_of)):
                self._leave(number, self._why_enough)
                continue
            yield from self._plan_or_defer(number)
            if self._unpriced is not None:
                return
            # Estimates have to differ by what predictions can tell. More stages store less: as long
            # as nothing fits, or what does not would be faster, they are worth a look.
            margin = UNCERTAINTY if self._deferred else 0.0
            better = self._expected_s(number) * (1 + margin) < least or math.isinf(least)
            if better:
                least = self._fitting_s
            worse = 0 if better else worse + 1
        for number, later in self._in_order():
            expected_s = later.estimate.seconds * self._shortfall
            if expected_s * (1 + UNCERTAINTY) >= self._best_s:
                self._leave(number, "by a first estimate it is hardly faster")
                continue
            if self._found and later.estimate.memory_fraction > MAX_MEMORY_RATIO:
                why = f"the fastest plans store more than {MAX_MEMORY_RATIO} times what there is"
                self._leave(number, why)
                continue
            yield from self._plan_deferred(number, later)
        if not self._found:
            raise self._error()

    def result(self) -> SearchResult | None:
        if self._unpriced is not None:
            return SearchResult(self._unpriced)
        if not self._found:
            return None if self.placed is None else SearchResult(self.placed)
        left = [
            Candidate(f"{', '.join(map(str, numbers))} stages", reason=f"not searched: {why}")
            for why, numbers in self._left.items()
        ]
        return choose(self._found, [*self._lost, *left])

    @property
    def _best_s(self) -> float:
        """Of a step, among the plans that fit."""
        return min((one.seconds for one in self._found), default=math.inf)

    @property
    def _fitting_s(self) -> float:
        """Of a step, among the plans that fit, found or estimated: what does not fit is no measure
        of them."""
        estimates = (later.estimate for later in self._deferred.values())
        return min([self._best_s, *(one.seconds for one in estimates if one.fits)])

    def _expected_s(self, number: int) -> float:
        """Of a step in so many stages, if they are still to be planned; else of the best plan."""
        later = self._deferred.get(number)
        return self._best_s if later is None else later.estimate.seconds

    @property
    def _shortfall(self) -> float:
        """Least ratio so far of a step's seconds to their estimate; 1 if there is none."""
        return min(self._shortfalls, default=1.0)

    def _plan_or_defer(self, number: int) -> Iterator[Proposal]:
        """Find the best plan with so many stages, unless memory is short."""
        # Where memory is short already, only those that store least.
        most = LEAST if self._deferred else None
        tries = _tries(number, self._cuts, self._ranks // number, most)
        estimates: dict[int, RelaxedEstimate] = {}
        for at, pipeline in enumerate(tries[:1] if number == 1 else tries):
            estimate = self.evaluator.estimate(pipeline)
            if estimate is None:
                yield from self._plan(number, tries)
                return
            estimates[at] = estimate
            if estimate.fits:
                break
        at = min(estimates, key=lambda at: (not estimates[at].fits, estimates[at].seconds))
        if number > 1:  # alone, recomputing comes before accumulation
            tries = [tries[at], *tries[:at], *tries[at + 1 :]]
        if estimates[0].fits and not self._deferred:
            yield from self._plan(number, tries)
        else:
            self._deferred[number] = Deferred(estimates[at], tries)

    def _in_order(self) -> Iterator[tuple[int, Deferred]]:
        """Yield the deferred numbers of stages in the order in which they are to be planned."""
        left = dict(self._deferred)
        while left:
            estimates = {number: later.estimate for number, later in left.items()}
            fitting = {number: one for number, one in estimates.items() if one.fits}
            least = min(one.seconds for one in (fitting or estimates).values())
            if fitting:
                near = [n for n, e in fitting.items() if e.seconds <= (1 + UNCERTAINTY) * least]
                roomy = [n for n in near if fitting[n].memory_fraction <= ROOMY]
                fullness = {n: fitting[n].memory_fraction for n in near}
                number = min(roomy) if roomy else min(near, key=fullness.__getitem__)
            else:
                number = next(n for n, one in estimates.items() if one.seconds == least)
            yield number, left.pop(number)

    def _leave(self, number: int, why: str) -> None:
        """Search no plan in so many stages; `why` is said of it, if anything."""
        if why:
            self._left.setdefault(why, []).append(number)

    def _plan(self, number: int, tries: Sequence[Pipeline | None]) -> Iterator[Proposal]:
        """Find the best plan with so many stages.

        Args:
            tries: pipelines to begin with; of the first for which a plan fits, others follow.
        """
        try:
            first = yield from self._first(tries)
        except (PlanError, ScheduleError, SpecError) as error:
            self._errors[number] = error
            self._lost.append(Candidate(stages_text(number), reason=reason_of(error)))
            return
        if first.plan.cost is None:
            self._unpriced = first
            return
        self._found.append(first)  # whatever may interrupt what follows
        yield from self._other_microbatches(first, number)
        best = self._found[-1]
        if best.plan.stages is not None:
            yield from self._improve(BestSchedule(best))
            yield from self._interleave()

    def _plan_deferred(self, number: int, later: Deferred) -> Iterator[Proposal]:
        """`_plan` for what was deferred."""
        count = len(self._found)
        yield from self._plan(number, later.tries)
        if len(self._found) > count and later.estimate.seconds:
            ratio = self._found[-1].seconds / later.estimate.seconds
            self._shortfalls.append(min(max(1.0, ratio), SHORT))

    def _first(self, tries: Sequence[Pipeline | None]) -> Proposing:
        """The candidate of the first of these pipelines with which one fits."""
        error: MemoryLimitError | None = None
        tried: list[Candidate] = []
        for pipeline in tries:
            try:
                first = yield from self.place(pipeline)
            except MemoryLimitError as larger:
                error = min(error or larger, larger, key=needed_bytes)
                move = "no microbatches" if pipeline is None else _microbatches_text(pipeline)
                tried.append(Candidate(move, memory_bytes=larger.needed_bytes, fits=False))
                continue
            _check_work(first.plan)
            attempts = (*tried, *first.plan.findings.attempts)
            return dataclasses.replace(first, plan=first.plan.with_findings(attempts=attempts))
        assert error is not None
        raise error

    def _improve(self, proposal: Proposal) -> Iterator[Proposal]:
        """Keep the candidate of a proposal instead of the one found last, for as many stages, if it
        fits and is better."""
        found = yield from self.propose(proposal)
        if found is not None and self._fits(found):
            self._take_better(found)

    def _interleave(self) -> Iterator[Proposal]:
        """Give each actor several stages in the plan found last, where that is faster.

        Ranks wait less for each other then, and send more. As with more actors, predictions have to
        tell that it pays: more stages have more in them that no model foresees.
        """
        one = self._found[-1]
        for pipeline in _interleaved(one.plan):
            cost = self._found[-1].plan.cost
            assert cost is not None, "a plan with a price"
            if cost.bubble_s <= UNCERTAINTY * cost.seconds:
                return
            other = yield from self.propose(OtherStages(one, pipeline))
            if other is None or not self._fits(other):
                continue
            if other.seconds * (1 + UNCERTAINTY) < one.seconds:
                self._take_better(other)

    def _take_better(self, candidate: SolvedCandidate) -> None:
        self._found[-1] = min(self._found[-1], candidate, key=order_of)

    def _fits(self, candidate: SolvedCandidate) -> bool:
        return candidate.plan.fits(self._memory_limit)

    def _error(self) -> TfparError:
        """That of the fewest stages, which says most, with what more of them would store."""
        if not self._errors:
            return PlanError(
                f"No pipeline is searched: {_UNCUT}. Ask for one by name, such as "
                f"tap.Pipeline({self._stages[0]}, 1), in which stages work one after the other."
            )
        first, *others = (error for _, error in sorted(self._errors.items()))
        least = min(map(needed_bytes, others), default=math.inf)
        if not isinstance(first, MemoryLimitError) or least >= first.needed_bytes:
            return first
        text = f"{first} As a pipeline, a rank stores {format_bytes(least)} at least."
        return MemoryLimitError(text, least)

    def _other_microbatches(self, first: SolvedCandidate, number: int) -> Iterator[Proposal]:
        """Try `first` with other microbatches, and keep what fits: with more, as long as these pay;
        else with fewer."""
        plan = first.plan
        if number == 1 and plan.microbatches == 1:
            return  # accumulation saves memory, of which there is enough
        options = self._worth_it(number)
        if number > 1 and self._is_even(plan, plan.microbatches):
            options = [m for m in options if self._is_even(plan, m)]
        more = [m for m in options if m > plan.microbatches]
        fewer = [m for m in reversed(options) if m < plan.microbatches]
        recompute = plan.stages is not None and plan.stages.recompute
        for way in (more, fewer):
            best, worse = first.seconds, 0
            for micro in way:
                pipeline = Pipeline(number, micro, recompute=recompute)
                other = yield from self.propose(OtherMicrobatches(first, pipeline))
                if other is None:
                    continue
                fits = self._fits(other)
                if fits:
                    self._take_better(other)
                if fits and other.seconds < best:
                    best, worse = other.seconds, 0
                elif fits or way is fewer:  # which would store even more
                    worse += 1
                if worse == PATIENCE:
                    break
            if best < first.seconds:
                return

    def _is_even(self, plan: Plan, microbatches: int) -> bool:
        """Whether the ranks of `plan` that split the batch have as many samples of each."""
        parts = plan.mesh.group_size(tuple(map(plan.mesh.axis, plan.batch_axes)))
        return self._cuts[-1] % (microbatches * parts) == 0

    def _worth_it(self, number: int) -> list[int]:
        """Microbatches for so many stages: enough to fill them."""
        if number == 1:
            return self._cuts[1:]
        return [m for m in self._cuts[1:] if number <= 2 * m <= 2 * MOST * number]


def _microbatches_text(pipeline: Pipeline) -> str:
    again = ", recomputed" if pipeline.recompute else ""
    return f"{microbatches_text(pipeline.order.num_microbatches)}{again}"


def _check_work(plan: Plan) -> None:
    """Raise PlanError if a stage has nothing to do: as many are not worth comparing."""
    cost = None if plan.stages is None else plan.stages.cost
    for stage, share in enumerate(() if cost is None else cost.stages):
        if not share.forward_s + share.backward_s + share.update_s:
            raise PlanError(f"Stage {stage} would have no work. Ask for fewer stages.")


def _tries(
    number: int, cuts: Sequence[int], size: int, most: int | None = None
) -> list[Pipeline | None]:
    """Pipelines with so many stages, each of which stores less than those before.

    Args:
        cuts: the numbers of microbatches that there can be, the last of as many as samples; of
            several stages, one beside 1 at least.
        size: ranks of a stage.
        most: how many of them, those that store least; by default all.
    """
    if number == 1:
        return list(dict.fromkeys([None, Pipeline(microbatches=cuts[-1])]))
    filled = [_even(cuts, f * number, size) for f in (FILLED, FILLED * 2, MOST)]
    ways = list(dict.fromkeys([*((m, False) for m in filled), (filled[-1], True)]))
    return [Pipeline(number, m, recompute=again) for m, again in ways[-(most or len(ways)) :]]


def _even(cuts: Sequence[int], most: int, size: int) -> int:
    """Choose a number of microbatches, `most` or up to half as many, whose samples most ranks of a
    stage can share evenly; of one, stages would work one after the other."""
    several = cuts[1:]
    near = [m for m in several if most < 2 * m <= 2 * most]
    near = near or [max((m for m in several if m <= most), default=several[0])]
    return max(near, key=lambda m: (math.gcd(size, cuts[-1] // m), m))


def _interleaved(plan: Plan) -> Iterator[Pipeline]:
    """Yield the pipelines with several stages on each actor of `plan`."""
    assert plan.stages is not None, "a plan with stages"
    actors, micro, again = plan.stages.num_actors, plan.microbatches, plan.stages.recompute
    for each in STAGES_OF_EACH:
        for name in ("interleaved", "zb-v"):
            with contextlib.suppress(ArgumentError):  # not for so many, or not recomputing
                yield Pipeline(actors, micro, name, virtual_stages=each, recompute=again)
