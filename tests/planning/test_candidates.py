"""The best few plans of a saved step, without TensorFlow."""

from __future__ import annotations

import pickle

import pytest

from tests.graphs import BATCH, saved
from tests.planning.test_saved_graphs import SLOW
from tfpar.cluster import Correction
from tfpar.constraints import replicate
from tfpar.planning.intra_op.planners import find_planner
from tfpar.planning.pricing.price import price_plan
from tfpar.planning.request import PlanRequest
from tfpar.planning.step_search import StepSearch
from tfpar.planning.trial_candidates import select_trial_candidates
from tfpar.plans import Candidate
from tfpar.spec import Mesh

MESH = Mesh.of([4])


@pytest.mark.parametrize("planner", ["tap", "rhino"])
def test_the_best_few_come_in_order_and_split_otherwise(planner):
    asked, plan_of = [], StepSearch(saved("wide"), BATCH, find_planner(planner), state_ratio=2.0)

    def search(request):
        asked.append(request)
        return plan_of(request)

    request = PlanRequest(MESH, SLOW)
    best, problem = search(request)
    plans = select_trial_candidates(best, search, request, 3)
    assert len(plans) >= 3 and plans[0].cost == best.cost
    assert len(asked) <= 1 + 3 and all(len(one.meshes) == 1 for one in asked[1:])
    seconds = [plan.cost.seconds for plan in plans[1:]]
    assert seconds == sorted(seconds) and not any(problem.excess(plan.cost) for plan in plans)
    for i, plan in enumerate(plans):
        assert all(plan.diff(other) for other in plans[:i])
        assert {rival.cost.seconds for rival in plan.findings.rivals} == {
            other.cost.seconds for other in plans if other is not plan
        }


def test_candidates_are_priced_on_any_machines():
    search, request = StepSearch(saved("wide"), BATCH, find_planner("tap")), PlanRequest(MESH, SLOW)
    best, problem = search(request)
    price, slower = search.repricer(best, request, MESH), Correction(2.0, 3.0).apply(SLOW)
    assert price(SLOW).cost.seconds == pytest.approx(best.cost.seconds)
    found = price_plan(best, problem, slower, BATCH)
    assert price(slower).cost == found.cost and price(slower).cluster is slower
    assert found.cost.seconds > 1.9 * best.cost.seconds


def test_constraints_leave_one_mesh_and_one_plan():
    constraints = (replicate(".*kernel"),)
    request = PlanRequest(Mesh.of({"model": 4}), SLOW, constraints)
    step = saved("wide")
    best, _ = StepSearch(step, BATCH, find_planner("tap"), state_ratio=2.0)(request)
    (plan,) = select_trial_candidates(best, lambda _: pytest.fail("nothing is open"), request, 3)
    assert plan.cost == best.cost


def test_what_is_found_when_asked_stays_in_its_process():
    rival = Candidate("2 stages", 1.0, find_links=lambda: 2.0)
    there = pickle.loads(pickle.dumps(rival))
    assert there == rival and there.find_links is None and rival.find_links() == 2.0
