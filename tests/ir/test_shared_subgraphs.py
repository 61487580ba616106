"""What a model repeats is found, whatever it is called (TAP §IV-C, Algorithm 1)."""

import pytest

from tests.ir.blocks import block, chain, parts_of, saved_parts, weight
from tfpar.ir.builder import GraphBuilder
from tfpar.ir.shared_subgraphs import largest


def counts(parts) -> list[int]:
    return [s.count for s in largest(parts.subgraphs)]


def test_blocks_with_unlike_names_are_one_subgraph():
    parts = parts_of(chain(["m/alpha", "m/beta", "m/gamma"]))
    (shared,) = largest(parts.subgraphs)
    assert [b.prefix for b in shared.blocks] == ["m/alpha", "m/beta", "m/gamma"]
    assert [len(v) for v in shared.variants] == [3]


def test_blocks_with_like_names_that_differ_are_not():
    graph = chain([f"m/block_{i}" for i in range(4)], activations=("Relu", "Tanh"))
    (*_, last) = (s for s in parts_of(graph).subgraphs if s.depth == 3)
    assert last.count == 2


@pytest.mark.parametrize("min_duplicate", [3, 4])
def test_min_duplicate_is_respected(min_duplicate):
    parts = parts_of(chain(["m/alpha", "m/beta", "m/gamma"]), min_duplicate)
    assert (counts(parts) == [3]) == (min_duplicate <= 3)
    assert (len(parts.repeats) == 1) == (min_duplicate <= 3)


def test_blocks_of_unlike_shapes_are_variants():
    build = GraphBuilder()
    x = build.const([[1.0] * 4], "float32")
    for i in range(2):
        x = block(build, f"m/narrow_{i}", x)
    build.name = "m/wider"
    x = build.one("MatMul", (x, weight(build, "wider", (4, 6))), (1, 6), "float32")
    for i in range(3):
        x = block(build, f"m/wide_{i}", x)
    build.graph.outputs.append(x)
    parts = parts_of(build.graph)
    shared = next(s for s in parts.subgraphs if s.count == 5)
    assert [len(v) for v in shared.variants] == [2, 3]
    assert sorted(f.count for f in parts.repeats) == [2, 3]


def test_a_stage_of_equal_blocks_is_no_block():
    scopes = [f"m/stage_{s}/block_{i}" for s in range(2) for i in range(3)]
    build = GraphBuilder()
    x = build.const([[1.0] * 4], "float32")
    for scope in scopes:
        x = block(build, f"{scope}/one", x)
        x = block(build, f"{scope}/two", x, "Tanh")
    build.graph.outputs.append(x)
    parts = parts_of(build.graph)
    (shared,) = largest(parts.subgraphs)
    assert shared.count == 6
    assert [f.count for f in parts.repeats] == [6]


@pytest.mark.slow
def test_a_model_may_have_several():
    parts = saved_parts("t5_4_layers")
    assert sorted(parts.counts().values()) == [4, 4]
    prefixes = {s.blocks[0].prefix for s in largest(parts.subgraphs) if s.count == 4}
    assert len(prefixes) == 2
    assert {"encoder" in p for p in prefixes} == {True, False}


@pytest.mark.slow
def test_towers_side_by_side_are_two_repeats():
    parts = saved_parts("clip_4_layers")
    first = [f.instances[0][0].name for f in parts.repeats if f.count == 4]
    assert sorted("image" in name for name in first) == [False, True]


@pytest.mark.slow
def test_dense_and_expert_blocks_in_turn_are_one_block():
    parts = saved_parts("vmoe_6_layers")
    (repeat,) = (f for f in parts.repeats if f.count == 3)
    names = " ".join(n.name for n in repeat.instances[0])
    assert "feed_forward_1/fc1" in names
    assert "moe" in names


@pytest.mark.slow
def test_blocks_that_share_their_weights_are_found():
    parts = saved_parts("widenet_4_layers")
    assert list(parts.counts().values()) == [4]


def test_convolutions_of_unlike_shapes_are_one_subgraph():
    parts = saved_parts("resnet")
    convolutions = [
        s
        for s in parts.subgraphs
        if [n for n in s.blocks[0].nodes if any(op.type == "Conv2D" for op in n.ops)]
        == s.blocks[0].nodes
    ]
    assert max(s.count for s in convolutions) >= 9
    assert all(len(s.variants) > 1 for s in convolutions)


@pytest.mark.slow
def test_a_bottleneck_is_a_block_but_not_its_stage():
    parts = saved_parts("resnet_two_stages")
    found = largest(parts.subgraphs)
    assert sorted(s.count for s in found if len(s.blocks[0].nodes) > 5) == [2, 6]
    assert sorted(f.count for f in parts.repeats if len(f.instances[0]) > 5) == [3, 3]


def test_layers_without_names_fold_by_what_repeats_in_a_row():
    parts = saved_parts("mixer")
    (repeat,) = (f for f in parts.repeats if f.count >= 4)
    assert repeat.count == 5
    assert sum(len(n.weights) for n in repeat.instances[0]) == 6
