"""TAP's planner (§IV-D, Algorithm 2): data and tensor parallelism, found by search.

The model is folded to its shared subgraphs. For every way to lay a data and a model axis over
the ranks, and to split the batch over one or both, all plans of each subgraph are priced, in the
surroundings of the best plans of the others, until none improves. A plan that pattern routing
refuses is no candidate. Pure data parallelism always is one, and the first.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

from tfpar.ir.collection import collection_paused
from tfpar.plans import Alternative, Plan, PlannedVariable
from tfpar.search.deadline import Deadline, check_search_seconds
from tfpar.search.folded_model import FoldedModel, Statistics
from tfpar.search.layout_search import INVALID, Found, Group, Key, LayoutSearch
from tfpar.search.problem import Layout, Problem
from tfpar.search.simplest import baselines, fastest, simplest, surcharge
from tfpar.spec import PlanError, Spec, TimeLimitError

PROMISING = 1.15
"""A layout whose plans come out this much slower than another's is not refined (empirical)."""


SMALL = 1.5
"""Where no plan fits, a layout whose best stores so much more than another's is not refined."""


@dataclasses.dataclass(eq=False)
class TapPlanner:
    """See the module.

    Args:
        min_duplicate: how many blocks make a shared subgraph (Algorithm 1); beyond what a model
            has, every weight is decided by itself.
        search_seconds: what the search may take, about; the best plan found by then is returned,
            that of data parallelism at the least.

    Attributes:
        statistics: of the last search.

    Raises:
        ArgumentError: no time at all.
    """

    min_duplicate: int = 2
    search_seconds: float | None = None
    name: str = "tap"
    statistics: Statistics = dataclasses.field(default_factory=Statistics)

    def __post_init__(self) -> None:
        check_search_seconds(self.search_seconds)

    def solve(self, problem: Problem) -> Plan:
        """The best plan of all layouts.

        Raises:
            PlanError: no plan is valid under the constraints; says why. If none was found in
                time, a TimeLimitError.
        """
        deadline = Deadline(self.search_seconds)
        with collection_paused():
            return self.search(problem, FoldedModel.of(problem, self.min_duplicate), deadline)

    def search(self, problem: Problem, model: FoldedModel, deadline: Deadline) -> Plan:
        """As `solve`, where the model is folded already."""
        self.statistics = model.statistics
        searches: list[LayoutSearch] = []
        offer = None if problem.offer is None else functools.partial(self._offer, problem, model)
        for layout in problem.layouts:
            if searches and deadline.over():
                break
            alike = (s for s in reversed(searches) if _are_alike(s.layout, layout))
            if len(layout.used_axes) > 1:
                alike = (s for s in searches if _is_cut_in_two(s.layout, layout))
            search = LayoutSearch(problem, model, layout, deadline, offer)
            search.explore(next(alike, None))
            searches.append(search)
        least = min((search.key for search in searches), default=INVALID)
        found: dict[LayoutSearch, Found] = {}
        for search in searches:
            if _promises(search.key, least, search.limit):
                if not deadline.over():
                    search.refine()
                plan_found = search.found()
                if plan_found is not None:
                    found[search] = plan_found
        if not found and deadline.cut_short:
            raise TimeLimitError("No plan was found in time. Give the search more search_seconds.")
        if not found:
            refused = next((search.refused for search in searches if search.refused), "")
            raise PlanError(f"No plan is valid under the constraints. The first one: {refused}.")
        best = fastest([*found.values()], problem)
        candidates = [*found.values(), *_baselines(problem, model)]
        more_s = surcharge(best, problem)
        if more_s and not deadline.over():
            search = next(s for s, f in found.items() if f is best)
            simpler = search.simplify(more_s)
            if simpler is not None:
                candidates.append(simpler)
        taken = simplest(candidates, problem)
        plan = _plan(problem, model, taken, searches, self.name)
        passed_over = None if taken is best else (best.cost.seconds, best.cost.collectives)
        return dataclasses.replace(plan, cut_short=deadline.cut_short, passed_over=passed_over)

    def _offer(self, problem: Problem, model: FoldedModel, found: Found) -> None:
        assert problem.offer is not None
        make = functools.partial(_plan, problem, model, found, (), self.name)
        problem.offer(make, found.cost)


