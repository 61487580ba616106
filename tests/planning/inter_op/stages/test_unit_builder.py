"""The units of training steps, and the stages that they get."""

from __future__ import annotations

import itertools
import time

import pytest

from tests.cases import some_first
from tests.graphs import saved
from tests.ir.blocks import chain
from tests.pipeline.test_step_stages import Step, sent
from tfpar.ir import BACKWARD, FORWARD, Op, Roles, StepGraph, planning_graph
from tfpar.pipeline import assignable, partition_step, stages_of_step
from tfpar.planning.deadline import Deadline, SearchStopped
from tfpar.planning.inter_op.stages.unit_builder import assign_step
from tfpar.spec import PlanError


def seconds(op: Op) -> float:
    """What it reads and writes, and more for products."""
    moved = sum(t.num_bytes for t in (*op.inputs, *op.outputs))
    products = ("MatMul", "BatchMatMulV2", "Einsum", "Conv2D")
    return 1e-9 * moved * (100 if op.type.startswith(products) else 1)


def planned(name):
    step = saved(name)
    graph = planning_graph(step.graph, step.gradients).graph
    return graph, Roles.of(graph, step.gradient_tensors)


def assigned(step: Step, num_stages: int, each=lambda op: 1.0, **fixed: int):
    """By name, the stage of each forward op of a step by hand."""
    graph = step.build.graph
    roles = Roles.of(graph, step.gradients)
    given = {step.named[name]: stage for name, stage in fixed.items()}
    units, found = assign_step(graph, roles, each, num_stages, fixed=given)
    stages = units.forward_stages(found.stages)
    return {op.name: stage for op, stage in stages.items()}


# --- models -------------------------------------------------------------------------------------


MODELS = ("gpt", "unet", "resnet", "dnabert", "clip_4_layers", "gshard_moe", "recurrent")


@pytest.mark.parametrize(
    ("name", "num_stages"),
    some_first(
        [("gpt", 3), ("unet", 2), ("gshard_moe", 2), ("recurrent", 3)],
        itertools.product(MODELS, (2, 3)),
    ),
)
def test_what_units_say_is_sent_is_what_the_step_sends(name, num_stages):
    """Activations, and no more of gradients; scalars aside, such as sums of losses."""
    graph, roles = planned(name)
    units, found = assign_step(graph, roles, seconds, num_stages)
    forward = units.forward_stages(found.stages)
    assert [op for op in graph.ops if op in forward] == assignable(graph, roles)
    activations = {
        (t, forward[op])
        for op in forward
        for t in op.inputs
        if t.op in forward and forward[t.op] != forward[op]
    }
    there = sum(t.num_bytes for t, _ in activations)
    tied = found.sent_bytes - sum(
        flow.num_bytes * len({found.stages[r] for r in flow.readers} - {found.stages[flow.source]})
        for flow in units.graph.flows
    )
    assert there <= found.sent_bytes - tied <= 2 * there
    step = StepGraph(graph, 0)
    stages = partition_step(step, forward)
    back = sent(step.graph, stages, BACKWARD, Roles.of(step.graph))
    assert there + back <= found.sent_bytes + 16


DEEP = ("gpt_5_layers", "t5_4_layers", "vit_7_layers", "clip_4_layers")


@pytest.mark.parametrize(
    ("name", "num_stages"),
    some_first([("gpt_5_layers", 3), ("t5_4_layers", 4)], itertools.product(DEEP, (2, 3, 4))),
)
def test_stages_take_alike(name, num_stages):
    graph, roles = planned(name)
    units, found = assign_step(graph, roles, seconds, num_stages)
    average = sum(found.seconds) / num_stages
    assert max(found.seconds) <= 1.1 * average * (1 + 1e-5)
    everything = sum(seconds(op) for op in graph.ops if roles.phase[op] in (FORWARD, BACKWARD))
    assert sum(found.seconds) == pytest.approx(everything)
    assert units.graph.seconds == pytest.approx(everything)


