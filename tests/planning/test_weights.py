"""The weights that a search decides, and the ways in which each may lie."""

from __future__ import annotations

import dataclasses

import pytest

from tests.planning.changes import changed
from tests.planning.tiny import chain, problem
from tfpar.ir import Op, Variable
from tfpar.planning.folding.folded_model import FoldedModel
from tfpar.planning.intra_op.weights import WeightGroup, resembling, weight_groups, weight_options
from tfpar.planning.meshes import LogicalMesh
from tfpar.planning.problem import ConstrainedSpec
from tfpar.spec import Mesh, format_spec, parse_spec

ONE_AXIS = LogicalMesh(Mesh.of({"data": 2, "model": 2}), (0,), (1,))
TWO_AXES = LogicalMesh(Mesh.of({"d1": 2, "d2": 2}), (), (0, 1))


@pytest.fixture(scope="module")
def asked():
    return problem(chain(64, 32, 48, 16), [2, 2])


@pytest.fixture(scope="module")
def model(asked):
    return FoldedModel.of(asked, 2)


def options(model, logical):
    variable = model.prepared.graph.variables[0]
    return [format_spec(spec) for spec in weight_options(variable, model, logical)]


def test_a_weight_is_whole_or_split_along_the_model_axis(model):
    assert options(model, ONE_AXIS) == ["R,R", "R,S(0)", "R,S(1)"]


def test_along_two_model_axes_dims_are_split_one_by_one_and_both(model):
    found = options(model, TWO_AXES)
    assert found[0] == "R,R"
    assert {"S(0),R", "R,S(1)", "S(0),S(1)", "S(1),S(0)"} <= set(found)
    assert "S(0),S(0)" not in found


def test_where_each_of_two_axes_has_to_be_used_none_alone_is(model):
    used = dataclasses.replace(TWO_AXES, used_axes=(0, 1))
    assert set(options(model, used)) == {"R,R", "S(0),S(1)", "S(1),S(0)"}


def test_weights_are_decided_in_the_order_of_the_graph(asked, model):
    names = [group.name for group in weight_groups(asked, model, ONE_AXIS)]
    assert names == ["layer_1/kernel", "layer_2/kernel"]


def test_what_is_given_is_not_decided(asked, model):
    fixed = {"layer_1/kernel": ConstrainedSpec(parse_spec("R,S(0)"), "so")}
    given = changed(asked, fixed=fixed)
    assert [g.name for g in weight_groups(given, model, ONE_AXIS)] == ["layer_2/kernel"]


def test_without_a_model_axis_nothing_is_decided(asked, model):
    data = dataclasses.replace(ONE_AXIS, model_axes=())
    assert weight_groups(asked, model, data) == []


def group(*texts: str, shape=(8, 16, 4)) -> WeightGroup:
    handle = Op("w/handle", "Placeholder", []).add_output(shape, "resource")
    return WeightGroup([Variable("w", shape, "float32", True, handle)], [*map(parse_spec, texts)])


def test_a_spec_of_another_mesh_resembles_what_is_split_in_the_same_dim_first():
    laid = group("R,R", "S(0),S(1)", "S(1),S(0)", "S(1),S(2)")
    assert resembling(parse_spec("R,S(0)"), laid) == 1
    assert resembling(parse_spec("R,S(1)"), laid) == 2, "of two, the one with the larger other dim"
    assert resembling(parse_spec("S(2),R"), laid) is None
    assert resembling(None, laid) is None


def test_of_options_that_resemble_a_spec_the_one_that_shares_more_is_taken():
    laid = group("R,S(0),R,R", "R,S(0),S(1),S(2)", "R,S(0),S(2),S(1)")
    assert resembling(parse_spec("R,S(0),S(2)"), laid) == 2
    assert resembling(parse_spec("R,S(0),S(1)"), laid) == 1


def test_a_spec_that_is_an_option_resembles_itself():
    laid = group("R,R", "R,S(0)", "R,S(1)")
    assert resembling(parse_spec("R,S(1)"), laid) == 2
