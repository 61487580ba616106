"""Layers that are put into stages: what a pattern matches, and what is said where it cannot."""

from __future__ import annotations

import pytest

import tfpar as tap
from tests.cases import at_night
from tests.graphs import saved, saved_names
from tests.plan.graphs import mlp
from tfpar.constraints import constraints_of, resolve_stages, resolve_variables
from tfpar.constraints.stages import _layers
from tfpar.ir import DType, Graph, GraphBuilder, Op, Roles, Variable, planning_graph
from tfpar.pipeline import assignable
from tfpar.spec import ArgumentError, Mesh, SpecError


def model(name: str) -> tuple[Graph, list[Op]]:
    step = saved(name)
    graph = planning_graph(step.graph, step.gradients).graph
    return graph, assignable(graph, Roles.of(graph, step.gradient_tensors))


def scopes(stages: dict[Op, int]) -> set[tuple[str, int]]:
    """The layers of a functional model that are put somewhere."""
    return {(op.name.split("/")[1], stage) for op, stage in stages.items()}


def resolved(graph: Graph, ops, *constraints, num_stages: int = 4, **options):
    return resolve_stages(constraints, graph, ops, num_stages, **options)


def called(*layers: tuple[str, str]) -> tuple[Graph, list[Op]]:
    """A model of dense layers, each (layer, the scope of its call); a scope alone has no weight."""
    build = GraphBuilder(name="x")
    attrs = {"dtype": DType("float32")}
    x = build.emit("Placeholder", (), [((2, 2), "float32")], attrs, "x").outputs[0]
    build.graph.inputs.append(x)
    for layer, scope in layers:
        if layer:
            place = build.emit("Placeholder", (), [((2, 2), "resource")], attrs, f"h/{layer}")
            handle = place.outputs[0]
            name = f"{layer}/kernel"
            variable = Variable(name, (2, 2), "float32", True, handle, f"net/{name}")
            build.graph.variables.append(variable)
            build.name = f"net_1/{scope}/Cast"
            value = build.one("ReadVariableOp", (handle,), (2, 2), "float32", attrs)
            build.name = f"net_1/{scope}"
            x = build.one("MatMul", (x, value), (2, 2), "float32", {"T": DType("float32")})
        build.name = f"net_1/{scope}"
        x = build.one("Relu", (x,), (2, 2), "float32", {"T": DType("float32")})
    graph = build.graph
    return graph, [op for op in graph.ops if op.inputs and op.type != "ReadVariableOp"]


def test_a_layer_goes_with_all_that_is_inside():
    graph, ops = model("gpt_5_layers")
    found = resolved(graph, ops, tap.stage("block_[34].*", 2), tap.stage("tokens", 0))
    layers = {"ln1", "ln2", "attention", "fc1", "fc2"}
    blocks = {(f"block_{i}_{layer}_1", 2) for i in (3, 4) for layer in layers}
    assert scopes(found) == {*blocks, ("tokens_1", 0)}
    assert {op for op in ops if "/block_3_attention_1/" in op.name} <= {*found}


@pytest.mark.parametrize(
    "pattern", ["block_3_attention", "block_3_attention_1", "functional/block_3_attention"]
)
def test_patterns_match_paths_and_their_ends(pattern):
    graph, ops = model("gpt_5_layers")
    assert scopes(resolved(graph, ops, tap.stage(pattern, 1))) == {("block_3_attention_1", 1)}


def test_numbers_of_calls_are_no_numbers_of_layers():
    """Keras calls the scopes of the layers dense and dense_1 dense_1 and dense_1_1."""
    layers = (
        ("dense", "dense_1"),
        ("", "dropout_1"),
        ("dense_1", "dense_1_1"),
        ("", "dropout_1_1"),
    )
    graph, ops = called(*layers)
    for name, scope in (("dense", "dense_1"), ("dense_1", "dense_1_1")):
        assert scopes(resolved(graph, ops, tap.stage(name, 1))) == {(scope, 1)}
    for name, scope in (("dropout", "dropout_1"), ("dropout_1", "dropout_1_1")):
        assert scopes(resolved(graph, ops, tap.stage(name, 1))) == {(scope, 1)}