def test_the_skips_of_a_unet_cross_where_they_are_small():
    """Cut at its bottom would send every skip; stages of a UNet lie around them all the same."""
    graph, roles = planned("unet")
    units, found = assign_step(graph, roles, seconds, 2)
    skips = [f for f in units.graph.flows if len({found.stages[r] for r in f.readers}) > 1]
    assert all(found.stages[f.source] == 0 for f in skips)
    names = [u.name for u in units.graph.units]
    first_down = next(i for i, n in enumerate(names) if "down_0" in n)
    last_up = max(i for i, n in enumerate(names) if "up_0" in n)
    assert found.stages[first_down] == 0 and found.stages[last_up] == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_stages"),
    some_first([("unet", 4), ("resnet", 2)], itertools.product(("unet", "resnet"), (2, 3, 4))),
)
def test_stages_take_alike_as_far_as_single_ops_allow(name, num_stages):
    """A convolution, forward and backward, cannot be cut; here some take a third of a stage."""
    graph, roles = planned(name)
    _, found = assign_step(graph, roles, seconds, num_stages)
    assert max(found.seconds) <= 1.15 * sum(found.seconds) / num_stages


def test_blocks_are_cut_where_stages_end_and_stay_whole_elsewhere():
    graph, roles = planned("gpt_5_layers")
    for num_stages in (2, 3, 4):
        units, _ = assign_step(graph, roles, seconds, num_stages)
        layers = {u.name.split("/")[1] for u in units.graph.units if "/" in u.name}
        fed_forward = {n for n in layers if n.startswith("block") and "fc1" in n}
        assert len(fed_forward) == num_stages - 1, "of the blocks that were cut"


def test_the_tied_table_of_t5_is_one_weight_of_several_units():
    graph, roles = planned("t5_4_layers")
    units, found = assign_step(graph, roles, seconds, 2)
    (tie,) = units.graph.ties
    assert len(tie.readers) == 3  # both inputs, and the logits
    table = next(v for v in graph.variables if v.name == "tokens/embeddings")
    assert tie.num_bytes == 2 * table.num_bytes
    assert {found.stages[r] for r in tie.readers} == {0, 1}
    stages = stages_of_step(graph, roles, units.forward_stages(found.stages))
    assert stages[table.handle.op] == 0


def test_the_towers_of_clip_hang_together_by_nothing_but_the_loss():
    graph, roles = planned("clip_4_layers")
    units, found = assign_step(graph, roles, seconds, 2)
    tower = {"text": set(), "image": set()}
    for unit, stage in zip(units.graph.units, found.stages, strict=True):
        for name, stages in tower.items():
            if f"{name}_block" in unit.name:
                stages.add(stage)
    assert sorted(map(len, tower.values())) in ([1, 1], [1, 2])


def test_96_layers_are_as_many_units_and_quick():
    graph = chain([f"model/block_{i}" for i in range(96)])
    roles = Roles.of(graph)
    before = time.process_time()
    units, found = assign_step(graph, roles, seconds, 8)
    assert time.process_time() - before < 3.0
    assert 96 <= len(units.graph.units) <= 200
    assert found.gap <= 1e-5
    assert max(found.seconds) <= found.most_seconds
    tensor = 2 * 4 * 4  # of float32
    assert found.sent_bytes == 7 * tensor, "a graph without gradients sends none back"


# --- by hand --------------------------------------------------------------------------------------


def layers(count: int) -> Step:
    """x = relu(x @ w), the gradient of the last weight."""
    step = Step()
    x = step.fed("x")
    for i in range(count):
        weight = step.variable(f"m/layer_{i}/w")
        h = step.op("MatMul", f"m/layer_{i}/product", x, step.read(weight, f"m/layer_{i}/read"))
        x = step.op("Relu", f"m/layer_{i}/relu", h)
    step.build.graph.outputs.append(x)
    return step


def test_a_shallow_model_is_cut_between_ops():
    found = assigned(layers(2), 4)
    assert [*found.values()] == [0, 1, 2, 3]


def test_more_stages_than_ops():
    with pytest.raises(PlanError, match=r"5 stages are too many.*so 4 is the most there can be"):
        assigned(layers(2), 5)


