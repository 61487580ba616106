"""Meshes: row-major ranks, groups, and what is refused."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import deep_list
from tests.spec.strategies import meshes
from tfpar.spec import ArgumentError, Mesh, SpecError, split


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
        (lambda: split([2, 2], axis_names=deep_list()), "one name per axis"),
        (lambda: split([2, 2], axis_names=["a", "a"]), "names repeat"),
        (lambda: split([2], axis_names=[""]), "non-empty strings"),
        (lambda: split([2, 2]).axis("rows"), "no axis 'rows'.*'data', 'model'"),
    ],
)
def test_errors_name_the_axis(make, sign):
    with pytest.raises(SpecError, match=sign):
        make()


@pytest.mark.parametrize(
    ("shape", "parts", "expected"),
    [
        ([8], 2, [4]),
        ([2, 8], 1, [2, 8]),
        ([2, 8], 2, [1, 8]),
        ([2, 8], 4, [1, 4]),
        ([4, 8], 2, [2, 8]),
        ([2, 6], 4, [1, 3]),
        ([2, 3, 4], 12, [1, 1, 2]),
        ([1, 4], 2, [1, 2]),
        ([2, 8], 16, [1, 1]),
        ([3, 8], 2, [3, 4]),
        ([3, 8], 8, [3, 1]),
        ([6, 4], 4, [3, 2]),
        ([2, 3, 4], 3, [2, 1, 4]),
    ],
)
def test_a_part_of_a_mesh_keeps_its_last_axes(shape, parts, expected):
    assert split(shape).sized(split(shape).size // parts) == split(expected)


def test_a_mesh_of_any_number_of_ranks_has_the_rest_along_its_first_axis():
    assert split([2, 8]).sized(3) == split([3, 1]) and split([2, 8]).sized(6) == split([3, 2])
    assert split([2, 2]).sized(8) == split([4, 2])
    with pytest.raises(ArgumentError, match="num_ranks is 0"):
        split([6, 4]).sized(0)


@given(meshes, st.integers(1, 12))
def test_parts_of_a_mesh_keep_what_they_can_of_its_last_axes(mesh, parts):
    if mesh.size % parts:
        return
    part = mesh.sized(mesh.size // parts)
    assert part.axis_names == mesh.axis_names and part.size * parts == mesh.size
    rows = [math.prod(mesh.shape[axis:]) for axis in range(mesh.num_axes + 1)]
    if not any(
        part.size % inner == 0 == outer % part.size for outer, inner in itertools.pairwise(rows)
    ):
        return  # no block of the mesh is a run of so many ranks
    for rank in range(mesh.size):  # laid in each part as they are in the whole
        first = mesh.coordinates(rank // part.size * part.size)
        own = part.coordinates(rank % part.size)
        assert mesh.coordinates(rank) == tuple(map(sum, zip(first, own, strict=True)))