def test_scopes_without_numbers_of_calls_are_known_too():
    graph, ops = called(("dense", "dense"), ("dense_1", "dense_1"), ("", "dropout_1"))
    for name in ("dense", "dense_1"):
        assert scopes(resolved(graph, ops, tap.stage(name, 1))) == {(name, 1)}
    assert scopes(resolved(graph, ops, tap.stage("dropout_1", 1))) == {("dropout_1", 1)}


SOME = ("clip_4_layers", "gshard_moe", "recurrent", "unet")


@pytest.mark.parametrize("name", [*SOME, *at_night(*sorted({*saved_names()} - {*SOME}))])
def test_layers_of_all_saved_models_are_known_by_the_places_of_their_weights(name):
    graph, _ = model(name)
    known = _layers(graph)
    for variable in graph.variables:
        path = variable.place.rpartition("/")[0]
        if variable.trainable and path and not path.endswith("lstm_cell"):  # read by a loop
            assert path in known.values(), variable.name


def test_where_no_layer_matches_ops_do():
    graph = mlp()
    ops = [op for op in graph.ops if op.name.startswith("mlp/")]
    found = resolved(graph, ops, tap.stage("fc1/Relu", 1))
    assert [op.name for op in found] == ["mlp/block_0/fc1/Relu"]


def test_a_constraint_twice_is_harmless_and_two_that_overlap_contradict():
    graph, ops = model("gpt")
    both = (tap.stage("block_1.*", 1), tap.stage("block_1_fc1", 1))
    assert scopes(resolved(graph, ops, *both)) >= {("block_1_fc1_1", 1)}
    message = r"Op .*block_1_fc1_1.*: stage\('block_1.*', 1\) and stage\('.*fc1', 0\) contradict"
    with pytest.raises(SpecError, match=message):
        resolved(graph, ops, tap.stage("block_1.*", 1), tap.stage("block_._fc1", 0))


def test_what_matches_nothing_is_named_with_what_is_near():
    graph, ops = model("gpt")
    with pytest.raises(SpecError, match=r"stage\('blok_1_fc1', 1\) matches no layer or op.*fc1"):
        resolved(graph, ops, tap.stage("blok_1_fc1", 1))
    with pytest.raises(SpecError, match=r"found inside .*write .*block_1"):
        resolved(graph, ops, tap.stage("block_1", 1))
    assert not resolved(graph, ops, tap.stage("blok_1_fc1", 1), must_match=False)


def test_stages_that_there_are_not_are_refused():
    graph, ops = model("gpt")
    with pytest.raises(SpecError, match="there are 4 stages, numbered from 0 to 3"):
        resolved(graph, ops, tap.stage("tokens", 4))
    with pytest.raises(SpecError, match="no pipeline of several stages.*tap.Pipeline"):
        resolved(graph, ops, tap.stage("tokens", 0), num_stages=1)
    for index in (-1, 0.5, True, "first", None):
        with pytest.raises(ArgumentError, match=r"stage\('tokens', .*\): index is"):
            tap.stage("tokens", index)
    with pytest.raises(ArgumentError, match="the pattern is 3"):
        tap.stage(3, 0)
    with pytest.raises(SpecError, match="not a regular expression"):
        tap.stage("(", 0)


def test_a_stage_is_a_constraint_like_others():
    one = tap.stage("block_1.*", 1)
    assert constraints_of("constraints", [one, tap.batch("data")])[0] is one
    assert str(one) == "stage('block_1.*', 1)" and not one.named_axes
    assert one == tap.stage("block_1.*", 1) != tap.stage("block_1.*", 0)
    mesh = Mesh.of([2, 2])
    assert not resolve_variables([one], [("block_1/kernel", (2, 2))], mesh)
    assert tap.constraints.batch_axes([one], mesh) == ("data", "model")
