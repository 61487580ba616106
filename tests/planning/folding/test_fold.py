"""A model whose blocks repeat is searched as one with three of each (TAP §IV-C)."""

import collections
import random

import pytest

from tests.ir.blocks import Parts, chain, named, parts_of, saved_parts
from tests.planning.problems import Captured
from tfpar.cluster import find_cluster
from tfpar.cost import evaluate, splits
from tfpar.ir import RepeatedBlock, Roles
from tfpar.planning.folding.fold import FoldedGraph, fold
from tfpar.planning.folding.folded_model import FoldedModel
from tfpar.propagation import Anchors, prepare, propagate
from tfpar.spec import Mesh, Replicate, Shard

BATCH = 8


@pytest.fixture(scope="module")
def vit():
    return saved_parts("vit_5_layers")


@pytest.fixture(scope="module")
def vmoe():
    return saved_parts("vmoe_8_layers")


@pytest.fixture(scope="module")
def t5():
    return saved_parts("t5_4_layers")


@pytest.fixture(scope="module")
def mlp():
    """No gradient flows to what the first block reads."""
    return saved_parts("residual_mlp")


def folded_of(parts: Parts) -> FoldedGraph:
    return fold(parts.graph, parts.repeats, parts.signatures)


MODELS = ["vit", "vmoe", "t5", "mlp"]


def blocks(count: int) -> Parts:
    return parts_of(chain([f"m/block_{i}" for i in range(count)]))


def test_op_count_does_not_grow_with_depth():
    sizes = {count: len(folded_of(blocks(count)).graph.ops) for count in (3, 4, 6, 12)}
    assert len(set(sizes.values())) == 1
    assert len(blocks(12).graph.ops) > 3 * sizes[12]


@pytest.mark.slow
def test_a_captured_model_does_not_grow_with_depth(vit):
    deeper = saved_parts("vit_7_layers")
    assert len(folded_of(deeper).graph.ops) == len(folded_of(vit).graph.ops) < len(vit.graph.ops)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_twins_cover_every_variable_once(name, request):
    parts = request.getfixturevalue(name)
    folded = folded_of(parts)
    twins = [v.name for vs in folded.twins.values() for v in vs]
    assert sorted(twins) == sorted(v.name for v in parts.graph.variables)
    for variable, others in folded.twins.items():
        assert {v.shape for v in others} == {variable.shape}


@pytest.mark.parametrize("name", MODELS)
def test_ops_stand_for_those_of_the_model(name, request):
    parts = request.getfixturevalue(name)
    folded = folded_of(parts)
    wanted = collections.Counter(op.type for op in parts.graph.ops)
    found: collections.Counter = collections.Counter()
    for op in folded.graph.ops:
        found[op.type] += folded.times.get(op, 1)
    kinds = ("MatMul", "BatchMatMulV2", "Einsum", "Softmax", "AddN", "AssignSubVariableOp")
    assert {k: found[k] for k in kinds} == {k: wanted[k] for k in kinds}


def test_weights_at_one_place_share_a_placement(vit):
    folded = folded_of(vit)
    group = next(g for g in folded.groups if "fc1/kernel" in g[0].name)
    assert [v.name.split("/")[-4] for v in group] == ["block_0", "block_1", "block_4"]
    middle = [v.name.split("/")[-4] for v in folded.twins[group[1]]]
    assert middle == ["block_1", "block_2", "block_3"]
    grouped = [v for g in folded.groups for v in g]
    assert sorted(v.name for v in grouped) == sorted(v.name for v in folded.graph.variables)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_plans_cost_the_same_folded_and_whole(name, request):
    parts = request.getfixturevalue(name)
    folded = folded_of(parts)
    whole = fold(parts.graph, [], parts.signatures)
    rnd = random.Random(0)
    mesh = Mesh(("data", "model"), (2, 2))
    prepared, reference = prepare(folded.graph), prepare(whole.graph)
    for _ in range(3):
        specs = {}
        for group in folded.groups:
            options = [(Replicate(), Replicate())]
            if group[0].trainable:
                options += [(Replicate(), s) for _, s in splits(group[0], prepared, mesh, (1,))]
            spec = rnd.choice(options)
            specs.update((t.name, spec) for v in group for t in folded.twins[v])
        one = _cost(prepared, mesh, specs, _roles(parts, folded))
        other = _cost(reference, mesh, specs, _roles(parts, whole))
        assert one.seconds == pytest.approx(other.seconds, rel=1e-9)
        for part in ("weight_bytes", "state_bytes", "gradient_bytes", "activation_bytes"):
            assert getattr(one, part) == pytest.approx(getattr(other, part), rel=1e-9), part
        assert one.memory_bytes == pytest.approx(other.memory_bytes, rel=0.05)


def _roles(parts, folded):
    times = dict(folded.times)
    times.update((folded.copies[op], 0) for op in parts.cut.stand_ins if op in folded.copies)
    return Roles.of(folded.graph, times=times)


def _cost(prepared, mesh, specs, roles):
    graph = prepared.graph
    batched = (Shard(0), Replicate())
    whole = (Replicate(), Replicate())
    anchors = Anchors(
        variables={v.name: specs[v.name] for v in graph.variables if v.name in specs},
        inputs=[batched if t.shape and t.shape[0] == BATCH else whole for t in graph.inputs],
        outputs=[whole] * len(graph.outputs),
    )
    cluster = find_cluster("v100-ethernet", mesh)
    return evaluate(propagate(prepared, mesh, anchors), cluster, roles, 2.0)


def test_a_fold_that_would_close_a_cycle_is_refused():
    graph = chain([f"m/block_{i}" for i in range(4)])
    # The second sum is negated, so that no instance owns what lies between the two halves.
    sum_op = named(graph, "m/AddV2_1")
    sum_op.type = "Sub"
    parts = parts_of(graph)
    nodes = [parts.node(f"m/block_{i}/dense") for i in range(4)]
    # In an order in which no model runs: the third block is to stand for the second.
    repeat = RepeatedBlock([[nodes[i]] for i in (0, 2, 1, 3)])
    folded = fold(graph, [repeat], parts.signatures)
    assert len(folded.graph.ops) == len(graph.ops)
    assert not folded.times
    assert [v.name for v in folded.graph.variables] == [v.name for v in graph.variables]


def test_a_first_block_that_differs_stays_and_shares_its_placement(mlp):
    folded = folded_of(mlp)
    assert len(folded.graph.ops) < len(mlp.graph.ops)
    group = next(g for g in folded.groups if "fc1/kernel" in g[0].name)
    assert sorted(v.name for v in group) == [f"block_{i}_fc1/kernel" for i in (0, 1, 2, 5)]


def test_weights_that_a_penalty_reads_too_have_one_place():
    """Five layers, and five squares of their weights, are two repeats of the same weights."""
    step = Captured.saved("penalized")
    problem = step.problem([2], "cpu")
    model = FoldedModel.of(problem, 2)
    twins = [v.name for found in model.folded.twins.values() for v in found]
    assert sorted(twins) == sorted(v.name for v in problem.step.graph.variables)
    assert len(model.prepared.graph.ops) < len(problem.step.graph.ops)


def test_the_fold_copies():
    parts = blocks(5)
    before = [(op, list(op.inputs)) for op in parts.graph.ops]
    folded_of(parts)
    assert [(op, list(op.inputs)) for op in parts.graph.ops] == before
