"""TAP's planner (§IV-D, Algorithm 2): data and tensor parallelism, found by search.

The model is folded to its shared subgraphs. For every logical mesh of a data and a model axis over
the ranks, with the batch split over one or both, all plans of each subgraph are priced, in the
surroundings of the best plans of the others, until none improves. A plan that pattern routing
refuses is no candidate. Pure data parallelism always is one, and the first.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

from tfpar.ir.collection import collection_paused
from tfpar.planning.deadline import Deadline
from tfpar.planning.folding.folded_model import FoldedModel, TapStatistics, folded_model
from tfpar.planning.folding.folded_plan import FoldedPlan, offer_folded_plan, unfold_plan
from tfpar.planning.intra_op.tap.mesh_search import INVALID, Key, MeshSearch
from tfpar.planning.intra_op.tap.neighbourhoods import adjacent, nearby
from tfpar.planning.intra_op.tap.warm_starts import LayoutsByFold, WarmStarts, kind_of
from tfpar.planning.intra_op.tie_breaking import (
    baselines,
    collective_penalty,
    fastest,
    pick_simplest,
)
from tfpar.planning.intra_op.weights import expert_counts
from tfpar.planning.meshes import LogicalMesh, expert_meshes, with_expert_meshes
from tfpar.planning.problem import Problem
from tfpar.plans import Candidate, Plan, SpecOption
from tfpar.spec import PlanError, TimeLimitError

MAX_TIME_RATIO = 1.15
"""A mesh whose plans come out this much slower than another's is not refined (empirical)."""

MAX_GLANCE_RATIO = 1.5
"""The same at a glance, for a mesh not to be searched at all, as long as nothing is known of meshes
like it for other numbers of ranks. (Where it is, the search that follows saves a few hundredths.)
"""

MESH_PATIENCE = 2
"""After how many numbers of ranks in a row that split weights in vain larger ones are left out."""

MAX_MEMORY_RATIO = 1.5
"""Largest ratio of a mesh's least memory to the best mesh's, for it to be refined where no plan
fits."""


@dataclasses.dataclass(eq=False)
class TapPlanner:
    """See the module.

    Args:
        min_duplicate: how many blocks make a shared subgraph (Algorithm 1); beyond what a model
            has, every weight is decided by itself.

    Attributes:
        statistics: of the last search.
    """

    min_duplicate: int = 2
    name: str = "tap"
    statistics: TapStatistics = dataclasses.field(default_factory=TapStatistics)

    def solve(self, problem: Problem) -> Plan:
        """Return the best plan of all meshes; that of data parallelism at the least if time is
        short.

        Raises:
            PlanError: no plan is valid under the constraints; says why. If none was found in
                time, a TimeLimitError.
        """
        deadline = problem.aim.budget.start()
        with collection_paused():
            return self.search(problem, folded_model(problem, self.min_duplicate), deadline)

    def search(self, problem: Problem, model: FoldedModel, deadline: Deadline) -> Plan:
        """Search as `solve` does, where the model is folded already."""
        self.statistics = model.statistics
        searches: list[MeshSearch] = []
        offer = (
            None
            if problem.aim.offer is None
            else functools.partial(offer_folded_plan, problem, model, self.name)
        )
        layouts = problem.step.graph_memo.of(LayoutsByFold).setdefault(
            self.min_duplicate, WarmStarts()
        )
        elsewhere = layouts.elsewhere(problem.meshes[0].mesh.size)
        for logical in _in_order(_meshes(problem, model)):
            if searches and deadline.over():
                break
            if _leads_nowhere(logical, searches):
                continue
            search = MeshSearch(problem, model, logical, deadline, offer)
            search.glance(layouts.of(logical))
            _explore(search, searches, kind_of(logical) in elsewhere)
            if search.key.over > 0:  # what was looked at was a plan before it, which stores more
                search.look_closely()
            if search.key.over < math.inf:
                layouts.add(logical, search.layout)
            searches.append(search)
        found: dict[MeshSearch, FoldedPlan] = {}
        for search in sorted(searches, key=lambda search: search.key):
            # Of one that was refined less may be left: it was looked at closely.
            least = min(search.key for search in searches)
            if _promises(search.key, least, search.limit):
                if not deadline.over():
                    search.refine()
                    layouts.add(search.logical, search.layout)
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
        more_s = collective_penalty(best, problem)
        if more_s and not deadline.over():
            search = next(s for s, f in found.items() if f is best)
            simpler = search.simplify(more_s)
            if simpler is not None:
                candidates.append(simpler)
        taken = pick_simplest(candidates, problem)
        return unfold_plan(
            problem,
            model,
            taken,
            self.name,
            alternatives=_alternatives(taken, model, searches),
            elsewhere=[
                Candidate(
                    str(search.logical),
                    search.key.seconds,
                    found[search].cost.memory_bytes if search in found else None,
                )
                for search in searches
                if not _is_on(taken, search.logical) and not search.key.over
            ],
            preferred_to=fastest(candidates, problem),
            cut_short=deadline.cut_short,
        )


