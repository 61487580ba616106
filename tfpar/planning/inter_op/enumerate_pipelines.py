"""Enumeration of pipelines: numbers of stages and microbatches, and schedules.

auto3d, §4.1, for stages that take consecutive ranks: the outer loop enumerates degrees, and
planners find the layouts inside. Every number of stages has an estimate, by which all are ranked.
The fastest are planned, until the estimates of the others say that none of them can win; these are
kept with what they were estimated to cost. Numbers that are far behind by what their largest op
takes alone are not even estimated. A layout for the ranks of one stage is the costly part, and the
same for any number of microbatches. So each number of stages is planned once, and priced, as its
tasks are simulated, with more and more microbatches as long as these pay.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tfpar.cost.cost import Cost
from tfpar.pipeline import Pipeline
from tfpar.planning.candidates import (
    BestSchedule,
    FewerRecomputed,
    OtherMicrobatches,
    OtherStages,
    Proposal,
    SolvedCandidate,
    describe_pipeline,
    microbatches_text,
    stages_text,
)
from tfpar.planning.drive import Evaluator, SearchResult
from tfpar.planning.inter_op.choosing import choose, needed_bytes, order_of, reason_of
from tfpar.planning.inter_op.other_stages import (
    evened,
    has_picked_schedule,
    in_any_schedule,
    interleaved,
    is_uneven,
)
from tfpar.planning.inter_op.pipeline_options import PipelineOptions
from tfpar.planning.inter_op.placing import Placing, Proposing
from tfpar.planning.inter_op.relaxed_estimate import RelaxedEstimate
from tfpar.planning.objective import UNCERTAINTY
from tfpar.plans import Candidate, Plan
from tfpar.spec import (
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
"""After how many numbers of microbatches in a row that are no better no others are priced."""


_UNCUT = "the batch cannot be cut in microbatches, of which stages need several"

LEAST = 2
"""Number of pipelines that are tried after the first where memory is short: those with the most
microbatches, whose meshes are the same, without and with a second forward pass."""

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


class RankedPipeline(NamedTuple):
    """The pipelines in some number of stages, before any is planned.

    Attributes:
        estimate: that of the best of them.
        pipeline: the best, by which it was estimated.
        tries: pipelines, in the order in which plans are to be found.
        is_roomy: its fastest plan fits, and so did those of fewer stages.
    """

    estimate: RelaxedEstimate
    pipeline: Pipeline | None
    tries: Sequence[Pipeline | None]
    is_roomy: bool


class EnumeratePipelines(Placing):
    """The outer search that ranks every number of stages, and plans those that may be fastest.

    It ends with a plan without stages if predictions cannot tell that the fastest is faster
    (`planning.objective.UNCERTAINTY`). A plan that its planner has not priced is taken as it is.
    A plan without stages is the first, if it fits; if it is good enough, nothing else is estimated
    but by its work. Then relaxed estimates of all numbers come before any is planned. Those whose
    fastest plan fits are planned first, the fastest of them; of estimates that predictions cannot
    tell apart, the fewest stages with room to spare. A number is left out if its estimate
    says that it cannot be faster than the best plan, whatever its microbatches and schedule. Where
    memory is short, plans that fit take long to find: then a number is left out, too, if its
    estimate, corrected by how much longer than estimated the plans found so far take, could not be
    told from the best plan; and, once there is a plan, if its fastest plan stores far more than
    there is.

    Args:
        stages: numbers to choose from, ascending.
        batch_size: of the step; None if unknown: then nothing is cut in microbatches.
        memory_limit: bytes that each rank may store; of stages that were priced, their own devices
            say what theirs may.
        ranks: of the job. Microbatches are cut so that those of a stage can share them evenly.
        why_enough: is said of the stages that are not planned once a candidate is good enough; if
            empty, nothing is.
        trains: whether the step has a backward pass. One that has none may run in one microbatch:
            stages then share its weights, and take no longer than one device with room for all.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        stages: Sequence[int],
        batch_size: int | None,
        memory_limit: float,
        ranks: int,
        why_enough: str = "",
        trains: bool = True,
    ) -> None:
        super().__init__(evaluator)
        self._stages = stages
        self._memory_limit = memory_limit
        self._ranks = ranks
        self._why_enough = why_enough
        self._options = PipelineOptions(divisors(batch_size or 1), trains)
        self._found: list[SolvedCandidate] = []
        self._lost: list[Candidate] = []
        self._errors: dict[int, TfparError] = {}
        self._ranked: dict[int, RankedPipeline] = {}
        self._shortfalls: list[float] = []
        self._unpriced: SolvedCandidate | None = None
        self._far: dict[int, Cost] = {}

    def proposals(self) -> Iterator[Proposal]:
        for number in self._stages:
            if number > 1 and self._options.is_uncut:
                name = stages_text(number)
                self._lost.append(Candidate(name, reason=f"not searched: {_UNCUT}"))
                continue
            if self._is_enough():
                self._leave_by_bound(number)
                continue
            bound = self._far_bound(number)
            if bound is not None:
                self._far[number] = bound
                continue
            yield from self._plan_or_rank(number)
            if self._unpriced is not None:
                return
        yield from self._plan_in_order()
        if self._found:
            for number, bound in self._far.items():
                why = "by what it computes alone it is slower than others by their estimates"
                self._leave(self._first_pipeline(number), bound, why)
        elif self._far:
            self._ranked = {}  # of which none fits
            for number in self._far:
                yield from self._plan_or_rank(number)
            yield from self._plan_in_order()
        if not self._found:
            raise self._error()
        if not self._is_enough():
            yield from self._plan_unlike()

    def result(self) -> SearchResult | None:
        if self._unpriced is not None:
            return SearchResult(self._unpriced)
        if not self._found:
            return None if self.placed is None else SearchResult(self.placed)
        return choose(self._found, sorted(self._lost, key=lambda one: one.seconds))

    @property
    def _best_s(self) -> float:
        """Of a step, among the plans that fit."""
        return min((one.seconds for one in self._found), default=math.inf)

    @property
    def _shortfall(self) -> float:
        """Least ratio so far of a step's seconds to their estimate; 1 if there is none."""
        return min(self._shortfalls, default=1.0)

    def _is_enough(self) -> bool:
        """Whether the best plan is so good that no other has to be looked for."""
        return bool(self._found) and self.evaluator.is_good_enough(min(self._found, key=order_of))

    def _why_not(self, ranked: RankedPipeline) -> str:
        """Why a plan of these pipelines is not looked for; empty if one is."""
        estimate = ranked.estimate
        if self._is_enough():
            return self._why_enough
        if ranked.is_roomy:
            if estimate.least_seconds >= self._best_s:
                return "by this estimate it is not faster in any microbatches and schedule"
            return ""
        if estimate.seconds * self._shortfall * (1 + UNCERTAINTY) >= self._best_s:
            return "by this estimate it is hardly faster"
        if self._found and estimate.memory_fraction > MAX_MEMORY_RATIO:
            return f"the fastest plan stores more than {MAX_MEMORY_RATIO} times what there is"
        return ""

    def _plan_or_rank(self, number: int) -> Iterator[Proposal]:
        """Find the best plan with so many stages if it is the first or has no estimate; else
        estimate it."""
        is_short = any(not ranked.is_roomy for ranked in self._ranked.values())
        tries = self._options.tries(number, self._ranks // number)
        if is_short:
            tries = [*dict.fromkeys([tries[0], *tries[-LEAST:]])]
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
        is_roomy = estimates[0].fits and not is_short
        if is_roomy and number == 1:
            yield from self._plan(number, tries)
            return
        best = estimates[at], tries[0]
        if at == 0 and estimates[at].fits:
            best = self._in_fewer_microbatches(number, *best)
        if not is_roomy:
            tries = [in_any_schedule(pipeline) for pipeline in dict.fromkeys([best[1], *tries])]
        self._ranked[number] = RankedPipeline(*best, tries, is_roomy)

    def _in_fewer_microbatches(
        self, number: int, estimate: RelaxedEstimate, pipeline: Pipeline | None
    ) -> tuple[RelaxedEstimate, Pipeline | None]:
        """Return the best estimate in so many stages with fewer microbatches, as long as these pay
        and fit, and its pipeline."""
        most = 1 if pipeline is None else pipeline.num_microbatches
        for count in reversed([m for m in self._options.worth_pricing(number) if m < most]):
            fewer = Pipeline(number, count)
            other = self.evaluator.estimate(fewer)
            if other is None or not other.fits or other.seconds >= estimate.seconds:
                break
            estimate, pipeline = other, fewer
        return estimate, pipeline

    def _far_bound(self, number: int) -> Cost | None:
        """Return what a step in so many stages computes at least, if that alone takes longer than
        the best step so far by estimate, shortfalls included; else None."""
        if not self._ranked:
            return None
        best_s = min(ranked.estimate.seconds for ranked in self._ranked.values())
        bound = self.evaluator.bound(self._first_pipeline(number))
        far = bound is not None and bound.seconds - bound.bubble_s > SHORT * best_s
        return bound if far else None

    def _first_pipeline(self, number: int) -> Pipeline | None:
        """The pipeline with so many stages that is tried first."""
        return self._options.tries(number, self._ranks // number)[0]

    def _plan_in_order(self) -> Iterator[Proposal]:
        """Plan the ranked numbers of stages, of which those are left out that cannot win."""
        for number, ranked in self._in_order():
            why = self._why_not(ranked)
            if why:
                self._leave(ranked.pipeline, ranked.estimate.cost, why)
            else:
                yield from self._plan_ranked(number, ranked)

    def _in_order(self) -> Iterator[tuple[int, RankedPipeline]]:
        """Yield the ranked numbers of stages in the order in which they are to be planned."""
        left = dict(self._ranked)
        while left:
            estimates = {number: later.estimate for number, later in left.items()}
            fitting = {number: one for number, one in estimates.items() if one.fits}
            least = min(one.seconds for one in (fitting or estimates).values())
            if fitting:
                near = [n for n, e in fitting.items() if e.seconds <= (1 + UNCERTAINTY) * least]
                roomy = [n for n in near if fitting[n].memory_fraction <= ROOMY]
                number = min(roomy or near)  # also the cheapest to plan
            else:
                number = next(n for n, one in estimates.items() if one.seconds == least)
            yield number, left.pop(number)

    def _leave_by_bound(self, number: int) -> None:
        """Keep what the work of a step in so many stages costs alone, if anything is said of it."""
        if self._why_enough:
            pipeline = self._first_pipeline(number)
            self._leave(pipeline, self.evaluator.bound(pipeline), self._why_enough)

    def _leave(self, pipeline: Pipeline | None, cost: Cost | None, why: str) -> None:
        """Look for no plan of a pipeline; it is kept with its estimated cost."""
        one = Candidate.priced(describe_pipeline(pipeline), cost)
        self._lost.append(dataclasses.replace(one, reason=f"estimated, not planned: {why}"))

    def _plan(self, number: int, tries: Sequence[Pipeline | None]) -> Iterator[Proposal]:
        """Find the best plan with so many stages.

        Args:
            tries: pipelines to begin with; of the first for which a plan fits, others follow.
        """
        try:
            first = yield from self._first(tries)
        except (PlanError, ScheduleError, SpecError) as error:
            self._errors[number] = error
            ranked = self._ranked.get(number)
            cost = None if ranked is None else ranked.estimate.cost
            one = Candidate.priced(stages_text(number), cost)
            self._lost.append(dataclasses.replace(one, reason=reason_of(error)))
            return
        if first.plan.cost is None:
            self._unpriced = first
            return
        self._found.append(first)  # whatever may interrupt what follows
        yield from self._other_microbatches(first, number)
        if self._found[-1].plan.stages is not None:
            if self._found[-1].plan.stages.recompute:
                yield from self._improve(FewerRecomputed(self._found[-1]))
            if not has_picked_schedule(self._found[-1].plan):
                yield from self._improve(BestSchedule(self._found[-1]))
            yield from self._even_out()
            yield from self._interleave()

    def _plan_ranked(self, number: int, ranked: RankedPipeline) -> Iterator[Proposal]:
        """`_plan` for what has an estimate."""
        count = len(self._found)
        yield from self._plan(number, ranked.tries)
        if len(self._found) > count and ranked.estimate.seconds:
            ratio = self._found[-1].seconds / ranked.estimate.seconds
            self._shortfalls.append(min(max(1.0, ratio), SHORT))

    def _plan_unlike(self) -> Iterator[Proposal]:
        """Plan stages on unlike numbers of ranks, where machines differ and that may be faster."""
        best = min(self._found, key=order_of)
        for tries in unlike_pipelines(self.evaluator, best, self._options):
            yield from self._plan(tries[0].num_stages, tries)

    def _first(self, tries: Sequence[Pipeline | None]) -> Proposing:
        """The candidate of the first of these pipelines with which one fits."""
        error: MemoryLimitError | None = None
        tried: list[Candidate] = []
        for pipeline in tries:
            try:
                first = yield from self.place(
                    pipeline, None if pipeline is None else pipeline.rank_order
                )
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

    def _even_out(self) -> Iterator[Proposal]:
        """Cut the plan found last as evenly as it can be, whatever stages send, where that may save
        much."""
        found = self._found[-1]
        if is_uneven(found.plan):
            yield from self._improve(OtherStages(found, evened(found.plan)))

    def _interleave(self) -> Iterator[Proposal]:
        """Give each actor several stages in the plan found last, where that is faster.

        Ranks wait less for each other then, and send more. As with more actors, predictions have to
        tell that it pays: more stages have more in them that no model foresees.
        """
        one = self._found[-1]
        for pipeline in interleaved(one.plan):
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
        options, samples = self._options.worth_pricing(number), self._options.cuts[-1]
        if number > 1 and is_even(plan, samples, plan.microbatches):
            options = [m for m in options if is_even(plan, samples, m)]
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


def unlike_pipelines(
    evaluator: Evaluator, given: SolvedCandidate, options: PipelineOptions
) -> Iterator[list[Pipeline]]:
    """Yield pipelines in stages on unlike numbers of ranks, where machines differ and that may be
    faster than a candidate: for each way to share out ranks, those to be tried in their order.

    Args:
        options: of the step.
    """
    if options.is_uncut:
        return
    for groups in evaluator.unlike_groups(given):
        tries = options.tries(len(groups), math.lcm(*map(len, groups)))
        yield [dataclasses.replace(one, ranks=groups) for one in tries if one is not None]


def is_even(plan: Plan, samples: int, microbatches: int) -> bool:
    """Whether the ranks of `plan` that split a batch have as many samples of each microbatch."""
    actors = 1 if plan.stages is None else plan.stages.num_actors
    layouts = [plan.layout_of(actor) for actor in range(actors)]
    return all(
        samples % (microbatches * one.mesh.group_size(axes)) == 0
        for one in layouts
        for axes in [tuple(map(one.mesh.axis, one.batch_axes))]
    )


def _microbatches_text(pipeline: Pipeline) -> str:
    again = ", recomputed" if pipeline.recompute else ""
    return f"{microbatches_text(pipeline.num_microbatches)}{again}"


def _check_work(plan: Plan) -> None:
    """Raise PlanError if a stage has nothing to do: as many are not worth comparing."""
    cost = None if plan.stages is None else plan.stages.cost
    for stage, share in enumerate(() if cost is None else cost.stages):
        if not share.forward_s + share.backward_s + share.update_s:
            raise PlanError(f"Stage {stage} would have no work. Ask for fewer stages.")
