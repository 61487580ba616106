"""What Rhino's evaluation found (§7.3, §7.4), on models of its kinds."""

import pytest

from tests.planning.problems import Captured, laid, partition
from tfpar.ir import BACKWARD, FORWARD, Roles
from tfpar.planning.intra_op.rhino import RhinoPlanner
from tfpar.spec import Replicate, Shard


def splits_of(partitioned, phases=(FORWARD, BACKWARD)):
    """The names of the dims that products and convolutions split along used mesh axes."""
    roles = Roles.of(partitioned.graph)
    for op, decision in partitioned.decisions.items():
        if roles.phase[op] in phases and ("MatMul" in op.type or "Conv" in op.type):
            yield op, decision.strategy


def is_data_parallel(problem, plan):
    """Whether activations are split by samples alone, on all ranks."""
    used = [axis for axis, parts in enumerate(plan.mesh.shape) if parts > 1]
    found = partition(problem, plan)
    for _, strategy in splits_of(found, (FORWARD,)):
        (made,) = strategy.out_specs
        if any(made[axis] != Shard(0) for axis in used):
            return False
    return {plan.mesh.axis(name) for name in plan.batch_axes} >= set(used)


@pytest.mark.slow
def test_a_classifier_of_many_classes_is_split_and_the_batch_too():
    """VGG19 with a million classes."""
    captured = Captured.saved("vgg")
    problem = captured.problem([1, 4], "rhino-m8")
    plan = RhinoPlanner().solve(problem)
    used = [axis for axis, parts in enumerate(plan.mesh.shape) if parts > 1]
    (head,) = laid(plan, "head/kernel")
    assert "S(1)" in head, head
    convolutions = [
        strategy for op, strategy in splits_of(partition(problem, plan)) if op.type == "Conv2D"
    ]
    assert convolutions
    for strategy in convolutions:
        assert all(strategy.out_specs[0][axis] == Shard(0) for axis in used)


@pytest.mark.nightly
def test_unet_is_data_parallel():
    problem = Captured.saved("unet").problem([1, 4], "rhino-m8")
    assert is_data_parallel(problem, RhinoPlanner().solve(problem))


@pytest.mark.nightly
def test_dnabert_is_data_parallel():
    problem = Captured.saved("dnabert").problem([1, 4], "rhino-m8")
    assert is_data_parallel(problem, RhinoPlanner().solve(problem))


@pytest.mark.nightly
def test_experts_are_parallel():
    """GShard MoE: tokens go to the ranks of their experts, and come back."""
    captured = Captured.saved("moe_4_experts")
    problem = captured.problem([1, 4], "rhino-m8").with_step(state_ratio=0.0)
    plan = RhinoPlanner().solve(problem)
    found = partition(problem, plan)
    for weight in ("moe/wi", "moe/wo"):
        assert all("S(0)" in spec for spec in laid(plan, weight)), laid(plan, weight)
    assert "all_to_all" in {kind for kind, _, _ in found.collectives()}
    assert plan.mesh.group_size(tuple(map(plan.mesh.axis, plan.batch_axes))) == 4


@pytest.mark.nightly
def test_projections_and_their_slots_are_split_for_gpt():
    """GPT-Medium on 8 devices: queries, keys and values; slots lie as their weights."""
    captured = Captured.saved("gpt_medium")
    problem = captured.problem([1, 8], "rhino-m8")
    plan = RhinoPlanner().solve(problem)
    for projection in ("query", "key", "value"):
        for spec in laid(plan, f"attention/{projection}/kernel"):
            assert "S(" in spec, (projection, spec)
    for name, variable in plan.variables.items():
        if "attention" in name and "kernel" in name and variable.spec is not None:
            assert any(not isinstance(p, Replicate) for p in variable.spec), name
