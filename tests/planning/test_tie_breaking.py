"""Of plans that predictions cannot tell apart, the simplest is taken, whoever searched."""

import dataclasses

import pytest

import tfpar as tap
from tests.cases import at_night
from tests.clusters import slow_cores
from tests.planning.changes import changed
from tests.planning.problems import Captured, laid, partition, price
from tfpar.cost import Cost
from tfpar.planning.intra_op.auto import AutoPlanner
from tfpar.planning.intra_op.rhino import RhinoPlanner
from tfpar.planning.intra_op.tap.planner import TapPlanner
from tfpar.planning.intra_op.tie_breaking import collective_penalty, fastest, pick_simplest
from tfpar.planning.objective import UNCERTAINTY
from tfpar.plans import Plan

PLANNERS = {"rhino": RhinoPlanner(), "rhino 2": RhinoPlanner(level=2), "tap": TapPlanner()}


def two_slow_cores():
    return slow_cores(2, processes=True)


@dataclasses.dataclass(frozen=True)
class Candidate:
    cost: Cost
    num_split: int = 0

    @classmethod
    def of(cls, seconds, collectives, num_split=0, memory=0.0):
        cost = Cost(seconds, (seconds, 0, 0), (0, 0, 0), 0, 0, 1, memory, collectives=collectives)
        return cls(cost, num_split)


@pytest.fixture(scope="module")
def two_processes():
    """The GPT of `benchmarks.step`, one layer of it, on two processes of a machine."""
    return Captured.saved("gpt_one_layer")


@pytest.fixture(scope="module")
def problem(two_processes):
    """One whose devices have 100 bytes, and predictions that are good for a tenth."""
    stated = two_processes.problem([2], two_slow_cores(), uncertainty=0.1)
    return changed(stated, cluster=stated.cluster.with_memory(100.0))


# --- what is simplest -------------------------------------------------------------------


def test_near_the_fastest_the_fewest_collectives_are_taken(problem):
    quick, plain, slow = Candidate.of(1.0, 50), Candidate.of(1.09, 3), Candidate.of(1.11, 0)
    assert fastest([plain, quick, slow], problem) is quick
    assert pick_simplest([plain, quick, slow], problem) is plain
    sure = problem.with_objective(uncertainty=0.0)
    assert pick_simplest([plain, quick, slow], sure) is quick


def test_of_as_many_collectives_the_fewest_split_weights_are_taken_then_the_faster(problem):
    many, few = Candidate.of(1.0, 3, num_split=9), Candidate.of(1.05, 3, num_split=2)
    assert pick_simplest([many, few], problem) is few
    assert pick_simplest([Candidate.of(1.06, 3, 2), few], problem) is few


def test_sharing_nothing_is_taken_where_it_is_the_fastest_and_not_for_being_simple(problem):
    alone, shared = Candidate.of(1.05, 0), Candidate.of(1.0, 50)
    assert pick_simplest([alone, shared], problem) is shared
    assert pick_simplest([alone, Candidate.of(1.06, 3)], problem) is alone


def test_a_simpler_plan_that_is_slower_than_sharing_nothing_is_not_taken(problem):
    best, alone, plain = Candidate.of(1.0, 50), Candidate.of(1.03, 0), Candidate.of(1.08, 3)
    assert pick_simplest([best, alone, plain], problem) is best
    simple = Candidate.of(1.02, 10)
    assert pick_simplest([best, alone, plain, simple], problem) is simple
    large = Candidate.of(1.03, 0, memory=200.0)
    assert pick_simplest([best, large, plain], problem) is plain, "where one device has no room"


def test_what_does_not_fit_is_not_simple(problem):
    fits, plain = Candidate.of(1.0, 50, memory=99.0), Candidate.of(0.5, 0, memory=200.0)
    assert pick_simplest([plain, fits], problem) is fits
    least = Candidate.of(9.0, 50, memory=150.0)
    assert pick_simplest([plain, least], problem) is least, "where nothing fits, what stores least"


def test_what_costs_least_with_the_surcharge_is_near_enough(problem):
    best = Candidate.of(1.0, 20)
    more_s = collective_penalty(best, problem)
    assert more_s == pytest.approx(0.1 / 20)
    # So a plan that saves half of the collectives may take half of the margin for it.
    assert 1.0 + 20 * more_s == pytest.approx(1.05 + 10 * more_s)
    assert collective_penalty(Candidate.of(1.0, 0), problem) == 0, "nothing is simpler"


