"""Steps cut into stages: what these send each other, of models."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping

import numpy as np
import pytest

from tests.graphs import saved, saved_names
from tests.pipeline.arithmetic import Arithmetic, N, run
from tests.pipeline.sent import sent
from tests.pipeline.test_step_stages import Step
from tests.planning.inter_op.stages.test_unit_builder import seconds
from tests.propagation.by_hand import FLOAT, ByHand
from tfpar.ir import (
    BACKWARD,
    FORWARD,
    Op,
    Roles,
    StepGraph,
    format_graph,
    format_step,
    itemsize,
    planning_graph,
)
from tfpar.pipeline.stage_partition import own_constants, partition_step, read_once, sent_whole
from tfpar.pipeline.step_graph import Runs, crossings
from tfpar.pipeline.step_stages import assignable, stages_of_step
from tfpar.planning.inter_op import assign_step


def planned(name: str) -> StepGraph:
    """A saved step up to its gradients, each of which ends at its weight."""
    step = saved(name)
    step.graph = planning_graph(step.graph, step.gradients).graph
    return step


def assigned(step: StepGraph, num_stages: int) -> dict[Op, int]:
    """Of the forward pass, as the search finds it."""
    roles = Roles.of(step.graph, step.gradient_tensors)
    units, found = assign_step(step.graph, roles, seconds, num_stages)
    return units.forward_stages(found.stages)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """How many tensors are sent, and how many bytes."""

    count: int
    num_bytes: int


def traffic(step: StepGraph, stages: Mapping[Op, int], phase: int) -> Traffic:
    roles = Roles.of(step.graph, step.gradient_tensors)
    found = [t for t, _, _ in sent(step.graph, stages) if roles.phase[t.op] == phase]
    return Traffic(len(found), sum(t.num_bytes for t in found))


def check_sent(step: StepGraph, stages: Mapping[Op, int]) -> None:
    """It can be sent; it goes on in the forward pass, and comes back in the backward pass."""
    roles = Roles.of(step.graph, step.gradient_tensors)
    for tensor, source, target in sent(step.graph, stages):
        assert itemsize(tensor.dtype) and tensor.is_static, tensor
        if roles.phase[tensor.op] == FORWARD:
            assert source < target, tensor
        elif tensor.shape != ():
            assert roles.phase[tensor.op] == BACKWARD, tensor
            assert source > target, tensor


CASES = (
    ("gpt_mixed", 2),
    ("t5", 3),
    ("unet", 4),
    ("resnet", 2),
    ("clip_4_layers", 2),
    ("recurrent", 2),
)
OTHERS = sorted({*itertools.product(saved_names(), (2, 3, 4))} - {*CASES})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "num_stages"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.nightly) for case in OTHERS)],
)
def test_all_that_crosses_can_be_sent_goes_its_way_and_is_counted(name, num_stages):
    """Of a variable, the stage graph counts what is sent by its handle."""
    step = planned(name)
    text = format_graph(step.graph)
    forward = assigned(step, num_stages)
    before = stages_of_step(step.graph, Roles.of(step.graph, step.gradient_tensors), forward)
    plain = dataclasses.replace(step)
    stages = partition_step(step, forward)
    assert [*stages] == step.graph.ops
    assert {*stages.values()} == {*range(num_stages)}
    check_sent(step, stages)
    for phase in (FORWARD, BACKWARD):
        now, then = traffic(step, stages, phase), traffic(plain, before, phase)
        assert now.count <= then.count and now.num_bytes <= then.num_bytes
    assert format_graph(plain.graph) == text, "the graph that was planned is as it was"
    roles = Roles.of(step.graph, step.gradient_tensors)
    counted = crossings(step.graph, roles, stages, Runs.without_joins(step.graph, roles))
    assert {(c.tensor, c.source, c.target) for c in counted} == {
        (t.op.inputs[0] if t.op.type == "ReadVariableOp" else t, source, target)
        for t, source, target in sent(step.graph, stages)
    }


@pytest.mark.parametrize(
    ("name", "num_stages"), [("t5", 3), ("unet", 2), ("clip_4_layers", 3), ("resnet", 2)]
)
def test_cuts_amid_layers(name, num_stages):
    step = planned(name)
    ops = assignable(step.graph, Roles.of(step.graph, step.gradient_tensors))
    stages = partition_step(step, {op: i * num_stages // len(ops) for i, op in enumerate(ops)})
    check_sent(step, stages)


def test_losses_that_meet_one_of_another_stage_are_summed_before():
    """Else each microbatch would wait for that one of all microbatches."""
    build = ByHand()
    early, late = (build.reduce("Sum", build.fed(name, 4, 6), [0, 1]) for name in "xy")
    packed = build.one("Pack", (early, late), (2,), "float32", {"N": 2, "T": FLOAT, "axis": 0})
    build.graph.outputs = [build.reduce("Sum", packed, [0])]
    stage = {
        op: int(op not in (early.op, *(t.op for t in early.op.inputs))) for op in build.graph.ops
    }
    assert sent_whole(build.graph, stage) == {early, late}
    assert not sent_whole(build.graph, dict.fromkeys(stage, 0))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_stages", "before", "after"),
    [
        (2, Traffic(11, 135_168), Traffic(4, 45_056)),
        (4, Traffic(15, 180_224), Traffic(10, 110_592)),
    ],
)
def test_gradients_of_what_the_decoder_of_t5_attends_to_are_sent_as_often_as_it_is(
    num_stages, before, after
):
    """So are those of its positions and of its tied table."""
    step = planned("t5_4_layers")
    forward = assigned(step, num_stages)
    roles = Roles.of(step.graph, step.gradient_tensors)
    assert traffic(step, stages_of_step(step.graph, roles, forward), BACKWARD) == before
    stages = partition_step(step, forward)
    assert traffic(step, stages, BACKWARD) == traffic(step, stages, FORWARD) == after


def test_gradients_stay_those_of_their_weights():
    step = planned("t5_4_layers")
    names = [g.values.name for g in step.gradients]
    partition_step(step, assigned(step, 3))
    assert [g.values.name for g in step.gradients] == names
    assert all(t.op in {*step.graph.ops} for t in step.gradient_tensors)


@pytest.mark.parametrize("name", ["gpt", "resnet", "recurrent"])
def test_a_step_of_one_stage_stays_as_it_is(name):
    step = planned(name)
    graph, text = step.graph, format_step(step)
    forward = dict.fromkeys(assignable(graph, Roles.of(graph, step.gradient_tensors)), 0)
    assert partition_step(step, forward) == dict.fromkeys(graph.ops, 0)
    assert step.graph is graph and format_step(step) == text


# --- copies ---------------------------------------------------------------------------------


def with_constants() -> Arithmetic:
    """A constant that is read in stages 0, 1 and 2; in the last one, what comes of it alone."""
    made = Arithmetic()
    ones = made.at(1, made.build.const(np.ones(N, "float32")))
    twice = made.at(1, made.build.binary("AddV2", ones, ones))
    x = made.at(0, made.build.binary("Mul", made.source(0), ones))
    y = made.at(1, made.build.binary("Mul", x, ones))
    z = made.at(2, made.build.binary("Mul", y, twice))
    made.graph.outputs = [z]
    return made


def test_each_stage_has_the_constants_that_it_reads():
    made = with_constants()
    before = run(made.graph, made.fed)
    found = own_constants(made.graph, made.stages())
    assert [*found] == made.graph.ops
    after = run(made.graph, made.fed)
    np.testing.assert_array_equal(*before.values(), *after.values())
    crossing = {(t.op.type, source, target) for t, source, target in sent(made.graph, found)}
    assert crossing == {("Mul", 0, 1), ("Mul", 1, 2)}
    assert sorted(found[op] for op in found if op.type == "Const") == [0, 1, 2]
    assert [found[op] for op in found if op.type == "AddV2"] == [2]


def test_constants_that_are_returned_stay():
    made = with_constants()
    twice = next(op for op in made.graph.ops if op.type == "AddV2")
    made.graph.outputs.append(twice.outputs[0])
    found = own_constants(made.graph, made.stages())
    assert found[twice] == 1
    assert sorted(found[op] for op in found if op.type == "AddV2") == [1, 2]


def test_constants_of_one_stage_stay_as_they_are():
    made = with_constants()
    text = format_graph(made.graph)
    assert own_constants(made.graph, dict.fromkeys(made.graph.ops, 0)) == dict.fromkeys(
        made.graph.ops, 0
    )
    assert format_graph(made.graph) == text


# --- reads ----------------------------------------------------------------------------------------


def counting(stages: int) -> tuple[Step, dict]:
    """An optimizer that reads the rate and the counter for each of two weights in each stage."""
    step = Step()
    rate = step.variable("rate", (), trainable=False)
    count = step.variable("count", (), trainable=False)
    stage = {}
    for s in range(stages):
        for name in (f"{s}/a", f"{s}/b"):
            read = [step.read(v, f"{name}/{v.op.name}") for v in (rate, count)]
            stage[step.op("Mul", f"{name}/by", *read, shape=()).op] = s
    step.assign("tick", count, step.build.const(1.0))
    tick = step.named["tick"]
    tick.control = [op for op in step.build.graph.ops if op.type == "ReadVariableOp"]
    graph = step.build.graph
    return step, {op: stage.get(op, 0) for op in graph.ops}


def test_other_stages_share_a_read():
    step, stage = counting(3)
    graph = step.build.graph
    assert len(sent(graph, stage)) == 8
    found = read_once(graph, stage)
    assert [*found] == graph.ops
    names = [(t.name, target) for t, _, target in sent(graph, found)]
    assert names == [("1/a/rate:0", 1), ("1/a/rate:0", 2), ("1/a/count:0", 1), ("1/a/count:0", 2)]
    reads = [op.name for op in graph.ops if op.type == "ReadVariableOp"]
    assert reads == ["0/a/rate", "0/a/count", "0/b/rate", "0/b/count", "1/a/rate", "1/a/count"]
    assert [op.name for op in step.named["tick"].control] == reads, "it waits for those that stay"


def test_a_read_after_an_update_is_another_value():
    step, stage = counting(2)
    graph, tick = step.build.graph, step.named["tick"]
    count = step.named["count"].outputs[0]
    for name in "cd":
        late = step.read(count, f"late_{name}")
        late.op.control.append(tick)
        stage[late.op] = 0
        stage[step.op("Neg", f"after_{name}", late, shape=()).op] = 1
    found = read_once(graph, stage)
    names = [t.name for t, _, _ in sent(graph, found)]
    assert names == ["1/a/rate:0", "1/a/count:0", "late_c:0"]


def test_reads_of_one_stage_stay_as_they_are():
    step, stage = counting(1)
    text = format_graph(step.build.graph)
    assert read_once(step.build.graph, stage) == stage
    assert format_graph(step.build.graph) == text
