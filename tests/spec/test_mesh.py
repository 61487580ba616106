"""Meshes: row-major ranks, groups, and what is refused."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.spec.strategies import meshes
from tfpar.spec import Mesh, SpecError, split


@given(meshes)
def test_ranks_are_row_major(mesh):
    assert mesh.size == math.prod(mesh.shape)
    coordinates = [mesh.coordinates(r) for r in range(mesh.size)]
    assert coordinates == list(itertools.product(*map(range, mesh.shape)))


@given(meshes, st.data())
def test_groups_part_the_ranks(mesh, data):
    axes = tuple(sorted(data.draw(st.sets(st.integers(0, mesh.num_axes - 1)))))
    groups = mesh.groups(axes)
    assert sorted(r for g in groups for r in g) == list(range(mesh.size))
    assert {len(g) for g in groups} == {mesh.group_size(axes)}
    for group in groups:
        assert list(group) == sorted(group)
        rest = {tuple(c for a, c in enumerate(mesh.coordinates(r)) if a not in axes) for r in group}
        assert len(rest) == 1


def test_neighbours_differ_in_the_last_axis():
    mesh = split([2, 4])
    assert mesh.groups((1,)) == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert mesh.groups((0,)) == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert mesh.groups((0, 1)) == (tuple(range(8)),)


def test_names():
    assert split([4]).axis_names == ("data",)
    assert split([2, 8]).axis_names == ("data", "model")
    assert split([2, 2, 2]).axis_names == ("axis0", "axis1", "axis2")
    assert split({"a": 2, "b": 3}) == Mesh(("a", "b"), (2, 3))
    assert split([2, 3], axis_names=["a", "b"]) == split({"a": 2, "b": 3})
    assert split({"x": 2, "y": 3}, axis_names=["a", "b"]) == split({"a": 2, "b": 3})
    assert str(split([2, 8])) == "data=2 x model=8"
    assert split([2, 8]).axis("model") == 1


@pytest.mark.parametrize(
    "make, sign",
    [
        (lambda: split([]), "at least one axis"),
        (lambda: split([2, 0]), "'model' has size 0"),
        (lambda: split([-1]), "'data' has size -1"),
        (lambda: split([2.0]), "has size 2.0"),
        (lambda: split([True]), "has size True"),
        (lambda: split([2, 2], axis_names=["a"]), "one name per axis"),
        (lambda: split([2, 2], axis_names=["a", "a"]), "names repeat"),
        (lambda: split([2], axis_names=[""]), "non-empty strings"),
        (lambda: split([2, 2]).axis("rows"), "no axis 'rows'.*'data', 'model'"),
    ],
)
def test_errors_name_the_axis(make, sign):
    with pytest.raises(SpecError, match=sign):
        make()
