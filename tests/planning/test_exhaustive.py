"""Every planner against all plans of tiny graphs: none is better, and few are worse."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from tests.cases import amounts, some_first
from tests.planning.changes import changed
from tests.planning.problems import within
from tests.planning.tiny import GRAPHS, SMALLEST, chain, drawn, problem
from tfpar.cluster import Cluster, Level, Node
from tfpar.cost import evaluate
from tfpar.ir import Roles
from tfpar.planning.intra_op import exhaustive
from tfpar.planning.intra_op.auto import AutoPlanner
from tfpar.planning.intra_op.exhaustive import MAX_PLANS, ExhaustivePlanner
from tfpar.planning.intra_op.planners import find_planner
from tfpar.planning.intra_op.rhino import RhinoPlanner
from tfpar.planning.intra_op.tap.planner import TapPlanner
from tfpar.planning.lower_bound import attach_bound, shared_seconds, single_device_seconds
from tfpar.planning.meshes import given_mesh
from tfpar.planning.problem import ConstrainedSpec, step_anchors
from tfpar.plans import Candidate, Plan
from tfpar.propagation import prepare, propagate
from tfpar.spec import ArgumentError, Mesh, PlanError, Replicate, Shard, parse_spec

BY_OPS = {
    "rhino": RhinoPlanner(),
    "rhino level 2": RhinoPlanner(level=2),
    "auto": AutoPlanner(),
}


def seconds(planner, asked):
    """What the planner's plan takes: as it says, and as the evaluator says of the whole graph."""
    plan = planner.solve(asked)
    prepared = prepare(asked.step.graph)
    laid = propagate(prepared, plan.mesh, step_anchors(plan, asked))
    roles = Roles.of(prepared.graph)
    cost = evaluate(laid, asked.cluster, roles, asked.step.state_ratio)
    assert plan.cost.seconds == pytest.approx(cost.seconds, rel=1e-6)
    return plan.cost.seconds


UNEVEN = "sizes that two does not divide"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh"),
    some_first(
        [(UNEVEN, (6,)), ("a large batch", (2,)), *((n, (2, 2)) for n in GRAPHS if n != UNEVEN)],
        itertools.product(GRAPHS, [(2,), (2, 2), (6,)]),
    ),
)
def test_tap_finds_the_best_of_all_ways_to_lay_few_weights(name, mesh):
    asked = problem(GRAPHS[name](), mesh)
    least = seconds(ExhaustivePlanner(), asked)
    assert seconds(TapPlanner(), asked) == pytest.approx(least, rel=1e-9)


def compared(seed: int, planner: TapPlanner) -> float:
    """How many times as long as at the best a step takes by the plan that `planner` finds."""
    asked = drawn(seed)
    return seconds(planner, asked) / seconds(ExhaustivePlanner(), asked)


UNFOLDED = TapPlanner(min_duplicate=10**9)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [10, 37])
def test_tap_is_near_where_it_searches_layer_by_layer(seed):
    """Its search is a local one where all weights together have more than 128 plans."""
    assert 1 - 1e-9 <= compared(seed, UNFOLDED) <= 1.005
    assert 1 - 1e-9 <= compared(seed, TapPlanner()) <= 1.02, "layers that are alike lie alike"


MANY_PLANS = {2, 4, 8, 15, 26, 32, 39, 45, 52, 66, 67, 71}
"""Seeds of long steps whose plans take seconds to try; a few more such steps are among the rest."""


@pytest.mark.slow
@pytest.mark.parametrize("seeds", amounts(8, 72))
def test_tap_is_seldom_off_and_never_far(seeds):
    behind = [compared(seed, UNFOLDED) for seed in range(seeds) if seed not in MANY_PLANS]
    assert len(behind) > seeds * 2 / 3
    assert min(behind) >= 1 - 1e-9
    assert sum(times > 1 + 1e-6 for times in behind) <= 1 and max(behind) <= 1.005


