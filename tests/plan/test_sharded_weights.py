"""`tap.fsdp`: how weights lie that ranks store in parts, and what is said when they cannot."""

from __future__ import annotations

import dataclasses

import pytest

from tests.plan.graphs import mlp
from tfpar.constraints import batch, fsdp, resolve_fsdp, resolve_variables, shard, split_weight
from tfpar.ir import Op, Variable
from tfpar.plans import Plan, keep, plan_from_constraints
from tfpar.spec import ArgumentError, Mesh, PlanError, Shard, SpecError, format_spec, parse_spec

MESH = Mesh.of({"data": 2, "model": 4})
SHAPES = {
    "fc1/kernel": (6, 16),
    "fc1/bias": (16,),
    "head/kernel": (16, 5),
    "scale": (),
    "one": (1,),
}


def variables() -> list[Variable]:
    found = []
    for name, shape in {**SHAPES, "moving_mean": (16,)}.items():
        handle = Op(f"{name}/handle", "Placeholder", []).add_output(shape, "resource")
        found.append(Variable(name, shape, "float32", name in SHAPES, handle))
    return found


def resolved(*constraints, mesh=MESH):
    known = variables()
    laid = resolve_variables(constraints, [(v.name, v.shape) for v in known], mesh)
    return resolve_fsdp(constraints, known, mesh, laid)


def specs(*constraints, mesh=MESH):
    return {n: format_spec(w.spec) for n, w in resolved(*constraints, mesh=mesh).items()}


def test_each_weight_is_split_in_its_longest_dim_and_read_whole():
    found = resolved(fsdp("data"))
    assert specs(fsdp("data")) == {
        "fc1/kernel": "S(1),R",
        "fc1/bias": "S(0),R",
        "head/kernel": "S(0),R",
        "scale": "R,R",
        "one": "R,R",
    }
    split = {name: weight for name, weight in found.items() if name not in ("scale", "one")}
    assert {format_spec(w.gathered) for w in split.values()} == {"R,R"}
    assert all(w.slots is None and w.scatters_gradient for w in split.values())
    assert found["scale"].gathered is None, "as it is stored"
    assert not any(w.keep_gathered for w in found.values())
    assert "moving_mean" not in found, "it is no weight"


def test_what_tensor_parallelism_splits_is_split_further_in_another_dim():
    found = resolved(shard("fc1/kernel", 1, "model"), fsdp("data", ".*kernel", keep=True))
    assert format_spec(found["fc1/kernel"].spec) == "S(0),S(1)"
    assert format_spec(found["fc1/kernel"].gathered) == "R,S(1)"
    assert found["fc1/kernel"].why == (
        "shard('fc1/kernel', dim=1, axis='model'); fsdp('data', '.*kernel', keep=True)"
    )
    assert found.keys() == {"fc1/kernel", "head/kernel"}


def test_lower_stages_leave_weights_whole():
    one, two = (resolved(fsdp("data", stage=stage))["fc1/kernel"] for stage in (1, 2))
    assert format_spec(one.spec) == "R,R" and format_spec(one.slots) == "S(1),R"
    assert one.gathered is None and not one.scatters_gradient
    assert two == dataclasses.replace(one, scatters_gradient=True, why="fsdp('data', stage=2)")


def test_axes_combine():
    found = resolved(fsdp("data"), fsdp("model"), batch("data", "model"))["fc1/kernel"]
    assert format_spec(found.spec) == "S(1),S(1)" and format_spec(found.gathered) == "R,R"


def test_slots_may_be_split_further_than_the_weights():
    found = resolved(fsdp("model", stage=1), fsdp("data", ".*kernel"), batch("data", "model"))[
        "fc1/kernel"
    ]
    assert format_spec(found.spec) == "S(1),R" and format_spec(found.slots) == "S(1),S(1)"
    assert format_spec(found.gathered) == "R,R"


def test_what_divides_comes_first_then_what_is_longer_than_the_axis():
    three = Mesh.of({"data": 3})
    assert split_weight((4, 9), parse_spec("R"), 0, three) == (Shard(1),)
    assert split_weight((5, 4), parse_spec("R"), 0, three) == (Shard(0),), "uneven"
    assert split_weight((2, 2), parse_spec("R"), 0, three) == parse_spec("R")


@pytest.mark.parametrize(
    ("constraints", "says"),
    [
        ([fsdp("rows")], "the mesh has no axis 'rows'"),
        ([fsdp("data", "nothing")], "fsdp('data', 'nothing') matches no weight"),
        ([fsdp("data", "moving_mean")], "matches no weight"),
        ([fsdp("data"), batch("model")], "the batch is not split over 'data'"),
        (
            [fsdp("data"), shard("fc1/kernel", 0, "data")],
            "shard('fc1/kernel', dim=0, axis='data') and fsdp('data') both split it along",
        ),
        ([fsdp("data"), fsdp("data")], "fsdp('data') and fsdp('data') both split it along"),
    ],
)
def test_what_cannot_hold_is_named(constraints, says):
    with pytest.raises(SpecError) as caught:
        resolved(*constraints)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (dict(axis=1), "axis is 1"),
        (dict(axis="data", stage=4), "stage is 4; it must be one of 1, 2, 3"),
        (dict(axis="data", keep="yes"), "keep is 'yes'"),
        (dict(axis="data", pattern="("), "not a regular expression"),
        (dict(axis="data", stage=2, keep=True), "stage 2 stores weights whole"),
    ],
)
def test_wrong_arguments_are_named(arguments, says):
    with pytest.raises((ArgumentError, SpecError), match="fsdp") as caught:
        fsdp(**arguments)
    assert says in str(caught.value)


def test_plan_files_differences_and_summaries_have_them():
    mesh = Mesh.of({"data": 2})
    plan = plan_from_constraints(mlp(), mesh, [fsdp("data", ".*kernel")])
    whole = plan_from_constraints(mlp(), mesh, [batch("data")])
    assert Plan.from_json(plan.to_json()) == plan
    name = next(n for n, v in plan.variables.items() if v.gathered is not None)
    assert f"{name} as layers read it: R -> as it is stored" in plan.diff(whole)
    kept = plan_from_constraints(mlp(), mesh, [fsdp("data", ".*kernel", keep=True)])
    assert f"{name}: kept for the backward pass" in plan.diff(kept)
    assert "gathered for their layers (ZeRO-3, FSDP)" in plan.summary()
    assert "Layers read it as" in plan.explain(name)
    wrong = dataclasses.replace(plan.variables[name], gathered=(Shard(9),))
    with pytest.raises(PlanError, match="gathered"):
        dataclasses.replace(plan, variables={**plan.variables, name: wrong})


def test_what_is_kept_of_a_plan_is_how_layers_read_weights():
    plan = plan_from_constraints(mlp(), Mesh.of({"data": 2}), [fsdp("data", ".*kernel")])
    kept = [c for c in keep(plan, ".*kernel") if hasattr(c, "spec")]
    assert kept and all(format_spec(c.spec) == "R" for c in kept)
