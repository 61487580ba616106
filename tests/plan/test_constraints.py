"""Constraints: what matches, how they combine, and what is said when they cannot hold."""

import logging

import pytest

from tests.plan.graphs import mlp
from tfpar.constraints import (
    batch,
    batch_axes,
    constraints_of,
    from_layout_map,
    replicate,
    resolve,
    resolve_outputs,
    resolve_variables,
    shard,
    shard_output,
)
from tfpar.spec import ArgumentError, Mesh, SpecError, format_spec

MESH = Mesh.of([2, 4])
VARIABLES = [
    ("block_0/fc1/kernel", (6, 16)),
    ("block_0/fc1/bias", (16,)),
    ("block_0/fc2/kernel", (16, 6)),
    ("block_1/fc1/kernel", (6, 16)),
    ("head/kernel", (6, 50257)),
    ("step", ()),
]


def specs(*constraints, mesh=MESH, variables=VARIABLES):
    return {n: format_spec(s) for n, s in resolve(constraints, variables, mesh).items()}


def error(*constraints, mesh=MESH, variables=VARIABLES) -> str:
    with pytest.raises(SpecError) as caught:
        resolve(constraints, variables, mesh)
    return str(caught.value)


@pytest.mark.parametrize("pattern", ["block_.*/fc1/kernel", "fc1/kernel", "fc1/k.*", ".*c1/kernel"])
def test_pattern_matches_paths_and_their_ends(pattern):
    found = specs(shard(pattern, dim=1, axis="model"))
    assert found == {"block_0/fc1/kernel": "R,S(1)", "block_1/fc1/kernel": "R,S(1)"}


def test_patterns_may_name_the_place_of_a_variable_in_its_model():
    places = {"block_0/fc1/kernel": "net/left/block_0/fc1/kernel"}
    for pattern in ("net/left/block_0/fc1/kernel", "net/left/.*/kernel"):
        constraint = shard(pattern, dim=1, axis="model")
        found = resolve_variables([constraint], VARIABLES, MESH, places=places)
        assert {n: format_spec(r.spec) for n, r in found.items()} == {
            "block_0/fc1/kernel": "R,S(1)"
        }
    with pytest.raises(SpecError, match="matches no variable"):
        resolve_variables([shard("net/fc1/kernel", 1, "model")], VARIABLES, MESH, places=places)


def test_alternatives_match_as_one_pattern():
    assert list(specs(shard("fc1/bias|fc2/kernel", dim=0, axis="model"))) == [
        "block_0/fc1/bias",
        "block_0/fc2/kernel",
    ]


def test_sizes_that_do_not_divide_are_fine():
    assert specs(shard("head/kernel", -1, "model")) == {"head/kernel": "R,S(1)"}


def test_constraints_on_different_axes_combine():
    found = specs(shard(".*kernel", 0, "data"), shard("head/kernel", 1, "model"))
    assert found["head/kernel"] == "S(0),S(1)"
    assert found["block_0/fc2/kernel"] == "S(0),R"


def test_exact_path_wins_over_patterns():
    found = specs(shard(".*kernel", 1, "model"), replicate("head/kernel"))
    assert found["head/kernel"] == "R,R"
    assert found["block_0/fc1/kernel"] == "R,S(1)"
    found = specs(shard(".*kernel", 1, "model"), replicate("head/kernel", axis="data"))
    assert found["head/kernel"] == "R,S(1)"


def test_stride_and_negative_dims():
    found = specs(shard("block_0/fc1/kernel", -1, "model", stride=8))
    assert found == {"block_0/fc1/kernel": "R,S(1/8)"}


def test_repeated_constraint_is_harmless():
    assert specs(shard("head.*", 1, "model"), shard("head/k.*", -1, "model")) == {
        "head/kernel": "R,S(1)"
    }


def test_contradiction_names_both_and_the_variable():
    text = error(shard(".*fc1/kernel", 0, "model"), shard("block_0.*kernel", 1, "model"))
    assert "block_0/fc1/kernel" in text and "contradict" in text and "'model'" in text
    assert "shard('.*fc1/kernel', dim=0, axis='model')" in text
    assert "shard('block_0.*kernel', dim=1, axis='model')" in text


def test_matching_nothing_names_the_nearest():
    text = error(shard("block_0/fc3/kernel", 1, "model"))
    assert "matches no variable" in text and "nearest names: 'block_0/fc" in text
    text = error(shard("1/kernel", 1, "model"))
    assert "to its end" in text and "write '.*1/kernel'" in text
    assert "write 'fc1/k.*'" in error(shard("fc1/k", 1, "model"))
    text = error(shard("xyz", 1, "model"), variables=[("a", ()), ("b", ())])
    assert "There are 2: 'a', 'b'" in text


def test_dim_out_of_range_names_variable_and_shape():
    text = error(shard("block_0.*", 1, "model"))
    assert "'block_0/fc1/bias' of shape (16,)" in text and "-1..0" in text
    assert "no dims to split" in error(shard("step", 0, "model"))


def test_unknown_axis_names_the_axes():
    text = error(shard("head/kernel", 1, "modle"))
    assert "no axis 'modle'" in text and "'data', 'model'" in text


def test_stride_that_does_not_fit_is_explained():
    text = error(shard("head/kernel", 0, "model", stride=4))
    assert "'head/kernel' of shape (6, 50257)" in text and "stride=4" in text and "divide" in text