LONGEST = "its activation"
"""That one of the smallest graphs has the most ways to run its ops."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh"),
    some_first(
        [("a layer", (3,)), *((name, (2,)) for name in SMALLEST if name != LONGEST)],
        itertools.product(SMALLEST, [(2,), (3,)]),
    ),
)
def test_rhino_finds_the_best_of_all_ways_to_run_few_ops(name, mesh):
    asked = problem(SMALLEST[name](), mesh)
    least = seconds(ExhaustivePlanner("ops"), asked)
    for planner in BY_OPS.values():
        assert seconds(planner, asked) == pytest.approx(least, rel=1e-9)
    assert seconds(TapPlanner(), asked) >= least * (1 - 1e-9), "it decides weights alone"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "planner"),
    some_first(
        [("a layer", "tap"), ("a layer", "rhino"), ("a narrow layer", "rhino level 2")],
        itertools.product(("a layer", "a narrow layer", LONGEST), ("tap", *BY_OPS)),
    ),
)
def test_the_plan_that_stores_least_is_found_where_nothing_fits(name, planner):
    asked = problem(SMALLEST[name](), [2]).with_objective(memory_limit=0.0)
    found = {"tap": TapPlanner(), **BY_OPS}[planner].solve(asked)
    space = ExhaustivePlanner("weights" if planner == "tap" else "ops")
    least = space.solve(asked)
    assert found.cost.memory_bytes >= least.cost.memory_bytes
    fastest = space.solve(asked.with_objective(memory_limit=None))
    assert least.cost.memory_bytes <= fastest.cost.memory_bytes


def test_what_is_given_stays_and_leaves_fewer_plans():
    free = problem(GRAPHS["towers"](), [2])
    column = parse_spec("R,S(1)")
    asked = free.with_meshes([given_mesh(Mesh(("data", "model"), (1, 2)), ["data"])]).with_given(
        variables={"left/kernel": ConstrainedSpec(column, "so")}, constraints=("so",)
    )
    planner = ExhaustivePlanner()
    plan = planner.solve(asked)
    given = plan.variables["left/kernel"]
    assert (given.spec, given.why) == (column, "so")
    assert planner.tried == 3, "the other one whole, in rows, or in columns"
    assert plan.variables["right/kernel"].spec in {column, (Replicate(), Shard(0))}


def test_more_plans_than_can_be_tried_are_refused_before_any_is():
    planner = find_planner("exhaustive")
    asked = problem(chain(64, *[32] * 20), [2, 2])
    with pytest.raises(PlanError, match=rf"at most {MAX_PLANS} plans, and this step has \d{{6,}}:"):
        planner.solve(asked)
    assert planner.tried == 0
    with pytest.raises(PlanError, match="every way for each of its ops"):
        ExhaustivePlanner("ops").solve(problem(GRAPHS["gated"](), [2]))


def test_axes_one_after_the_other_are_counted_as_they_come(monkeypatch):
    monkeypatch.setattr(exhaustive, "MAX_PLANS", 300)
    planner = ExhaustivePlanner("ops")
    with pytest.raises(PlanError, match="at most 300 plans, and this step has more:"):
        planner.solve(problem(SMALLEST["a layer that is not trained"](), [2, 2]))
    assert planner.tried == 301


def test_a_search_that_ends_early_has_the_best_so_far():
    asked = problem(GRAPHS["gated"](), [2, 2])
    whole, hurried = ExhaustivePlanner(), ExhaustivePlanner()
    best = whole.solve(asked)
    plan = hurried.solve(within(1e-9, asked))
    assert plan.findings.cut_short and hurried.tried == 1 and not best.findings.cut_short
    assert plan.cost.seconds >= best.cost.seconds


def test_of_near_plans_the_simplest_is_taken_here_too():
    asked = problem(GRAPHS["a large batch"](), [2])
    simple = ExhaustivePlanner().solve(asked.with_objective(uncertainty=10.0))
    quick = ExhaustivePlanner().solve(asked)
    assert quick.findings.passed_over is None
    assert simple.cost.collectives <= quick.cost.collectives
    assert simple.cost.seconds >= quick.cost.seconds


def test_it_is_called_exhaustive_and_decides_weights_or_ops():
    assert find_planner("exhaustive").name == "exhaustive"
    assert ExhaustivePlanner("ops").name == "exhaustive by ops", "cached apart"
    with pytest.raises(ArgumentError, match="decides"):
        ExhaustivePlanner("layers")


@pytest.mark.parametrize("dispatch_s", [1e-6, 1e-3])
def test_plans_are_the_best_where_hosts_are_slow(dispatch_s):
    """With 1 us the device is the limit, with 1 ms its host."""
    asked = problem(GRAPHS["one layer"](), (2,))
    asked = changed(asked, cluster=asked.cluster.with_device(dispatch_s=dispatch_s))
    least = seconds(ExhaustivePlanner(), asked)
    for planner in (TapPlanner(), *BY_OPS.values()):
        assert seconds(planner, asked) == pytest.approx(least, rel=1e-9)


@pytest.mark.parametrize("name", SMALLEST)
@pytest.mark.parametrize("mesh", [(2,), (3,)])
def test_no_plan_is_below_the_bound(name, mesh):
    asked = problem(SMALLEST[name](), mesh)
    best = attach_bound(ExhaustivePlanner("ops").solve(asked), asked, asked.cluster)
    assert best.bound == (pytest.approx(best.cost.seconds), 0.0), "it knows all plans"
    found = attach_bound(RhinoPlanner().solve(asked), asked, asked.cluster)
    compute = attach_bound(best.with_findings(bound_s=None), asked, asked.cluster).bound
    assert compute.seconds <= found.bound.seconds <= best.cost.seconds * (1 + 1e-9)
    assert found.bound.seconds == pytest.approx(best.cost.seconds, rel=2e-3), "nearly the best"
    assert found.bound.gap == pytest.approx(found.cost.seconds / found.bound.seconds - 1)
    assert Plan.from_json(found.to_json()).bound == found.bound


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name",),
    some_first(
        [("a layer that is not trained",)], [(name,) for name in SMALLEST if name != LONGEST]
    ),
)
def test_the_bound_of_two_axes_is_the_best_of_all_ways_along_both(name, monkeypatch):
    monkeypatch.setattr(exhaustive, "MAX_PLANS", 20_000)
    asked = problem(SMALLEST[name](), (2, 2))
    least = ExhaustivePlanner("ops").solve(asked).cost.seconds
    bound_s = RhinoPlanner().solve(asked).findings.bound_s
    assert bound_s <= least * (1 + 1e-9)
    assert bound_s == pytest.approx(least, rel=1e-3)


@pytest.mark.parametrize("dispatch_s", [0.0, 1e-4])
@pytest.mark.parametrize("name", ["gated", "towers", "a large batch"])
def test_no_layout_of_weights_is_below_the_bound(name, dispatch_s):
    """On meshes of two axes, too."""
    asked = problem(GRAPHS[name](), (2, 2))
    asked = changed(asked, cluster=asked.cluster.with_device(dispatch_s=dispatch_s))
    least = seconds(ExhaustivePlanner(), asked)
    for planner in BY_OPS.values():
        assert 0 < planner.solve(asked).findings.bound_s <= least * (1 + 1e-9)


def test_what_one_rank_computes_is_the_best():
    """Nothing else can be done there: the bound is met."""
    asked = problem(SMALLEST["a layer"](), (1,))
    plan = attach_bound(TapPlanner().solve(asked), asked, asked.cluster)
    assert plan.bound.gap == pytest.approx(0.0, abs=1e-9)


def test_a_fast_and_a_slow_device_share_the_work_by_their_speeds():
    asked = problem(SMALLEST["a layer"](), (2,))
    fast = asked.cluster.device
    slow = dataclasses.replace(
        fast,
        flops={dtype: rate / 3 for dtype, rate in fast.flops.items()},
        memory_bandwidth=fast.memory_bandwidth / 3,
        launch_s=3 * fast.launch_s,
        name="slow",
    )
    alone = single_device_seconds(asked, asked.cluster, 1)
    nodes = tuple(Node(one, levels=()) for one in (fast, slow))
    cluster = Cluster("unlike", nodes, asked.cluster.levels[:1] or (Level(2, 1e9, 1e-6),))
    shared = shared_seconds(single_device_seconds(asked, cluster, 2))
    assert shared == pytest.approx(alone[0] * 3 / 4)


def test_no_bound_is_above_a_plan_that_was_found():
    """Compute alone may be: some ops are priced for less in parts."""
    asked = problem(SMALLEST["a layer"](), (2,))
    plan = TapPlanner().solve(asked)
    quick = Candidate("data=2 x model=1", 1e-12, 1.0)
    skipped = Candidate("data=1 x model=2", 1e-13)
    told = attach_bound(plan.with_findings(layouts=(quick, skipped)), asked, asked.cluster)
    assert told.findings.bound_s == quick.seconds
