"""Which pipeline a step runs in, if any: how many stages and microbatches, and in which order.

auto3d, §4.1, for a cluster whose stages take ranks one behind the other: the degrees outside, and
inside them what the planners find. A plan for the ranks of one stage is the costly part, and the
same for any number of microbatches. So each number of stages is planned once, and priced, as its
tasks are simulated, with more and more microbatches as long as these pay.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from tfpar.cost.cost import Cost
from tfpar.pipeline import Pipeline
from tfpar.pipeline.generators import name_of
from tfpar.plans import Plan, Rival
from tfpar.search.objective import UNCERTAINTY
from tfpar.search.so_far import SearchInterrupted
from tfpar.search.stages.promise import Promise
from tfpar.spec import (
    ArgumentError,
    MemoryLimitError,
    Mesh,
    PlanError,
    ScheduleError,
    SpecError,
    TfparError,
)
from tfpar.spec.quantities import format_bytes

PATIENCE = 2
"""After how many numbers in a row that are no better the next larger ones are left out."""

FILLED = 4
"""Microbatches for each stage that are tried first: the bubble is a quarter of the work then."""

MOST = 16
"""Microbatches for each stage beyond which nothing is gained: the bubble is a sixteenth then."""

STAGES_OF_EACH = (2, 4)
"""How many stages each set of ranks may have in place of one, where ranks wait long for others."""

LEAST = 2
"""How many of `_tries` are looked at where memory is short: of the most microbatches, whose meshes
are the same, without and with a second forward pass."""

ROOMY = 2 / 3
"""What part of what there is a plan may store, as it is promised, for one that fits to be found
likely: stages differ, and what they store is not known before they are there."""

SHORT = 1.5
"""The shortfall of one number of stages that is expected of others, at most. All promises leave
out transfers; what goes beyond has causes of its own, such as little memory."""

FAR = 2
"""How many times what there is the fastest plan in some number of stages may store for plans that
fit to be searched, where other numbers have some."""


@dataclasses.dataclass(frozen=True)
class Ways:
    """How a step can be planned and priced.

    Attributes:
        planned: a plan with such a pipeline; None asks for one without. Raises PlanError where
            there is none, a MemoryLimitError where none fits.
        repriced: a plan of `planned` as it costs in another schedule or with recomputed stages,
            None if it cannot run so.
        scheduled: a plan with stages in the schedule that suits it best.
        enough: whether a plan is good enough to search no more stages.
        why_enough: is said of the stages that are not searched; if empty, nothing is.
        promised: what a pipeline promises before plans that fit are searched; None if that is not
            known, or not worth it.
        restaged: a plan with stages as it costs with those of another pipeline, on the same sets of
            ranks, in the schedule that suits them best; None if it cannot run so.
    """

    planned: Callable[[Pipeline | None], Plan]
    repriced: Callable[[Plan, Pipeline], Plan | None]
    scheduled: Callable[[Plan], Plan]
    enough: Callable[[Plan], bool]
    why_enough: str = ""
    promised: Callable[[Pipeline | None], Promise | None] = lambda _: None
    restaged: Callable[[Plan, Pipeline], Plan | None] = lambda *_: None


def numbers_of_stages(mesh: Mesh, least: int = 1) -> tuple[int, ...]:
    """How many equal stages the ranks of `mesh` can be divided among."""
    return tuple(n for n in range(least, mesh.size + 1) if mesh.size % n == 0 and _divides(mesh, n))


def _divides(mesh: Mesh, parts: int) -> bool:
    try:
        mesh.divided(parts)
    except SpecError:
        return False
    return True


def choose_pipeline(
    stages: Sequence[int],
    batch_size: int | None,
    ways: Ways,
    memory_limit: float,
    ranks: int,
) -> Plan:
    """The plan whose step is fastest, with what it was preferred to.

    It is one without stages if predictions cannot tell that the fastest is faster
    (`search.objective.UNCERTAINTY`). A plan that its planner has not priced is taken as it is.
    Where memory is short, it takes long to find a plan that fits: from the first number of stages
    on whose fastest plan does not, it is first seen what all promise, until more stages promise
    hardly less than some that fit. Those whose fastest plan fits are planned first; of promises
    that predictions cannot tell apart, the fewest stages with room to spare. A number is left out
    if its promise, corrected by how much longer than promised the plans found so far take, could
    not be told from the best of them; and, once there is a plan, if its fastest plan stores far
    more than there is.

    Args:
        stages: numbers to choose from, ascending.
        batch_size: of the step; None if unknown: then nothing is cut in microbatches.
        memory_limit: bytes that each rank may store; of stages that were priced, their own devices
            say what theirs may.
        ranks: of the job. Microbatches are cut so that those of a stage can share them evenly.

    Raises:
        PlanError: there is no plan; a MemoryLimitError if none fits.
        SearchInterrupted: Ctrl-C; knows the best plan so far.
    """
    search = _Search(batch_size, ways, memory_limit, ranks)
    worse, least = 0, math.inf
    for number in stages:
        if worse == PATIENCE:
            search.leave(number, "fewer stages were no worse twice in a row")
            continue
        if search.is_done():
            search.leave(number, ways.why_enough)
            continue
        with search.keeping_what_it_found():
            search.plan_or_postpone(number)
        if search.unpriced is not None:
            return search.unpriced
        # Promises have to differ by what predictions can tell. More stages store less: as long as
        # nothing fits, or what does not would be faster, they are worth a look.
        margin = UNCERTAINTY if search.postponed else 0.0
        better = search.promised_s(number) * (1 + margin) < least or math.isinf(least)
        if better:
            least = search.fitting_s
        worse = 0 if better else worse + 1
    for number, later in search.in_order():
        if later.promise.seconds * search.shortfall * (1 + UNCERTAINTY) >= search.best_s:
            search.leave(number, "by a first estimate it is hardly faster")
            continue
        if search.found and later.promise.stored > FAR:
            search.leave(number, f"the fastest plans store more than {FAR} times what there is")
            continue
        with search.keeping_what_it_found():
            search.plan_promised(number, later)
    return search.chosen()


class Postponed(NamedTuple):
    """A number of stages that is planned when it is known what others promise.

    Attributes:
        promise: the best of its pipelines.
        tries: these pipelines, in the order in which plans are to be found.
    """

    promise: Promise
    tries: Sequence[Pipeline | None]


class _Search:
    def __init__(self, batch_size: int | None, ways: Ways, memory_limit: float, ranks: int) -> None:
        self.ways = ways
        self.memory_limit = memory_limit
        self.ranks = ranks
        self.cuts = _divisors(batch_size or 1)
        self.found: list[Plan] = []
        self.lost: list[Rival] = []
        self.left: dict[str, list[int]] = {}
        self.errors: dict[int, TfparError] = {}
        self.postponed: dict[int, Postponed] = {}
        self.shortfalls: list[float] = []
        self.unpriced: Plan | None = None

    @property
    def best_s(self) -> float:
        """Of a step, among the plans that fit."""
        return min((_cost(p).seconds for p in self.found), default=math.inf)

    @property
    def fitting_s(self) -> float:
        """Of a step, among the plans that fit, found or promised: what does not fit is no measure
        of them."""
        promises = (later.promise for later in self.postponed.values())
        return min([self.best_s, *(promise.seconds for promise in promises if promise.fits)])

    def promised_s(self, number: int) -> float:
        """Of a step in so many stages, if they are still to be planned; else of the best plan."""
        later = self.postponed.get(number)
        return self.best_s if later is None else later.promise.seconds

    @property
    def shortfall(self) -> float:
        """How many times as long as it was promised a step took at least."""
        return min(self.shortfalls, default=1.0)

    @contextlib.contextmanager
    def keeping_what_it_found(self) -> Iterator[None]:
        """Ctrl-C within ends the search with the best plan so far, if there is one."""
        try:
            yield
        except KeyboardInterrupt:
            if not self.found:
                raise
            best = dataclasses.replace(self.chosen(), cut_short=True)
            raise SearchInterrupted(functools.partial(dataclasses.replace, best)) from None

    def plan_or_postpone(self, number: int) -> None:
        """Find the best plan with so many stages, unless memory is short."""
        # Where memory is short already, only those that store least.
        most = LEAST if self.postponed else None
        tries = _tries(number, self.cuts, self.ranks // number, most)
        promises: dict[int, Promise] = {}
        for at, pipeline in enumerate(tries[:1] if number == 1 else tries):
            promise = self.ways.promised(pipeline)
            if promise is None:
                self.plan(number, tries)
                return
            promises[at] = promise
            if promise.fits:
                break
        at = min(promises, key=lambda at: (not promises[at].fits, promises[at].seconds))
        if number > 1:  # alone, recomputing comes before accumulation
            tries = [tries[at], *tries[:at], *tries[at + 1 :]]
        if promises[0].fits and not self.postponed:
            self.plan(number, tries)
        else:
            self.postponed[number] = Postponed(promises[at], tries)

    def in_order(self) -> Iterator[tuple[int, Postponed]]:
        """What was postponed, as it is to be planned."""
        left = dict(self.postponed)
        while left:
            promises = {number: later.promise for number, later in left.items()}
            fitting = {number: promise for number, promise in promises.items() if promise.fits}
            least = min(promise.seconds for promise in (fitting or promises).values())
            if fitting:
                near = [n for n, p in fitting.items() if p.seconds <= (1 + UNCERTAINTY) * least]
                roomy = [n for n in near if fitting[n].stored <= ROOMY]
                number = min(roomy or near, key=lambda n: n if roomy else fitting[n].stored)
            else:
                number = next(n for n, promise in promises.items() if promise.seconds == least)
            yield number, left.pop(number)

    def is_done(self) -> bool:
        """Whether what there is, is good enough."""
        return bool(self.found) and self.ways.enough(min(self.found, key=_order))

    def leave(self, number: int, why: str) -> None:
        """Search no plan in so many stages; `why` is said of it, if anything."""
        if why:
            self.left.setdefault(why, []).append(number)

    def plan(self, number: int, tries: Sequence[Pipeline | None]) -> None:
        """Find the best plan with so many stages.

        Args:
            tries: pipelines to begin with; of the first for which a plan fits, others follow.
        """
        try:
            first = self._first(tries)
        except (PlanError, ScheduleError, SpecError) as error:
            self.errors[number] = error
            self.lost.append(Rival(_stages_text(number), None, reason_of(error)))
            return
        if first.cost is None:
            self.unpriced = first
            return
        self.found.append(first)  # whatever may interrupt what follows
        for other in self._with_others(first, number):
            self._take_better(other)
        if self.found[-1].stages is not None:
            scheduled = self.ways.scheduled(self.found[-1])
            if self._fits(scheduled):
                self._take_better(scheduled)
            self._interleave()

    def plan_promised(self, number: int, later: Postponed) -> None:
        """`plan` for what was postponed."""
        count = len(self.found)
        self.plan(number, later.tries)
        if len(self.found) > count and later.promise.seconds:
            taken = _cost(self.found[-1]).seconds
            self.shortfalls.append(min(max(1.0, taken / later.promise.seconds), SHORT))

    def _interleave(self) -> None:
        """Give each set of ranks several stages in the plan found last, where that is faster.

        Ranks wait less for each other then, and send more. As with more sets of ranks, predictions
        have to tell that it pays: more stages have more in them that no model foresees.
        """
        one = self.found[-1]
        for pipeline in _interleaved(one):
            cost = _cost(self.found[-1])
            if cost.bubble_s <= UNCERTAINTY * cost.seconds:
                return
            plan = self.ways.restaged(one, pipeline)
            if plan is None or not self._fits(plan):
                continue
            if _cost(plan).seconds * (1 + UNCERTAINTY) < _cost(one).seconds:
                self._take_better(plan)

    def _take_better(self, plan: Plan) -> None:
        """Keep `plan` instead of the one found last, for as many stages, if it is better."""
        self.found[-1] = min(self.found[-1], plan, key=_order)

    def _fits(self, plan: Plan) -> bool:
        return plan.fits(self.memory_limit)

    def chosen(self) -> Plan:
        if not self.found:
            raise self._error()
        near = self.best_s * (1 + UNCERTAINTY)
        without = (p for p in self.found if p.stages is None and _cost(p).seconds <= near)
        best = next(without, None) or min(self.found, key=_order)
        others = sorted((plan for plan in self.found if plan is not best), key=_order)
        rivals = [Rival(name_of_plan(plan), plan.cost, plan=plan) for plan in others]
        left = [
            Rival(f"{', '.join(map(str, numbers))} stages", None, f"not searched: {why}")
            for why, numbers in self.left.items()
        ]
        return dataclasses.replace(best, rivals=(*rivals, *self.lost, *left))

    def _error(self) -> TfparError:
        """That of the fewest stages, which says most, with what more of them would store."""
        first, *others = (error for _, error in sorted(self.errors.items()))
        least = min(map(_needed, others), default=math.inf)
        if not isinstance(first, MemoryLimitError) or least >= first.needed_bytes:
            return first
        text = f"{first} As a pipeline, a rank stores {format_bytes(least)} at least."
        return MemoryLimitError(text, least)

    def _first(self, tries: Sequence[Pipeline | None]) -> Plan:
        """A plan with the first of these pipelines with which one fits."""
        error: MemoryLimitError | None = None
        for pipeline in tries:
            try:
                return self.ways.planned(pipeline)
            except MemoryLimitError as larger:
                error = min(error or larger, larger, key=_needed)
        assert error is not None
        raise error

    def _with_others(self, first: Plan, number: int) -> Iterator[Plan]:
        """`first` with other microbatches, where it fits so: with more, as long as these pay; else
        with fewer."""
        if number == 1 and first.microbatches == 1:
            return  # accumulation saves memory, of which there is enough
        options = self._worth_it(number)
        if number > 1 and self._is_even(first, first.microbatches):
            options = [m for m in options if self._is_even(first, m)]
        more = [m for m in options if m > first.microbatches]
        fewer = [m for m in reversed(options) if m < first.microbatches]
        recompute = first.stages is not None and first.stages.recompute
        for way in (more, fewer):
            best, worse = _cost(first).seconds, 0
            for micro in way:
                plan = self.ways.repriced(first, Pipeline(number, micro, recompute=recompute))
                if plan is None:
                    continue
                fits = self._fits(plan)
                if fits:
                    yield plan
                if fits and _cost(plan).seconds < best:
                    best, worse = _cost(plan).seconds, 0
                elif fits or way is fewer:  # which would store even more
                    worse += 1
                if worse == PATIENCE:
                    break
            if best < _cost(first).seconds:
                return

    def _is_even(self, plan: Plan, microbatches: int) -> bool:
        """Whether the ranks of `plan` that split the batch have as many samples of each."""
        parts = plan.mesh.group_size(tuple(map(plan.mesh.axis, plan.batch_axes)))
        return self.cuts[-1] % (microbatches * parts) == 0

    def _worth_it(self, number: int) -> list[int]:
        """Microbatches for so many stages: enough to fill them, or one, if microbatches join."""
        if number == 1:
            return self.cuts[1:]
        return [m for m in self.cuts if m == 1 or number <= 2 * m <= 2 * MOST * number]


def _tries(
    number: int, cuts: Sequence[int], size: int, most: int | None = None
) -> list[Pipeline | None]:
    """Pipelines with so many stages, each of which stores less than those before.

    Args:
        cuts: the numbers of microbatches that there can be, the last of as many as samples.
        size: ranks of a stage.
        most: how many of them, those that store least; by default all.
    """
    if number == 1:
        return list(dict.fromkeys([None, Pipeline(microbatches=cuts[-1])]))
    filled = [_even(cuts, f * number, size) for f in (FILLED, FILLED * 2, MOST)]
    ways = list(dict.fromkeys([*((m, False) for m in filled), (filled[-1], True)]))
    return [Pipeline(number, m, recompute=again) for m, again in ways[-(most or len(ways)) :]]


def _even(cuts: Sequence[int], most: int, size: int) -> int:
    """How many microbatches there are to be: `most` or up to half as many, whose samples most ranks
    of a stage can share evenly."""
    near = [m for m in cuts if most < 2 * m <= 2 * most] or [max(m for m in cuts if m <= most)]
    return max(near, key=lambda m: (math.gcd(size, cuts[-1] // m), m))


def _interleaved(plan: Plan) -> Iterator[Pipeline]:
    """The pipelines of several stages on each set of ranks that `plan` has."""
    assert plan.stages is not None, "a plan with stages"
    actors, micro, again = plan.stages.num_actors, plan.microbatches, plan.stages.recompute
    for each in STAGES_OF_EACH:
        for name in ("interleaved", "zb-v"):
            with contextlib.suppress(ArgumentError):  # not for so many, or not recomputing
                yield Pipeline(actors, micro, name, virtual_stages=each, recompute=again)


def name_of_plan(plan: Plan) -> str:
    """`2 stages (1f1b), 8 microbatches, each data=4 x model=2`."""
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
        f"{_stages_text(stages)}{shared} ({schedule}{again}), "
        f"{plan.microbatches} microbatches, each {plan.mesh}"
        + (f", batch over {split}" if split else "")
    )


def _stages_text(number: int) -> str:
    return "no stages" if number == 1 else f"{number} stages"


def reason_of(error: TfparError) -> str:
    """Why there is no plan, in a few words."""
    if isinstance(error, MemoryLimitError):
        return f"a rank would store {format_bytes(error.needed_bytes)}"
    return str(error).split(". ")[0].rstrip(".")


def _cost(plan: Plan) -> Cost:
    assert plan.cost is not None, "a plan that was searched for"
    return plan.cost


def _order(plan: Plan) -> tuple[float, int]:
    """The fastest plan comes first, of equal ones that with fewest microbatches."""
    return _cost(plan).seconds, plan.microbatches


def _needed(error: TfparError) -> float:
    return error.needed_bytes if isinstance(error, MemoryLimitError) else math.inf


def _divisors(size: int) -> list[int]:
    return [n for n in range(1, size + 1) if size % n == 0]