def _meshes(problem: Problem, model: FoldedModel) -> list[LogicalMesh]:
    """Return the meshes to search. Experts are over as many ranks as they can be: so each rank has
    few of them, and sums gradients over few others."""
    mesh, samples = problem.meshes[0].mesh, problem.batch.samples
    found = []
    for count in expert_counts(model):
        widest = {one.model_sizes: one for one in expert_meshes(mesh, count)}
        found += [one for one in widest.values() if not samples or samples % one.batch_parts == 0]
    return with_expert_meshes(problem.meshes, found)


def _baselines(problem: Problem, model: FoldedModel) -> Iterator[FoldedPlan]:
    """Yield the plans that take no search, with the weights that a search decides as their only
    anchored variables and counted as unsplit."""
    decided = {
        v.name
        for group in model.folded.groups
        for v in group
        if group[0].trainable and len(group[0].shape) > 1
    }
    for plain in baselines(problem, model):
        weights = {n: spec for n, spec in plain.anchors.variables.items() if n in decided}
        anchors = dataclasses.replace(plain.anchors, variables=weights)
        yield dataclasses.replace(plain, anchors=anchors, num_split=0)


def _alternatives(
    taken: FoldedPlan, model: FoldedModel, searches: Sequence[MeshSearch]
) -> dict[str, list[SpecOption]]:
    """Collect the priced options of each variable: on the mesh of `taken`, and the best split
    elsewhere."""
    priced: dict[str, list[SpecOption]] = {}
    elsewhere: dict[str, SpecOption] = {}
    for search in searches:
        if _is_on(taken, search.logical):
            priced = search.alternatives()
            continue
        whole = search.plans.replicated
        for name, known in search.alternatives().items():
            for option in known:
                better = name not in elsewhere or option.seconds < elsewhere[name].seconds
                if option.spec != whole and math.isfinite(option.seconds) and better:
                    elsewhere[name] = dataclasses.replace(option, layout=str(search.logical))
    for name, option in elsewhere.items():
        priced.setdefault(name, []).append(option)
    groups = [group for group in model.folded.groups if group[0].name in priced]
    return {variable.name: priced[group[0].name] for group in groups for variable in group}


def _is_on(found: FoldedPlan, logical: LogicalMesh) -> bool:
    """Whether a plan was found on `logical`."""
    return (found.mesh, found.batch_axes) == (logical.mesh, logical.batch_names)


def _promises(key: Key, least: Key, limit: float, ratio: float = MAX_TIME_RATIO) -> bool:
    """Whether a mesh's best plan so far is near `least`, the best of all.

    Where nothing fits into memory yet, near is what stores not much more.

    Args:
        limit: the memory of a device, in bytes.
        ratio: how many times as long it may take.
    """
    if least.over > 0:
        return limit + key.over <= MAX_MEMORY_RATIO * (limit + least.over)
    return key.over == 0 and key.seconds <= ratio * least.seconds