def test_a_loop_that_is_longer_than_a_stage_is_named():
    """And why it cannot be cut."""
    graph, roles = planned("recurrent")
    loops = [op.name for op in assignable(graph, roles) if op.type == "While"]
    lasting = {name: 2.0 for name in loops}
    with pytest.raises(PlanError, match="99 stages are too many") as error:
        assign_step(graph, roles, lambda op: lasting.get(op.name, 1e-6), 99)
    assert loops and all(f"{name!r} (" in str(error.value) for name in loops), error.value
    assert "cannot be cut: each round reads what the one before it has made" in str(error.value)


def test_fixed_ops_take_their_layer_with_them():
    step = layers(6)
    found = assigned(step, 2, **{"m/layer_1/relu": 1})
    assert found["m/layer_0/relu"] == 0
    assert {found[f"m/layer_{i}/relu"] for i in range(1, 6)} == {1}


def test_a_layer_fixed_to_two_stages_is_cut_within():
    step = layers(3)
    found = assigned(step, 2, **{"m/layer_1/product": 0, "m/layer_1/relu": 1})
    assert found["m/layer_1/product"] == 0 and found["m/layer_1/relu"] == 1


def test_fixed_ops_against_the_flow_of_data_are_named():
    with pytest.raises(PlanError, match=r"'m/layer_2/relu' in stage 0, but 'm/layer_2/relu' reads"):
        assigned(layers(3), 2, **{"m/layer_0/relu": 1, "m/layer_2/relu": 0})


def test_what_writes_a_variable_stays_together():
    """A counter that two layers move: what lies between them goes with them."""
    step = layers(4)
    count = step.variable("count", trainable=False)
    for i in (1, 2):
        value = step.named[f"m/layer_{i}/relu"].outputs[0]
        step.assign(f"m/layer_{i}/move", count, value)
    found = assigned(step, 3)
    assert found["m/layer_1/move"] == found["m/layer_2/move"]
    with pytest.raises(PlanError, match="they touch one variable or list. Give them one stage"):
        assigned(step, 3, **{"m/layer_1/move": 0, "m/layer_2/move": 1})


def test_lists_are_not_sent():
    """Neither in the forward pass nor in the backward pass."""
    step = Step()
    x, w = step.fed("x"), step.variable("w")
    h = step.op("MatMul", "h", x, step.read(w, "read"))
    rows = step.op("TensorListFromTensor", "rows", h)
    rows.dtype = "variant"
    y = step.op("TensorListStack", "y", rows)
    z = step.op("Relu", "z", y)
    found = assigned(step, 2)
    assert found["rows"] == found["y"]
    assert len({*found.values()}) == 2
    dz = step.back("ReluGrad", "dz", z, z)
    pieces = step.back("TensorListFromTensor", "pieces", dz)
    pieces.dtype = "variant"
    dh = step.back("TensorListStack", "dh", pieces, h)
    step.gradients = [step.back("MatMul", "dw", x, dh)]
    step.forward = {step.named[n]: int(n == "z") for n in ("h", "rows", "y", "z")}
    assert step.stages("dz", "pieces", "dh", "dw") == (1, 0, 0, 0)


def test_what_has_no_known_shape_is_not_sent():
    step = Step()
    x, w = step.fed("x"), step.variable("w")
    h = step.op("MatMul", "h", x, step.read(w, "read"))
    kept = step.op("BooleanMask", "kept", h, shape=(None, 4))
    squares = step.op("Square", "squares", kept, shape=(None, 4))
    total = step.op("Sum", "total", squares, shape=())
    step.op("Relu", "rest", total, shape=())
    found = assigned(step, 2)
    assert found["kept"] == found["squares"] == found["total"]
    assert len({*found.values()}) == 2


def test_a_step_that_reads_nothing():
    step = Step()
    step.build.const(1.0)
    with pytest.raises(PlanError, match="nothing to assign"):
        assigned(step, 1)


def test_a_search_that_is_given_up():
    deadline = Deadline()
    deadline.stop()
    step = layers(3)
    graph = step.build.graph
    with pytest.raises(SearchStopped):
        assign_step(graph, Roles.of(graph), seconds, 2, deadline=deadline)
