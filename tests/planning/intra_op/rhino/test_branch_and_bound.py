"""Meshes are bounded, and those on which no plan comes near the best are not searched."""

from __future__ import annotations

import dataclasses
import math

import pytest

from tests.planning.changes import changed
from tests.planning.problems import Captured
from tests.planning.tiny import GRAPHS, problem
from tfpar.cost import Cost
from tfpar.planning.deadline import Deadline
from tfpar.planning.folding.folded_model import folded_model
from tfpar.planning.folding.folded_plan import FoldedPlan
from tfpar.planning.intra_op.rhino.branch_and_bound import MeshTree
from tfpar.planning.intra_op.rhino.mesh_search import MeshShapeSearch
from tfpar.planning.meshes import given_mesh
from tfpar.propagation import Anchors
from tfpar.spec import Mesh

UNCERTAIN = 0.1


def plan(mesh: Mesh, seconds: float, waiting: float = 0.0, memory: float = 0.0) -> FoldedPlan:
    """A plan with a collective that takes so long, part of it waiting."""
    parts = (seconds - waiting, 0.0, 0.0), (waiting, 0.0, 0.0)
    cost = Cost(seconds, *parts, 0.0, 0.0, 1, weight_bytes=memory, collectives=1)
    return FoldedPlan(mesh, (), Anchors({}), cost, 0)


@dataclasses.dataclass(eq=False)
class Known:
    """A search of which is known what it finds, and its bound, by the sizes of the mesh."""

    mesh: Mesh
    least: dict[tuple[int, ...], float]
    found: dict[tuple[int, ...], float]
    part_waiting: float
    memory: float

    def least_seconds(self, deadline: Deadline, num_axes: int = 1) -> float:
        sizes = self.mesh.shape if num_axes == 1 else ("axes", *self.mesh.shape)
        return self.least.get(sizes, 1.0)

    def run(self, deadline: Deadline) -> FoldedPlan:
        seconds = self.found.get(self.mesh.shape, 10.0)
        return plan(self.mesh, seconds, self.part_waiting * seconds, self.memory)


def grown(least, found, *, plain=20.0, waiting=0.0, uncertainty=UNCERTAIN, memory=0.0):
    """The meshes of 8 ranks, searched."""
    asked = problem(GRAPHS["one layer"](), [8]).with_objective(uncertainty=uncertainty)
    tree = MeshTree(
        asked,
        lambda mesh, batch: Known(mesh, least, found, waiting, memory),
        [plan(Mesh.of([8]), plain, memory=memory)],
        Deadline(),
    )
    tree.search()
    return tree


def searched(least, found, **options):
    """The meshes of 8 ranks that are searched, in their order, and those that are skipped."""
    tree = grown(least, found, **options)
    assert tree.bound_s == min(search.least_seconds(Deadline()) for search in tree._meshes)
    return [s.mesh.shape for s in tree.searches], {one.name: one.seconds for one in tree.skipped}


def test_the_mesh_with_the_least_bound_comes_first_and_may_be_the_only_one():
    least = {(8, 1): 12.0, (4, 2): 5.0, (2, 4): 11.0}
    assert searched(least, {(4, 2): 9.0}) == (
        [(4, 2)],
        {"data=8 x model=1": 12.0, "data=2 x model=4": 11.0},
    )
    assert searched(least, {(4, 2): 10.5})[0] == [(4, 2), (2, 4)], "one as simple may be near"
    assert searched(least, {(4, 2): 10.5}, uncertainty=0.0)[0] == [(4, 2)]


def test_where_nothing_fits_all_meshes_are_searched():
    least = {(8, 1): 12.0, (4, 2): 5.0, (2, 4): 11.0}
    assert len(searched(least, {(4, 2): 9.0}, memory=1e30)[0]) == 3


def test_axes_are_split_where_collectives_take_time():
    found = {(2, 4): 8.0, (2, 2, 2): 6.0}
    assert searched({}, found)[0][3:] == [], "nothing is waited for"
    assert searched({}, found, waiting=0.5)[0][3:] == [(2, 2, 2)]
    least = {(2, 4): 7.9}
    assert searched(least, found, waiting=0.5)[0][3:] == [], (
        "no plan with that first axis is faster"
    )


def test_a_bound_of_the_finest_mesh_is_one_of_all():
    least = {(8, 1): 12.0, (4, 2): 5.0, (2, 4): 11.0, ("axes", 2, 2, 2): 9.0}
    tree = grown(least, {(4, 2): 9.0})
    assert tree.bound_s == 5.0
    tree.tighten_bound()
    assert tree.bound_s == 9.0
    tree.solve()  # what is found is the best: nothing is asked of the searches


def test_a_finest_mesh_without_a_plan_says_nothing_of_others():
    least = {(8, 1): 12.0, (4, 2): 5.0, (2, 4): 11.0, ("axes", 2, 2, 2): math.inf}
    tree = grown(least, {(4, 2): 9.0})
    tree.tighten_bound()
    assert tree.bound_s == 5.0


def test_no_closer_bound_is_looked_for_when_the_time_is_over():
    least = {(8, 1): 12.0, (4, 2): 5.0, (2, 4): 11.0, ("axes", 2, 2, 2): 9.0}
    tree = grown(least, {(4, 2): 9.0})
    tree.deadline = Deadline(0.0)
    tree.tighten_bound()
    assert tree.bound_s == 5.0


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("recurrent", (1, 2)),
        ("recurrent", (2, 1)),
        ("recurrent", (2, 2)),
        ("mlp", (2, 2)),
        ("mlp", (1, 4)),
        ("wide", (2, 8)),
    ],
)
@pytest.mark.parametrize("cluster", ["v100-ethernet", "cpu"])
def test_the_bound_of_a_mesh_is_below_its_plan(name, sizes, cluster):
    """Also of ops that are left alone, behind an axis of one rank, and in one memory; nothing but
    work counts."""
    asked = Captured.saved(name).problem([math.prod(sizes)], cluster)
    mesh = Mesh(("data", "model"), sizes)
    asked = changed(asked, cluster=asked.cluster.with_device(launch_s=0.0))
    asked = asked.with_meshes([given_mesh(mesh, ["model"])])
    search = MeshShapeSearch(asked, folded_model(asked, 2), mesh, [1], 2)
    found = search.run(Deadline()).cost.seconds
    first, both = (search.least_seconds(Deadline(), count) for count in (1, 2))
    assert 0 < first <= both * (1 + 1e-9) and both <= found * (1 + 1e-9)
