"""What an axis adds to a step that others divide: no more than there is."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.planning.problems import Captured
from tfpar.cluster import find_cluster
from tfpar.cost import collective_seconds
from tfpar.planning.deadline import Deadline
from tfpar.planning.folding.folded_model import folded_model
from tfpar.planning.intra_op.rhino.further_axes import _AddedPricer
from tfpar.planning.intra_op.rhino.mesh_search import MeshShapeSearch
from tfpar.spec import Mesh

CLUSTERS = ["rhino-m8", "v100-ethernet", "dgx-a100"]
KINDS = ["all_reduce", "reduce_scatter", "all_gather", "all_to_all"]


@pytest.fixture(scope="module")
def roles():
    return folded_model(Captured.saved("mlp").problem([4], "rhino-m8"), 2).roles


@pytest.mark.parametrize("cluster", CLUSTERS)
@pytest.mark.parametrize("shape", [(2, 4), (8, 2), (3, 5), (2, 2, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_collective_over_several_axes_takes_what_each_adds(cluster, shape, kind, roles):
    """Of the bytes of each, those behind it have divided its own."""
    known, last = find_cluster(cluster), len(shape) - 1
    mesh = Mesh(tuple("abc"[: len(shape)]), shape)
    part = _AddedPricer(mesh, known, roles, last).part_added(kind)
    assert 0 <= part <= 1
    subsets = (itertools.combinations(range(last), n) for n in range(1, last + 1))
    for before in itertools.chain.from_iterable(subsets):
        every = (*before, last)
        for size in np.geomspace(1, 1e10, 41):

            def seconds(axes, size=size, every=every):
                share = mesh.group_size(axes) / mesh.group_size(every)
                return collective_seconds(kind, axes, size * share, mesh, known)

            least = sum(seconds((axis,)) for axis in before) + part * seconds((last,))
            assert least <= seconds(every) * (1 + 1e-9)


def test_where_links_are_alike_a_collective_adds_its_own_time(roles):
    pricer = _AddedPricer(Mesh(("a", "b"), (2, 4)), find_cluster("rhino-m8"), roles, 1)
    assert pricer.part_added("all_reduce") == pytest.approx(1.0)


def test_a_second_axis_raises_the_bound():
    """Without it, what is sent along that axis was free."""
    asked = Captured.saved("mlp").problem([4], "rhino-m8")
    mesh = Mesh(("data", "model"), (2, 2))
    search = MeshShapeSearch(asked, folded_model(asked, 2), mesh, None, 2)
    both = search.least_seconds(Deadline(), 2)
    assert both > 1.05 * search.least_seconds(Deadline())
    assert both <= search.run(Deadline()).cost.seconds
