"""Steps cut into stages: what these send each other, of models."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping

import pytest

from tests.graphs import saved, saved_names
from tests.pipeline.sent import sent
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
from tfpar.pipeline.stage_partition import partition_step, sent_whole
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