# --- searches ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("planner", ["rhino 2", *at_night("rhino", "tap")])
def test_data_parallelism_is_taken_where_a_dozen_splits_gain_little(two_processes, planner):
    asked = two_processes.problem([2], two_slow_cores(), uncertainty=UNCERTAINTY)
    sure = two_processes.problem([2], two_slow_cores())
    plan, quickest = PLANNERS[planner].solve(asked), PLANNERS[planner].solve(sure)
    assert quickest.findings.passed_over is None
    assert quickest.cost.seconds < plan.cost.seconds <= (1 + UNCERTAINTY) * quickest.cost.seconds
    assert plan.cost.collectives < quickest.cost.collectives / 2
    assert plan.findings.passed_over == (quickest.cost.seconds, quickest.cost.collectives)
    assert plan.batch_axes == ("data", "model") and laid(plan, "kernel") <= {"R,R", "open"}
    assert price(asked, plan).seconds == pytest.approx(plan.cost.seconds, rel=1e-4)


def test_what_gains_much_is_split_as_before():
    wide = Captured.saved("wide_20000_classes")
    plan = PLANNERS["rhino"].solve(wide.problem([2], two_slow_cores(), uncertainty=UNCERTAINTY))
    assert isinstance(plan.variables["head/kernel"].spec[0], tap.Shard)
    assert plan.findings.passed_over is not None, "but less else is"


@pytest.mark.slow
@pytest.mark.parametrize("planner", [TapPlanner(), AutoPlanner()], ids=["tap", "auto"])
def test_nothing_is_split_where_that_gains_nothing(two_processes, planner):
    """Links so slow that one device is as fast."""
    problem = two_processes.problem([2], two_slow_cores(), uncertainty=UNCERTAINTY)
    levels = problem.cluster.nodes[0].levels
    slow = tuple(dataclasses.replace(level, bandwidth=1e6, latency_s=1.0) for level in levels)
    node = dataclasses.replace(problem.cluster.nodes[0], levels=slow)
    cluster = dataclasses.replace(
        problem.cluster,
        nodes=(node,),
        levels=tuple(dataclasses.replace(v, bandwidth=1e6) for v in problem.cluster.levels),
    )
    plan = planner.solve(changed(problem, cluster=cluster))
    assert not plan.splits_anything() and plan.cost.collectives == 0
    assert "Every rank computes the same" in plan.summary(full=True)


@pytest.mark.slow
def test_a_summary_tells_what_ranks_take_of_a_batch_that_is_not_split(two_processes):
    """Every rank looks up its columns of all tokens; of the labels it needs its own."""
    problem = two_processes.problem([2], two_slow_cores())
    plan = PLANNERS["rhino"].solve(problem)
    laid_out = partition(problem, plan)
    assert not plan.batch_axes and plan.ops
    text = plan.summary(laid_out, full=True)
    tokens, labels = (t.op.name for t in laid_out.graph.inputs[:2])
    rows = {
        cells[1]: cells[3:5]
        for line in text.splitlines()
        if len(cells := [cell.strip() for cell in line.split("|")]) == 6
    }
    assert rows[tokens] == ["all of it", "all of it"]
    assert rows[labels] == ["all of it", "S(0) over model"]


def test_plans_say_what_they_were_preferred_to(two_processes, tmp_path):
    problem = two_processes.problem([2], two_slow_cores(), uncertainty=UNCERTAINTY)
    plan = PLANNERS["tap"].solve(problem)
    seconds, collectives = plan.findings.passed_over
    behind = 100 * (plan.cost.seconds / seconds - 1)
    for text in (plan.summary(full=True), plan.explain("head/kernel")):
        assert f"within {behind:.1f} % of the fastest plan found" in text
        assert f"{plan.cost.collectives} collectives a step in place of {collectives}" in text
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json").findings.passed_over == plan.findings.passed_over


@pytest.mark.parametrize("planner", PLANNERS)
def test_what_is_the_fastest_is_not_said_to_be_simpler(planner):
    """Links so slow that ranks which share nothing are the fastest, by far."""
    problem = Captured.saved("mlp").problem([2], two_slow_cores(), uncertainty=UNCERTAINTY)
    levels = tuple(dataclasses.replace(v, latency_s=1.0) for v in problem.cluster.levels)
    plan = PLANNERS[planner].solve(
        problem.with_cluster(dataclasses.replace(problem.cluster, levels=levels))
    )
    assert plan.findings.passed_over is None or plan.cost.seconds >= plan.findings.passed_over[0]
