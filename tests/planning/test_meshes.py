"""The meshes that a search may choose from."""

from __future__ import annotations

import pytest

from tfpar.planning.meshes import (
    LogicalMesh,
    expert_meshes,
    finer_meshes,
    finest_meshes,
    given_mesh,
    idle_mesh,
    logical_meshes,
    shapes,
    with_expert_meshes,
)
from tfpar.spec import Mesh, Replicate, Shard


def test_every_split_of_the_ranks_is_a_candidate_data_parallelism_first():
    found = logical_meshes(Mesh.of([2, 2]))
    assert list(map(str, found)) == [
        "data=4 x model=1, batch over data and model",
        "data=2 x model=2, batch over data and model",
        "data=2 x model=2, batch over data",
        "data=1 x model=4, batch over data and model",
        "data=1 x model=4, batch over data",
        "data=1 x d1=2 x d2=2, batch over data",
    ]
    assert all(logical.mesh.size == 4 for logical in found)
    assert not found[0].model_axes, "where no axis is for weights there are none to split"


def test_experts_have_an_axis_beside_those_of_data_and_model_as_long_as_there_are_copies():
    found = expert_meshes(Mesh.of([4, 4]), experts=4)
    assert list(map(str, found)) == [
        "data=4 x experts=2 x model=2, batch over data and experts",
        "data=2 x experts=4 x model=2, batch over data and experts",
        "data=2 x experts=2 x model=4, batch over data and experts",
        "data=1 x experts=4 x model=4, batch over data and experts",
        "data=1 x experts=2 x model=8, batch over data and experts",
        "data=2 x experts=2 x d1=2 x d2=2, batch over data and experts",
        "data=1 x experts=4 x d1=2 x d2=2, batch over data and experts",
        "data=1 x experts=2 x d1=4 x d2=2, batch over data and experts",
        "data=1 x experts=2 x d1=2 x d2=4, batch over data and experts",
    ]
    assert {(mesh.model_axes, mesh.expert_axes) for mesh in found} == {
        ((2,), (1,)),
        ((2, 3), (1,)),
    }
    assert {mesh.shared_axes for mesh in found} == {(1,)}
    assert expert_meshes(Mesh.of([4]), experts=3) == []


def test_experts_get_an_axis_only_where_it_is_open_how_the_batch_is_split():
    free, own = logical_meshes(Mesh.of([8])), expert_meshes(Mesh.of([8]), experts=2)
    found = with_expert_meshes(free, own)
    assert found[-len(own) :] == own and {len(mesh.mesh.shape) for mesh in found[: -len(own)]} == {
        2
    }
    chosen = [mesh for mesh in free if mesh.batch_parts == 2]
    assert with_expert_meshes(chosen, own) == chosen and len(chosen) > 1
    assert with_expert_meshes(free, []) == free


@pytest.mark.parametrize("size", [1, 2, 6, 12])
def test_candidates_are_those_of_as_many_ranks_however_they_stand(size):
    assert logical_meshes(Mesh.of([size])) == logical_meshes(Mesh.of([1, size]))
    assert len(set(logical_meshes(Mesh.of([size])))) == len(logical_meshes(Mesh.of([size])))


def test_weights_may_be_split_over_what_the_batch_leaves_or_over_all():
    mesh = Mesh(("data", "model", "one"), (2, 4, 1))
    assert given_mesh(mesh, ["data"]) == LogicalMesh(mesh, (0,), (1,))
    assert given_mesh(mesh, ["data", "model"]) == LogicalMesh(mesh, (0, 1), (0, 1))
    assert str(given_mesh(mesh, [])).endswith("batch over no axis")


def test_who_decides_the_batch_too_has_fewer_meshes_to_choose_from():
    free = logical_meshes(Mesh.of([12]))
    found = shapes(free)
    assert [mesh.shape for mesh, _ in found] == [(12, 1), (6, 2), (4, 3), (3, 4), (2, 6)]
    assert {axes for _, axes in found} == {None}
    few = [logical for logical in free if logical.batch_parts < 3]
    assert [mesh.shape for mesh, _ in shapes(few)] == [(2, 6), (1, 12)], "ranks in a row, but once"
    one = given_mesh(Mesh(("data", "model"), (1, 12)), ["data"])
    assert shapes([one]) == [(one.mesh, (0,))]
    assert [mesh.shape for mesh, _ in shapes(logical_meshes(Mesh.of([1])))] == [(1, 1)]


def test_that_all_ranks_compute_the_same_is_for_open_meshes():
    free = logical_meshes(Mesh.of([2, 2]))
    idle = idle_mesh(free)
    assert idle is not None and idle.mesh.size == 4 and not (idle.batch_axes or idle.model_axes)
    assert idle not in free
    assert idle_mesh([given_mesh(Mesh.of([4]), [])]) is None


def test_only_inputs_that_hold_the_batch_are_split():
    logical = given_mesh(Mesh(("data", "model"), (2, 2)), ["model"])
    assert logical.batch_names == ("model",)
    assert logical.input_spec(True) == (Replicate(), Shard(0))
    assert logical.input_spec(False) == (Replicate(), Replicate())


def test_an_axis_is_split_in_two_as_long_as_there_are_four_at_most():
    found = finer_meshes(Mesh(("data", "model"), (2, 8)))
    assert [mesh.shape for mesh in found] == [(2, 4, 2), (2, 2, 4)]
    assert found[0].axis_names == ("data", "d1", "d2")
    assert [m.shape for m in finer_meshes(Mesh(("model", "data"), (6, 1)))] == [(3, 2), (2, 3)]
    assert finer_meshes(Mesh(("a", "b", "c", "d"), (4, 4, 4, 4))) == []


def test_the_finest_meshes_have_prime_axes_in_every_order_four_at_most():
    found = {size: [mesh.shape for mesh in finest_meshes(size)] for size in (2, 6, 16, 64)}
    assert found == {
        2: [(2,)],
        6: [(2, 3), (3, 2)],
        16: [(2, 2, 2, 2)],
        64: [(2, 2, 2, 2, 4)],
    }
