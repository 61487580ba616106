"""TAP's planner: it finds the best plan of its space, and the plans that experts would make."""

import dataclasses
import itertools
import re

import numpy as np
import pytest

import tfpar as tap
from tests.cases import some_first
from tests.clusters import joined_by, slow_cores
from tests.planning.problems import (
    Captured,
    assert_priced_as_a_whole,
    assignments,
    laid,
    partition,
    price,
)
from tfpar.cluster import Link, find_cluster
from tfpar.planning.folding.folded_model import FoldedModel
from tfpar.planning.intra_op.tap.mesh_search import MeshSearch
from tfpar.planning.intra_op.tap.planner import TapPlanner
from tfpar.planning.objective import UNCERTAINTY, Objective
from tfpar.plans import plan_from_constraints
from tfpar.spec import Shard, SpecError


def solve(problem, **fields):
    return TapPlanner(**fields).solve(problem)


def split_kernels(plan):
    return {
        re.sub(r"\d+", "#", name)
        for name, v in plan.variables.items()
        if any(isinstance(p, Shard) for p in v.spec or ())
    }


# --- the best of its space ------------------------------------------------------------


EXHAUSTIVE = ("mlp", "embedded", "convolutions")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "cluster"),
    some_first(
        [("mlp", "v100-ethernet")],
        itertools.product(EXHAUSTIVE, ("v100-ethernet", "cpu")),
    ),
)
def test_the_plan_costs_what_the_best_of_all_plans_costs(case, cluster):
    problem = Captured.saved(case).problem([2, 2], cluster)
    plan = solve(problem)
    model, least = FoldedModel.of(problem, 2), np.inf
    for logical in problem.meshes:
        groups = MeshSearch(problem, model, logical).groups
        for specs in assignments({g.name: g.options for g in groups}):
            if logical.used_axes and not any(isinstance(s[1], Shard) for s in specs.values()):
                continue  # ranks that all compute the same have no use for an axis
            candidate = dataclasses.replace(
                plan,
                mesh=logical.mesh,
                batch_axes=tuple(logical.mesh.axis_names[a] for a in logical.batch_axes),
                variables={
                    name: dataclasses.replace(v, spec=specs.get(name), alternatives=())
                    for name, v in plan.variables.items()
                },
            )
            least = min(least, price(problem, candidate).seconds)
    # Where links are slow, nothing is faster than all ranks computing the same.
    whole = {n: dataclasses.replace(v, spec=None) for n, v in plan.variables.items()}
    mesh = tap.Mesh(("model", "data"), (4, 1))
    idle = dataclasses.replace(
        plan,
        mesh=mesh,
        batch_axes=(),
        variables={name: dataclasses.replace(v, alternatives=()) for name, v in whole.items()},
    )
    least = min(least, price(problem, idle).seconds)
    assert plan.cost.seconds == pytest.approx(least, rel=1e-6)


