"""Sharding patterns come from op rules."""

import pytest

from tests.planning.problems import Captured
from tfpar.cluster import find_cluster
from tfpar.cost.patterns import expert_dims, patterns, splits
from tfpar.planning.folding import FoldedModel
from tfpar.spec import Mesh, Shard

MESH = Mesh.of({"data": 2, "model": 2})


@pytest.fixture(scope="module")
def problem():
    return Captured.saved("every_weight").problem([2, 2], "rhino-m8")


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


@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        (
            "moe_8_experts",
            {f"block_{block}/moe/{name}": (0,) for block in (1, 3) for name in ("wi", "wo")},
        ),
        ("every_weight", {}),
    ],
)
def test_experts_are_the_parts_of_a_weight_that_meet_samples_of_their_own(saved, expected):
    model = FoldedModel.of(Captured.saved(saved).problem([2, 2], "rhino-m8"), 2)
    weights = (v for v in model.prepared.graph.variables if v.trainable)
    dims = {v.name: expert_dims(v, model.prepared) for v in weights}
    assert {name: found for name, found in dims.items() if found} == expected
