"""No planner dies of a graph that runs, and whatever is proposed for a tensor fits it."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import tfpar as tap
from tests.cases import nightly
from tests.e2e.random_models import Apply, captured
from tests.equivalence import assert_equivalent
from tests.planning.problems import Captured, assert_priced_as_a_whole, within
from tfpar.planning import find_plan
from tfpar.planning.intra_op import find_planner
from tfpar.planning.pricing import propagate_plan
from tfpar.plans import Plan, plan_from_constraints
from tfpar.spec import Mesh, Replicate, Shard, drop_uneven_shards, fits, parse_spec

ASKED = (
    ("tap", 1.0, None, [2, 2], "dgx-a100"),
    ("rhino", 1.0, 2, [2, 3], "cpu"),
    ("rhino", 1.0, 3, [4, 2], "v100-ethernet"),
    ("auto", 0.5, None, [8, 8], "dgx-h100"),
    ("tap", 0.1, None, [2], "atp-ic1"),
)


def check(problem, plan: Plan) -> None:
    """Every tensor can lie as the plan has it, and the plan is a file that can be read."""
    laid = propagate_plan(plan, problem)
    assert all(fits(tensor.shape or (), spec, laid.mesh) for tensor, spec in laid.specs.items())
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.summary(laid)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [25, 43])
def test_each_planner_has_a_plan_for_any_graph(seed):
    step = captured(seed)
    # What one search does to its graph is no other one's business: all plan the same capture.
    for planner, seconds, level, mesh, cluster in ASKED:
        problem = within(seconds, step.problem(mesh, cluster))
        check(problem, find_plan(problem, find_planner(planner, level)))
    problem = step.problem([2, 2], "cpu")
    graph, gradients = step.step.graph, step.step.gradients
    check(problem, plan_from_constraints(graph, Mesh.of([2, 2]), (), gradients=gradients))


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [2, 6, 9, 12, 13, 15, 16, 20, 28, 30, 32, 36, 41, 42])
def test_each_planner_has_a_plan_for_many_graphs(seed):
    test_each_planner_has_a_plan_for_any_graph(seed)


# --- what fits --------------------------------------------------------------------------------


def test_a_stride_that_fits_behind_another_one_need_not_fit_alone():
    mesh, behind = Mesh.of([2, 2]), parse_spec("S(0/11),S(0/6)")
    alone = (Replicate(), Shard(0, 6))
    assert fits((44,), behind, mesh) and drop_uneven_shards((44,), behind, mesh) == behind
    assert not fits((44,), alone, mesh) and drop_uneven_shards((44,), alone, mesh) == parse_spec(
        "R,R"
    )
    assert fits((None,), alone, mesh) and fits((7,), parse_spec("S(0),S(0)"), mesh)


# --- what is searched runs --------------------------------------------------------------------


def scored():
    """The gradient of `top_k` becomes a sum per sample, which planning puts into the graph."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential(
        [
            keras.Input((3, 4)),
            Apply(lambda h: ops.top_k(h, 2)[0]),
            layers.Flatten(),
            layers.Dense(2),
        ]
    )
    model.compile("sgd", "mse", jit_compile=False)
    return model


@pytest.mark.slow
def test_chunks_are_priced_of_a_step_with_sums_per_sample():
    step = Captured.of(scored, 8, (tf.TensorSpec((8, 3, 4)), tf.TensorSpec((8, 2))))
    problem = step.problem([2, 2], "dgx-a100")
    plan = find_plan(problem, find_planner("tap"))
    assert "TfparBlockSum" in {op.type for op in problem.step.graph.ops}
    assert plan.chunks > 1 or plan.cost.hidden_s == 0.0
    if plan.chunks == 1:
        assert_priced_as_a_whole(problem, plan)


@pytest.mark.slow
@pytest.mark.parametrize("planner", [nightly("tap"), "rhino"])
def test_a_searched_plan_of_sums_per_sample_trains_as_one_device_does(planner):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(16, 3, 4)).astype("float32")
    assert_equivalent(
        scored, (x, x[:, 0, :2]), mesh=tap.split([2, 2]), planner=planner, cluster="dgx-a100"
    )
