"""Which pipeline a step runs in, if any: how many stages and microbatches, and in which order.

auto3d, §4.1, for a cluster whose stages take ranks one behind the other: the degrees outside, and
inside them what the planners find. A plan for the ranks of one stage is the costly part, and the
same for any number of microbatches. So each number of stages is planned once, and priced, as its
tasks are simulated, with more and more microbatches as long as these pay.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence

from tfpar.cost.cost import Cost
from tfpar.pipeline import Pipeline
from tfpar.pipeline.generators import name_of
from tfpar.plans import Plan, Rival
from tfpar.search.objective import UNCERTAINTY
from tfpar.search.so_far import SearchInterrupted
from tfpar.spec import MemoryLimitError, Mesh, PlanError, ScheduleError, SpecError, TfparError
from tfpar.spec.quantities import format_bytes

PATIENCE = 2
"""After how many numbers in a row that are no better the next larger ones are left out."""

FILLED = 4
"""Microbatches for each stage that are tried first: the bubble is a quarter of the work then."""

MOST = 16
"""Microbatches for each stage beyond which nothing is gained: the bubble is a sixteenth then."""


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
    """

    planned: Callable[[Pipeline | None], Plan]
    repriced: Callable[[Plan, Pipeline], Plan | None]
    scheduled: Callable[[Plan], Plan]
    enough: Callable[[Plan], bool]
    why_enough: str = ""


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
    stages: Sequence[int], batch_size: int | None, ways: Ways, memory_limit: float
) -> Plan:
    """The plan whose step is fastest, with what it was preferred to.

    Of plans that predictions cannot tell apart (`search.objective.UNCERTAINTY`) it is the one with
    fewest stages, and then microbatches. A plan that its planner has not priced is taken as it is.

    Args:
        stages: numbers to choose from, ascending.
        batch_size: of the step; None if unknown: then nothing is cut in microbatches.
        memory_limit: bytes that a rank may store.

    Raises:
        PlanError: there is no plan; a MemoryLimitError if none fits.
        SearchInterrupted: Ctrl-C; knows the best plan so far.
    """
    search = _Search(batch_size, ways, memory_limit)
    worse = 0
    for number in stages:
        if worse == PATIENCE:
            search.leave(number, "fewer stages were better twice in a row")
            continue
        if search.is_done():
            search.leave(number, ways.why_enough)
            continue
        before = search.best_s
        try:
            search.plan(number)
        except SearchInterrupted:
            if not search.found:
                raise
            best = dataclasses.replace(search.chosen(), cut_short=True)
            raise SearchInterrupted(functools.partial(dataclasses.replace, best)) from None
        if search.unpriced is not None:
            return search.unpriced
        worse = 0 if search.best_s < before or math.isinf(before) else worse + 1
    return search.chosen()