FOLDED = {
    "gpt": "gpt_2000_words",
    "t5": "t5_3_layers",
    "gshard_moe": "moe_inner_512",
    "resnet": "resnet_20000_classes",
}
"""Steps with blocks that repeat, in which something is worth splitting."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh"), some_first([("gpt", (1, 2))], itertools.product(FOLDED, [(2, 2)]))
)
def test_folding_loses_no_quality(name, mesh):
    problem = Captured.saved(FOLDED[name]).problem(mesh, "v100-ethernet")
    folded, whole = solve(problem), solve(problem, min_duplicate=10**6)
    assert folded.cost.seconds <= whole.cost.seconds * (1 + 1e-9)
    assert_priced_as_a_whole(problem, folded)


# --- judgement --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large_t5():
    """Two blocks to a tower, as wide as T5-Large; one sequence."""
    return Captured.saved("t5_large")


@pytest.mark.nightly
def test_megatron_for_gpt_where_one_sequence_is_all_there_is():
    """Of plans whose prices are that near, it has the fewest collectives."""
    problem = Captured.saved("gpt_one_sequence").problem([1, 4], "rhino-m8")
    plan = solve(problem.with_aim(objective=Objective(uncertainty=UNCERTAINTY)))
    assert plan.mesh.shape == (1, 4)
    for projection in ("query", "key", "value"):
        assert laid(plan, f"attention/{projection}/kernel") == {"R,S(1)"}  # by heads
    assert laid(plan, "attention_output/kernel") == {"R,S(0)"}
    assert laid(plan, "fc1/kernel") == {"R,S(1)"}
    assert laid(plan, "fc2/kernel") == {"R,S(0)"}
    assert laid(plan, "head/kernel") == {"R,S(1)"}


@pytest.mark.nightly
def test_megatron_and_a_split_vocabulary_for_t5(large_t5):
    problem = large_t5.problem([1, 4], "rhino-m8")
    plan = solve(problem)
    for projection in ("query", "key", "value"):
        assert laid(plan, f"/{projection}/kernel") == {"R,S(1)"}
    assert laid(plan, "out/kernel") == {"R,S(0)"}
    assert laid(plan, "wi/kernel") == {"R,S(1)"}
    assert laid(plan, "wo/kernel") == {"R,S(0)"}
    assert laid(plan, "tokens/embeddings") == {"R,S(0)"}
    # The heads stay split through the attention: all that moves is what Megatron's f and g move.
    moved = {kind for kind, _, _ in partition(problem, plan).collectives()}
    assert moved <= {"all_reduce", "all_gather"}


@pytest.mark.nightly
def test_classes_are_split_where_there_are_many():
    many, few = (
        solve(Captured.saved(f"resnet_{n}_classes").problem([1, 4], slow_cores(4)))
        for n in (200_000, 10)
    )
    assert laid(many, "head/kernel") == {"R,S(1)"}
    assert split_kernels(many) <= {"head/kernel", "head/bias"}
    assert few.mesh.shape == (4, 1) and few.batch_axes == ("data", "model")
    assert not split_kernels(few)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_wide_head_is_split(ranks):
    plan = solve(Captured.saved("wide_50000_classes").problem([1, ranks], "cpu"))
    (head,) = laid(plan, "head/kernel")
    assert head.startswith("R,S(")


@pytest.mark.nightly
def test_experts_are_parallel():
    captured = Captured.saved("moe_8_experts")
    # With Adam, whose update takes long, more weights would be split for its sake.
    problem = captured.problem([1, 8], "rhino-m8").with_step(state_ratio=0.0)
    plan = solve(problem)
    assert laid(plan, "moe/wi") == laid(plan, "moe/wo") == {"R,S(0)"}
    assert split_kernels(plan) <= {"block_#/moe/wi", "block_#/moe/wo"}
    assert plan.batch_axes == ("data", "model")  # each rank has tokens of its own
    assert "all_to_all" in {kind for kind, _, _ in partition(problem, plan).collectives()}


@pytest.mark.nightly
def test_the_best_tensor_parallel_plan_splits_less_when_links_are_slow(large_t5):
    """TAP §IV-F, Fig. 3: over Ethernet, 16 ranks do best with the feed-forward layers alone."""

    def seconds(split, inter):
        grid = tap.Mesh.of([2, 8])
        cluster = joined_by(find_cluster("v100-ethernet", grid), inter)
        mesh = {"data": 1, "model": 16}
        constraints = [tap.batch("data"), *(tap.shard(p, d, "model") for p, d in split)]
        step = large_t5.step
        plan = plan_from_constraints(
            step.graph, tap.Mesh.of(mesh), constraints, gradients=step.gradients
        )
        return price(large_t5.problem(mesh, cluster, constraints), plan).seconds

    heads = [("(query|key|value)/kernel", 1), ("out/kernel", 0)]
    feed_forward = [("wi/kernel", 1), ("wo/kernel", 0)]
    ethernet, fast = Link(4e9, 50e-6), Link(130e9, 5e-6)
    assert seconds(feed_forward, ethernet) < seconds(heads + feed_forward, ethernet)
    assert seconds(heads + feed_forward, fast) < seconds(feed_forward, fast)


@pytest.mark.nightly
def test_slow_links_between_nodes_leave_more_weights_whole(large_t5):
    grid = tap.Mesh.of([2, 4])
    nvlink = find_cluster("rhino-m8", grid)
    fast = joined_by(nvlink, Link(130e9, 5e-6))
    slow = joined_by(nvlink, Link(1e9, 50e-6))
    across = solve(large_t5.problem([2, 4], fast))
    within = solve(large_t5.problem([2, 4], slow))
    assert across.mesh.shape[1] > within.mesh.shape[1] or len(split_kernels(across)) > len(
        split_kernels(within)
    )


# --- constraints, validity, memory --------------------------------------------------------


@pytest.fixture(scope="module")
def small_gpt():
    return Captured.saved("gpt")


@pytest.mark.slow
def test_constraints_narrow_the_search(small_gpt):
    constraints = [tap.batch("data"), tap.shard(".*fc1/kernel", 1, "model")]
    plan = solve(small_gpt.problem([2, 2], "cpu", constraints))
    assert plan.mesh == tap.split([2, 2]) and plan.batch_axes == ("data",)
    assert laid(plan, "fc1/kernel") == {"R,S(1)"}
    assert "fc1" in plan.variables["block_0_fc1/kernel"].why
    assert "tap planner" in plan.variables["block_0_fc2/kernel"].why


def test_a_constraint_that_matches_nothing_is_refused(small_gpt):
    with pytest.raises(SpecError, match="matches no variable"):
        small_gpt.problem([2, 2], "cpu", [tap.shard("nothing/kernel", 1, "model")])


@pytest.mark.slow
def test_a_model_that_does_not_fit_whole_is_split():
    problem = Captured.saved("gpt_short").problem([1, 2], "rhino-m8")
    problem = problem.with_step(state_ratio=0.0)  # an update that takes little time
    whole = solve(problem)
    assert not split_kernels(whole)
    needed = whole.cost.memory_bytes
    tight = problem.cluster.with_memory(0.6 * needed)
    plan = solve(problem.with_cluster(tight))
    assert plan.cost.memory_bytes < needed
    assert plan.cost.seconds >= whole.cost.seconds


@pytest.mark.nightly
def test_where_nothing_fits_a_mesh_is_judged_by_what_its_own_plan_stores():
    """Not by what whole weights would store on it, whose gradients alone take more."""
    problem = Captured.saved("resnet_200000_classes").problem([8], "v100-ethernet")
    tight = problem.with_objective(memory_limit=0.5 * solve(problem).cost.memory_bytes)
    (batch_split,) = (m for m in tight.meshes if m.mesh.shape == (1, 8) and len(m.batch_axes) == 2)
    alone = solve(dataclasses.replace(tight, meshes=(batch_split,)))
    assert 0 < tight.excess_in_parts(solve(tight).cost) <= tight.excess_in_parts(alone.cost)


# --- meshes that are left out -----------------------------------------------------------
@pytest.mark.slow
def test_larger_meshes_are_left_out_once_they_promised_less_and_less(monkeypatch):
    searched = []
    glance = MeshSearch.glance

    def told(self, layouts):
        searched.append(self.logical)
        glance(self, layouts)

    monkeypatch.setattr(MeshSearch, "glance", told)
    problem = Captured.saved("wide_20000_classes").problem([8, 8], "v100-ethernet")
    plan = solve(problem)
    left_out = [logical for logical in problem.meshes if logical not in searched]
    assert left_out and {m.model_size for m in left_out} >= {64}
    assert plan.mesh in [logical.mesh for logical in searched]
    monkeypatch.setattr("tfpar.planning.intra_op.tap.planner.MESH_PATIENCE", 100)
    assert solve(dataclasses.replace(problem)).cost == plan.cost, "none of them is better"
