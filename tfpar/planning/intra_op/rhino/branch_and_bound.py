"""Branch and bound over the meshes of a step (Land and Doig 1960): which are searched, and in what
order.

A mesh is bounded from below (`relaxation`) by its first axis, however many others the rest is split
into. The mesh with the least bound is searched first, then all with one or two axes on which a plan
may be near enough to the best to be taken (`tie_breaking`). Where the best of them waits for
collectives, one of its axes is split in two, as long as that gains more than predictions can tell:
on links of several speeds three or four axes move less.

The bound of all of them is closer where more axes are looked at: a mesh whose axes are prime can do
what all meshes can whose axes are products of its own (`MeshTree.tighten_bound`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

from tfpar.planning.deadline import Deadline
from tfpar.planning.folding.folded_plan import FoldedPlan
from tfpar.planning.intra_op.rhino.mesh_search import MeshShapePlan, MeshShapeSearch
from tfpar.planning.intra_op.tie_breaking import fastest
from tfpar.planning.meshes import MAX_AXES, finer_meshes, finest_meshes, shapes
from tfpar.planning.problem import Problem
from tfpar.planning.solver import RELATIVE_GAP
from tfpar.plans import Candidate
from tfpar.spec import Mesh

R = TypeVar("R")

MIN_GAIN = 0.02
"""The part of a step that has to be saved at best, at least, by a mesh of more axes to be searched,
or by any plan for a closer bound to be looked for: predictions do not tell plans apart that are so
near to each other."""

MIN_WAITING = 0.1
"""The part of a step that waits for collectives from which more axes are tried: they save little
else."""

MAX_FINEST_MESHES = 3
"""Number of meshes with prime axes up to which all of them are bounded: there is one where the
number of ranks is a power of a prime, and there are three of 12 ranks."""

LOOK_S = 0.2
"""Interval, in seconds, at which whoever waits for a search looks whether Ctrl-C came."""


@dataclasses.dataclass(eq=False)
class MeshTree:
    """The meshes of a problem, and what is found on them.

    Args:
        make: the search of a mesh, and of the axes that split the batch, where these are given.
        plain: plans that take no search.

    Attributes:
        searches, results: of the meshes that were searched.
    """

    problem: Problem
    make: Callable[[Mesh, Sequence[int] | None], MeshShapeSearch]
    plain: Sequence[FoldedPlan]
    deadline: Deadline
    searches: list[MeshShapeSearch] = dataclasses.field(default_factory=list)
    results: list[MeshShapePlan | None] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self._meshes = [self.make(*shaped) for shaped in shapes(self.problem.meshes)]
        bounds = [search.least_seconds for search in self._meshes]
        self._least_s = dict(zip(self._meshes, side_by_side(bounds, self.deadline), strict=True))
        self._closer_bound_s = 0.0
        self._by_first_axis = {_used(s.mesh)[:1]: least for s, least in self._least_s.items()}

    @property
    def bound_s(self) -> float:
        """Seconds that no plan takes less than; 0 where that is not known."""
        return max(min(self._least_s.values()), self._closer_bound_s)

    @property
    def skipped(self) -> list[Candidate]:
        """The meshes that were not searched, with what a plan takes there at least."""
        return [
            Candidate(str(search.mesh), least_s)
            for search, least_s in self._least_s.items()
            if search not in self.searches and math.isfinite(least_s)
        ]

    def search(self) -> None:
        """Search all meshes that may have the plan that is taken."""
        first = min(self._meshes, key=self._least_s.__getitem__)
        self._run([first])
        limit_s = (1 + self.problem.aim.objective.uncertainty) * self._fastest_s()
        self._run([s for s in self._meshes if s is not first and self._least_s[s] <= limit_s])
        # of plans that are equal that of the simpler mesh comes first
        found = sorted(zip(self.searches, self.results, strict=True), key=self._place)
        self.searches = [search for search, _ in found]
        self.results = [result for _, result in found]
        if len(self._meshes) > 1:
            self._split_axes()

    def tighten_bound(self) -> None:
        """Bound what is on any mesh more closely, by several axes of the finest ones; not if the
        best is near its bound already."""
        if self.deadline.over() or self._fastest_s() <= self.bound_s * (1 + MIN_GAIN):
            return
        size = self._meshes[0].mesh.size
        if len(self._meshes) == 1:
            finest = self._meshes
        else:
            finest = [self.make(mesh, None) for mesh in finest_meshes(size)]
        if len(finest) <= MAX_FINEST_MESHES:
            bounds = [functools.partial(s.least_seconds, num_axes=MAX_AXES) for s in finest]
            least_s = min(side_by_side(bounds, self.deadline))
            # Infinite if constraints leave those meshes no plan, which says nothing of others.
            self._closer_bound_s = least_s if math.isfinite(least_s) else 0.0

    def solve(self) -> None:
        """Search on level 3 the meshes that may become the fastest by it: where the gap of level 2
        is larger than the mesh is behind the best. Those that look fastest come first."""
        found = {at: result for at, result in enumerate(self.results) if result is not None}
        for at in sorted(found, key=lambda at: found[at].cost.seconds):
            result = found[at]
            best = fastest([r for r in self.results if r is not None], self.problem)
            if self._fastest_s() <= self.bound_s * (1 + RELATIVE_GAP):
                return  # it is the best
            least = result.cost.seconds * (1.0 - result.report.gap)
            may_be = self.problem.excess_in_parts(best.cost) or least < best.cost.seconds
            if result.report.gap > RELATIVE_GAP and may_be and not self.deadline.over():
                search = self.searches[at].on_level(3)
                (better,) = side_by_side([search.run], self.deadline)
                both = [result, *([] if better is None else [better])]
                self.results[at] = fastest(both, self.problem)

    def _place(self, found: tuple[MeshShapeSearch, MeshShapePlan | None]) -> int:
        """Return the place of a mesh among those of the problem."""
        return self._meshes.index(found[0])

    def _split_axes(self) -> None:
        """Split the axes of the best mesh as long as that makes it so much faster that the plan
        would be taken, though one on fewer axes may be simpler."""
        tried = {_used(search.mesh) for search in self._meshes}
        worth = 1 + max(MIN_GAIN, self.problem.aim.objective.uncertainty)
        best = None
        while (known := self._known()) and (fast := fastest(known, self.problem)) is not best:
            if best is not None and fast.cost.seconds * worth > best.cost.seconds:
                return
            best, limit_s = fast, self._fastest_s() / worth
            waiting = sum(best.cost.communication_s) + best.cost.exposed_s
            if waiting <= MIN_WAITING * best.cost.seconds or self.deadline.over():
                return
            finer = [mesh for mesh in finer_meshes(best.mesh) if _used(mesh) not in tried]
            tried.update(map(_used, finer))
            least_s = [self._by_first_axis.get(_used(mesh)[:1], 0.0) for mesh in finer]
            self._run(
                [
                    self.make(mesh, None)
                    for mesh, least in zip(finer, least_s, strict=True)
                    if least < limit_s
                ]
            )

    def _run(self, searches: Sequence[MeshShapeSearch]) -> None:
        """Run searches side by side."""
        self.searches += searches
        self.results += side_by_side([search.run for search in searches], self.deadline)

    def _known(self) -> list[FoldedPlan]:
        return [*self.plain, *(result for result in self.results if result is not None)]

    def _fastest_s(self) -> float:
        """Seconds of the fastest plan that is known; infinite where none fits."""
        known = self._known()
        best = fastest(known, self.problem) if known else None
        fits = best is not None and not self.problem.excess_in_parts(best.cost)
        return best.cost.seconds if best is not None and fits else math.inf


def side_by_side(runs: Sequence[Callable[[Deadline], R]], deadline: Deadline) -> list[R]:
    """Run parts of searches in threads: the solver works beside Python; all else takes turns.

    If one fails, or Ctrl-C comes, nobody waits for the others: they see soon that they are given
    up.
    """
    pool = ThreadPoolExecutor(max(1, min(len(runs), os.cpu_count() or 1)))
    try:
        running = [pool.submit(run, deadline) for run in runs]
        # A thread that waits without an end may not notice Ctrl-C.
        while wait(running, LOOK_S, FIRST_EXCEPTION).not_done:
            if any(future.done() and future.exception() for future in running):
                break
        return [future.result() for future in running if future.done()]
    except BaseException:
        deadline.stop()
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _used(mesh: Mesh) -> tuple[int, ...]:
    """The sizes of the axes that have several ranks."""
    return tuple(size for size in mesh.shape if size > 1)
