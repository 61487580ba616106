"""Sharding patterns come from op rules; plans show them, and what else was priced."""

import keras
import numpy as np
import pytest

import tfpar as tap
from benchmarks.models import SMALL, batch_of, compile_model
from tests.search.problems import Captured, lay_out
from tfpar.cluster.named import find_cluster
from tfpar.cost.patterns import patterns, splits
from tfpar.search.model.folded_model import FoldedModel
from tfpar.search.tap.planner import TapPlanner
from tfpar.spec import PlanError, Shard

MESH = tap.Mesh.of({"data": 2, "model": 2})


def network():
    """One weight of every kind."""
    tokens = keras.Input((8,), dtype="int32")
    x = keras.layers.Embedding(32, 16, name="tokens")(tokens)
    x = keras.layers.Conv1D(24, 3, padding="same", name="conv")(x)
    x = keras.layers.Dense(48, use_bias=False, name="fused")(x)  # 3 x 4 x 4: unlike q, k and v
    q, k, v = (keras.ops.reshape(x, (-1, 8, 3, 4, 4))[:, :, i] for i in range(3))
    scores = keras.ops.einsum("bqhd,bkhd->bhqk", q, k)
    x = keras.ops.einsum("bhqk,bkhd->bqhd", keras.ops.softmax(scores), v)
    x = keras.layers.EinsumDense("bqhd,hdm->bqm", (None, 16), name="out")(x)
    x = keras.layers.LayerNormalization(name="norm")(x)
    return compile_model(keras.Model(tokens, keras.layers.Dense(10, name="head")(x)))


@pytest.fixture(scope="module")
def problem():
    data = np.zeros((4, 8), "int32"), np.zeros((4, 8), "int32")
    return Captured.of(network, 4, data).problem([2, 2], "rhino-m8")


@pytest.fixture(scope="module")
def model(problem):
    return FoldedModel.of(problem, 2)


def found(model, weight, axis="model"):
    """{placement: [(phase, kind, bytes)]} of a weight's patterns."""
    (node,) = (n for n in model.nodes.nodes if weight in {w.name for w in n.weights})
    cluster = find_cluster("rhino-m8", MESH)
    return {
        str(p.placement): [(c.phase, c.kind, c.num_bytes) for c in p.communication]
        for p in patterns(node, model.prepared, MESH, cluster, (0,))
        if p.weight == weight and p.axis in ("", axis)
    }


def test_a_product_reduces_forward_by_rows_and_backward_by_columns(model):
    assert found(model, "head/kernel") == {
        "R": [("backward", "all_reduce", 16 * 10 * 4)],  # its gradient, over the batch
        "S(0)": [("forward", "all_reduce", 4 * 8 * 10 * 4)],  # the partial sums
        "S(1)": [("backward", "all_reduce", 4 * 8 * 16 * 4)],  # the input's gradient
    }


def test_a_vocabulary_split_reduces_what_is_looked_up(model):
    assert found(model, "tokens/embeddings")["S(0)"] == [("forward", "all_reduce", 4 * 8 * 16 * 4)]
    assert found(model, "tokens/embeddings")["S(1)"] == []


def test_convolutions_split_channels(model):
    patterns_of = found(model, "conv/kernel")
    assert set(patterns_of) == {"R", "S(1)", "S(2)"}
    assert patterns_of["S(1)"][0][:2] == ("forward", "all_reduce")
    assert patterns_of["S(2)"][0][:2] == ("backward", "all_reduce")


def test_a_fused_weight_is_split_within_each_of_its_parts(model):
    """Queries, keys and values in one matrix: heads are split, not the three."""
    (fused,) = (v for v in model.prepared.graph.variables if v.name == "fused/kernel")
    offered = [shard for axis, shard in splits(fused, model.prepared, MESH) if axis == 1]
    assert offered == [Shard(0), Shard(1, 16)]


def test_biases_and_scales_have_no_pattern_of_their_own(model):
    assert set(found(model, "norm/gamma")) == {"R"}
    assert set(found(model, "head/bias")) == {"R"}


# --- what plans say ---------------------------------------------------------------------


def build():
    """A GPT for which splitting weights gains more than predictions may be off."""
    return compile_model(SMALL["gpt"](hidden=512, length=256, vocabulary=4000, num_layers=1))


@pytest.fixture(scope="module")
def plan():
    return tap.plan(build, batch_of(build(), 1), [1, 4], "rhino-m8", planner="tap")


@pytest.mark.slow
def test_the_summary_goes_layer_by_layer(plan):
    text = plan.summary()
    assert "Found by the tap planner for cluster 'rhino-m8' (1 node of 4)" in text
    assert "Memory of a device" in text and "Next best layouts: " in text
    layers = text[text.index("Layers (") : text.index("Variables\n")]
    assert "S(0) over model" in layers and "all_reduce over model" in layers and " us |" in layers


@pytest.mark.slow
def test_a_variable_is_explained_with_the_runner_up(plan):
    text = plan.explain("block_0_fc1/kernel")
    assert "S(1) over model" in text and "chosen by the tap planner" in text
    others = text[text.index("otherwise, at best:") :].splitlines()[1:]
    assert "replicated: " in text and "%)" in others[0]


@pytest.mark.slow
def test_a_layer_is_explained_with_its_patterns(plan):
    text = plan.explain("block_0_fc2")
    assert "Layer 'functional" in text and "Sharding patterns, each by itself:" in text
    assert "kernel S(0) over model:" in text and "all_reduce over model (forward" in text


@pytest.mark.slow
def test_a_name_that_is_nothing_is_refused(plan):
    with pytest.raises(PlanError, match="no variable 'block_9'"):
        plan.explain("block_9")


@pytest.mark.slow
def test_diff_tells_what_another_cluster_changes(plan):
    other = tap.plan(build, batch_of(build(), 64), [1, 4], "v100-ethernet", planner="tap")
    lines = plan.diff(other)
    assert any(line.startswith("cluster: rhino-m8 -> v100-ethernet") for line in lines)
    assert any(line.startswith("predicted step: ") for line in lines)
    assert plan.diff(plan) == []


@pytest.mark.slow
def test_a_saved_plan_says_the_same_without_the_graph(plan):
    again = tap.Plan.from_json(plan.to_json())
    assert again == plan
    assert "Predicted" in again.summary() and "otherwise, at best" in again.explain("head/kernel")


def test_the_planner_is_a_planner(problem):
    planner = TapPlanner()
    made = planner.solve(problem)
    assert made.planner == planner.name == "tap"
    assert planner.statistics.valid <= planner.statistics.candidates
    assert lay_out(made, problem).mesh == made.mesh
