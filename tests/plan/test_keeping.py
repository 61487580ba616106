"""`keep`: what a plan does with some of a model stays, the rest is decided anew."""

from __future__ import annotations

import re

import pytest

from tests.cases import deep_list
from tests.plan.graphs import mlp
from tfpar.constraints import batch, replicate, shard, shard_output
from tfpar.plans import keep, plan_from_constraints
from tfpar.spec import ArgumentError, Mesh, PlanError, SpecError

MESH = Mesh.of({"data": 2, "model": 2})
COLUMNS = shard("block_0/fc1/.*", -1, "model")
ROWS = shard("block_0/fc2/kernel", 0, "model")


def planned(*constraints, mesh=MESH):
    return plan_from_constraints(mlp(), mesh, constraints)


def specs(plan):
    return {n: v.spec for n, v in plan.variables.items() if v.spec is not None}


OLD = planned(COLUMNS, ROWS, shard("head/kernel", 1, "model"))


@pytest.mark.parametrize("pattern", ["block_0/.*", "block_0", "mlp/block_0|block_0", "fc."])
def test_what_matches_stays_and_the_rest_is_open(pattern):
    new = planned(*keep(OLD, pattern))
    assert specs(new) == {n: s for n, s in specs(OLD).items() if n.startswith("block_0")}
    assert new.batch_axes == OLD.batch_axes == ("data",)


def test_the_rest_takes_other_constraints_and_what_is_kept_wins():
    new = planned(*keep(OLD, "block_0"), replicate(".*"), shard("head/kernel", 0, "data"))
    assert specs(new)["block_0/fc1/kernel"] == OLD.variables["block_0/fc1/kernel"].spec
    assert specs(new)["block_0/fc2/kernel"] == OLD.variables["block_0/fc2/kernel"].spec
    assert [*map(str, specs(new)["head/kernel"])] == ["S(0)", "R"]


def test_a_file_will_do(tmp_path):
    path = tmp_path / "p.json"
    OLD.save(path)
    assert specs(planned(*keep(path, "block_0"))) == specs(planned(*keep(OLD, "block_0")))
    with pytest.raises(PlanError, match="There is no plan file"):
        keep(tmp_path / "q.json", "block_0")


def test_the_batch_stays_split_over_the_same_axes():
    old = planned(COLUMNS, batch())
    assert planned(*keep(old, "fc1")).batch_axes == ()
    told = (
        r"keep\(plan, 'fc1'\), with a batch over no axis and batch\('data'\) contradict each other"
    )
    with pytest.raises(SpecError, match=told):
        planned(*keep(old, "fc1"), batch("data"))


def test_pinned_activations_stay():
    old = planned(shard_output("mlp/block_0/fc1", 1, "model"), COLUMNS)
    (name, spec) = next(iter(old.tensors.items()))
    new = planned(*keep(old, "block_0/fc1"))
    assert dict(new.tensors) == {name: spec}
    assert not planned(*keep(old, "block_0/fc1/bias")).tensors


def test_meshes_of_other_sizes_but_not_of_other_axes():
    wider = Mesh.of({"data": 1, "model": 5})
    assert specs(planned(*keep(OLD, "block_0"), mesh=wider)) == specs(
        planned(*keep(OLD, "block_0"))
    )
    turned = Mesh.of({"model": 2, "data": 2})
    kernel = specs(planned(*keep(OLD, "block_0"), mesh=turned))["block_0/fc1/kernel"]
    assert [*map(str, kernel)] == ["S(1)", "R"]
    for mesh, told in (
        (Mesh.of({"a": 2, "b": 2}), "the mesh has no axis"),
        (
            Mesh.of({"data": 2, "model": 2, "more": 2}),
            "has the mesh axes data, model, but the mesh",
        ),
    ):
        with pytest.raises(SpecError, match=told) as error:
            planned(*keep(OLD, "block_0"), mesh=mesh)
        assert "keep('block_0/fc1/kernel'" in str(error.value)


def test_errors_name_the_call():
    with pytest.raises(
        SpecError, match=r"keep\(plan, 'blok_0'\) matches no variable or layer"
    ) as e:
        keep(OLD, "blok_0")
    assert "block_0/fc1/kernel" in str(e.value)
    with pytest.raises(PlanError, match=re.escape("keep(plan, 'bias'): the plan leaves all that")):
        keep(planned(ROWS), "bias")
    with pytest.raises(SpecError, match="not a regular expression"):
        keep(OLD, "block_(")
    with pytest.raises(ArgumentError, match=r"keep\(plan, \[.*\]\): the pattern is \[.*a string"):
        keep(OLD, deep_list())
    with pytest.raises(ArgumentError, match="plan is 3"):
        keep(3, "block_0")