def _leads_nowhere(logical: LogicalMesh, searches: Sequence[MeshSearch]) -> bool:
    """Whether meshes that split weights in as many axes, over fewer ranks, promised less and less.

    Weights that are split over more ranks need wider collectives of thinner pieces: once that costs
    more than it saves, it goes on to.
    """
    sizes: dict[int, Key] = {}  # the best so far, by the ranks that split weights
    alike = [s for s in searches if _are_alike(s.logical, logical)]
    for search in alike:
        size = search.logical.model_size
        sizes[size] = min(sizes.get(size, INVALID), search.key)
    smaller = [key for size, key in sizes.items() if size < logical.model_size]
    if len(smaller) <= MESH_PATIENCE:
        return False
    least, limit = min(search.key for search in searches), searches[0].limit
    best = min(smaller[:-MESH_PATIENCE])
    return all(key >= best and not _promises(key, least, limit) for key in smaller[-MESH_PATIENCE:])


def _in_order(meshes: Sequence[LogicalMesh]) -> list[LogicalMesh]:
    """As they are, but for those that split weights in several axes: these come last, over few
    ranks before over many, and among those the axes that differ least before others."""

    def key(logical: LogicalMesh) -> tuple[int, ...]:
        if len(logical.used_axes) < 2:
            return (0,)
        return 1, logical.model_size, max(logical.mesh.shape[axis] for axis in logical.used_axes)

    return sorted(meshes, key=key)


def _explore(search: MeshSearch, before: Sequence[MeshSearch], is_known: bool) -> None:
    """Find out what a mesh promises that was glanced at.

    If it is known what suits meshes like it, and some of that fits, only what is near is priced, if
    it looks good. Else the search goes on from whole weights too, and from what was found where one
    axis has all the ranks that several of this mesh have: on the first mesh of those over so many
    ranks, if that looked good. (It did not if it was left out, as fewer ranks led nowhere.)

    One weight at a time comes first where several axes split weights, as options are many there,
    and where a mesh does not look good; two at a time then, if that made it promise something.

    Args:
        before: the searches on other meshes.
        is_known: meshes like it were searched for another number of ranks.
    """
    logical = search.logical
    alike = [s for s in before if _are_alike(s.logical, logical)]
    least = min([search.key, *(s.key for s in before)])
    is_known = is_known and not least.over

    def looks_good(other: MeshSearch) -> bool:
        ratio = MAX_TIME_RATIO if is_known else MAX_GLANCE_RATIO
        return _promises(other.key, least, other.limit, ratio)

    if len(logical.used_axes) < 2:
        if alike or is_known:
            search.explore([search.whole], nearby if looks_good(search) else adjacent)
        else:
            search.exhaust()
            return
    else:
        one = next((s for s in before if _is_cut_in_two(s.logical, logical)), None)
        is_first = all(s.logical.model_size != logical.model_size for s in alike)
        if not is_known and is_first and (looks_good(one) if one is not None else not before):
            search.explore([search.whole, *([] if one is None else [one.layout])], adjacent)
        elif looks_good(search):
            search.explore((), adjacent)
    if _promises(search.key, least, search.limit):
        search.explore((), nearby)


def _is_cut_in_two(one: LogicalMesh, other: LogicalMesh) -> bool:
    """Whether `other` has a DeviceMesh(d1, d2) in place of the model axis of `one`."""
    return (
        one.batch_axes == other.batch_axes
        and one.used_axes == one.model_axes == other.model_axes[:1]
        and one.mesh.shape[:-1] == other.mesh.shape[:-2]
    )


def _are_alike(one: LogicalMesh, other: LogicalMesh) -> bool:
    """Whether two meshes differ only in how long their axes are."""
    return kind_of(one) == kind_of(other)