@pytest.mark.parametrize(
    "make, sign",
    [
        (lambda: shard("(", 0, "model"), "not a regular expression"),
        (lambda: shard("", 0, "model"), "pattern"),
        (lambda: shard("a", "1", "model"), "dim is '1'; it must be a whole number"),
        (lambda: from_layout_map({"a": "model"}), "axis name or None per dim"),
        (lambda: from_layout_map({"a": ("model", "model")}), "two dims over one mesh axis"),
    ],
)
def test_malformed_constraints_are_refused_when_made(make, sign):
    with pytest.raises((ArgumentError, SpecError), match=sign):
        make()


def test_constraints_come_one_by_one_or_as_a_list_or_as_a_layout_map():
    one, layouts = shard("a", 1, "model"), {"b": (None, "model")}
    mapped = from_layout_map(layouts)
    for given, found in (
        (None, ()),
        ((), ()),
        (one, (one,)),
        ([one], (one,)),
        (layouts, mapped),
        (mapped, mapped),
        ([one, mapped], (one, *mapped)),
        ([layouts, one], (*mapped, one)),
        (iter([one]), (one,)),
    ):
        assert constraints_of("constraints", given) == found
    for wrong in (3, "a", [3], ["a"], [None], [[3]], lambda: one):
        with pytest.raises(ArgumentError, match="constraints is .*; it must be a constraint"):
            constraints_of("constraints", wrong)


# --- layout maps -----------------------------------------------------------------


def test_layout_map_lays_every_axis():
    constraints = from_layout_map({".*fc1/kernel": (None, "model"), ".*bias": (None,)})
    assert specs(*constraints) == {
        "block_0/fc1/kernel": "R,S(1)",
        "block_0/fc1/bias": "R,R",
        "block_1/fc1/kernel": "R,S(1)",
    }
    text = error(*constraints, shard("block_0/fc1.*", 0, "data"))
    assert "contradict" in text


def test_layout_map_of_keras():
    keras = pytest.importorskip("keras")
    layouts = {".*fc1/kernel": keras.distribution.TensorLayout(("data", "model"))}
    assert specs(*from_layout_map(layouts))["block_1/fc1/kernel"] == "S(0),S(1)"


def test_layout_map_longer_than_the_rank_is_refused():
    text = error(*from_layout_map({".*fc1.*": (None, "model")}))
    assert "lays out 2 dims" in text and "'block_0/fc1/bias'" in text


def test_unmatched_layout_entries_are_warned_of(caplog):
    constraints = from_layout_map({".*fc1/kernel": (None, "model"), "attention.*": ("model",)})
    with caplog.at_level(logging.WARNING, "tfpar"):
        resolve(constraints, VARIABLES, MESH)
    assert "attention" in caplog.text
    assert "matches no variable" in error(*from_layout_map({"attention.*": ("model",)}))


# --- the batch -------------------------------------------------------------------


@pytest.mark.parametrize(
    "constraints, mesh, expected",
    [
        ((), Mesh.of([4]), ("data",)),
        ((), MESH, ("data", "model")),
        ((), Mesh.of([2, 2, 2]), ("axis0", "axis1", "axis2")),
        ((shard(".*", 0, "model"),), MESH, ("data",)),
        ((replicate(".*"),), MESH, ("data", "model")),
        ((shard_output(".*", 1, "model"),), MESH, ("data",)),
        # ZeRO lays state over the axis that holds the batch.
        ((shard("adam.*", 0, "data"),), MESH, ("data", "model")),
        ((shard("adam.*", 0, "a"),), Mesh.of({"a": 2, "b": 2}), ("b",)),
        ((shard("adam.*", 0, "a"), batch("b", "a")), Mesh.of({"a": 2, "b": 2}), ("a", "b")),
        ((batch(),), MESH, ()),
    ],
)
def test_batch_axes(constraints, mesh, expected):
    assert batch_axes(constraints, mesh) == expected


def test_batch_errors():
    with pytest.raises(SpecError, match="no axis 'rows'"):
        batch_axes([batch("rows")], MESH)
    with pytest.raises(SpecError, match="contradict"):
        batch_axes([batch("data"), batch("model")], MESH)


# --- activations -----------------------------------------------------------------


def outputs(*constraints, mesh=MESH):
    found = resolve_outputs(constraints, mlp(), mesh)
    return {n: format_spec(r.spec) for n, r in found.items()}


def test_output_of_a_scope_keeps_the_batch_split():
    assert outputs(shard_output("mlp/block_0", -1, "model")) == {
        "mlp/block_0/fc2/Relu:0": "S(0),S(1)"
    }
    assert outputs(shard_output("mlp/block_0", 1, "model"), batch()) == {
        "mlp/block_0/fc2/Relu:0": "R,S(1)"
    }


def test_outermost_scopes_win_and_op_names_serve():
    assert list(outputs(shard_output(".*block.*", 1, "model"))) == ["mlp/block_0/fc2/Relu:0"]
    assert list(outputs(shard_output(".*/MatMul", 1, "model"))) == [
        "mlp/block_0/fc1/MatMul:0",
        "mlp/block_0/fc2/MatMul:0",
        "mlp/head/MatMul:0",
    ]


def test_output_errors():
    graph = mlp()
    for constraint, signs in (
        (shard_output("mlp/blok_0", 1, "model"), ("no scope or op", "'mlp/block_0'")),
        (shard_output("mlp/block_0", 2, "model"), ("mlp/block_0/fc2/Relu:0", "-2..1")),
    ):
        with pytest.raises(SpecError) as caught:
            resolve_outputs([constraint], graph, MESH)
        assert all(s in str(caught.value) for s in signs)
    both = [shard_output("mlp/block_0", 0, "model"), shard_output("mlp/bl.*", 1, "model")]
    with pytest.raises(SpecError, match="contradict"):
        resolve_outputs(both, graph, MESH)