def _baselines(problem: Problem, model: FoldedModel) -> Iterator[Found]:
    limit = problem.cluster.device.memory_bytes
    for plain in baselines(problem, model):
        seconds, laid = plain.cost.seconds, plain.anchors.variables
        key = Key(max(0.0, plain.cost.memory_bytes - limit), seconds, 0, seconds)
        chosen = [
            (Group(weights, [laid[weights[0].name]]), 0)
            for weights in model.folded.groups
            if weights[0].trainable and len(weights[0].shape) > 1
        ]
        yield Found(plain.layout, key, plain.cost, chosen)


def _plan(
    problem: Problem, model: FoldedModel, found: Found, searches: Sequence[LayoutSearch],
    planner: str,
) -> Plan:  # fmt: skip
    """The plan of the whole model: what is chosen for a block serves all its instances."""
    layout = found.layout
    specs: dict[str, tuple[Spec | None, str]] = {
        name: (given.spec, given.why) for name, given in problem.fixed.items()
    }
    twins = {v.name: [t.name for t in ts] for v, ts in model.folded.twins.items()}
    for group, pick in found.chosen:
        for variable in group.variables:
            for twin in twins[variable.name]:
                specs.setdefault(twin, (group.options[pick], f"chosen by the {planner} planner"))
    priced = _alternatives(found, searches)
    group_of = {
        twin: group[0].name
        for group in model.folded.groups
        for variable in group
        for twin in twins[variable.name]
    }
    variables = {}
    for variable in problem.variables:
        laid, why = specs.get(variable.name, (None, ""))
        alternatives = priced.get(group_of.get(variable.name, ""), ())
        variables[variable.name] = PlannedVariable(
            tuple(variable.shape), variable.dtype, variable.trainable, laid, why,
            tuple(alternatives),
        )  # fmt: skip
    others = sorted(
        (search.key.seconds, str(search.layout))
        for search in searches
        if search.layout != layout and not search.key.over
    )
    return problem.plan(
        mesh=layout.mesh,
        batch_axes=tuple(layout.mesh.axis_names[a] for a in layout.batch_axes),
        variables=variables,
        planner=planner,
        cost=found.cost,
        layouts=tuple((name, seconds) for seconds, name in others),
    )


def _alternatives(best: Found, searches: Sequence[LayoutSearch]) -> dict[str, list[Alternative]]:
    """What was priced for each group: on the best layout, and the best split on any other."""
    alternatives: dict[str, list[Alternative]] = {}
    elsewhere: dict[str, Alternative] = {}
    for search in searches:
        if search.layout == best.layout:
            alternatives = search.alternatives()
            continue
        whole = search.plans.engine.replicated
        for name, known in search.alternatives().items():
            for option in known:
                better = name not in elsewhere or option.seconds < elsewhere[name].seconds
                if option.spec != whole and math.isfinite(option.seconds) and better:
                    elsewhere[name] = dataclasses.replace(option, layout=str(search.layout))
    for name, option in elsewhere.items():
        alternatives.setdefault(name, []).append(option)
    return alternatives


def _promises(key: Key, least: Key, limit: float) -> bool:
    """Whether a layout's best plan so far is near `least`, the best of all.

    Where nothing fits into memory yet, near is what stores not much more.

    Args:
        limit: the memory of a device, in bytes.
    """
    if least.over > 0:
        return limit + key.over <= SMALL * (limit + least.over)
    return key.over == 0 and key.seconds <= PROMISING * least.seconds


def _is_cut_in_two(one: Layout, other: Layout) -> bool:
    """Whether `other` has a DeviceMesh(d1, d2) in place of the model axis of `one`."""
    return (
        one.batch_axes == other.batch_axes
        and one.used_axes == (1,)
        and one.mesh.shape[1] == math.prod(other.mesh.shape[1:])
    )


def _are_alike(one: Layout, other: Layout) -> bool:
    """Whether two layouts differ only in how long their axes are."""
    return (one.batch_axes, one.model_axes) == (other.batch_axes, other.model_axes)