class _Search:
    def __init__(self, batch_size: int | None, ways: Ways, memory_limit: float) -> None:
        self.ways = ways
        self.memory_limit = memory_limit
        self.cuts = _divisors(batch_size or 1)
        self.found: list[Plan] = []
        self.lost: list[Rival] = []
        self.left: dict[str, list[int]] = {}
        self.errors: list[TfparError] = []
        self.unpriced: Plan | None = None

    @property
    def best_s(self) -> float:
        """Of a step, among the plans that fit."""
        return min((_cost(p).seconds for p in self.found), default=math.inf)

    def is_done(self) -> bool:
        """Whether what there is, is good enough."""
        return bool(self.found) and self.ways.enough(min(self.found, key=_order))

    def leave(self, number: int, why: str) -> None:
        """Search no plan in so many stages; `why` is said of it, if anything."""
        if why:
            self.left.setdefault(why, []).append(number)

    def plan(self, number: int) -> None:
        """Find the best plan with so many stages."""
        try:
            first = self._first(number)
        except (PlanError, ScheduleError, SpecError) as error:
            self.errors.append(error)
            self.lost.append(Rival(_stages_text(number), None, _reason(error)))
            return
        if first.cost is None:
            self.unpriced = first
            return
        best = min([first, *self._with_others(first, number)], key=_order)
        if best.stages is not None:
            scheduled = self.ways.scheduled(best)
            best = min(best, scheduled, key=_order) if self._fits(scheduled) else best
        self.found.append(best)

    def _fits(self, plan: Plan) -> bool:
        return _cost(plan).memory_bytes <= self.memory_limit

    def chosen(self) -> Plan:
        if not self.found:
            raise self._error()
        near = self.best_s * (1 + UNCERTAINTY)
        best = next(plan for plan in self.found if _cost(plan).seconds <= near)
        others = sorted((plan for plan in self.found if plan is not best), key=_order)
        rivals = [Rival(name_of_plan(plan), plan.cost) for plan in others]
        left = [
            Rival(f"{', '.join(map(str, numbers))} stages", None, f"not searched: {why}")
            for why, numbers in self.left.items()
        ]
        return dataclasses.replace(best, rivals=(*rivals, *self.lost, *left))

    def _error(self) -> TfparError:
        """That of the fewest stages, which says most, with what more of them would store."""
        first, *others = self.errors
        least = min(map(_needed, others), default=math.inf)
        if not isinstance(first, MemoryLimitError) or least >= first.needed_bytes:
            return first
        text = f"{first} As a pipeline, a rank stores {format_bytes(least)} at least."
        return MemoryLimitError(text, least)

    def _first(self, number: int) -> Plan:
        """A plan with so many stages, with microbatches and recomputing as memory asks for."""
        wanted = max(m for m in self.cuts if m <= FILLED * number)
        most = max(m for m in self.cuts if m <= MOST * number)
        tries: list[Pipeline | None]
        if number == 1:
            tries = [None, Pipeline(microbatches=self.cuts[-1])]
        else:
            tries = [
                Pipeline(number, wanted),
                Pipeline(number, most),
                Pipeline(number, most, recompute=True),
            ]
        tries = list(dict.fromkeys(tries))
        error: MemoryLimitError | None = None
        for pipeline in tries:
            try:
                return self.ways.planned(pipeline)
            except MemoryLimitError as larger:
                error = min(error or larger, larger, key=_needed)
        assert error is not None
        raise error

    def _with_others(self, first: Plan, number: int) -> Iterator[Plan]:
        """`first` with other microbatches, where it fits so, as long as more of them pay."""
        recompute = first.stages is not None and first.stages.recompute
        if number == 1 and first.microbatches == 1:
            return  # accumulation saves memory, of which there is enough
        best, worse = math.inf, 0
        for micro in self._worth_it(number):
            if micro == first.microbatches:
                continue
            plan = self.ways.repriced(first, Pipeline(number, micro, recompute=recompute))
            if plan is None or not self._fits(plan):
                continue
            yield plan
            worse = 0 if _cost(plan).seconds < best else worse + 1
            best = min(best, _cost(plan).seconds)
            if worse == PATIENCE:
                return

    def _worth_it(self, number: int) -> list[int]:
        """Microbatches for so many stages: enough to fill them, or one, if microbatches join."""
        if number == 1:
            return self.cuts[1:]
        return [m for m in self.cuts if m == 1 or number <= 2 * m <= 2 * MOST * number]


def name_of_plan(plan: Plan) -> str:
    """`2 stages (1f1b), 8 microbatches, each data=4 x model=2`."""
    if plan.stages is None:
        name = f"no stages, {plan.mesh}"
        return f"{name}, {plan.microbatches} microbatches" if plan.microbatches > 1 else name
    again = ", recomputing" if plan.stages.recompute else ""
    name = name_of(plan.stages.schedule)
    schedule = "an order of its own" if name == "given" else name
    return (
        f"{_stages_text(plan.stages.num_actors)} ({schedule}{again}), "
        f"{plan.microbatches} microbatches, each {plan.mesh}"
    )


def _stages_text(number: int) -> str:
    return "no stages" if number == 1 else f"{number} stages"


def _reason(error: TfparError) -> str:
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
